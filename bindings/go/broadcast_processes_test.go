package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"
)

// inBothWays runs a test by connect and in a directory. tools is the place's name for the pelton command.
func inBothWays(t *testing.T, test func(t *testing.T, name, tools string)) {
	t.Run("by connect", func(t *testing.T) { name := place(t); test(t, name, name) })
	t.Run("in a directory", func(t *testing.T) { name := channelPlace(t); test(t, name, "path:"+name) })
}

// publishAt publishes under a name of inBothWays.
func publishAt(ctx context.Context, name string, options *Options) (*Publisher, error) {
	if strings.HasPrefix(name, "/") {
		return CreatePublisher(ctx, name, options)
	}
	return Publish(name, options)
}

func subscribeAt(ctx context.Context, name string, options *Options) (*Subscriber, error) {
	if strings.HasPrefix(name, "/") {
		return OpenSubscriber(ctx, name, options)
	}
	return ConnectSubscriber(ctx, name, options)
}

// publishSide is a child: "publish NAME SUBSCRIBERS COUNT END" publishes that many messages, of sizes as in
// interop_test, once it has the subscribers.
func publishSide(ctx context.Context, name string, subscribers, count int, end string) error {
	publisher, err := publishAt(ctx, name, &Options{Capacity: 1 << 22})
	if err != nil {
		return err
	}
	fmt.Println("listening")
	if err := publisher.WaitSubscribers(ctx, subscribers); err != nil {
		return err
	}
	for n := range count {
		if err := publisher.Send(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
			return err
		}
	}
	fmt.Println("done", count)
	if end == "close" {
		return errors.Join(publisher.WaitReleased(ctx), publisher.Close())
	}
	<-ctx.Done()
	return nil
}

// subscribeSide is a child: "subscribe NAME POLICY COUNT END" receives that many messages.
func subscribeSide(ctx context.Context, name, policy string, count int, end string) error {
	options := map[string]*Options{"gate": {}, "lag": {Policy: Lag}, "latest": {Policy: Latest},
		"durable": {Durable: "audit"}, "durable-lag": {Durable: "feed", Policy: Lag}}[policy]
	options.Await = true
	subscriber, err := subscribeAt(ctx, name, options)
	if err != nil {
		return err
	}
	fmt.Println("connected")
	received := count
	for next := uint64(0); count > 0; count-- {
		delivery, err := subscriber.Receive(ctx)
		if err != nil {
			return err
		}
		// It may have joined in the middle.
		if next == 0 {
			next = delivery.Number - delivery.Missed
		}
		if next += delivery.Missed; delivery.Number != next || !isPayload(delivery.Bytes, int(next-1)) {
			return fmt.Errorf("message %d is wrong", next)
		}
		next++
	}
	fmt.Println("done", received)
	if end == "close" {
		return subscriber.Close()
	}
	<-ctx.Done()
	return nil
}

// receiveAll receives until the publisher's end, and checks every message, and that the sum fits.
func receiveAll(ctx context.Context, subscriber *Subscriber, count int, wanted error) error {
	next, received := uint64(1), uint64(0)
	for {
		delivery, err := subscriber.Receive(ctx)
		if errors.Is(err, wanted) {
			break
		}
		if err != nil {
			return err
		}
		next += delivery.Missed
		if n := int(next - 1); delivery.Number != next || len(delivery.Bytes) != sizes[n%len(sizes)] ||
			!isPayload(delivery.Bytes, n) {
			return fmt.Errorf("message %d is wrong: %d with %d bytes", next, delivery.Number, len(delivery.Bytes))
		}
		next++
		received++
	}
	if missed := subscriber.Missed(); received+missed != uint64(count) {
		return fmt.Errorf("%d received and %d missed of %d", received, missed, count)
	}
	return nil
}

func TestGoPublishesToGoAndRust(t *testing.T) {
	inBothWays(t, func(t *testing.T, name, tools string) {
		const count = 1000
		ctx := soon(t)
		publisher := must(publishAt(ctx, name, &Options{Capacity: 1 << 20}))
		defer publisher.Close()
		gates := []*process{tool(t, "sub", "--frame", "len32", tools),
			tool(t, "sub", "--lag-after", "60", "--frame", "len32", tools)}
		others := []*process{child(t, "subscribe", name, "gate", count, "close"),
			child(t, "subscribe", name, "lag", 1, "close"), child(t, "subscribe", name, "latest", 1, "close"),
			tool(t, "sub", "--lag", "--count", "1", "--frame", "len32", tools),
			tool(t, "sub", "--latest", "--count", "1", "--frame", "len32", tools)}
		if err := publisher.WaitSubscribers(ctx, len(gates)+len(others)); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error)
		go func() {
			for n := range count {
				if err := publisher.Send(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
					failed <- err
				}
			}
			failed <- errors.Join(publisher.WaitReleased(ctx), publisher.Close())
		}()
		done := make(chan bool)
		go func() { readFrames(t, gates[0].output, count, 0); close(done) }()
		readFrames(t, gates[1].output, count, 0)
		<-done
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
		for _, process := range append(gates, others...) {
			process.exits(0)
		}
	})
}

func TestRustPublishesToGo(t *testing.T) {
	inBothWays(t, func(t *testing.T, name, tools string) {
		const count = 1000
		ctx := soon(t)
		options := []*Options{{}, {LagAfter: time.Minute}, {Policy: Lag}, {Policy: Lag, Slack: 1 << 17}, {Policy: Latest}}
		publishes := tool(t, "pub", "--frame", "len32", "--capacity", "1M", "--subscribers", fmt.Sprint(len(options)), tools)
		failed := make(chan error, len(options))
		for _, o := range options {
			o.Await = true
			subscriber := must(subscribeAt(ctx, name, o))
			defer subscriber.Close()
			go func() {
				err := receiveAll(ctx, subscriber, count, ErrClosed)
				if err != nil {
					// Otherwise it would hold the publisher up.
					subscriber.Close()
				}
				if missed := subscriber.Missed(); o.Policy == Gate && missed != 0 {
					err = errors.Join(err, fmt.Errorf("%d missed", missed))
				}
				failed <- err
			}()
		}
		if err := errors.Join(writeFrames(publishes.input, count), publishes.input.Close()); err != nil {
			t.Fatal(err)
		}
		for range options {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
		publishes.exits(0)
	})
}

// The publisher is Go's, or Rust's.
func TestAKilledPublisherIsReportedAfterItsLastMessage(t *testing.T) {
	const count = 60
	for _, isRust := range []bool{false, true} {
		inBothWays(t, func(t *testing.T, name, tools string) {
			ctx := soon(t)
			var publishes *process
			if isRust {
				publishes = tool(t, "pub", "--frame", "len32", "--subscribers", "4", tools)
			} else {
				publishes = child(t, "publish", name, 4, count, "stay")
				publishes.says("listening")
			}
			var all []*Subscriber
			for _, o := range []*Options{{}, {Policy: Lag, Slack: 1 << 22}, {Policy: Latest}} {
				o.Await = true
				all = append(all, must(subscribeAt(ctx, name, o)))
				defer all[len(all)-1].Close()
			}
			receives := tool(t, "sub", "--frame", "len32", tools)
			if isRust {
				if err := writeFrames(publishes.input, count); err != nil {
					t.Fatal(err)
				}
			} else {
				publishes.says(fmt.Sprint("done ", count))
			}
			readFrames(t, receives.output, count, 0)
			publishes.kill()
			for _, subscriber := range all {
				if err := receiveAll(ctx, subscriber, count, ErrPeerDied); err != nil {
					t.Error(err)
				}
			}
			receives.exits(1)
			if !strings.Contains(receives.errors.String(), "died") {
				t.Error(receives.errors.String())
			}
			// The next one, under the same name.
			next := must(publishAt(ctx, name, nil))
			defer next.Close()
			for _, subscriber := range all {
				if err := subscriber.Resume(ctx); err != nil {
					t.Fatal(err)
				}
				if err := next.WaitSubscribers(ctx, 1); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// The subscriber is Go's, or Rust's; the publisher Go's, which sleeps for it, or Rust's, which other subscribers
// follow.
func TestAKilledSubscriberHoldsNothingUpAndAStoppedOneDoes(t *testing.T) {
	for _, isRust := range []bool{false, true} {
		inBothWays(t, func(t *testing.T, name, tools string) {
			ctx := soon(t)
			publisher := must(publishAt(ctx, name, &Options{Capacity: 1 << 16}))
			defer publisher.Close()
			var receives *process
			if isRust {
				receives = tool(t, "sub", "--frame", "len32", tools)
			} else {
				receives = child(t, "subscribe", name, "gate", 1<<20, "stay")
				receives.says("connected")
			}
			if err := publisher.WaitSubscribers(ctx, 1); err != nil {
				t.Fatal(err)
			}
			stop(t, receives)
			sent := sendUntilFull(t, publisher)
			soonOver, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
			defer cancel()
			if err := publisher.Send(soonOver, payload(sent, 1000)); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			if held := states(t, publisher); len(held) != 1 || held[0].Holds == 0 || held[0].Peer.PID != receives.Process.Pid {
				t.Fatalf("%+v", held)
			}
			failed := waiting(t, "(*Publisher).Send", func() error { return publisher.Send(ctx, payload(sent, 1000)) })
			receives.kill()
			if err := <-failed; err != nil {
				t.Fatal(err)
			}
			if left := states(t, publisher); len(left) != 0 {
				t.Fatalf("%+v", left)
			}
		})
	}
}

func TestARustPublisherContinuesAfterKilledGoSubscribers(t *testing.T) {
	inBothWays(t, func(t *testing.T, name, tools string) {
		const count = 1000
		ctx := soon(t)
		publishes := tool(t, "pub", "--frame", "len32", "--capacity", "1M", "--subscribers", "3", tools)
		survivor := must(subscribeAt(ctx, name, &Options{Await: true}))
		defer survivor.Close()
		killed := []*process{child(t, "subscribe", name, "gate", 100, "stay"), child(t, "subscribe", name, "lag", 1, "stay")}
		failed := make(chan error)
		go func() { failed <- errors.Join(writeFrames(publishes.input, count), publishes.input.Close()) }()
		go func() {
			err := receiveAll(ctx, survivor, count, ErrClosed)
			survivor.Close()
			failed <- err
		}()
		for i, process := range killed {
			process.says("connected")
			process.says(fmt.Sprint("done ", []int{100, 1}[i]))
			process.kill()
		}
		for range 2 {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
		publishes.exits(0)
	})
}

// Subscribers that are killed at any moment, while others follow.
func TestSubscribersKilledAtAnyMomentAffectNoOther(t *testing.T) {
	inBothWays(t, func(t *testing.T, name, tools string) {
		ctx := soon(t)
		publisher := must(publishAt(ctx, name, &Options{Capacity: 1 << 16}))
		survivor := must(subscribeAt(ctx, name, nil))
		defer survivor.Close()
		failed := make(chan error)
		go func() {
			n := 0
			for delivery, err := range survivor.Messages(ctx) {
				if err != nil || !isPayload(delivery.Bytes, n) || len(delivery.Bytes) != n%2000 ||
					delivery.Number != uint64(n+1) {
					failed <- fmt.Errorf("message %d: %w", n, err)
					return
				}
				n++
			}
			failed <- nil
		}()
		stopped := make(chan bool)
		go func() {
			defer close(stopped)
			for round := range 2 * rounds(t) {
				policy := []string{"gate", "lag", "latest"}[round%3]
				process := child(t, "subscribe", name, policy, 1<<30, "stay")
				process.says("connected")
				time.Sleep(time.Duration(round*7%10) * time.Millisecond)
				_ = process.Process.Signal(syscall.SIGKILL)
				_, _ = io.Copy(io.Discard, process.output)
				_ = process.end()
			}
		}()
		for n, isOver := 0, false; !isOver; n++ {
			if err := publisher.Send(ctx, payload(n, n%2000)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-stopped:
				isOver = true
			default:
			}
		}
		publisher.Close()
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	})
}

// isNumbered reports whether a message is that of its number, as children publish them.
func isNumbered(delivery Delivery) bool {
	return len(delivery.Bytes) == int(delivery.Number%500) && isPayload(delivery.Bytes, int(delivery.Number))
}

// Publishers, Go's and Rust's in turn, and durable subscribers are killed at any moment. One subscriber stays.
func TestABroadcastInADirectorySurvivesKillsOfAllSides(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	random := rand.New(rand.NewPCG(1, 1))
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16})).Close()
	survivor := must(OpenSubscriber(ctx, path, nil))
	defer survivor.Close()
	received := uint64(0)
	// receives takes messages until a number, or, for 0, the publisher's death.
	receives := func(until uint64) {
		t.Helper()
		for until == 0 || received < until {
			delivery, err := survivor.Receive(ctx)
			if until == 0 && errors.Is(err, ErrPeerDied) {
				return
			}
			if err != nil || delivery.Number != received+1 || delivery.Missed != 0 || !isNumbered(delivery) {
				t.Fatalf("message %d after %d: %v", delivery.Number, received, err)
			}
			received++
		}
	}
	type progress struct{ number, missed uint64 }
	// follows checks a message of a follower against the last one before it. If that was not released, it comes again, or
	// is missed, and so are those that were missed before it.
	follows := func(policy string, next, last progress) {
		t.Helper()
		first := next.number - next.missed
		if last.number != 0 && (first < last.number-last.missed || first > last.number+1) ||
			policy == "gate" && next.missed != 0 {
			t.Fatalf("%s: message %d, %d missed before it, after %d, %d missed", policy, next.number, next.missed,
				last.number, last.missed)
		}
	}
	policies := []string{"gate", "lag"}
	followers, last := make([]*process, 2), make([]progress, 2)
	for round := range 2 * rounds(t) {
		for i, policy := range policies {
			followers[i] = child(t, "path-follow", path, policy, policy)
		}
		var publishes *process
		if first := received + 1; round%2 == 0 {
			publishes = child(t, "path-publish", path)
		} else {
			publishes = tool(t, "pub", "--frame", "len32", "path:"+path)
			go func() {
				for n, err := int(first), error(nil); err == nil; n++ {
					frame := binary.LittleEndian.AppendUint32(nil, uint32(n%500))
					_, err = publishes.input.Write(append(frame, payload(n, n%500)...))
				}
			}()
		}
		if round > 0 {
			if err := survivor.Resume(ctx); err != nil {
				t.Fatal(err)
			}
		}
		receives(received + 1 + random.Uint64N(300))
		killed := append([]*process{publishes}, followers...)
		for i := range killed {
			j := i + random.IntN(len(killed)-i)
			killed[i], killed[j] = killed[j], killed[i]
			_ = killed[i].Process.Kill()
			time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
		}
		receives(0)
		for i, follower := range followers {
			// What it printed, it has received, and perhaps not released.
			for isFirst := true; ; isFirst = false {
				var next progress
				if n, _ := fmt.Fscanln(follower.output, &next.number, &next.missed); n != 2 {
					break
				}
				if !isFirst {
					last[i].missed = 0
				}
				follows(policies[i], next, last[i])
				last[i] = next
			}
			_ = follower.end()
		}
		_ = publishes.end()
	}
	// The last of each follower takes the rest.
	publisher := must(CreatePublisher(ctx, path, nil))
	defer publisher.Close()
	for i, policy := range policies {
		o := &Options{Durable: policy}
		if policy == "lag" {
			o.Policy = Lag
		}
		subscriber := must(OpenSubscriber(ctx, path, o))
		defer subscriber.Close()
		for last[i].number < received {
			delivery := must(subscriber.Receive(ctx))
			next := progress{delivery.Number, delivery.Missed}
			follows(policy, next, last[i])
			last[i] = next
		}
	}
	if next := publisher.lane.Number(); next != received+1 || received == 0 {
		t.Fatalf("%d is next after %d", next, received)
	}
}
