// A server that answers each "a" of its client. At "e" it waits for a line of its input, and has another program read on.
// inetd PORT PROGRAM [ARGUMENT]...
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
)

func need(failed error) {
	if failed != nil {
		fmt.Println(failed)
		os.Exit(1)
	}
}

func main() {
	listener, failed := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	need(failed)
	fmt.Println("ready")
	conn, failed := listener.Accept()
	need(failed)
	for word := []byte("a"); ; {
		_, failed = conn.Read(word)
		need(failed)
		if word[0] == 'e' {
			break
		}
		conn.Write(word)
	}
	bufio.NewReader(os.Stdin).ReadString('\n')
	file, failed := conn.(*net.TCPConn).File()
	need(failed)
	conn.Close()
	reader := exec.Command(os.Args[2], os.Args[3:]...)
	reader.Stdin, reader.Stdout, reader.Stderr = file, os.Stdout, os.Stderr
	need(reader.Run())
}
