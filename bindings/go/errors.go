package pelton

import (
	"errors"
	"fmt"
	"strings"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
)

// The errors of this package, for errors.Is. The text of a returned error has the details: what was found, what was
// wanted, and what to do. When the context ends a wait, the error is the context's. A full or an empty lane is no
// error: see [Sender.TrySend] and [Receiver.TryReceive].
var (
	// ErrClosed reports that the other side has closed, which is the ordinary end of a channel. See [EndError].
	ErrClosed = fail.ErrClosed
	// ErrPeerDied reports that the other side's process ended without closing. Resume waits for a successor. See
	// [EndError].
	ErrPeerDied = fail.ErrPeerDied
	// ErrTooLarge reports a message larger than the reservation, or than the channel permits.
	ErrTooLarge = fail.ErrTooLarge
	// ErrTooSmall reports a buffer smaller than the message.
	ErrTooSmall = fail.ErrTooSmall
	// ErrTooManyFiles reports more than 64 descriptors for one message.
	ErrTooManyFiles = fail.ErrTooManyFiles
	// ErrDescriptorsLost reports that this process had no free descriptor for all that came with a message. Raise
	// RLIMIT_NOFILE.
	ErrDescriptorsLost = fail.ErrDescriptorsLost
	// ErrCorrupt reports that the other side broke a rule of the layout or the protocol. Close the handle.
	ErrCorrupt = fail.ErrCorrupt
	// ErrRefused reports that the other side refuses this one, or that this kind of channel cannot do it.
	ErrRefused = fail.ErrRefused
	// ErrHungUp reports that the other side hung up during the handshake. Its own error has the reason.
	ErrHungUp = fail.ErrHungUp
	// ErrTimedOut reports that the other side did not answer during the handshake.
	ErrTimedOut = fail.ErrTimedOut
	// ErrNoListener reports that no process listens under the name. Start the other side, or set [Options.Await].
	ErrNoListener = fail.ErrNoListener
	// ErrInUse reports that another process listens under the name.
	ErrInUse = fail.ErrInUse
	// ErrName reports a name that is neither short nor unix:PATH, or whose socket cannot exist; or one that is no durable
	// name.
	ErrName = fail.ErrName
	// ErrOption reports an option with an invalid value.
	ErrOption = fail.ErrOption
	// ErrNoChannel reports that there is no channel at the path. Create it, or set [Options.Await].
	ErrNoChannel = fail.ErrNoChannel
	// ErrNotAChannel reports that what is at the path is no channel, or is not safe to use.
	ErrNotAChannel = fail.ErrNotAChannel
	// ErrRoleTaken reports that the path channel has its receiver, or all its senders, already, that the broadcast has its
	// publisher, that a process uses the durable name, or that the record file has another writer.
	ErrRoleTaken = fail.ErrRoleTaken
	// ErrNoSpace reports a full file system. Nothing is damaged; try again when there is space.
	ErrNoSpace = fail.ErrNoSpace
	// ErrRebooted reports a path channel from before a reboot. `pelton recover` keeps its complete messages.
	ErrRebooted = fail.ErrRebooted
	// ErrSystem reports an error of the operating system, which errors.Is and errors.As find too.
	ErrSystem = fail.ErrSystem
	// ErrClosedHandle reports that the handle is closed. Create a new one.
	ErrClosedHandle = fail.ErrClosedHandle
	// ErrConcurrentUse reports that another goroutine is in a call with the handle. Nothing has happened.
	ErrConcurrentUse = fail.ErrConcurrentUse
	// ErrNotReserved reports Commit or Abort without a reservation.
	ErrNotReserved = fail.ErrNotReserved
	// ErrReserved reports that a reservation must be committed or aborted first.
	ErrReserved = fail.ErrReserved
	// ErrNotReceived reports that the message was released already.
	ErrNotReceived = fail.ErrNotReceived
	// ErrNotReleased reports that received messages must be released before [Receiver.FlushTo].
	ErrNotReleased = fail.ErrNotReleased
	// ErrNotARecordFile reports that the file has another format, or a version that this program does not know.
	ErrNotARecordFile = fail.ErrNotARecordFile
	// ErrDamaged reports damage in a record file, with valid records behind it. A reader continues with those. To write,
	// move the file away.
	ErrDamaged = fail.ErrDamaged
	// ErrTorn reports that a record file ends with a part of a write: its writer was killed, or is writing now.
	ErrTorn = fail.ErrTorn
	// ErrLaterVersion reports that a record file continues in a later version. Use a pelton as new as its writer.
	ErrLaterVersion = fail.ErrLaterVersion
	// ErrServiceMemory reports that a service has no memory left, for this client, for a reply that would wait for
	// space, or for a request in pieces. The call has failed: its client gets a [*CallError], the service this as the
	// reply's error. See [Options.Memory].
	ErrServiceMemory = fail.ErrServiceMemory
	// ErrAbandoned reports that the service dropped the call without a reply: its handler panicked, or forgot.
	ErrAbandoned = fail.ErrAbandoned
)

// EndError reports that the other side of a channel is gone.
type EndError struct {
	// Err is [ErrClosed] or [ErrPeerDied].
	Err error
	// Unreleased is the number of messages that were committed and not released.
	Unreleased uint64
}

// Error returns the text of the error.
func (e *EndError) Error() string {
	if e.Err == ErrClosed {
		return fmt.Sprintf("pelton: the other side has closed; %d messages were not released", e.Unreleased)
	}
	return fmt.Sprintf("pelton: the other side died without closing; %d messages were not released: Resume waits for a successor", e.Unreleased)
}

// Unwrap returns Err.
func (e *EndError) Unwrap() error { return e.Err }

func isCorrupt(err error) bool { return errors.Is(err, ErrCorrupt) }

// linkError returns a lane's error as this package's.
func linkError(err error) error {
	if errors.Is(err, lane.ErrConsumerClosed) {
		return &EndError{Err: ErrClosed}
	}
	return fail.Lane(err)
}

// checkSize checks a message against its receiver's limit.
func checkSize(bytes int, most uint64) error {
	if uint64(bytes) > most {
		return fail.New(fail.ErrTooLarge,
			"a message of %d bytes is larger than the %d that the other side takes: send less, or raise CallBytesMax there", bytes, most)
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

// Error returns the text of the error.
func (f *CallError) Error() string {
	if f.Code >= failedLibrary {
		return "pelton: the call failed: " + strings.TrimPrefix(packet.Printable(string(f.Bytes)), "pelton: ")
	}
	return fmt.Sprintf("pelton: the service failed the call with code %d: %.200q", f.Code, f.Bytes)
}

// Is reports whether target is the error of the library's code.
func (f *CallError) Is(target error) bool {
	return f.Code == failedMemory && target == ErrServiceMemory
}
