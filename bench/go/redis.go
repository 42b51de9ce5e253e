// GETs by go-redis (gopkg.in/redis.v5), one after the other: the client's words and output of c/pingpong.c.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"

	"gopkg.in/redis.v5"
)

func main() {
	words := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	port := words.Int("p", 0, "")
	warmup := words.Float64("w", 0.2, "seconds")
	measure := words.Float64("t", 1, "seconds")
	words.Bool("H", true, "always")
	words.Parse(os.Args[2:])
	client := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("127.0.0.1:%d", *port), PoolSize: 1})
	check(client.Set("key", "a value of some bytes", 0).Err())
	var took []time.Duration
	now := time.Now()
	start := now.Add(seconds(*warmup))
	for now.Before(start.Add(seconds(*measure))) {
		sent := now
		found, err := client.Get("key").Result()
		check(err)
		if found != "a value of some bytes" {
			check(fmt.Errorf("the answer is %q", found))
		}
		now = time.Now()
		if sent.After(start) {
			took = append(took, now.Sub(sent))
		}
	}
	hold()
	report(took)
}
