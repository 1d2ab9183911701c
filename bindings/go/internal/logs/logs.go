// Package logs has the logger of the whole package: none, until the program sets one.
package logs

import (
	"log/slog"
	"sync/atomic"
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
