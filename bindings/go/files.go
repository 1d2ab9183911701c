package pelton

import (
	"context"
	"os"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
	"golang.org/x/sys/unix"
)

// Descriptors that travel with messages: over the socket, before the message is committed. spec/protocol.md,
// "Descriptors with messages".

// sentFiles are duplicates of the descriptors of message seq.
type sentFiles struct {
	seq uint32
	fds []int
}

// SendFiles sends a message together with descriptors, at most 64, which the receiver takes by [Message.TakeFiles].
// The files stay the caller's and may be closed afterwards. The sender keeps duplicates until the message is
// released, for a successor of the receiver; it closes those of released messages in SendFiles and Unreleased. It
// waits for space as Send does, and for space in the socket.
//
// Errors: as Send; [ErrTooManyFiles]; [ErrRefused] on a path channel; [ErrSystem] if a descriptor cannot be
// duplicated or sent. After any error, nothing was sent.
func (s *Sender) SendFiles(ctx context.Context, message []byte, files ...*os.File) error {
	if len(files) == 0 {
		return s.Send(ctx, message)
	}
	if len(files) > lane.DescriptorsMax {
		return fail.New(ErrTooManyFiles, "%d descriptors are to be sent with a message, wanted at most %d", len(files),
			lane.DescriptorsMax)
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if s.role != nil {
		return fail.New(ErrRefused, "descriptors cannot travel through a path channel: connect by a socket to send them")
	}
	fds, err := duplicate(files)
	if err != nil {
		return err
	}
	s.unreleased()
	seq := s.out.Lane.Tail().Seq
	for {
		sent, err := s.trySendFiles(ctx, message, seq, fds)
		if sent {
			s.sent = append(s.sent, sentFiles{seq, fds})
			return nil
		}
		if err == nil {
			err = wait.Interrupted(ctx, &s.guard)
		}
		if err != nil {
			kernel.CloseAll(fds)
			return err
		}
	}
}

// trySendFiles returns false after it has waited for something that was missing.
func (s *Sender) trySendFiles(ctx context.Context, message []byte, seq uint32, fds []int) (bool, error) {
	if err := s.usable(); err != nil {
		return false, err
	}
	space, ok, err := s.tryReserveWithFiles(uint64(len(message)), uint32(len(fds)))
	if err != nil {
		return false, err
	}
	if !ok {
		s.out.Lane.CountWait()
		s.wantedBytes, s.wantedFiles, s.untilReleased = uint64(len(message)), uint32(len(fds)), false
		return false, wait.For(ctx, (*sendWait)(s), s.out.Doorbell, &s.spin, &s.guard)
	}
	// The descriptors are in the socket before the message is visible, and those that a successor has not got yet
	// before them.
	if sent, err := s.trySendOwed(ctx); !sent || err != nil {
		return false, err
	}
	if sent, err := s.sendDescriptors(ctx, seq, fds); !sent || err != nil {
		return false, err
	}
	copy(space, message)
	s.commit(len(message))
	return true, nil
}

// sendDescriptors returns false if it did not send them. Close ends its wait: either it finds the link here, or this
// finds that the handle is closed. Close must not read s.out.Link, which Resume replaces.
func (s *Sender) sendDescriptors(ctx context.Context, seq uint32, fds []int) (bool, error) {
	s.sending.Store(s.out.Link)
	defer s.sending.Store(nil)
	if s.guard.IsClosing() {
		return false, nil
	}
	return s.out.Link.SendDescriptors(ctx, seq, fds)
}

func (s *Sender) tryReserveWithFiles(bytes uint64, count uint32) ([]byte, bool, error) {
	s.window.Follow(s.out.Lane, s.out.Memory, nil)
	space, ok, err := s.out.Lane.TryReserve(bytes, count)
	if err != nil {
		return nil, false, s.failed(err)
	}
	return space, ok, nil
}

// trySendOwed sends descriptors again that a successor of the receiver has not got yet. It returns false after it has
// waited for space.
func (s *Sender) trySendOwed(ctx context.Context) (bool, error) {
	for s.unsent > 0 {
		owed := s.sent[len(s.sent)-s.unsent]
		if sent, err := s.sendDescriptors(ctx, owed.seq, owed.fds); !sent || err != nil {
			return false, err
		}
		s.unsent--
	}
	return true, nil
}

// resendFiles sends a successor the descriptors of all unreleased messages. When the context ends, the rest precedes
// the next message's. When the successor has died meanwhile, the next call reports that.
func (s *Sender) resendFiles(ctx context.Context) error {
	s.unreleased()
	s.unsent = len(s.sent)
	for s.unsent > 0 && ctx.Err() == nil && !s.out.Link.IsPeerGone() && !s.guard.IsClosing() {
		if _, err := s.trySendOwed(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// forgetSentFiles closes the duplicates for released messages.
func (s *Sender) forgetSentFiles() {
	head, released := s.out.Lane.Head().Seq, 0
	for released < len(s.sent) && int32(s.sent[released].seq-head) < 0 {
		released++
	}
	if released > 0 {
		closeSentFiles(s.sent[:released])
		s.sent = append([]sentFiles(nil), s.sent[released:]...)
		s.unsent = min(s.unsent, len(s.sent))
	}
}

func closeSentFiles(all []sentFiles) {
	for _, files := range all {
		kernel.CloseAll(files.fds)
	}
}

// duplicate returns descriptors of its own for the files.
func duplicate(files []*os.File) (fds []int, err error) {
	for _, file := range files {
		raw, err := file.SyscallConn()
		if err == nil {
			var failed error
			err = raw.Control(func(fd uintptr) {
				var own int
				if own, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); failed == nil {
					fds = append(fds, own)
				}
			})
			if err == nil {
				err = failed
			}
		}
		if err != nil {
			kernel.CloseAll(fds)
			return nil, fail.System("duplicating "+file.Name(), err)
		}
	}
	return fds, nil
}
