// Package fail has the errors of this module: the sentinels that package pelton shows to its users, and the error
// that has one of them, a text with the details, and the system's error if there is one.
package fail

import (
	"errors"
	"fmt"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// The sentinels. Package pelton documents them.
var (
	ErrClosed          = errors.New("pelton: the other side has closed")
	ErrPeerDied        = errors.New("pelton: the other side died without closing")
	ErrTooLarge        = errors.New("pelton: too large for the reservation or the channel")
	ErrTooSmall        = errors.New("pelton: the buffer is too small")
	ErrTooManyFiles    = errors.New("pelton: more descriptors than can travel with one message")
	ErrDescriptorsLost = errors.New("pelton: this process had no free descriptor for all that came")
	ErrCorrupt         = errors.New("pelton: the other side broke a rule of the layout or the protocol")
	ErrRefused         = errors.New("pelton: refused by the other side, or impossible with this kind of channel")
	ErrHungUp          = errors.New("pelton: the other side hung up during the handshake")
	ErrTimedOut        = errors.New("pelton: the other side did not answer in time")
	ErrNoListener      = errors.New("pelton: no process listens under the name")
	ErrInUse           = errors.New("pelton: another process listens under the name")
	ErrName            = errors.New("pelton: invalid name")
	ErrOption          = errors.New("pelton: an option has an invalid value")
	ErrNoChannel       = errors.New("pelton: there is no channel at the path")
	ErrNotAChannel     = errors.New("pelton: the path cannot be used as a channel")
	ErrRoleTaken       = errors.New("pelton: the channel has its receiver or all its senders, or the record file its writer, already")
	ErrNoSpace         = errors.New("pelton: the file system is full")
	ErrRebooted        = errors.New("pelton: the channel is from before a reboot")
	ErrSystem          = errors.New("pelton: the operating system reported an error")
	ErrClosedHandle    = errors.New("pelton: the handle is closed")
	ErrConcurrentUse   = errors.New("pelton: another goroutine is in a call with this handle")
	ErrNotReserved     = errors.New("pelton: nothing is reserved")
	ErrReserved        = errors.New("pelton: a reservation is not committed or aborted yet")
	ErrNotReceived     = errors.New("pelton: the message is released already")
	ErrNotReleased     = errors.New("pelton: received messages are not released yet")
	ErrNotARecordFile  = errors.New("pelton: no record file of this version")
	ErrDamaged         = errors.New("pelton: the record file is damaged")
	ErrTorn            = errors.New("pelton: the record file ends with a part of a write")
	ErrLaterVersion    = errors.New("pelton: the record file continues in a later version")
	ErrServiceMemory   = errors.New("pelton: the service has no memory left for what it keeps of its clients")
	ErrAbandoned       = errors.New("pelton: the service let go of the call without a reply")
)

// Error is a sentinel with details.
type Error struct {
	kind   error
	detail string
	cause  error
}

// New returns an error of that kind. The detail says what was found, what was wanted, and what to do.
func New(kind error, format string, args ...any) error {
	return &Error{kind: kind, detail: fmt.Sprintf(format, args...)}
}

// System returns nil for nil, else [ErrSystem] with the operation that failed.
func System(operation string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{kind: ErrSystem, detail: operation, cause: err}
}

// With returns an error of that kind with another error as its cause, which may be nil.
func With(cause, kind error, format string, args ...any) error {
	return &Error{kind: kind, detail: fmt.Sprintf(format, args...), cause: cause}
}

// Lane returns a lane's error as this module's.
func Lane(err error) error {
	var tooLarge *lane.TooLarge
	if errors.As(err, &tooLarge) {
		return New(ErrTooLarge,
			"a message of %d bytes is larger than this channel's limit of %d: send less, or create it with twice the capacity",
			tooLarge.Bytes, tooLarge.BytesMax)
	}
	return New(ErrCorrupt, "%v: the peer is damaged, hostile, or not pelton", err)
}

// Error returns the details.
func (e *Error) Error() string {
	if e.cause == nil {
		return "pelton: " + e.detail
	}
	return "pelton: " + e.detail + ": " + e.cause.Error()
}

// Unwrap returns the sentinel, and the system's error if there is one.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}
