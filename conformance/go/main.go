// The conformance driver in Go. ../README.md has the command line and the messages.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

// messages are slices of the repeated alphabet.
type messages struct {
	letters []byte
	count   int
	size    int
}

func newMessages(count, size int) messages {
	return messages{bytes.Repeat([]byte("abcdefghijklmnopqrstuvwxyz"), size/26+2), count, size}
}

func (m messages) at(i int) []byte { return m.letters[i%26:][:m.size] }

func (m messages) check(i int, found []byte) error {
	if bytes.Equal(found, m.at(i)) {
		return nil
	}
	return fmt.Errorf("message %d: found %q, expected %q", i, found, m.at(i))
}

func send(ctx context.Context, name string, m messages) error {
	sender, err := pelton.ConnectSender(ctx, name, &pelton.Options{Await: true}) // waits for a receiver to listen
	if err != nil {
		return err
	}
	for i := range m.count {
		if err := sender.Send(ctx, m.at(i)); err != nil {
			return err
		}
	}
	if err := sender.WaitReleased(ctx); err != nil { // until the receiver has released every message
		return err
	}
	return sender.Close()
}

func recv(ctx context.Context, name string, m messages) error {
	listener, err := pelton.Listen(name, nil)
	if err != nil {
		return err
	}
	defer listener.Close()
	receiver, err := listener.AcceptReceiver(ctx)
	if err != nil {
		return err
	}
	defer receiver.Close()
	received := 0
	for message, err := range receiver.Messages(ctx) { // ends when the sender has closed
		if err == nil {
			err = m.check(received, message.Bytes())
		}
		if err != nil {
			return err
		}
		received++
	}
	if received != m.count {
		return fmt.Errorf("found %d messages, expected %d", received, m.count)
	}
	return nil
}

func gather(ctx context.Context, name string, m messages) error {
	receiver, err := pelton.Gather(name, nil)
	if err != nil {
		return err
	}
	defer receiver.Close()
	for range m.count {
		message, err := receiver.Receive(ctx) // of all senders, round-robin
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", message.Bytes()[:min(m.size, len(message.Bytes()))])
		message.Release()
	}
	return nil
}

func call(ctx context.Context, name string, m messages) error {
	client, err := pelton.ConnectClient(ctx, name, &pelton.Options{Await: true})
	if err != nil {
		return err
	}
	defer client.Close()
	for i := range m.count {
		reply, err := client.Call(ctx, m.at(i))
		if err == nil {
			err = m.check(i, reply)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func serve(ctx context.Context, name string, m messages) error {
	service, err := pelton.ListenService(name, nil)
	if err != nil {
		return err
	}
	defer service.Close()
	var served atomic.Int64
	err = service.Serve(ctx, func(request pelton.Request) { // a goroutine for each request
		if request.IsNotification() {
			return
		}
		if err := request.Reply(request.Bytes()); err != nil {
			fmt.Fprintln(os.Stderr, "reply:", err)
		} else if served.Add(1) == int64(m.count) {
			service.Drain() // Serve returns when every client has its replies
		}
	})
	if err != nil {
		return err
	}
	if found := served.Load(); found != int64(m.count) {
		return fmt.Errorf("found %d calls, expected %d", found, m.count)
	}
	return nil
}

func main() {
	verb := append(os.Args, "")[1]
	command, unit := map[string]func(context.Context, string, messages) error{"send": send, "recv": recv, "call": call, "serve": serve, "gather": gather}[verb], "messages"
	if command == nil {
		fmt.Printf("unsupported %s: this driver does not have it\n", verb)
		os.Exit(3)
	}
	if len(os.Args) != 5 {
		fmt.Fprintf(os.Stderr, "usage: driver %s NAME COUNT SIZE\n", verb)
		os.Exit(2)
	}
	if verb == "call" || verb == "serve" {
		unit = "calls"
	}
	count, _ := strconv.Atoi(os.Args[3])
	size, _ := strconv.Atoi(os.Args[4])
	seconds, err := strconv.Atoi(os.Getenv("PELTON_SECONDS"))
	if err != nil {
		seconds = 10
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds)*time.Second)
	defer cancel()
	if err := command(ctx, os.Args[2], newMessages(count, size)); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", verb, err)
		os.Exit(1)
	}
	fmt.Printf("ok %s %d %s\n", verb, count, unit)
}
