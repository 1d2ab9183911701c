package pelton

import (
	"errors"
	"fmt"

	"pelton/internal/lane"
)

// Code is what failed, by the numbers and texts of the library's other languages (include/pelton.h). It is an error itself, for
// errors.Is; a *[Error] that wraps it has the details.
//
// Codes of what this package has no way to run into (descriptors sent, flushing, record files) are here for completeness of the
// list.
type Code int

// The codes. Full, empty and out of time are answers, not errors: see [Sender.TrySend] and [Receiver.TryReceive]; a wait that
// its context ends is the context's error.
const (
	ErrAgain              Code = -1
	ErrClosed             Code = -2
	ErrPeerDied           Code = -3
	ErrTooLarge           Code = -4
	ErrTooSmall           Code = -5
	ErrTooManyDescriptors Code = -6
	ErrDescriptorsLost    Code = -7
	ErrCorrupt            Code = -8
	ErrRefused            Code = -9
	ErrHungUp             Code = -10
	ErrNoListener         Code = -11
	ErrInUse              Code = -12
	ErrName               Code = -13
	ErrOption             Code = -14
	ErrNoChannel          Code = -15
	ErrNotAChannel        Code = -16
	ErrRoleTaken          Code = -17
	ErrNoSpace            Code = -18
	ErrRebooted           Code = -19
	ErrSystem             Code = -20
	ErrForked             Code = -21
	ErrInternal           Code = -22
	ErrNull               Code = -23
	ErrClosedHandle       Code = -24
	ErrWrongThread        Code = -25
	ErrNotReserved        Code = -26
	ErrReserved           Code = -27
	ErrNotReceived        Code = -28
	ErrNotReleased        Code = -29
	ErrSink               Code = -30
	ErrNotARecordFile     Code = -31
	ErrDamaged            Code = -32
	ErrTorn               Code = -33
)

var codeTexts = [...]string{
	-ErrAgain:              "not now: full, empty, or the deadline has passed",
	-ErrClosed:             "the other side has closed",
	-ErrPeerDied:           "the other side died without closing: resume waits for a successor",
	-ErrTooLarge:           "larger than what was reserved, or than this channel takes",
	-ErrTooSmall:           "what was given to be filled is too small: the size wanted was written",
	-ErrTooManyDescriptors: "more descriptors than can go with one message",
	-ErrDescriptorsLost:    "this process had no room for all descriptors: raise RLIMIT_NOFILE",
	-ErrCorrupt:            "the peer broke a rule of the layout or the protocol: close the channel",
	-ErrRefused:            "refused by the other side, or not possible with this kind of channel",
	-ErrHungUp:             "the peer hung up during the handshake: see what it says",
	-ErrNoListener:         "nobody listens under the name: start the other side, or give a deadline",
	-ErrInUse:              "somebody listens under the name already",
	-ErrName:               "a name that cannot be",
	-ErrOption:             "an option has a value that cannot be",
	-ErrNoChannel:          "there is no channel at the path: create it, or give a deadline",
	-ErrNotAChannel:        "what is at the path cannot be used as a channel",
	-ErrRoleTaken:          "the path's channel has its receiver, or all its senders, already",
	-ErrNoSpace:            "the file system is full: nothing is damaged, try again when there is space",
	-ErrRebooted:           "the path's channel is from before a reboot: pelton recover keeps what is whole",
	-ErrSystem:             "the operating system refused something: errno says what",
	-ErrForked:             "the handle belongs to the process that forked this one: make a new one here",
	-ErrInternal:           "a bug in pelton was caught: close the handle, and report it",
	-ErrNull:               "mistake of the caller: NULL where it must not be",
	-ErrClosedHandle:       "mistake of the caller: the handle is closed, or of another kind",
	-ErrWrongThread:        "mistake of the caller: another thread is in a call with this handle",
	-ErrNotReserved:        "mistake of the caller: nothing is reserved, or no batch begun",
	-ErrReserved:           "mistake of the caller: commit or abort what is reserved first",
	-ErrNotReceived:        "mistake of the caller: no message is received, or it was released already",
	-ErrNotReleased:        "mistake of the caller: release or hold what was received first",
	-ErrSink:               "the sink took nothing: nothing of it is released, and it comes again",
	-ErrNotARecordFile:     "what is at the path cannot be used as a record file",
	-ErrDamaged:            "a record file is damaged somewhere, and goes on after that",
	-ErrTorn:               "a record file's end is torn, as a killed writer leaves it: all before it is whole",
}

// Error is the code's text.
func (c Code) Error() string {
	if c < 0 && int(-c) < len(codeTexts) {
		return codeTexts[-c]
	}
	return fmt.Sprintf("code %d", int(c))
}

// Error says what was found, what was wanted, and what to do. errors.Is finds its Code, and the system's error if there is one.
type Error struct {
	Code Code
	// Detail is in words.
	Detail string
	// Unreleased is how many messages were committed and not released, with [ErrClosed] and [ErrPeerDied].
	Unreleased uint64
	cause      error
}

func (e *Error) Error() string {
	text := e.Detail
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return "pelton: " + text
}

// Is says whether target is this error's code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// Unwrap is what the system said.
func (e *Error) Unwrap() error { return e.cause }

func failure(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Detail: fmt.Sprintf(format, args...)}
}

// system puts what was being done before what the system said; nil for nil.
func system(what string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Code: ErrSystem, Detail: what, cause: err}
}

// ended is how a channel ends.
func ended(code Code, unreleased uint64) *Error {
	if code == ErrClosed {
		return &Error{Code: code, Unreleased: unreleased,
			Detail: fmt.Sprintf("the other side has closed; %d messages were not released", unreleased)}
	}
	return &Error{Code: code, Unreleased: unreleased, Detail: fmt.Sprintf(
		"the other side died without closing; %d messages were not released: Resume waits for a successor", unreleased)}
}

// laneError puts what the lane found into this package's words.
func laneError(err error) error {
	var tooLarge *lane.TooLarge
	if errors.As(err, &tooLarge) {
		return failure(ErrTooLarge,
			"a message of %d bytes is larger than this channel's limit of %d: send less, or create it with twice the capacity",
			tooLarge.Bytes, tooLarge.BytesMax)
	}
	return failure(ErrCorrupt, "%v: the peer is damaged, hostile, or not pelton", err)
}
