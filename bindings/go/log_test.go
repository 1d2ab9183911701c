package pelton

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
	"golang.org/x/sys/unix"
)

// buffer is a log that goroutines share.
type buffer struct {
	mutex sync.Mutex
	bytes bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.bytes.Write(p)
}

func (b *buffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.bytes.String()
}

// refuseOne has a peer refused, for what it sends.
func refuseOne(t *testing.T, receiver *Receiver, name string) {
	t.Helper()
	ctx := soon(t)
	fd := must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
	defer kernel.HangUp(fd, os.Geteuid())
	if err := kernel.TrySend(fd, []byte("bad")); err != nil {
		t.Fatal(err)
	}
	for {
		if _, _, err := receiver.TryReceive(); err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(polled, 1); err == nil && n == 1 {
			return
		}
	}
}

func refusedRecord() string {
	return fmt.Sprintf(`level=WARN msg="pelton: refused the peer" pid=%d uid=%d reason="a packet of 3 bytes came, wanted at least 80"`,
		os.Getpid(), os.Geteuid())
}

func TestARefusedPeerIsLogged(t *testing.T) {
	var log buffer
	SetLog(slog.New(slog.NewTextHandler(&log, nil)))
	defer SetLog(nil)
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	// Again, if a refusal less than a second ago had a record.
	for !strings.Contains(log.String(), refusedRecord()) {
		if ctx.Err() != nil {
			t.Fatalf("the log is %q, wanted %q", log.String(), refusedRecord())
		}
		refuseOne(t, receiver, name)
	}
}

func TestManyRefusalsHaveFewRecordsWhichCountTheOthers(t *testing.T) {
	var log buffer
	SetLog(slog.New(slog.NewTextHandler(&log, nil)))
	defer SetLog(nil)
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	refusals := 0
	for isCounted := false; !isCounted; refusals++ {
		if ctx.Err() != nil {
			t.Fatalf("%d refusals, and the log is %q", refusals, log.String())
		}
		isCounted = strings.Contains(log.String(), "earlier_left_out=")
		// After the record that counts others one more, which no later record counts.
		refuseOne(t, receiver, name)
	}
	receiver.Close()
	for {
		records, all := strings.Count(log.String(), refusedRecord()), 0
		for _, number := range regexp.MustCompile(`earlier_left_out=(\d+)`).FindAllStringSubmatch(log.String(), -1) {
			all += must(strconv.Atoi(number[1]))
		}
		switch {
		case records >= refusals || ctx.Err() != nil:
			t.Fatalf("%d records of %d refusals, which count %d more: %s", records, refusals, all, log.String())
		case records+all >= refusals:
			return
		}
		// The last peers may learn of their refusal before that is counted, and the listener may end in between.
		logs.Refusals.End("pelton: a listener ends")
		time.Sleep(time.Millisecond)
	}
}

// sending is a log in which a channel carries each record.
type sending struct{ sender *Sender }

func (s sending) Write(p []byte) (int, error) {
	return len(p), s.sender.Send(context.Background(), p)
}

func TestALoggerMayUseAChannelOfItsOwn(t *testing.T) {
	ctx := soon(t)
	logName, name := place(t), place(t)
	reader := must(Gather(logName, nil))
	defer reader.Close()
	sender := make(chan *Sender, 1)
	go func() { sender <- must(ConnectSender(ctx, logName, nil)) }()
	// It accepts the sender while it waits.
	first := make(chan []byte, 1)
	go func() { first <- bytes.Clone(must(reader.Receive(ctx)).Bytes()) }()
	log := sending{<-sender}
	defer log.sender.Close()
	SetLog(slog.New(slog.NewTextHandler(log, nil)))
	defer SetLog(nil)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	for {
		select {
		case record := <-first:
			if !strings.Contains(string(record), refusedRecord()) {
				t.Errorf("the record is %q, wanted %q", record, refusedRecord())
			}
			return
		case <-ctx.Done():
			t.Fatal("no record has passed through the channel")
		default:
			// Again, if a refusal less than a second ago had a record.
			refuseOne(t, receiver, name)
		}
	}
}
