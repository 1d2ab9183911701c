package kernel

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
	"golang.org/x/sys/unix"
)

// again is a log whose handler does what a channel's endpoint does before it sleeps.
type again struct {
	slog.Handler
	records *int
}

func (a again) Enabled(context.Context, slog.Level) bool { return true }

func (a again) Handle(context.Context, slog.Record) error {
	*a.records++
	Membarrier()
	return nil
}

// refuseMembarrier has the kernel refuse it to this thread, to which the goroutine must be locked.
func refuseMembarrier() error {
	const load, jumpIfEqual, result, refuse, allow = 0x20, 0x15, 0x06, 0x00050000, 0x7fff0000
	filter := []unix.SockFilter{
		{Code: load}, {Code: jumpIfEqual, Jf: 1, K: unix.SYS_MEMBARRIER},
		{Code: result, K: refuse | uint32(unix.ENOSYS)}, {Code: result, K: allow},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}

func TestTheHandlerOfARefusedMembarrierMayUseItAgain(t *testing.T) {
	records := 0
	logs.Set(slog.New(again{records: &records}))
	defer logs.Set(nil)
	hasLoggedFallback.Store(false)
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and its filter with it.
		runtime.LockOSThread()
		err := refuseMembarrier()
		if err == nil && Membarrier() {
			err = unix.EEXIST
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil || records != 1 {
			t.Errorf("%v, and %d records, wanted one", err, records)
		}
	case <-time.After(time.Minute):
		t.Fatal("the call waits for itself")
	}
}
