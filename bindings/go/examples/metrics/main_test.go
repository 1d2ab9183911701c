package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
	"github.com/prometheus/client_golang/prometheus"
)

func TestTheCountersOfAReceiverAreGathered(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	name := "unix:" + t.TempDir() + "/events"
	receiver, err := pelton.Gather(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer receiver.Close()
	sender, err := pelton.ConnectSender(ctx, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	endpoint := NewEndpoint(name)
	for range 3 {
		if err := sender.Send(ctx, []byte("hello")); err != nil {
			t.Fatal(err)
		}
		message, err := receiver.Receive(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := message.Release(); err != nil {
			t.Fatal(err)
		}
		endpoint.Note(receiver)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(endpoint)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]float64{}
	for _, family := range families {
		found[family.GetName()] = family.GetMetric()[0].GetCounter().GetValue()
	}
	if len(found) != 5 || found["endpoint_messages_total"] != 3 || found["endpoint_bytes_total"] != 15 {
		t.Fatal(fmt.Sprint(found))
	}
}
