package pelton

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
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

func TestARefusedPeerIsLogged(t *testing.T) {
	var log buffer
	SetLog(slog.New(slog.NewTextHandler(&log, nil)))
	defer SetLog(nil)
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	fd, err := kernel.ConnectTo(strings.TrimPrefix(name, "unix:"))
	if err != nil {
		t.Fatal(err)
	}
	defer kernel.HangUp(fd, os.Geteuid())
	if err := kernel.TrySend(fd, []byte("bad")); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf(`level=WARN msg="pelton: refused the peer" pid=%d uid=%d reason="a packet of 3 bytes came, wanted at least 80"`,
		os.Getpid(), os.Geteuid())
	for !strings.Contains(log.String(), want) {
		if _, _, err := receiver.TryReceive(); err != nil || ctx.Err() != nil {
			t.Fatalf("%v; the log is %q, wanted %q", err, log.String(), want)
		}
	}
}
