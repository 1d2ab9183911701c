// Metrics receives messages and serves the receiver's counters to Prometheus, beside the program's own metrics.
//
//	metrics NAME ADDRESS     receives from NAME until the sender ends; http://ADDRESS/metrics meanwhile
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync/atomic"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Endpoint has the last counters of one. The goroutine that uses the endpoint notes them.
type Endpoint struct {
	descriptions [5]*prometheus.Desc
	last         atomic.Pointer[pelton.Counters]
}

// NewEndpoint returns the metrics of a sender or a receiver of this channel.
func NewEndpoint(channel string) *Endpoint {
	of := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("endpoint_"+name+"_total", help, nil, prometheus.Labels{"channel": channel})
	}
	return &Endpoint{descriptions: [5]*prometheus.Desc{
		of("messages", "Messages sent or released"),
		of("bytes", "Bytes of their payloads"),
		of("waits", "Waits for space or for a message"),
		of("sleeps", "Waits in which the endpoint slept"),
		of("wakes", "Times that the endpoint woke the other side"),
	}}
}

// Note notes the counters of a sender or a receiver.
func (e *Endpoint) Note(endpoint interface {
	Counters() (pelton.Counters, bool)
}) {
	if counters, ok := endpoint.Counters(); ok {
		e.last.Store(&counters)
	}
}

// Describe is of [prometheus.Collector].
func (e *Endpoint) Describe(descriptions chan<- *prometheus.Desc) {
	for _, description := range e.descriptions {
		descriptions <- description
	}
}

// Collect is of [prometheus.Collector].
func (e *Endpoint) Collect(metrics chan<- prometheus.Metric) {
	last := e.last.Load()
	if last == nil {
		return
	}
	for i, count := range [5]uint64{last.Messages, last.Bytes, last.Waits, last.Sleeps, last.WakesSent} {
		metrics <- prometheus.MustNewConstMetric(e.descriptions[i], prometheus.CounterValue, float64(count))
	}
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: metrics NAME ADDRESS")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	receiver, err := pelton.ConnectReceiver(ctx, os.Args[1], &pelton.Options{Await: true})
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	endpoint := NewEndpoint(os.Args[1])
	prometheus.MustRegister(endpoint)
	go func() { log.Fatal(http.ListenAndServe(os.Args[2], promhttp.Handler())) }()
	for {
		message, err := receiver.Receive(ctx)
		if errors.Is(err, pelton.ErrClosed) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", message.Bytes())
		if err := message.Release(); err != nil {
			log.Fatal(err)
		}
		endpoint.Note(receiver)
	}
}
