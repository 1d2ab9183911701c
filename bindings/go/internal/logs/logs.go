// Package logs has the logger of the whole package: none, until the program sets one.
package logs

import (
	"log/slog"
	"sync/atomic"
	"time"
)

var logger atomic.Pointer[slog.Logger]

// Set sets the logger; nil: none.
func Set(l *slog.Logger) { logger.Store(l) }

// Warn logs what the user must know, if there is a logger.
func Warn(text string, attributes ...any) {
	if l := logger.Load(); l != nil {
		l.Warn(text, attributes...)
	}
}

// Refusals are the records of refused peers.
var Refusals Limited

// Limited permits one record per second: a peer that connects in a loop would fill the log.
type Limited struct {
	// The next record's earliest time, in nanoseconds since begin.
	next    atomic.Int64
	leftOut atomic.Int64
}

// A guess.
const interval = time.Second

var begin = time.Now()

// Warn logs, or counts the record for the attribute earlier_left_out of the next one.
func (l *Limited) Warn(text string, attributes ...any) {
	if logger.Load() == nil {
		return
	}
	if leftOut, ok := l.admit(time.Since(begin)); ok {
		if leftOut > 0 {
			attributes = append(attributes, "earlier_left_out", leftOut)
		}
		Warn(text, attributes...)
	}
}

// End logs how many records there were none for, because none may follow that counts them.
func (l *Limited) End(text string) {
	if leftOut := l.leftOut.Swap(0); leftOut > 0 {
		Warn(text, "earlier_left_out", leftOut)
	}
}

// admit reports whether there is a record at this time; if so, how many before it there were none for.
func (l *Limited) admit(now time.Duration) (leftOut int64, ok bool) {
	next := l.next.Load()
	if int64(now) >= next && l.next.CompareAndSwap(next, int64(now+interval)) {
		return l.leftOut.Swap(0), true
	}
	l.leftOut.Add(1)
	return 0, false
}
