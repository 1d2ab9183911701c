package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"golang.org/x/sys/unix"
)

// inMemory is the prefix of names in /dev/shm: run-tests searches for those that are left.
func inMemory() string { return "pelton-go-" + filepath.Base(os.TempDir()) + "-" }

// channelPlace is where a test makes a channel: in memory.
func channelPlace(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("/dev/shm", inMemory())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	return directory + "/channel"
}

var small = &Options{Capacity: 1 << 18}

func TestAPathChannelKeepsMessagesForALaterReceiver(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	for generation := range 3 {
		sender := must(CreateSender(ctx, path, small))
		for n := range 100 {
			if err := sender.Send(ctx, payload(100*generation+n, n)); err != nil {
				t.Fatal(err)
			}
		}
		if sender.Unreleased() != uint64(100*(generation+1)) {
			t.Fatal(sender.Unreleased())
		}
		sender.Close()
	}
	receiver := must(OpenReceiver(ctx, path, nil))
	var kept []Message
	for n := range 150 {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) || message.Redelivered() || n >= 100 &&
			message.Generation() != uint32(n/100+1) {
			t.Fatal(n, message.Redelivered(), message.Generation())
		}
		if n < 140 {
			message.Release()
		} else {
			kept = append(kept, message)
		}
	}
	if _, err := OpenReceiver(ctx, path, nil); !errors.Is(err, ErrRoleTaken) ||
		!strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Fatal(err)
	}
	receiver.Close()
	for _, message := range kept {
		if err := message.Release(); err != nil {
			t.Fatal(err)
		}
	}
	receiver = must(OpenReceiver(ctx, path, nil))
	defer receiver.Close()
	for n := 140; n < 300; n++ {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) || !message.Redelivered() {
			t.Fatal(n, message.Redelivered())
		}
		message.Release()
	}
	// The end of the senders is reported once. Then the next may come.
	if _, _, err := receiver.TryReceive(); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, ok, err := receiver.TryReceive(); ok || err != nil {
		t.Fatal(ok, err)
	}
	go func() {
		sender, err := OpenSender(ctx, path, nil)
		if err == nil {
			err = errors.Join(sender.Send(ctx, []byte("late")), sender.Close())
		}
		if err != nil {
			t.Error(err)
		}
	}()
	message := must(receiver.Receive(ctx))
	if string(message.Bytes()) != "late" || message.Redelivered() || message.Generation() != 4 ||
		message.Release() != nil {
		t.Fatalf("%q", message.Bytes())
	}
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

func TestHeldMessagesKeepTheRoleOfTheirClosedReceiver(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	options := &Options{Capacity: 1 << 18, Lanes: 2}
	first, second := must(CreateSender(ctx, path, options)), must(CreateSender(ctx, path, options))
	defer first.Close()
	defer second.Close()
	if err := errors.Join(first.Send(ctx, []byte("held")), first.Send(ctx, []byte("held")),
		second.Send(ctx, []byte("held"))); err != nil {
		t.Fatal(err)
	}
	receiver := must(OpenReceiver(ctx, path, nil))
	var held []Message
	for range 3 {
		held = append(held, must(receiver.Receive(ctx)))
	}
	if err := first.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	receiver.Close()
	// The sender detects the close all the same.
	var ended *EndError
	if err := first.WaitReleased(ctx); !errors.As(err, &ended) || ended.Err != ErrClosed || ended.Unreleased != 2 {
		t.Fatal(err)
	}
	opened := make(chan *Receiver, 1)
	go func() { opened <- must(OpenReceiver(ctx, path, &Options{Await: true})) }()
	for _, message := range held {
		if _, err := OpenReceiver(ctx, path, nil); !errors.Is(err, ErrRoleTaken) {
			t.Fatal(err)
		}
		if len(opened) > 0 || string(message.Bytes()) != "held" || message.Release() != nil {
			t.Fatalf("%d opened, %q", len(opened), message.Bytes())
		}
	}
	receiver = <-opened
	defer receiver.Close()
	for range held {
		if message := must(receiver.Receive(ctx)); !message.Redelivered() || message.Release() != nil {
			t.Fatal("not redelivered")
		}
	}
}

// A sender comes, sends and closes while the receiver that awaits it is stopped, which then finds only messages.
func TestAReceiverThatAwaitsASenderIsOpenedByMessagesToo(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreateReceiver(ctx, path, small)).Close()
	awaits := child(t, "path-await", path)
	for {
		receiver, err := OpenReceiver(ctx, path, nil)
		if errors.Is(err, ErrRoleTaken) {
			break
		}
		must(receiver, err).Close()
	}
	awaits.reaches("S")
	stop(t, awaits)
	sender := must(OpenSender(ctx, path, nil))
	if err := sender.Send(ctx, []byte("one")); err != nil {
		t.Fatal(err)
	}
	sender.Close()
	if err := awaits.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaits.says("open")
}

func TestAReceiverOpensByTheMessagesOfASenderThatHasLeftAgain(t *testing.T) {
	ctx := soon(t)
	for range 100 {
		path := channelPlace(t)
		opened := make(chan *Receiver)
		go func() { opened <- must(CreateReceiver(ctx, path, &Options{Await: true})) }()
		sender := must(OpenSender(ctx, path, &Options{Await: true}))
		// Usually the receiver wakes after this.
		if err := errors.Join(sender.Send(ctx, []byte("hello")), sender.Close()); err != nil {
			t.Fatal(err)
		}
		receiver := <-opened
		if message := must(receiver.Receive(ctx)); string(message.Bytes()) != "hello" || message.Release() != nil {
			t.Fatalf("found %q", message.Bytes())
		}
		if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
			t.Fatalf("found %v, wanted the sender's end", err)
		}
		receiver.Close()
	}
}

func TestATakenRoleIsAwaitedUntilTheContextEnds(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	sender := must(CreateSender(ctx, path, small))
	defer sender.Close()
	receiver := must(OpenReceiver(ctx, path, nil))
	open := map[string]func(context.Context, *Options) error{
		"receiver": func(ctx context.Context, o *Options) error { _, err := OpenReceiver(ctx, path, o); return err },
		"sender":   func(ctx context.Context, o *Options) error { _, err := OpenSender(ctx, path, o); return err },
	}
	for role, open := range open {
		begun := time.Now()
		if err := open(ctx, nil); !errors.Is(err, ErrRoleTaken) || errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(role, err)
		}
		if took := time.Since(begun); took < directory.ClaimKilled {
			t.Errorf("%s: without Await it waited for %v, wanted %v", role, took, directory.ClaimKilled)
		}
		begun = time.Now()
		limited, cancel := context.WithTimeout(ctx, 3*directory.ClaimKilled)
		err := open(limited, &Options{Await: true})
		if took := time.Since(begun); took < 3*directory.ClaimKilled {
			t.Errorf("%s: with Await it waited for %v, wanted %v", role, took, 3*directory.ClaimKilled)
		}
		if cancel(); !errors.Is(err, ErrRoleTaken) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(role, err)
		}
	}
	next := make(chan *Receiver)
	go func() { next <- must(OpenReceiver(ctx, path, &Options{Await: true})) }()
	if !parked("(*Directory).claim") {
		t.Fatal("it does not wait")
	}
	receiver.Close()
	(<-next).Close()
}

func TestARestartRightAfterAKillTakesTheRole(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	sender := must(CreateSender(ctx, path, small))
	defer sender.Close()
	for round := range 10 {
		killed := child(t, "path-hold", path)
		killed.says("open")
		// It still has the role until the kernel has ended it.
		if err := killed.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		receiver := must(OpenReceiver(ctx, path, &Options{Await: true}))
		for err := error(ErrPeerDied); errors.Is(err, ErrPeerDied) || errors.Is(err, ErrClosed); {
			err = sender.Send(ctx, payload(round, 100))
			if err != nil && !errors.Is(err, ErrPeerDied) && !errors.Is(err, ErrClosed) {
				t.Fatal(err)
			}
		}
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), round) || message.Release() != nil || receiver.Close() != nil {
			t.Fatal(round)
		}
		killed.kill()
	}
}

func TestAPathSenderGetsTheEndOnceAndContinues(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	sender := must(CreateSender(ctx, path, small))
	defer sender.Close()
	for round := range 4 {
		receiver := must(OpenReceiver(ctx, path, nil))
		if err := sender.Resume(ctx); err != nil {
			t.Fatal(round, err)
		}
		if err := sender.Send(ctx, payload(round, 1000)); err != nil {
			t.Fatal(round, err)
		}
		for receiver.mayBeReady() {
			must(receiver.Receive(ctx)).Release()
		}
		if err := errors.Join(sender.WaitReleased(ctx), receiver.Close()); err != nil {
			t.Fatal(round, err)
		}
		reports := 0
		for range 1000 {
			if _, err := sender.TrySend(nil); errors.Is(err, ErrClosed) {
				reports++
			} else if err != nil {
				t.Fatal(round, err)
			}
		}
		if reports != 1 {
			t.Fatalf("round %d: reported %d times", round, reports)
		}
	}
}

func TestALaneByPathStretchesIntoSpaceThatIsAllocatedAhead(t *testing.T) {
	for _, directory := range []string{"/dev/shm", os.TempDir()} {
		t.Run(directory, func(t *testing.T) {
			path, ctx := must(os.MkdirTemp(directory, inMemory())), soon(t)
			defer os.RemoveAll(path)
			path += "/channel"
			sender := must(CreateSender(ctx, path, &Options{Capacity: 8 << 20}))
			defer sender.Close()
			blocks := func() int64 {
				var stat unix.Stat_t
				if err := unix.Stat(path+"/0.data", &stat); err != nil {
					t.Fatal(err)
				}
				return stat.Blocks * 512
			}
			first, n := blocks(), 0
			for ; n < 3000; n++ {
				if err := sender.Send(ctx, payload(n, 2000)); err != nil {
					t.Fatal(err)
				}
			}
			if first < 256<<10 || first > 300<<10 || uint64(blocks()) < sender.out.Lane.Backed() ||
				sender.out.Lane.Backed() < 6_000_000 {
				t.Fatal(first, blocks(), sender.out.Lane.Backed())
			}
			if err := sender.Sync(); err != nil {
				t.Fatal(err)
			}
			receiver := must(OpenReceiver(ctx, path, nil))
			defer receiver.Close()
			for n := range 3000 {
				message := must(receiver.Receive(ctx))
				if !isPayload(message.Bytes(), n) {
					t.Fatal(n)
				}
				message.Release()
			}
			if err := errors.Join(receiver.Sync(), sender.Trim(), sender.Send(ctx, payload(1, 3_000_000))); err != nil {
				t.Fatal(err)
			}
			if message := must(receiver.Receive(ctx)); !isPayload(message.Bytes(), 1) {
				t.Fatal("after trimming")
			}
		})
	}
}

func TestSeveralSendersByPathHaveALaneEach(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	options := &Options{Capacity: 1 << 16, Lanes: 5}
	receiver := must(CreateReceiver(ctx, path, options))
	defer receiver.Close()
	var group sync.WaitGroup
	for range 5 {
		group.Go(func() {
			sender, err := OpenSender(ctx, path, nil)
			for n := 0; n < 500 && err == nil; n++ {
				err = sender.Send(ctx, payload(n, n))
			}
			if err != nil {
				t.Error(err)
			}
			if err := sender.WaitReleased(ctx); err != nil {
				t.Error(err)
			}
			sender.Close()
		})
	}
	next, total := map[uint32]int{}, 0
	for total < 2500 {
		message, err := receiver.Receive(ctx)
		if errors.Is(err, ErrClosed) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(message.Bytes()); !isPayload(message.Bytes(), n) || n != next[message.Lane()]%500 {
			t.Fatalf("lane %d: %d, wanted %d", message.Lane(), n, next[message.Lane()])
		}
		next[message.Lane()]++
		total++
		message.Release()
	}
	group.Wait()
	var senders []*Sender
	for range 5 {
		senders = append(senders, must(OpenSender(ctx, path, nil)))
	}
	if _, err := OpenSender(ctx, path, nil); !errors.Is(err, ErrRoleTaken) {
		t.Fatal(err)
	}
	for _, sender := range senders {
		sender.Close()
	}
	must(OpenSender(ctx, path, nil)).Close()
}

func TestConcurrentCreatorsFindOneChannel(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	// What dead creators left: an empty directory, one with only the channel's file, and one that is no channel.
	left := filepath.Dir(path) + "/.channel.pelton-1-"
	for i, file := range []string{"", "channel", "other"} {
		if err := os.Mkdir(left+fmt.Sprint(i), 0o700); err != nil {
			t.Fatal(err)
		}
		if file != "" {
			if err := os.WriteFile(left+fmt.Sprint(i)+"/"+file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	var group sync.WaitGroup
	for range 10 {
		group.Go(func() {
			sender, err := CreateSender(ctx, path, &Options{Capacity: 1 << 16, Lanes: 10})
			if err == nil {
				err = sender.Send(ctx, []byte("x"))
			}
			if err != nil {
				t.Error(err)
				return
			}
			sender.Close()
		})
	}
	group.Wait()
	receiver := must(OpenReceiver(ctx, path, nil))
	defer receiver.Close()
	for range 10 {
		must(receiver.Receive(ctx)).Release()
	}
	entries := must(os.ReadDir(filepath.Dir(path)))
	if len(entries) != 2 || entries[0].Name() != ".channel.pelton-1-2" {
		t.Fatal(entries)
	}
}

// Each check of opening, broken once.
func TestADirectoryThatIsNoChannelIsRefusedAndNotTouched(t *testing.T) {
	ctx := soon(t)
	for name, c := range map[string]struct {
		spoil func(path string) error
		code  error
	}{
		"no channel": {func(p string) error { return os.RemoveAll(p) }, ErrNoChannel},
		"an empty directory": {func(p string) error { os.RemoveAll(p); return os.Mkdir(p, 0o700) },
			ErrNotAChannel},
		"a file": {func(p string) error { os.RemoveAll(p); return os.WriteFile(p, nil, 0o600) },
			ErrNotAChannel},
		"a link": {func(p string) error {
			return errors.Join(os.Rename(p, p+"2"),
				os.Symlink(p+"2", p))
		}, ErrNotAChannel},
		"a mode that is wider": {func(p string) error { return os.Chmod(p, 0o755) }, ErrNotAChannel},
		"a file's wider mode":  {func(p string) error { return os.Chmod(p+"/0.data", 0o644) }, ErrNotAChannel},
		"a missing page":       {func(p string) error { return os.Remove(p + "/0.consumer") }, ErrNotAChannel},
		"a page cut short": {func(p string) error { return os.Truncate(p+"/0.consumer", 4096) },
			ErrNotAChannel},
		"data cut short": {func(p string) error { return os.Truncate(p+"/0.data", 4096) }, ErrNotAChannel},
		"a doorbell that is a file": {func(p string) error {
			os.Remove(p + "/0.bell")
			return os.WriteFile(p+"/0.bell",
				nil, 0o600)
		}, ErrNotAChannel},
		"a life that is a file": {func(p string) error {
			os.Remove(p + "/0.life")
			return os.WriteFile(p+"/0.life",
				nil, 0o600)
		}, ErrNotAChannel},
		"a flipped bit":          {flip("channel", 90), ErrNotAChannel},
		"a count of lanes":       {flip("channel", 129), ErrNotAChannel},
		"a page of another kind": {flip("receiver", 3), ErrNotAChannel},
		"another boot": {func(p string) error {
			b, err := os.ReadFile(p + "/channel")
			b[100] ^= 1
			binary.LittleEndian.PutUint64(b[112:], directory.Checksum(b))
			return errors.Join(err, os.WriteFile(p+"/channel", b, 0o600))
		}, ErrRebooted},
		"a page of another boot": {flip("0.producer", 96), ErrNotAChannel},
		"a page's capacity":      {flip("0.producer", 66), ErrNotAChannel},
		"a head outside":         {flip("0.consumer", 131), ErrCorrupt},
		"a tail of number 0":     {flip("0.producer", 132), ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			path := channelPlace(t)
			must(CreateSender(ctx, path, small)).Close()
			if err := c.spoil(path); err != nil {
				t.Fatal(err)
			}
			_, receiverErr := OpenReceiver(ctx, path, nil)
			sender, err := OpenSender(ctx, path, nil)
			if name == "a tail of number 0" {
				// A receiver does not read it.
				receiverErr = err
			}
			if !errors.Is(err, c.code) || !errors.Is(receiverErr, c.code) {
				t.Fatal(sender, err, receiverErr)
			}
			if c.code == ErrNotAChannel {
				if _, err := CreateSender(ctx, path, small); !errors.Is(err, c.code) {
					t.Fatal(err)
				}
			}
		})
	}
}

func flip(file string, at int) func(string) error {
	return func(path string) error {
		b, err := os.ReadFile(path + "/" + file)
		if err != nil {
			return err
		}
		b[at] ^= 1
		return os.WriteFile(path+"/"+file, b, 0o600)
	}
}

func TestBothLanguagesShareAChannelByPath(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	// Go creates and fills it, Rust adds to it, Go receives some of it, Rust the rest.
	sender := must(CreateSender(ctx, path, &Options{Capacity: 1 << 20, Lanes: 2}))
	for n := range 100 {
		if err := sender.Send(ctx, []byte(fmt.Sprint(n))); err != nil {
			t.Fatal(err)
		}
	}
	sender.Close()
	sends := tool(t, "send", "path:"+path)
	for n := 100; n < 200; n++ {
		fmt.Fprintln(sends.input, n)
	}
	sends.input.Close()
	sends.exits(0)
	receiver := must(OpenReceiver(ctx, path, nil))
	for n := range 120 {
		message := must(receiver.Receive(ctx))
		if string(message.Bytes()) != fmt.Sprint(n) || n >= 100 && message.Generation() != 2 {
			t.Fatalf("%d: %q of %d", n, message.Bytes(), message.Generation())
		}
		message.Release()
	}
	receiver.Close()
	receives := tool(t, "recv", "path:"+path)
	for n := 120; n < 200; n++ {
		receives.says(fmt.Sprint(n))
	}
	receives.exits(0)
	info := tool(t, "info", path)
	info.exits(0)
}

// One side stays, the other is killed again and again, and is of either language. Each time the death is reported
// once.
func TestSidesByPathOfEitherLanguageAreSucceeded(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	receiver := must(CreateReceiver(ctx, path, small))
	next := 0
	for round := range 6 {
		var sends *process
		if round%2 == 0 {
			sends = tool(t, "send", "--drain", "path:"+path)
		} else {
			sends = tool(t, "send", "path:"+path)
		}
		for range 50 {
			fmt.Fprintln(sends.input, next)
			message, err := receiver.Receive(ctx)
			if err != nil || string(message.Bytes()) != fmt.Sprint(next) {
				t.Fatalf("%d: %q %v %s", next, message.Bytes(), err, sends.errors.String())
			}
			message.Release()
			next++
		}
		wanted := ErrPeerDied
		if round%3 == 2 {
			sends.input.Close()
			wanted = ErrClosed
		} else {
			sends.kill()
		}
		if _, err := receiver.Receive(ctx); !errors.Is(err, wanted) {
			t.Fatal(round, err)
		}
		if wanted == ErrClosed {
			// It has the role until it ends.
			sends.exits(0)
		}
	}
	receiver.Close()
	sender := must(OpenSender(ctx, path, nil))
	defer sender.Close()
	for round := range 6 {
		receives := tool(t, "recv", "--follow", "path:"+path)
		for range 50 {
			if err := sender.Send(ctx, []byte(fmt.Sprint(next))); err != nil {
				t.Fatal(err)
			}
			receives.says(fmt.Sprint(next))
			next++
		}
		if err := sender.WaitReleased(ctx); err != nil {
			t.Fatal(err)
		}
		receives.kill()
		// Nothing reads these, until the death is reported.
		var died *EndError
		for deadline := time.Now().Add(30 * time.Second); died == nil; {
			sent, err := sender.TrySend([]byte("lost?"))
			if errors.As(err, &died) && died.Err != ErrPeerDied || time.Now().After(deadline) || err == nil && !sent {
				t.Fatal(round, sent, err)
			}
			time.Sleep(100 * time.Microsecond)
		}
		again := must(OpenReceiver(ctx, path, nil))
		for again.mayBeReady() {
			if message := must(again.Receive(ctx)); string(message.Bytes()) != "lost?" || message.Release() != nil {
				t.Fatalf("%q", message.Bytes())
			}
		}
		if err := errors.Join(sender.Resume(ctx), again.Close()); err != nil {
			t.Fatal(err)
		}
		for isReported := false; !isReported; {
			isReported = errors.Is(sender.WaitReleased(ctx), ErrClosed)
			if _, err := sender.TrySend([]byte("lost?")); errors.Is(err, ErrClosed) {
				isReported = true
			}
		}
		rest := must(OpenReceiver(ctx, path, nil))
		for rest.mayBeReady() {
			must(rest.Receive(ctx)).Release()
		}
		if err := errors.Join(sender.Resume(ctx), rest.Close()); err != nil {
			t.Fatal(err)
		}
		if err := sender.Resume(ctx2(t, 20*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
	}
}

func ctx2(t *testing.T, after time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), after)
	t.Cleanup(cancel)
	return ctx
}

func TestANewSideOfAPathWakesTheOther(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	waits := make(chan error, 1)
	sleeps := func(function string, wait func() error) {
		t.Helper()
		go func() { waits <- wait() }()
		if !parked(function) {
			t.Fatal(function, "does not sleep")
		}
	}
	sender := must(CreateSender(ctx, path, &Options{Capacity: 1 << 16}))
	sleeps("(*Sender).Resume", func() error { return sender.Resume(ctx) })
	receiver := must(OpenReceiver(ctx, path, nil))
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
	sender.Close()
	if _, err := receiver.Receive(ctx); err == nil || !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	sleeps("(*Receiver).Resume", func() error { return receiver.Resume(ctx) })
	sender = must(OpenSender(ctx, path, nil))
	defer sender.Close()
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
	receiver.Close()
	for n := 0; ; n++ {
		if sent, err := sender.TrySend(payload(n, 1000)); err == nil && !sent {
			break
		} else if err != nil && !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	}
	// Full, and no receiver. The next one's arrival wakes it, and then its releases.
	sleeps("(*Sender).Send", func() error { return sender.Send(ctx, payload(0, 1000)) })
	receiver = must(OpenReceiver(ctx, path, nil))
	defer receiver.Close()
	for receiver.mayBeReady() {
		must(receiver.Receive(ctx)).Release()
	}
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
}

// Like a child on its way to exec, the test keeps the dead process's liveness file open, so that nothing hangs up.
func TestASuccessorsGenerationReportsADeathWhoseLivenessFileIsStillOpen(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	sender := must(CreateSender(ctx, path, small))
	defer sender.Close()
	receiver := child(t, "path-receive", path)
	if err := sender.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	life := must(unix.Open(path+"/receiver.life", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0))
	defer unix.Close(life)
	receiver.kill()
	for range 1000 {
		if _, err := sender.TrySend(nil); err != nil {
			t.Fatal(err)
		}
	}
	next := must(OpenReceiver(ctx, path, nil))
	defer next.Close()
	reports := 0
	for range 1000 {
		if _, err := sender.TrySend(nil); errors.Is(err, ErrPeerDied) {
			reports++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if reports != 1 || sender.Peer().PID != os.Getpid() {
		t.Fatalf("reported %d times, sends to %v", reports, sender.Peer())
	}
}

func TestKillsByPathAtAnyMoment(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 4))
	path, ctx := channelPlace(t), soon(t)
	must(CreateSender(ctx, path, &Options{Capacity: 1 << 16})).Close()
	for range rounds(t) {
		sender, receiver := child(t, "path-send", path), child(t, "path-receive", path)
		time.Sleep(time.Duration(random.IntN(30000)) * time.Microsecond)
		for _, victim := range []*process{sender, receiver} {
			if random.IntN(3) > 0 {
				victim.kill()
			}
		}
		for _, other := range []*process{sender, receiver} {
			other.kill()
			if strings.Contains(other.errors.String(), "wrong") {
				t.Fatal(other.errors.String())
			}
		}
	}
	last := must(OpenReceiver(ctx, path, nil))
	defer last.Close()
	for at := uint64(0); last.mayBeReady(); {
		message := must(last.Receive(ctx))
		n := binary.LittleEndian.Uint64(message.Bytes())
		if at != 0 && n != at+1 {
			t.Fatalf("%d after %d", n, at)
		}
		at = n
		message.Release()
	}
}

func TestOnAnOverlayTheFilesOfALowerLayerDeliverEachMessageOnce(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting takes root")
	}
	mount := func(source, target, kind, options string) {
		if err := unix.Mount(source, target, kind, 0, options); err != nil {
			t.Skip("no permission to mount", kind, err)
		}
		t.Cleanup(func() { unix.Unmount(target, unix.MNT_DETACH) })
	}
	for _, receiverIsFirst := range []bool{true, false} {
		ctx, root := soon(t), t.TempDir()
		layers, merged := filepath.Join(root, "layers"), filepath.Join(root, "merged")
		for _, path := range []string{layers, merged} {
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		mount("tmpfs", layers, "tmpfs", "size=32m")
		lower, upper, work := filepath.Join(layers, "lower"), filepath.Join(layers, "upper"), filepath.Join(layers,
			"work")
		for _, path := range []string{lower, upper, work} {
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		before := must(CreateSender(ctx, filepath.Join(lower, "channel"), small))
		for n := range 3 {
			if err := before.Send(ctx, payload(n, n)); err != nil {
				t.Fatal(err)
			}
		}
		before.Close()
		mount("overlay", merged, "overlay", fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work))
		path := filepath.Join(merged, "channel")
		var sender *Sender
		var receiver *Receiver
		if receiverIsFirst {
			receiver, sender = must(OpenReceiver(ctx, path, nil)), must(OpenSender(ctx, path, nil))
		} else {
			sender, receiver = must(OpenSender(ctx, path, nil)), must(OpenReceiver(ctx, path, nil))
		}
		// More than the lane holds, so that the sender sees what is released.
		for n := range 3000 {
			if n >= 3 {
				if err := sender.Send(ctx, payload(n, 500)); err != nil {
					t.Fatal(err)
				}
			}
			message := must(receiver.Receive(ctx))
			if !isPayload(message.Bytes(), n) {
				t.Fatal(n)
			}
			message.Release()
		}
		sender.Close()
		receiver.Close()
	}
}
