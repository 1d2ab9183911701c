package pelton

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"time"
)

// One goroutine that sends and receives: what the calls cost by themselves. Between processes: go run ./bench.
func BenchmarkSendReceiveRelease256(b *testing.B) {
	name := b.TempDir() + "/socket"
	ctx := context.Background()
	receiver := must(Gather("unix:"+name, nil))
	defer receiver.Close()
	sender := must(ConnectSender(ctx, "unix:"+name, nil))
	defer sender.Close()
	message := payload(0, 256)
	b.ReportAllocs()
	for b.Loop() {
		if err := sender.Send(ctx, message); err != nil {
			b.Fatal(err)
		}
		if received, err := receiver.Receive(ctx); err != nil || received.Release() != nil {
			b.Fatal(err)
		}
	}
}

// As above, a broadcast with one subscriber.
func BenchmarkPublishReceive256(b *testing.B) {
	ctx := context.Background()
	publisher := must(NewPublisher(nil))
	defer publisher.Close()
	subscriber := must(publisher.NewSubscriber(nil))
	defer subscriber.Close()
	message := payload(0, 256)
	b.ReportAllocs()
	for b.Loop() {
		if err := publisher.Send(ctx, message); err != nil {
			b.Fatal(err)
		}
		if _, err := subscriber.Receive(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// A client and a service of this process. Between processes: go run ./bench.
func BenchmarkCall256(b *testing.B) {
	name := b.TempDir() + "/socket"
	ctx := context.Background()
	service := must(ListenService("unix:"+name, nil))
	defer service.Close()
	go func() { _ = service.Serve(ctx, echo) }()
	client := must(ConnectClient(ctx, "unix:"+name, nil))
	defer client.Close()
	request, reply := payload(0, 256), make([]byte, 256)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := client.CallInto(ctx, request, reply); err != nil {
			b.Fatal(err)
		}
	}
}

// As above, by a hundred goroutines at a time.
func BenchmarkCall256ByManyGoroutines(b *testing.B) {
	name := b.TempDir() + "/socket"
	ctx := context.Background()
	service := must(ListenService("unix:"+name, nil))
	defer service.Close()
	go func() { _ = service.Serve(ctx, echo) }()
	client := must(ConnectClient(ctx, "unix:"+name, nil))
	defer client.Close()
	request := payload(0, 256)
	b.ReportAllocs()
	b.SetParallelism(100 / runtime.GOMAXPROCS(0))
	b.RunParallel(func(pb *testing.PB) {
		reply := make([]byte, 256)
		for pb.Next() {
			if _, err := client.CallInto(ctx, request, reply); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// A service of another process that sleeps when it is asked, and a client that sleeps until the reply comes: two
// doorbells are rung for each call.
func BenchmarkCallAsleep(b *testing.B) {
	name := "unix:" + b.TempDir() + "/socket"
	ctx := context.Background()
	child(b, "serve", name, "stay").says("listening")
	client := must(ConnectClient(ctx, name, nil))
	defer client.Close()
	request, reply := payload(0, 64), make([]byte, 64)
	var took []time.Duration
	for b.Loop() {
		// Longer than either side spins before it sleeps.
		time.Sleep(300 * time.Microsecond)
		begin := time.Now()
		if _, err := client.CallInto(ctx, request, reply); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
	b.ReportMetric(0, "ns/op")
}
