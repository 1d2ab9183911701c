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

func ExampleClient_Call() {
	echo, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	go func() { // commonly another process
		err := service.Serve(ctx, func(request pelton.Request) {
			if len(request.Bytes()) == 0 {
				_ = request.Fail(22, []byte("nothing to say"))
				return
			}
			_ = request.Reply([]byte(strings.ToUpper(string(request.Bytes()))))
		})
		if err != nil && !errors.Is(err, pelton.ErrClosedHandle) {
			log.Fatal(err)
		}
	}()

	client, err := pelton.ConnectClient(ctx, echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	reply, err := client.Call(ctx, []byte("hello"))
	fmt.Printf("%s %v\n", reply, err)
	_, err = client.Call(ctx, nil)
	var failed *pelton.Failed
	if errors.As(err, &failed) {
		fmt.Printf("%d: %s\n", failed.Code, failed.Bytes)
	}
	// Output:
	// HELLO <nil>
	// 22: nothing to say
}

func ExampleCall_Parts() {
	numbers, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(numbers, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	go func() { // commonly another process
		_ = service.Serve(ctx, func(request pelton.Request) {
			// Ends when the client cancels the call, or goes.
			for n := 1; request.Part(request.Context(), fmt.Append(nil, n)) == nil; n++ {
			}
		})
	}()

	client, err := pelton.ConnectClient(ctx, numbers, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	call, err := client.Submit(ctx, []byte("count"))
	if err != nil {
		log.Fatal(err)
	}
	for part, err := range call.Parts(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", part)
		if string(part) == "3" {
			break // which cancels the call
		}
	}
	// Output:
	// 1
	// 2
	// 3
}
