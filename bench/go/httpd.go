// A small page by Go's net/http on the address given.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	page, err := os.ReadFile(os.Args[2])
	if err == nil {
		http.HandleFunc("/page.txt", func(to http.ResponseWriter, _ *http.Request) { to.Write(page) })
		err = http.ListenAndServe(os.Args[1], nil)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
