// Echo with goroutines and Go's poller: one a connection in the server, two a connection in the client.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

const nudge = 1000

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func echo(conn *net.TCPConn) {
	defer conn.Close()
	piece := make([]byte, 16384)
	for {
		count, err := conn.Read(piece)
		if err == io.EOF {
			check(conn.CloseWrite())
			return
		}
		check(err)
		_, err = conn.Write(piece[:count])
		check(err)
	}
}

func serve() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	for {
		conn, err := listener.Accept()
		check(err)
		go echo(conn.(*net.TCPConn))
	}
}

func talk(port string, place string, number int) {
	dialled, err := net.Dial("tcp", "127.0.0.1:"+port)
	check(err)
	conn := dialled.(*net.TCPConn)
	name := filepath.Join(place, strconv.Itoa(number))
	for {
		if _, err := os.Stat(filepath.Join(place, "wait")); err != nil {
			break
		}
		_, err = conn.Write(make([]byte, nudge))
		check(err)
		_, err = io.ReadFull(conn, make([]byte, nudge))
		check(err)
	}
	data, err := os.ReadFile(name + ".in")
	check(err)
	sent := make(chan error)
	go func() {
		_, err := conn.Write(data)
		if err == nil {
			err = conn.CloseWrite()
		}
		sent <- err
	}()
	var got bytes.Buffer
	_, err = got.ReadFrom(conn)
	check(err)
	check(os.WriteFile(name+".out", got.Bytes(), 0o644))
	check(<-sent)
	conn.Close()
}

func main() {
	if os.Args[1] == "server" {
		serve()
	}
	count, err := strconv.Atoi(os.Args[3])
	check(err)
	var all sync.WaitGroup
	for number := 0; number < count; number++ {
		all.Add(1)
		go func(number int) {
			defer all.Done()
			talk(os.Args[2], os.Args[4], number)
		}(number)
	}
	all.Wait()
}
