package pelton

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
)

// HoldMax in a directory: the limit is a word there, which subscribers load when they join, also without a publisher.

// mustBeRefused checks the kind of an error, and that its text has all parts.
func mustBeRefused(t *testing.T, err error, parts ...string) {
	t.Helper()
	if !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Fatalf("%q is not in %q", part, err)
		}
	}
}

func TestAPublisherInADirectoryRefusesSubscribersThatMayHoldIt(t *testing.T) {
	for _, limit := range []time.Duration{-1, time.Second} {
		path, ctx := channelPlace(t), soon(t)
		publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16, HoldMax: limit}))
		defer publisher.Close()
		byConnect := newTestPublisher(t, &Options{Capacity: 1 << 16, HoldMax: limit})
		refuses := func() {
			t.Helper()
			for _, o := range []*Options{{}, {LagAfter: time.Second + 1}, {LagAfter: time.Hour}} {
				_, connected := byConnect.NewSubscriber(o)
				_, words, _ := strings.Cut(connected.Error(), "refused: ")
				words, _, _ = strings.Cut(words, "HoldMax")
				_, err := OpenSubscriber(ctx, path, o)
				mustBeRefused(t, err, words+"HoldMax")
				named := *o
				named.Durable = "audit"
				_, err = OpenSubscriber(ctx, path, &named)
				mustBeRefused(t, err, words+"HoldMax")
			}
			// Its name has no slot.
			mustBeRefused(t, RemoveSubscription(path, "audit", nil), "no durable subscription")
		}
		refuses()
		admitted := []*Options{{Policy: Lag}, {Policy: Latest}, {Policy: Lag, Durable: "feed"}}
		if limit > 0 {
			admitted = append(admitted, &Options{LagAfter: time.Second}, &Options{LagAfter: 1, Durable: "soon"})
		} else {
			_, err := OpenSubscriber(ctx, path, &Options{LagAfter: 1})
			mustBeRefused(t, err, "for 1ns", "at most 0s")
		}
		for _, o := range admitted {
			defer must(OpenSubscriber(ctx, path, o)).Close()
		}
		if found := states(t, publisher); len(found) != len(admitted) {
			t.Fatalf("%+v", found)
		}
		// The limit stays when the publisher has left.
		publisher.Close()
		refuses()
		defer must(OpenSubscriber(ctx, path, &Options{Policy: Lag})).Close()
		// The next one has another one, or none.
		publisher = must(CreatePublisher(ctx, path, &Options{HoldMax: 2 * time.Hour}))
		defer publisher.Close()
		defer must(OpenSubscriber(ctx, path, &Options{LagAfter: time.Hour})).Close()
		_, err := OpenSubscriber(ctx, path, nil)
		mustBeRefused(t, err, "at most 2h0m0s")
		publisher.Close()
		publisher = must(CreatePublisher(ctx, path, nil))
		defer publisher.Close()
		defer must(OpenSubscriber(ctx, path, nil)).Close()
	}
}

func TestAPublisherWithALimitWaitsForAGateToEnd(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16, HoldMax: 2 * time.Hour})).Close()
	gates := must(OpenSubscriber(ctx, path, &Options{LagAfter: time.Hour}))
	defer gates.Close()
	limited := &Options{HoldMax: time.Minute}
	begun := time.Now()
	_, err := CreatePublisher(ctx, path, limited)
	mustBeRefused(t, err, path, fmt.Sprintf("process %d", os.Getpid()), "for 1h0m0s", "at most 1m0s", "end it",
		"raise the publisher's HoldMax")
	if took := time.Since(begun); took < directory.ClaimKilled {
		t.Fatalf("it waited for %v, wanted %v", took, directory.ClaimKilled)
	}
	begun = time.Now()
	over, cancel := context.WithTimeout(ctx, 2*directory.ClaimKilled)
	defer cancel()
	_, err = CreatePublisher(over, path, &Options{HoldMax: time.Minute, Await: true})
	mustBeRefused(t, err)
	if took := time.Since(begun); !errors.Is(err, context.DeadlineExceeded) || took < 2*directory.ClaimKilled {
		t.Fatal(err, took)
	}
	// The former limit is there again.
	second := must(OpenSubscriber(ctx, path, &Options{LagAfter: 2 * time.Hour}))
	defer second.Close()
	_, err = OpenSubscriber(ctx, path, nil)
	mustBeRefused(t, err, "at most 2h0m0s")
	// A publisher that is refused has no role: another one begins.
	publisher := must(CreatePublisher(ctx, path, nil))
	if found := states(t, publisher); len(found) != 2 {
		t.Fatalf("%+v", found)
	}
	_, err = CreatePublisher(ctx, path, limited)
	if !errors.Is(err, ErrRoleTaken) {
		t.Fatal(err)
	}
	publisher.Close()
	second.Close()
	failed := waiting(t, "CreatePublisher", func() (err error) {
		publisher, err = CreatePublisher(ctx, path, &Options{HoldMax: time.Minute, Await: true})
		return err
	})
	gates.Close()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	defer publisher.Close()
	_, err = OpenSubscriber(ctx, path, nil)
	mustBeRefused(t, err)
}

func TestAPublisherWithALimitIsRefusedByADurableGateThatIsAway(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16})).Close()
	gates := must(OpenSubscriber(ctx, path, &Options{Durable: "audit"}))
	defer gates.Close()
	limited := &Options{HoldMax: -1}
	_, err := CreatePublisher(ctx, path, limited)
	mustBeRefused(t, err, `the durable subscription "audit"`, fmt.Sprintf("process %d", os.Getpid()), "without a limit",
		"at most 0s", "end it and remove it by RemoveSubscription")
	gates.Close()
	_, err = CreatePublisher(ctx, path, limited)
	mustBeRefused(t, err, `the durable subscription "audit" of `+path+" may hold", "remove it by RemoveSubscription")
	// It continues by lag, which may be passed.
	must(OpenSubscriber(ctx, path, &Options{Durable: "audit", Policy: Lag})).Close()
	must(CreatePublisher(ctx, path, limited)).Close()

	must(CreatePublisher(ctx, path, nil)).Close()
	must(OpenSubscriber(ctx, path, &Options{Durable: "other"})).Close()
	_, err = CreatePublisher(ctx, path, limited)
	mustBeRefused(t, err, "other")
	if err := RemoveSubscription(path, "other", nil); err != nil {
		t.Fatal(err)
	}
	must(CreatePublisher(ctx, path, limited)).Close()
}

func TestAKilledGateWithoutANameDoesNotRefuseAPublisherWithALimit(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16})).Close()
	gates := child(t, "subscribe", path, "gate", 1<<20, "stay")
	gates.says("connected")
	_, err := CreatePublisher(ctx, path, &Options{HoldMax: -1})
	mustBeRefused(t, err, fmt.Sprintf("process %d", gates.Process.Pid))
	// A stopped one is not dead.
	stop(t, gates)
	_, err = CreatePublisher(ctx, path, &Options{HoldMax: -1})
	mustBeRefused(t, err, fmt.Sprintf("process %d", gates.Process.Pid))
	gates.kill()
	publisher := must(CreatePublisher(ctx, path, &Options{HoldMax: -1}))
	defer publisher.Close()
	for n := range 200 {
		if err := publisher.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if left := states(t, publisher); len(left) != 0 {
		t.Fatalf("%+v", left)
	}
}

func TestADurableSubscriptionThatReturnsForLongerKeepsItsPlace(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 18, HoldMax: time.Minute}))
	defer publisher.Close()
	within := &Options{Durable: "audit", LagAfter: time.Minute}
	subscriber := must(OpenSubscriber(ctx, path, within))
	sends(t, publisher, 100)
	takes(t, subscriber, 1, 40)
	subscriber.Close()
	_, err := OpenSubscriber(ctx, path, &Options{Durable: "audit", LagAfter: time.Hour})
	mustBeRefused(t, err, "for 1h0m0s", "at most 1m0s")
	sends(t, publisher, 10)
	if away := states(t, publisher); len(away) != 1 || away[0].Durable != "audit" || away[0].Behind != 70 ||
		away[0].LagAfter != time.Minute {
		t.Fatalf("%+v", away)
	}
	subscriber = must(OpenSubscriber(ctx, path, within))
	defer subscriber.Close()
	if !subscriber.Continues() {
		t.Fatal("it begins anew")
	}
	takes(t, subscriber, 41, 110)
}

// A publisher that begins with a limit and a subscriber that may hold it up for longer never both succeed.
func TestAPublisherWithALimitNeverBeginsTogetherWithAGateInADirectory(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16})).Close()
	// One attempt.
	over, cancel := context.WithCancel(ctx)
	cancel()
	limited := &Options{HoldMax: time.Millisecond, Await: true}
	within := &Options{LagAfter: time.Millisecond, Durable: "audit"}
	must(OpenSubscriber(ctx, path, within)).Close()
	var begun, joined int
	for round := range 20 * rounds(t) {
		o := &Options{LagAfter: time.Minute}
		if round%2 == 1 {
			o.Durable = "audit"
		}
		var subscriber *Subscriber
		failed := make(chan error)
		go func() {
			var err error
			subscriber, err = OpenSubscriber(ctx, path, o)
			failed <- err
		}()
		// A subscriber opens more files before it joins than a publisher before it stores its limit.
		for until := time.Now().Add(time.Duration(round%50) * 10 * time.Microsecond); time.Now().Before(until); {
		}
		publisher, err := CreatePublisher(over, path, limited)
		refused := <-failed
		switch {
		case err == nil && refused == nil:
			t.Fatal("both have begun, in round ", round)
		case err == nil:
			mustBeRefused(t, refused)
			begun++
			// What the refused one has left does not hold it up.
			for n := range 70 {
				if err := publisher.Send(ctx, payload(n, 1000)); err != nil {
					t.Fatal(err)
				}
			}
			publisher.Close()
		default:
			mustBeRefused(t, err)
			joined++
			if refused == nil {
				subscriber.Close()
			} else {
				mustBeRefused(t, refused)
			}
		}
		// No limit, and the durable subscription within it, for the next round.
		must(CreatePublisher(ctx, path, nil)).Close()
		subscriber, err = OpenSubscriber(ctx, path, within)
		if err != nil || !subscriber.Continues() {
			t.Fatal("round ", round, err)
		}
		subscriber.Close()
	}
	t.Logf("the publisher began %d times, and was refused %d times", begun, joined)
}

// Whatever the limit's word says: a subscriber joins or is refused, and the next publisher stores its own.
func TestAHostileLimitRefusesOrAdmits(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, small))
	defer publisher.Close()
	const holdLimit = 144
	word := (*uint64)(unsafe.Pointer(&publisher.path.Table.Bytes[holdLimit]))
	for _, limit := range []uint64{1, 2, 1 << 31, 1<<63 - 1, 1 << 63, 1<<64 - 2, 1<<64 - 1} {
		atomic.StoreUint64(word, limit)
		_, err := OpenSubscriber(ctx, path, nil)
		mustBeRefused(t, err, "without a limit")
		subscriber, err := OpenSubscriber(ctx, path, &Options{LagAfter: 1<<63 - 1})
		if limit >= 1<<63 {
			must(subscriber, err).Close()
		} else {
			mustBeRefused(t, err)
		}
		must(OpenSubscriber(ctx, path, &Options{Policy: Lag})).Close()
		states(t, publisher)
		publisher.Close()
		publisher = must(CreatePublisher(ctx, path, nil))
		defer publisher.Close()
		word = (*uint64)(unsafe.Pointer(&publisher.path.Table.Bytes[holdLimit]))
		must(OpenSubscriber(ctx, path, nil)).Close()
	}
}
