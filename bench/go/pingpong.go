// The ping-pong benchmark by Go's net: the words and the output of c/pingpong.c, for one connection. With -m copy the server
// echoes by io.Copy, which splices.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

func echo(conn net.Conn, size int) {
	message := make([]byte, size)
	for {
		if _, err := io.ReadFull(conn, message); err == io.EOF {
			conn.Close()
			return
		} else {
			check(err)
		}
		_, err := conn.Write(message)
		check(err)
	}
}

func splice(conn net.Conn) {
	_, err := io.Copy(conn, conn)
	check(err)
	conn.Close()
}

func serve(size int, copies bool) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println("listening", listener.Addr().(*net.TCPAddr).Port)
	for {
		conn, err := listener.Accept()
		check(err)
		if copies {
			go splice(conn)
		} else {
			go echo(conn, size)
		}
	}
}

func ask(port int, size int, warmup time.Duration, measure time.Duration) []time.Duration {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	check(err)
	message, answer := make([]byte, size), make([]byte, size)
	var took []time.Duration
	now := time.Now()
	start := now.Add(warmup)
	for number := uint64(0); now.Before(start.Add(measure)); number++ {
		sent := now
		binary.LittleEndian.PutUint64(message, number)
		_, err := conn.Write(message)
		check(err)
		_, err = io.ReadFull(conn, answer)
		check(err)
		if found := binary.LittleEndian.Uint64(answer); found != number {
			check(fmt.Errorf("the answer carries number %d, not %d", found, number))
		}
		now = time.Now()
		if sent.After(start) {
			took = append(took, now.Sub(sent))
		}
	}
	hold()
	conn.Close()
	return took
}

func main() {
	words := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	port := words.Int("p", 0, "")
	size := words.Int("s", 64, "")
	warmup := words.Float64("w", 0.2, "seconds")
	measure := words.Float64("t", 1, "seconds")
	mode := words.String("m", "", "of the server: copy, or by Read and Write")
	words.Bool("H", true, "always")
	words.Parse(os.Args[2:])
	if os.Args[1] == "server" {
		serve(*size, *mode == "copy")
	}
	took := ask(*port, *size, seconds(*warmup), seconds(*measure))
	report(took)
}
