package pelton

import (
	"errors"
	"fmt"
	"strings"

	"pelton/internal/fail"
	"pelton/internal/lane"
	"pelton/internal/packet"
)

// The errors of this package, for errors.Is. The text of a returned error has the details: what was found, what was wanted, what to do. A
// wait that its context ends returns the context's error. A full or empty lane is no error: see [Sender.TrySend] and [Receiver.TryReceive].
var (
	// ErrClosed: the other side has closed, which is the ordinary end of a channel. See [EndError].
	ErrClosed = fail.ErrClosed
	// ErrPeerDied: the other side's process ended without closing. Resume waits for a successor. See [EndError].
	ErrPeerDied = fail.ErrPeerDied
	// ErrTooLarge: a message is larger than the reservation, or than the channel permits.
	ErrTooLarge = fail.ErrTooLarge
	// ErrTooSmall: the buffer is smaller than the message.
	ErrTooSmall = fail.ErrTooSmall
	// ErrTooManyFiles: more than 64 descriptors are to travel with one message.
	ErrTooManyFiles = fail.ErrTooManyFiles
	// ErrDescriptorsLost: this process had no free descriptor for all that came with a message. Raise RLIMIT_NOFILE.
	ErrDescriptorsLost = fail.ErrDescriptorsLost
	// ErrCorrupt: the other side broke a rule of the layout or the protocol. Close the handle.
	ErrCorrupt = fail.ErrCorrupt
	// ErrRefused: the other side refuses this one, or this kind of channel cannot do it.
	ErrRefused = fail.ErrRefused
	// ErrHungUp: the other side hung up during the handshake. Its own error has the reason.
	ErrHungUp = fail.ErrHungUp
	// ErrTimedOut: the other side did not answer during the handshake.
	ErrTimedOut = fail.ErrTimedOut
	// ErrNoListener: no process listens under the name. Start the other side, or set [Options.Await].
	ErrNoListener = fail.ErrNoListener
	// ErrInUse: another process listens under the name.
	ErrInUse = fail.ErrInUse
	// ErrName: a name that is neither short nor unix:PATH, or whose socket cannot exist.
	ErrName = fail.ErrName
	// ErrOption: an option has an invalid value.
	ErrOption = fail.ErrOption
	// ErrNoChannel: there is no channel at the path. Create it, or set [Options.Await].
	ErrNoChannel = fail.ErrNoChannel
	// ErrNotAChannel: what is at the path is not a channel, or is not safe to use.
	ErrNotAChannel = fail.ErrNotAChannel
	// ErrRoleTaken: the path channel has its receiver, or all its senders, already.
	ErrRoleTaken = fail.ErrRoleTaken
	// ErrNoSpace: the file system is full. Nothing is damaged; try again when there is space.
	ErrNoSpace = fail.ErrNoSpace
	// ErrRebooted: the path channel is from before a reboot. `pelton recover` keeps the whole messages.
	ErrRebooted = fail.ErrRebooted
	// ErrSystem: the operating system reported an error, which errors.Is and errors.As find too.
	ErrSystem = fail.ErrSystem
	// ErrClosedHandle: the handle is closed. Create a new one.
	ErrClosedHandle = fail.ErrClosedHandle
	// ErrConcurrentUse: another goroutine is in a call with a handle that one at a time may use. Nothing has happened.
	ErrConcurrentUse = fail.ErrConcurrentUse
	// ErrNotReserved: Commit or Abort without a reservation.
	ErrNotReserved = fail.ErrNotReserved
	// ErrReserved: a reservation is to be committed or aborted first.
	ErrReserved = fail.ErrReserved
	// ErrNotReceived: the message is released already.
	ErrNotReceived = fail.ErrNotReceived
	// ErrServiceMemory: a service has no memory left, for this client, for a reply that would wait until its client has room, or for a request
	// in pieces. The call has failed: at its client this is a [*CallError], at the service the error of the reply. See [Options.Memory].
	ErrServiceMemory = fail.ErrServiceMemory
	// ErrAbandoned: the service let go of the call without a reply: its handler panicked, or forgot.
	ErrAbandoned = fail.ErrAbandoned
)

// EndError reports that the other side of a channel is gone.
type EndError struct {
	// Err is [ErrClosed] or [ErrPeerDied].
	Err error
	// Unreleased is the number of messages that were committed and not released.
	Unreleased uint64
}

func (e *EndError) Error() string {
	if e.Err == ErrClosed {
		return fmt.Sprintf("pelton: the other side has closed; %d messages were not released", e.Unreleased)
	}
	return fmt.Sprintf("pelton: the other side died without closing; %d messages were not released: Resume waits for a successor", e.Unreleased)
}

// Unwrap returns Err.
func (e *EndError) Unwrap() error { return e.Err }

func isCorrupt(err error) bool { return errors.Is(err, ErrCorrupt) }

// linkError puts what a lane found into this package's words.
func linkError(err error) error {
	if errors.Is(err, lane.ErrConsumerClosed) {
		return &EndError{Err: ErrClosed}
	}
	return fail.Lane(err)
}

// checkSize checks a message against the most that its receiver takes.
func checkSize(bytes int, most uint64) error {
	if uint64(bytes) > most {
		return fail.New(fail.ErrTooLarge, "a message of %d bytes is larger than the %d that the other side takes: ask for less, or raise CallBytesMax there", bytes, most)
	}
	return nil
}

const (
	// Codes of failures from here on are the library's.
	failedLibrary = 0xffff0000
	failedMemory  = 0xffff0001
)

// CallError reports that the service failed a call. errors.As finds it. See [Request.Fail].
type CallError struct {
	// Code is defined by the service. Codes from 0xffff0000 are the library's: see [ErrServiceMemory].
	Code uint32
	// Bytes are defined by the service; for the library's codes they are a text.
	Bytes []byte
}

func (f *CallError) Error() string {
	if f.Code >= failedLibrary {
		return "pelton: the call failed: " + strings.TrimPrefix(packet.Printable(string(f.Bytes)), "pelton: ")
	}
	return fmt.Sprintf("pelton: the service failed the call with code %d: %.200q", f.Code, f.Bytes)
}

// Is says whether target is what the library's code stands for.
func (f *CallError) Is(target error) bool {
	return f.Code == failedMemory && target == ErrServiceMemory
}
