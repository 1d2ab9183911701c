// The peer in Go: `peer THERE BACK` listens at THERE, sends each message back to BACK, and ends with its sender.
package main

import (
	"context"
	"log"
	"os"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	listener, err := pelton.Listen(os.Args[1], nil)
	check(err)
	sender, err := pelton.ConnectSender(ctx, os.Args[2], nil)
	check(err)
	receiver, err := listener.AcceptReceiver(ctx)
	check(err)
	for message, err := range receiver.Messages(ctx) {
		check(err)
		check(sender.Send(ctx, message.Bytes()))
	}
	check(sender.Close())
	check(receiver.Close())
	check(listener.Close())
}
