package pelton

import (
	"log/slog"

	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
)

// SetLog sets the logger for what changes how the program runs and is no result of a call: peers that were refused,
// with pid, uid and reason, and fallbacks, where the system refuses membarrier. Refused peers have at most one record
// per second; its earlier_left_out counts those before it without a record, and at the end of a listener a last record
// counts the rest. nil, the default: no log. Nothing is logged
// for each message. Does not wait. Any goroutine.
//
// The logger's handler runs in the goroutine that caused the record, within a call of this package. It must not use
// the endpoint of that call.
func SetLog(logger *slog.Logger) { logs.Set(logger) }
