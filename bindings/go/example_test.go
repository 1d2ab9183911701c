package pelton_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"sync"
	"time"

	"pelton"
)

// name is a place for an example's socket.
func name() (string, func()) {
	directory, err := os.MkdirTemp("", "pelton-example")
	if err != nil {
		log.Fatal(err)
	}
	return "unix:" + directory + "/socket", func() { os.RemoveAll(directory) }
}

func Example() {
	events, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	listener, err := pelton.Listen(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer listener.Close()

	go func() { // commonly another process
		sender, err := pelton.ConnectSender(ctx, events, nil)
		if err != nil {
			log.Fatal(err)
		}
		defer sender.Close()
		for _, word := range []string{"hello", "again"} {
			if err := sender.Send(ctx, []byte(word)); err != nil {
				log.Fatal(err)
			}
		}
	}()

	receiver, err := listener.AcceptReceiver(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	for message, err := range receiver.Messages(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d: %s\n", message.Seq(), message.Bytes())
	}
	fmt.Println("the sender has closed")
	// Output:
	// 1: hello
	// 2: again
	// the sender has closed
}

func ExampleSender_Reserve() {
	events, remove := name()
	defer remove()
	ctx := context.Background()
	receiver, err := pelton.Gather(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	sender, err := pelton.ConnectSender(ctx, events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer sender.Close()

	room, err := sender.Reserve(ctx, 4096)
	if err != nil {
		log.Fatal(err)
	}
	n := copy(room, "written in place")
	if err := sender.Commit(n); err != nil {
		log.Fatal(err)
	}

	buffer := make([]byte, 4096)
	n, err = receiver.ReceiveInto(ctx, buffer)
	fmt.Printf("%s %v\n", buffer[:n], err)
	// Output: written in place <nil>
}

func ExampleGather() {
	events, remove := name()
	defer remove()
	ctx := context.Background()
	receiver, err := pelton.Gather(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()

	var senders sync.WaitGroup
	for n := range 3 {
		senders.Go(func() {
			sender, err := pelton.ConnectSender(ctx, events, &pelton.Options{Capacity: 1 << 20})
			if err != nil {
				log.Fatal(err)
			}
			defer sender.Close()
			if err := sender.Send(ctx, make([]byte, 10*n)); err != nil {
				log.Fatal(err)
			}
		})
	}
	total := 0
	for range 3 {
		message, err := receiver.Receive(ctx)
		if err != nil {
			log.Fatal(err)
		}
		total += len(message.Bytes())
		message.Release()
	}
	senders.Wait()
	fmt.Println(total, "bytes of three senders")
	// Output: 30 bytes of three senders
}

func ExampleReceiver_Receive_deadline() {
	events, remove := name()
	defer remove()
	receiver, err := pelton.Gather(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	_, err = receiver.Receive(ctx)
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output: true
}

func ExampleReceiver_NewReader() {
	events, remove := name()
	defer remove()
	ctx := context.Background()
	listener, err := pelton.Listen(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer listener.Close()
	go func() {
		sender, err := pelton.ConnectSender(ctx, events, nil)
		if err != nil {
			log.Fatal(err)
		}
		defer sender.Close()
		if _, err := io.Copy(sender.NewWriter(ctx), strings.NewReader("a stream of bytes")); err != nil {
			log.Fatal(err)
		}
	}()
	receiver, err := listener.AcceptReceiver(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	text, err := io.ReadAll(receiver.NewReader(ctx))
	fmt.Printf("%s %v\n", text, err)
	// Output: a stream of bytes <nil>
}
