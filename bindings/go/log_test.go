package pelton

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
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
	refusals, leftOut := 0, 0
	for leftOut == 0 {
		if ctx.Err() != nil {
			t.Fatalf("%d refusals, and the log is %q", refusals, log.String())
		}
		refuseOne(t, receiver, name)
		refusals++
		if _, number, found := strings.Cut(log.String(), "earlier_left_out="); found {
			number, _, _ = strings.Cut(number, "\n")
			leftOut = must(strconv.Atoi(number))
		}
	}
	if records := strings.Count(log.String(), refusedRecord()); records >= refusals {
		t.Errorf("%d records of %d refusals", records, refusals)
	}
}
