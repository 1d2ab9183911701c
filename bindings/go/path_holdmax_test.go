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
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"golang.org/x/sys/unix"
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
	mustBeRefused(t, err, fmt.Sprintf("a subscriber of %s, process %d, may hold", path, os.Getpid()),
		"for longer than 1m0s: raise HoldMax, or end it")
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
	mustBeRefused(t, err, fmt.Sprintf(`the durable subscription "audit" of %s, which process %d uses`, path, os.Getpid()),
		"for longer than 0s", "continue the subscription by Lag", "remove it by RemoveSubscription")
	gates.Close()
	_, err = CreatePublisher(ctx, path, limited)
	mustBeRefused(t, err, `"audit"`, "which no process uses")
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
	lags := must(OpenSubscriber(ctx, path, &Options{Policy: Lag}))
	defer lags.Close()
	table := lane.Table(lags.sub.Cursor.Bytes)
	var begun, joined int
	for round := range 20 * rounds(t) {
		// One that continues, one without a name, and one of a new name.
		o := &Options{LagAfter: time.Minute, Durable: []string{"audit", "", "new"}[round%3]}
		var subscriber *Subscriber
		failed := make(chan error)
		go func() {
			var err error
			subscriber, err = OpenSubscriber(ctx, path, o)
			failed <- err
		}()
		// A subscriber opens more files before it joins than a publisher before it stores its limit.
		for until := time.Now().Add(time.Duration(round/3%50) * 10 * time.Microsecond); time.Now().Before(until); {
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
			if limit := table.HoldLimit(); limit != 0 {
				t.Fatal("the refused one leaves the limit ", limit.Duration())
			}
			if refused == nil {
				subscriber.Close()
			} else {
				mustBeRefused(t, refused)
			}
		}
		if err := RemoveSubscription(path, "new", nil); o.Durable != "new" || refused != nil {
			mustBeRefused(t, err, "no durable subscription")
		} else if err != nil {
			t.Fatal(err)
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

// At each descriptor that it needs, also for the subscribers, and because of the lane.
func TestAPublisherThatFailsToBeginLeavesTheFormerLimit(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16, HoldMax: time.Minute})).Close()
	subscriber := must(OpenSubscriber(ctx, path, &Options{LagAfter: time.Second}))
	defer subscriber.Close()
	for range 5 {
		defer must(OpenSubscriber(ctx, path, &Options{Policy: Lag})).Close()
	}
	table := lane.Table(subscriber.sub.Cursor.Bytes)
	former := table.HoldLimit()
	limited := &Options{HoldMax: 2 * time.Second}
	for most := 0; ; most++ {
		free := withDescriptors(t, most)
		publisher, err := CreatePublisher(ctx, path, limited)
		free()
		if err == nil {
			publisher.Close()
			break
		}
		if found := table.HoldLimit(); !errors.Is(err, unix.EMFILE) || found != former {
			t.Fatalf("limit %d after %d descriptors: %v", found, most, err)
		}
	}
	if former = table.HoldLimit(); former.Duration() != limited.HoldMax {
		t.Fatal(former)
	}
	const heldPlace, behindTheData = 136, 1<<32 | 1<<16
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&table[heldPlace])), behindTheData)
	_, err := CreatePublisher(ctx, path, nil)
	if found := table.HoldLimit(); !errors.Is(err, ErrCorrupt) || found != former {
		t.Fatal(found, err)
	}
}

// Of a publisher here and subscribers of the pelton command, and the other way round.
func TestALimitInADirectoryIsThatOfTheCommandToo(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publish := func(code int, arguments ...string) {
		t.Helper()
		p := tool(t, append([]string{"pub", "--capacity", "64K", "path:" + path}, arguments...)...)
		p.input.Close()
		p.exits(code)
	}
	const refused = 3
	publish(0, "--hold-max", "0")
	_, err := OpenSubscriber(ctx, path, &Options{LagAfter: 1})
	mustBeRefused(t, err, "at most 0s")
	must(OpenSubscriber(ctx, path, &Options{Policy: Lag})).Close()
	publish(0)
	gates := must(OpenSubscriber(ctx, path, &Options{Durable: "here"}))
	publish(refused, "--hold-max", "0")
	gates.Close()
	publish(refused, "--hold-max", "0")
	if err := RemoveSubscription(path, "here", nil); err != nil {
		t.Fatal(err)
	}

	publisher := must(CreatePublisher(ctx, path, &Options{HoldMax: time.Second}))
	tool(t, "sub", "path:"+path).exits(refused)
	tool(t, "sub", "--lag-after", "1.1", "--durable", "there", "path:"+path).exits(refused)
	mustBeRefused(t, RemoveSubscription(path, "there", nil), "no durable subscription")
	takes := tool(t, "sub", "--lag-after", "1", "--durable", "there", "--count", "1", "path:"+path)
	if err := errors.Join(publisher.WaitSubscribers(ctx, 1), publisher.Send(ctx, []byte("hello"))); err != nil {
		t.Fatal(err)
	}
	takes.says("hello")
	takes.exits(0)
	publisher.Close()
	_, err = CreatePublisher(ctx, path, &Options{HoldMax: time.Second - 1})
	mustBeRefused(t, err, `"there"`, "no process")
	must(CreatePublisher(ctx, path, &Options{HoldMax: time.Second})).Close()
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
