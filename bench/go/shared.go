// What the programs have in common, as c/bench.c has it.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"time"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func seconds(count float64) time.Duration { return time.Duration(count * 1e9) }

// hold says that all is measured, and keeps the connections until standard input ends.
func hold() {
	fmt.Println("holding")
	io.Copy(io.Discard, os.Stdin)
}

func report(took []time.Duration) {
	sum := time.Duration(0)
	for _, one := range took {
		sum += one
	}
	sort.Slice(took, func(a, b int) bool { return took[a] < took[b] })
	at := func(share float64) int64 { return int64(took[int(share*float64(len(took)-1))]) }
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"rate": float64(len(took)) / sum.Seconds(), "p50_ns": at(0.5), "p99_ns": at(0.99), "p999_ns": at(0.999),
	})
}
