package pelton_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
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

func ExampleRecordFile() {
	directory, err := os.MkdirTemp("", "pelton-go")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(directory)
	path := filepath.Join(directory, "events.records")

	file, err := pelton.OpenRecordFile(path, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, event := range []string{"started", "stopped"} {
		if err := file.Append([]byte(event)); err != nil {
			log.Fatal(err)
		}
	}
	if err := file.Close(); err != nil { // writes and syncs
		log.Fatal(err)
	}

	reader, err := pelton.OpenRecordReader(path)
	if err != nil {
		log.Fatal(err)
	}
	defer reader.Close()
	for record, err := range reader.Records() {
		if err != nil { // ErrDamaged: it continues behind the damage
			log.Fatal(err)
		}
		fmt.Printf("%d %s\n", record.Seq, record.Bytes)
	}
	// Output:
	// 1 started
	// 2 stopped
}

// A path channel keeps messages while no receiver is alive, and the record file has each of them once.
func ExampleReceiver_FlushTo() {
	directory, err := os.MkdirTemp("/dev/shm", "pelton-go")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(directory)
	ctx, channel := context.Background(), filepath.Join(directory, "channel")
	sender, err := pelton.CreateSender(ctx, channel, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := sender.Send(ctx, []byte("kept")); err != nil {
		log.Fatal(err)
	}
	if err := sender.Close(); err != nil {
		log.Fatal(err)
	}

	receiver, err := pelton.OpenReceiver(ctx, channel, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	file, err := pelton.OpenRecordFile(filepath.Join(directory, "events.records"), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	if err := receiver.FlushTo(ctx, file); err != nil { // ErrPeerDied: call it again for the next sender
		log.Fatal(err)
	}
	fmt.Println("the sender has closed, and everything is on the disk")
	// Output: the sender has closed, and everything is on the disk
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
		if err != nil && !errors.Is(err, pelton.ErrClosedHandle) && ctx.Err() == nil {
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
	var failed *pelton.CallError
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

func ExampleCall_Await() {
	squares, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(squares, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	go func() { // commonly another process
		_ = service.Serve(ctx, func(request pelton.Request) {
			n := request.Bytes()[0]
			_ = request.Reply([]byte{n * n})
		})
	}()

	client, err := pelton.ConnectClient(ctx, squares, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var calls []*pelton.Call
	for n := range byte(10) { // all are on their way before the first is awaited
		call, err := client.Submit(ctx, []byte{n}, pelton.Idempotent)
		if err != nil {
			log.Fatal(err)
		}
		calls = append(calls, call)
	}
	calls[0].Cancel()
	sum := 0
	for _, call := range calls[1:] {
		reply, err := call.Await(ctx)
		if err != nil {
			log.Fatal(err)
		}
		sum += int(reply[0])
	}
	fmt.Println(sum)
	// Output: 285
}

func ExampleClient_CallInto() {
	echo, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	go func() { _ = service.Serve(ctx, func(request pelton.Request) { _ = request.Reply(request.Bytes()) }) }()

	client, err := pelton.ConnectClient(ctx, echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	buffer := make([]byte, 1024) // used again and again: nothing is allocated for a call
	for range 3 {
		reply, err := client.CallInto(ctx, []byte("again"), buffer)
		fmt.Printf("%s %v\n", reply, err)
	}
	// Output:
	// again <nil>
	// again <nil>
	// again <nil>
}

// A loop of one's own instead of Serve: here it takes notifications, which need no reply, and abandons a request.
func ExampleService_Receive() {
	notes, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(notes, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	client, err := pelton.ConnectClient(ctx, notes, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if err := client.Notify(ctx, []byte("by the way")); err != nil {
		log.Fatal(err)
	}
	call, err := client.Submit(ctx, []byte("and what do you say?"))
	if err != nil {
		log.Fatal(err)
	}
	for range 2 {
		request, err := service.Receive(ctx)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: to be answered: %v\n", request.Bytes(), !request.IsNotification())
		if err := request.Abandon(); err != nil {
			log.Fatal(err)
		}
	}
	_, err = call.Await(ctx)
	fmt.Println(errors.Is(err, pelton.ErrAbandoned))
	// Output:
	// by the way: to be answered: false
	// and what do you say?: to be answered: true
	// true
}

// A service drains: it answers what it has taken, and no call fails.
func ExampleService_Drain() {
	echo, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	service, err := pelton.ListenService(echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	client, err := pelton.ConnectClient(ctx, echo, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	call, err := client.Submit(ctx, []byte("the last"))
	if err != nil {
		log.Fatal(err)
	}
	err = service.Serve(ctx, func(request pelton.Request) {
		service.Drain() // commonly by a signal
		_ = request.Reply(request.Bytes())
	})
	_ = service.Close()
	reply, failed := call.Await(ctx)
	fmt.Printf("%s %v %v\n", reply, failed, err)
	// Output: the last <nil> <nil>
}

// A channel that is a directory: the sender need not wait for a receiver, and what it has sent outlives it.
func ExampleCreateSender() {
	place, err := os.MkdirTemp("", "pelton-example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(place)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sender, err := pelton.CreateSender(ctx, place+"/events", &pelton.Options{Capacity: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	if err := sender.SendBatch(ctx, []byte("one"), []byte("two"), []byte("three")); err != nil {
		log.Fatal(err)
	}
	if err := sender.Sync(); err != nil { // on the disk, where the directory is on one
		log.Fatal(err)
	}
	fmt.Println(sender.Unreleased(), "wait")
	if err := sender.Close(); err != nil {
		log.Fatal(err)
	}

	receiver, err := pelton.OpenReceiver(ctx, place+"/events", nil) // commonly another process, later
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	for range 3 {
		message, err := receiver.Receive(ctx)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d: %s\n", message.Seq(), message.Bytes())
		if err := message.Release(); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 3 wait
	// 1: one
	// 2: two
	// 3: three
}

// TrySend and TryReceive do not wait. Messages are kept here; the lane has space again when they are released, in any
// order.
func ExampleSender_TrySend() {
	events, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	receiver, err := pelton.Gather(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	sender, err := pelton.ConnectSender(ctx, events, &pelton.Options{Capacity: 1 << 16})
	if err != nil {
		log.Fatal(err)
	}
	defer sender.Close()

	var kept []pelton.Message
	for {
		hadRoom, err := sender.TrySend(make([]byte, 10000))
		if err != nil {
			log.Fatal(err)
		}
		if !hadRoom {
			break
		}
		message, err := receiver.Receive(ctx)
		if err != nil {
			log.Fatal(err)
		}
		kept = append(kept, message)
	}
	_, ok, err := receiver.TryReceive()
	fmt.Println("more has come:", ok, err)
	for _, message := range kept {
		if err := message.Release(); err != nil {
			log.Fatal(err)
		}
	}
	if err := sender.WaitReleased(ctx); err != nil { // until everything is released
		log.Fatal(err)
	}
	hadRoom, err := sender.TrySend(make([]byte, 10000))
	fmt.Println("has room:", hadRoom, err)
	// Output:
	// more has come: false <nil>
	// has room: true <nil>
}

// Statistics of both sides, for a metrics library: examples/metrics exports them to Prometheus.
func ExampleSender_Counters() {
	events, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	receiver, err := pelton.Gather(events, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	for range 2 {
		sender, err := pelton.ConnectSender(ctx, events, nil)
		if err != nil {
			log.Fatal(err)
		}
		if err := sender.Send(ctx, []byte("hello")); err != nil {
			log.Fatal(err)
		}
		message, err := receiver.Receive(ctx)
		if err != nil {
			log.Fatal(err)
		}
		if err := message.Release(); err != nil {
			log.Fatal(err)
		}
		sent, isFree := sender.Counters()
		fmt.Println("sent:", sent.Messages, sent.Bytes, isFree)
		sender.Close()
	}
	_, isThere, err := receiver.TryReceive() // finds that both have left
	received, _ := receiver.Counters()
	fmt.Println("received:", received.Messages, received.Bytes, isThere, err)
	// Output:
	// sent: 1 5 true
	// sent: 1 5 true
	// received: 2 10 false <nil>
}

// Descriptors travel with a message: here the end of a pipe, which the receiver then reads.
func ExampleSender_SendFiles() {
	events, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
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

	output, input, err := os.Pipe()
	if err != nil {
		log.Fatal(err)
	}
	if err := sender.SendFiles(ctx, []byte("a pipe"), output); err != nil {
		log.Fatal(err)
	}
	output.Close() // the sender has a duplicate
	fmt.Fprint(input, "through the pipe")
	input.Close()

	message, err := receiver.Receive(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer message.Release()
	files := message.TakeFiles()
	text, err := io.ReadAll(files[0])
	fmt.Printf("%s: %s %v\n", message.Bytes(), text, err)
	files[0].Close()
	// Output:
	// a pipe: through the pipe <nil>
}

// The receiver connects, and continues with another sender when the first is gone.
func ExampleReceiver_Resume() {
	events, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	go func() { // commonly two processes, one after the other
		listener, err := pelton.Listen(events, nil)
		if err != nil {
			log.Fatal(err)
		}
		defer listener.Close()
		for n := range 2 {
			sender, err := listener.AcceptSender(ctx)
			if err != nil {
				log.Fatal(err)
			}
			if err := sender.Send(ctx, fmt.Append(nil, "of sender ", n)); err != nil {
				log.Fatal(err)
			}
			sender.Close()
		}
	}()
	receiver, err := pelton.ConnectReceiver(ctx, events, &pelton.Options{Await: true})
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()
	for n := range 2 {
		for message, err := range receiver.Messages(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Printf("%s\n", message.Bytes())
		}
		if n == 0 {
			if err := receiver.Resume(ctx); err != nil {
				log.Fatal(err)
			}
		}
	}
	// Output:
	// of sender 0
	// of sender 1
}

func ExamplePublish() {
	prices, remove := name()
	defer remove()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	done := make(chan bool)

	go func() { // commonly another process
		defer close(done)
		options := &pelton.Options{Policy: pelton.Lag, StartFrom: pelton.FromOldest, Await: true}
		subscriber, err := pelton.ConnectSubscriber(ctx, prices, options)
		if err != nil {
			log.Fatal(err)
		}
		defer subscriber.Close()
		for delivery, err := range subscriber.Messages(ctx) { // until the publisher closes
			if err != nil {
				log.Fatal(err)
			}
			fmt.Printf("%s, %d missed\n", delivery.Bytes, delivery.Missed)
		}
	}()

	// It keeps the last 100 messages for subscribers that come later.
	publisher, err := pelton.Publish(prices, &pelton.Options{History: 100})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.WaitSubscribers(ctx, 1); err != nil {
		log.Fatal(err)
	}
	for price := 1; price <= 3; price++ {
		if err := publisher.Send(ctx, fmt.Appendf(nil, "price %d", price)); err != nil {
			log.Fatal(err)
		}
	}
	publisher.Close()
	<-done
	// Output:
	// price 1, 0 missed
	// price 2, 0 missed
	// price 3, 0 missed
}

// A directory keeps messages, and the place of a durable subscriber, while no process uses it.
func ExampleCreatePublisher() {
	place, err := os.MkdirTemp("", "pelton-example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(place)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	publish := func(trades ...string) {
		publisher, err := pelton.CreatePublisher(ctx, place+"/trades", &pelton.Options{History: 100})
		if err != nil {
			log.Fatal(err)
		}
		defer publisher.Close()
		for _, trade := range trades {
			if err := publisher.Send(ctx, []byte(trade)); err != nil {
				log.Fatal(err)
			}
		}
	}
	audit := func(count int) {
		options := &pelton.Options{Durable: "audit", StartFrom: pelton.FromOldest}
		subscriber, err := pelton.OpenSubscriber(ctx, place+"/trades", options)
		if err != nil {
			log.Fatal(err)
		}
		defer subscriber.Close()
		for range count {
			delivery, err := subscriber.Receive(ctx)
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(delivery.Number, string(delivery.Bytes))
			if err := subscriber.Release(); err != nil {
				log.Fatal(err)
			}
		}
	}

	publish("one", "two")
	audit(1)
	publish("three") // perhaps days later
	audit(2)
	fmt.Println(pelton.RemoveSubscription(place+"/trades", "audit", nil))
	// Output:
	// 1 one
	// 2 two
	// 3 three
	// <nil>
}

// A channel of Go gives each value to one goroutine. A broadcast gives each message to all.
// A goroutine for each publisher receives from many.
func ExampleSubscriber_Messages_many() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	received := make(chan string)
	var receiving sync.WaitGroup
	for _, topic := range []string{"bid", "offer"} {
		publisher, err := pelton.NewPublisher(nil)
		if err != nil {
			log.Fatal(err)
		}
		subscriber, err := publisher.NewSubscriber(nil)
		if err != nil {
			log.Fatal(err)
		}
		receiving.Go(func() {
			defer subscriber.Close()
			for delivery, err := range subscriber.Messages(ctx) {
				if err != nil {
					log.Fatal(err)
				}
				received <- fmt.Sprintf("%s %s", topic, delivery.Bytes)
			}
		})
		if err := publisher.Send(ctx, []byte("17")); err != nil {
			log.Fatal(err)
		}
		publisher.Close()
	}
	go func() {
		receiving.Wait()
		close(received)
	}()
	for message := range received {
		fmt.Println(message)
	}
	// Unordered output:
	// bid 17
	// offer 17
}

func ExampleNewPublisher() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	publisher, err := pelton.NewPublisher(&pelton.Options{Capacity: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	var done sync.WaitGroup
	var lengths [3]int
	for i := range lengths {
		subscriber, err := publisher.NewSubscriber(nil)
		if err != nil {
			log.Fatal(err)
		}
		done.Go(func() {
			defer subscriber.Close()
			for delivery, err := range subscriber.Messages(ctx) {
				if err != nil {
					log.Fatal(err)
				}
				lengths[i] += len(delivery.Bytes)
			}
		})
	}
	for n := range 101 {
		if err := publisher.Send(ctx, make([]byte, n)); err != nil {
			log.Fatal(err)
		}
	}
	publisher.Close()
	done.Wait()
	fmt.Println(lengths)
	// Output: [5050 5050 5050]
}
