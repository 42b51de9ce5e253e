// Both ends of connections in one program of Go.
//
// talk PORT BYTES sends so many bytes on each of four, while it reads them back and compares. Meanwhile it collects garbage, and
// is profiled: signals come, whose handler goes up the stack from what they came into. It waits for a line of stdin before it ends.
// serve PORT returns what it gets.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"runtime"
	"runtime/pprof"
	"strconv"
	"sync"
)

const connections = 4

func need(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func exchange(conn net.Conn, seed int64, total int) {
	sent, got := make([]byte, total), make([]byte, total)
	rand.New(rand.NewSource(seed)).Read(sent)
	go func() {
		for at := 0; at < total; {
			end := at + 1 + (at*7919)%100000
			if end > total {
				end = total
			}
			n, err := conn.Write(sent[at:end])
			need(err)
			at += n
			runtime.Gosched()
		}
	}()
	_, err := io.ReadFull(conn, got)
	need(err)
	if !bytes.Equal(sent, got) {
		need(fmt.Errorf("other bytes came back"))
	}
}

func talk(port string, total int) {
	var all sync.WaitGroup
	need(pprof.StartCPUProfile(io.Discard))
	for i := 0; i < connections; i++ {
		conn, err := net.Dial("tcp", "127.0.0.1:"+port)
		need(err)
		all.Add(1)
		go func(seed int64) {
			defer all.Done()
			for round := int64(0); round < 8; round++ {
				exchange(conn, seed+8*round, total/8)
				runtime.GC()
			}
		}(int64(i))
	}
	all.Wait()
	pprof.StopCPUProfile()
	fmt.Println("equal")
	bufio.NewReader(os.Stdin).ReadString('\n')
}

func serve(port string) {
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	need(err)
	fmt.Println("ready")
	for {
		conn, err := listener.Accept()
		need(err)
		go func() {
			io.Copy(conn, conn) // by splice(2), through a pipe
			conn.Close()
		}()
	}
}

func main() {
	if len(os.Args) == 4 && os.Args[1] == "talk" {
		total, err := strconv.Atoi(os.Args[3])
		need(err)
		talk(os.Args[2], total)
	} else {
		serve(os.Args[2])
	}
}
