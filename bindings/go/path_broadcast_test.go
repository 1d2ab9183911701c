package pelton

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// takes receives messages of numbers from..=to, all of which are there, and releases them.
func takes(t *testing.T, subscriber *Subscriber, from, to uint64) {
	t.Helper()
	for number := from; number <= to; number++ {
		delivery, ok, err := subscriber.TryReceive()
		if err != nil || !ok {
			t.Fatal(number, ok, err)
		}
		if delivery.Number != number || !isPayload(delivery.Bytes, int(number)) || len(delivery.Bytes) != int(number%500) {
			t.Fatalf("message %d came as %d, with %d bytes", number, delivery.Number, len(delivery.Bytes))
		}
	}
	if err := subscriber.Release(); err != nil {
		t.Fatal(err)
	}
}

// sends sends messages of the next numbers.
func sends(t *testing.T, publisher *Publisher, count int) {
	t.Helper()
	for range count {
		number := int(publisher.lane.Number())
		if ok, err := publisher.TrySend(payload(number, number%500)); err != nil || !ok {
			t.Fatal(number, ok, err)
		}
	}
}

func TestADirectoryKeepsMessagesForSubscribersThatComeLater(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 18, History: 100}))
	sends(t, publisher, 150)
	publisher.Close()
	oldest := must(OpenSubscriber(ctx, path, &Options{StartFrom: FromOldest}))
	defer oldest.Close()
	takes(t, oldest, 1, 150)
	// The publisher that has left is no news.
	if _, ok, err := oldest.TryReceive(); ok || err != nil {
		t.Fatal(ok, err)
	}
	last := must(OpenSubscriber(ctx, path, &Options{StartFrom: 7, Policy: Lag}))
	defer last.Close()
	takes(t, last, 144, 150)
	now := must(OpenSubscriber(ctx, path, nil))
	defer now.Close()
	newest := must(OpenSubscriber(ctx, path, &Options{Policy: Latest, StartFrom: FromOldest}))
	defer newest.Close()
	if delivery, ok, err := newest.TryReceive(); err != nil || !ok || delivery.Number != 150 || delivery.Missed != 149 {
		t.Fatal(delivery.Number, ok, err)
	}

	// The next publisher continues the count, and its subscribers follow.
	publisher = must(CreatePublisher(ctx, path, nil))
	defer publisher.Close()
	if publisher.Capacity() != 1<<18 {
		t.Fatal(publisher.Capacity())
	}
	sends(t, publisher, 10)
	for _, subscriber := range []*Subscriber{oldest, last, now} {
		takes(t, subscriber, 151, 160)
	}
	if states := states(t, publisher); len(states) != 4 || states[0].Peer.PID != os.Getpid() {
		t.Fatalf("%+v", states)
	}
	// Its end is.
	publisher.Close()
	for range 2 {
		if _, _, err := oldest.TryReceive(); !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	}
	failed := waiting(t, "(*Subscriber).Resume", func() error { return oldest.Resume(ctx) })
	publisher = must(CreatePublisher(ctx, path, nil))
	defer publisher.Close()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	sends(t, publisher, 1)
	takes(t, oldest, 161, 161)
	takes(t, now, 161, 161)
	if err := publisher.WaitReleased(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestADurableSubscriptionKeepsItsPlace(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	for _, policy := range []*Options{{Durable: "audit"}, {Durable: "audit", LagAfter: time.Hour},
		{Durable: "audit", Policy: Lag, Slack: 1 << 16}} {
		t.Run(fmt.Sprint(policy.Policy, policy.LagAfter), func(t *testing.T) {
			publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 18}))
			defer publisher.Close()
			first := publisher.lane.Number()
			subscriber := must(OpenSubscriber(ctx, path, policy))
			if subscriber.Continues() {
				t.Fatal("it continues a subscription that is new")
			}
			if _, err := OpenSubscriber(ctx, path, policy); !errors.Is(err, ErrRoleTaken) ||
				!strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
				t.Fatal(err)
			}
			if err := RemoveSubscription(path, "audit", nil); !errors.Is(err, ErrRoleTaken) {
				t.Fatal(err)
			}
			sends(t, publisher, 100)
			takes(t, subscriber, first, first+39)
			// It is received, and not released.
			if delivery, ok, err := subscriber.TryReceive(); err != nil || !ok || delivery.Number != first+40 {
				t.Fatal(delivery.Number, ok, err)
			}
			subscriber.Close()
			sends(t, publisher, 10)
			// The end of its process is noticed soon.
			for away := states(t, publisher); ctx.Err() == nil && away[0].Peer.PID != 0; away = states(t, publisher) {
				time.Sleep(time.Millisecond)
			}
			if away := states(t, publisher); len(away) != 1 || away[0].Durable != "audit" || away[0].Peer.PID != 0 ||
				away[0].Behind != 70 {
				t.Fatalf("%+v", away)
			}
			// A successor of both.
			publisher.Close()
			publisher = must(CreatePublisher(ctx, path, nil))
			defer publisher.Close()
			subscriber = must(OpenSubscriber(ctx, path, policy))
			if !subscriber.Continues() {
				t.Fatal("it begins anew")
			}
			if _, err := OpenSubscriber(ctx, path, &Options{Durable: "other", Policy: Latest}); !errors.Is(err, ErrRefused) {
				t.Fatal(err)
			}
			takes(t, subscriber, first+40, first+109)
			sends(t, publisher, 1)
			takes(t, subscriber, first+110, first+110)
			subscriber.Close()
			if policy.Policy == Lag || policy.LagAfter > 0 {
				if _, err := OpenSubscriber(ctx, path, &Options{Durable: "audit"}); !errors.Is(err, ErrRefused) {
					t.Fatal(err)
				}
			}
			if err := RemoveSubscription(path, "audit", nil); err != nil {
				t.Fatal(err)
			}
			if err := RemoveSubscription(path, "audit", nil); !errors.Is(err, ErrRefused) {
				t.Fatal(err)
			}
			if left := states(t, publisher); len(left) != 0 {
				t.Fatalf("%+v", left)
			}
			publisher.Close()
		})
	}
}

func TestADurableSubscriptionThatIsAwayHoldsThePublisherUpOrMisses(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16}))
	defer publisher.Close()
	must(OpenSubscriber(ctx, path, &Options{Durable: "lags", Policy: Lag, Slack: 4096})).Close()
	sends(t, publisher, 5000)
	var subscriber *Subscriber
	var delivery Delivery
	// What is not released comes again, and so does the number of messages missed before it.
	for range 2 {
		if subscriber != nil {
			subscriber.Close()
		}
		subscriber = must(OpenSubscriber(ctx, path, &Options{Durable: "lags", Policy: Lag}))
		defer subscriber.Close()
		delivery = must(subscriber.Receive(ctx))
		if delivery.Missed == 0 || delivery.Number != delivery.Missed+1 || subscriber.Missed() != delivery.Missed {
			t.Fatal(delivery.Number, delivery.Missed)
		}
	}
	takes(t, subscriber, delivery.Number+1, 5000)

	must(OpenSubscriber(ctx, path, &Options{Durable: "gates"})).Close()
	sendUntilFull(t, publisher)
	if held := states(t, publisher); len(held) != 2 || held[1].Durable != "gates" || held[1].Holds == 0 {
		t.Fatalf("%+v", held)
	}
	failed := waiting(t, "(*Publisher).Send", func() error { return publisher.Send(ctx, payload(0, 1000)) })
	if err := RemoveSubscription(path, "gates", nil); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

func TestABroadcastInADirectoryRefusesWhatDoesNotFit(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	refused := func(wanted error, err error) {
		t.Helper()
		if !errors.Is(err, wanted) {
			t.Errorf("%v, wanted %v", err, wanted)
		}
	}
	open := func(options *Options) error {
		subscriber, err := OpenSubscriber(ctx, path, options)
		if err == nil {
			subscriber.Close()
		}
		return err
	}
	refused(ErrNoChannel, open(nil))
	refused(ErrNoChannel, RemoveSubscription(path, "audit", nil))
	publisher := must(CreatePublisher(ctx, path, small))
	defer publisher.Close()
	_, err := CreatePublisher(ctx, path, nil)
	refused(ErrRoleTaken, err)
	_, err = OpenReceiver(ctx, path, nil)
	refused(ErrNotAChannel, err)
	_, err = CreateSender(ctx, path, nil)
	refused(ErrNotAChannel, err)
	_, err = publisher.NewSubscriber(nil)
	refused(ErrRefused, err)
	refused(ErrName, open(&Options{Durable: "a name"}))
	refused(ErrName, open(&Options{Durable: strings.Repeat("n", 65)}))
	refused(ErrName, RemoveSubscription(path, "", nil))
	refused(ErrNotAChannel, open(&Options{Memory: 4096}))
	_, err = ConnectSubscriber(ctx, "prices", &Options{Durable: "audit"})
	refused(ErrOption, err)
	_, err = newTestPublisher(t, nil).NewSubscriber(&Options{Durable: "audit"})
	refused(ErrOption, err)

	var all []*Subscriber
	for range SubscribersMax {
		all = append(all, must(OpenSubscriber(ctx, path, nil)))
	}
	refused(ErrRefused, open(nil))
	refused(ErrRefused, open(&Options{Durable: "audit"}))
	over, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, err = OpenSubscriber(over, path, &Options{Await: true})
	refused(ErrRefused, err)
	refused(context.DeadlineExceeded, err)
	if err := publisher.WaitSubscribers(ctx, SubscribersMax); err != nil {
		t.Fatal(err)
	}
	for _, subscriber := range all {
		subscriber.Close()
	}
	if left := states(t, publisher); len(left) != 0 {
		t.Fatalf("%+v", left)
	}
	refused(nil, open(&Options{Durable: strings.Repeat("n", 64)}))

	other := channelPlace(t)
	must(CreateSender(ctx, other, nil)).Close()
	_, err = CreatePublisher(ctx, other, nil)
	refused(ErrNotAChannel, err)
}

// A subscriber that waits for the directory, and one that waits for its name.
func TestOpeningASubscriberWaitsForTheDirectoryAndTheName(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	var first, second *Subscriber
	opening := func(to **Subscriber) chan error {
		return waiting(t, "OpenSubscriber", func() (err error) {
			*to, err = OpenSubscriber(ctx, path, &Options{Await: true, Durable: "audit"})
			return err
		})
	}
	opened := opening(&first)
	publisher := must(CreatePublisher(ctx, path, small))
	defer publisher.Close()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	opened = opening(&second)
	first.Close()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if !second.Continues() {
		t.Fatal("it begins anew")
	}
	over, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := OpenSubscriber(over, path, &Options{Await: true, Durable: "audit"}); !errors.Is(err, ErrRoleTaken) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// Another process has stopped while it opens or removes a durable subscription.
func TestAStoppedProcessThatNamesASlotEndsTheWaitForThat(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	defer must(CreatePublisher(ctx, path, small)).Close()
	channel := must(os.OpenFile(path+"/channel", os.O_RDWR, 0))
	defer channel.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
	if err := unix.FcntlFlock(channel.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenSubscriber(ctx, path, &Options{Durable: "audit"}); !errors.Is(err, ErrTimedOut) {
		t.Fatal(err)
	}
	over, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if _, err := OpenSubscriber(over, path, &Options{Durable: "audit", Await: true}); !errors.Is(err, ErrTimedOut) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if err := RemoveSubscription(path, "audit", nil); !errors.Is(err, ErrTimedOut) {
		t.Fatal(err)
	}
	// One without a name needs no such lock.
	must(OpenSubscriber(ctx, path, nil)).Close()
}

// Whatever is in the files, each side reports it or delivers what the bytes say: it neither panics nor stays in a call.
func TestHostileBytesInTheFilesOfABroadcastEndInErrors(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 8 * rounds(t) {
		publisher := must(CreatePublisher(ctx, path, &Options{Capacity: 1 << 16, MessageBytesMax: 2000}))
		var all []*Subscriber
		for _, o := range []*Options{{}, {Durable: "a"}, {Policy: Lag, Slack: 4096}, {Policy: Latest},
			{Durable: "b", LagAfter: time.Microsecond}} {
			all = append(all, must(OpenSubscriber(ctx, path, o)))
		}
		damage := func() {
			page, table := publisher.side.Page.Bytes, publisher.path.Table.Bytes
			segment := [][]byte{page[128:768], publisher.side.Data.Bytes, table[64:192], table[8192:8832],
				table[16384+64:][:5*8192]}[random.IntN(5)]
			bytes := segment[8*random.IntN(len(segment)/8):][:8]
			for i := range bytes {
				bytes[i] = byte(random.Uint64() >> random.IntN(9))
			}
		}
		for range 40 {
			damage()
			for range random.IntN(30) {
				_, _ = publisher.TrySend(payload(0, random.IntN(2000)))
			}
			for _, subscriber := range all {
				for range random.IntN(30) {
					_, _, _ = subscriber.TryReceive()
				}
			}
			publisher.Subscribers()
			if random.IntN(8) == 0 {
				all[1].Close()
				options := &Options{Durable: "a", StartFrom: StartFrom(random.IntN(90))}
				if subscriber, err := OpenSubscriber(ctx, path, options); err == nil {
					all[1] = subscriber
				}
			}
		}
		for _, subscriber := range all {
			subscriber.Close()
		}
		publisher.Close()
		if publisher, err := CreatePublisher(ctx, path, nil); err == nil {
			_, _ = publisher.TrySend(nil)
			publisher.Close()
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
}

// While a successor begins, the page still says that its predecessor has closed, whose end the subscriber has reported.
func TestAPublisherThatBeginsHasNotClosed(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, small))
	defer publisher.Close()
	subscriber := must(OpenSubscriber(ctx, path, nil))
	defer subscriber.Close()
	const generation, state, open, closed = 144, 384, 1, 2
	page := publisher.side.Page.Bytes
	word := (*uint64)(unsafe.Pointer(&page[generation]))
	store := func(value uint32) { atomic.StoreUint32((*uint32)(unsafe.Pointer(&page[state])), value) }
	var begins, has atomic.Uint64
	done := make(chan bool)
	defer func() { <-done }()
	const rounds = 2000
	go func() {
		defer close(done)
		for round := range uint64(rounds) {
			for begins.Load() == round {
				runtime.Gosched()
			}
			store(open)
			has.Store(atomic.AddUint64(word, 1))
		}
	}()
	for round := range uint64(rounds) {
		store(closed)
		past := atomic.LoadUint64(word)
		subscriber.path.past = past
		begins.Store(round + 1)
		for has.Load() <= past {
			if hasClosed, _ := subscriber.hasClosed(); hasClosed {
				begins.Store(rounds)
				t.Fatal("the successor's generation counts as closed")
			}
		}
	}
}

// Descriptors may run out when several subscribers have joined by themselves: each attempt to meet them ends in one
// more, and not in one for each.
func TestAPublisherWithoutDescriptorsTriesAgainOnceAtATime(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	publisher := must(CreatePublisher(ctx, path, small))
	defer publisher.Close()
	for range 3 {
		defer must(OpenSubscriber(ctx, path, nil)).Close()
	}
	// During a call, an attempt only notes that there is news.
	if err := publisher.guard.Enter(); err != nil {
		t.Fatal(err)
	}
	free := withDescriptors(t, 0)
	for isOnTime := false; !isOnTime; {
		for range 3 {
			if err := publisher.attend(); !errors.Is(err, ErrSystem) {
				t.Fatal(err)
			}
		}
		// Unless the attempt came before this.
		isOnTime = publisher.meetTimer.Stop()
		time.Sleep(3 * meetAgain)
		if publisher.hasNews.Swap(false) && isOnTime {
			t.Fatal("it tries again more than once")
		}
	}
	_ = publisher.attend()
	free()
	publisher.leave()
	if err := publisher.WaitSubscribers(ctx, 3); err != nil {
		t.Fatal(err)
	}
}

// withDescriptors has this process find at most so many free descriptors until the returned function is called.
func withDescriptors(t *testing.T, most int) (free func()) {
	t.Helper()
	lowest := must(os.Open("/dev/null"))
	defer lowest.Close()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	set := func(limit unix.Rlimit) {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
	}
	free = sync.OnceFunc(func() { set(before) })
	t.Cleanup(free)
	set(unix.Rlimit{Cur: uint64(lowest.Fd()) + uint64(most), Max: before.Max})
	return free
}

// Endpoints, open and closed, and calls that fail leave no descriptor, mapping or goroutine.
func TestABroadcastInADirectoryLeavesNothingBehind(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	pass := func() {
		publisher := must(CreatePublisher(ctx, path, small))
		if _, err := CreatePublisher(ctx, path, nil); !errors.Is(err, ErrRoleTaken) {
			t.Fatal(err)
		}
		for _, options := range []*Options{{}, {Policy: Lag}, {Policy: Latest}, {Durable: "a"}, {Durable: "b", Policy: Lag}} {
			subscriber := must(OpenSubscriber(ctx, path, options))
			sends(t, publisher, 3)
			must(subscriber.Receive(ctx))
			if options.Durable != "" {
				if _, err := OpenSubscriber(ctx, path, options); !errors.Is(err, ErrRoleTaken) {
					t.Fatal(err)
				}
			}
			if _, err := OpenSubscriber(ctx, path, &Options{Memory: 4096}); !errors.Is(err, ErrNotAChannel) {
				t.Fatal(err)
			}
			// With a message in place, the mapping would wait for a collection.
			if options.Policy == Gate {
				subscriber.Release()
			}
			subscriber.Close()
		}
		publisher.Close()
		for _, name := range []string{"a", "b"} {
			if err := RemoveSubscription(path, name, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	count := func() (all [3]int) {
		maps := string(must(os.ReadFile("/proc/self/maps")))
		return [3]int{len(must(os.ReadDir("/proc/self/fd"))), strings.Count(maps, path), runtime.NumGoroutine()}
	}
	pass()
	closesEnd(t)
	before := count()
	for range 3 {
		pass()
	}
	for after := count(); ; after = count() {
		if after[0] <= before[0] && after[1] <= before[1] && after[2] <= before[2] {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("descriptors, mappings and goroutines: %v before, %v after", before, after)
		}
		time.Sleep(time.Millisecond)
	}
}
