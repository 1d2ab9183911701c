package pelton

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/records"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// flushedLane is what FlushTo knows of a lane.
type flushedLane struct {
	// The file with whose last number the lane was compared.
	file *RecordFile
	// Where the first taken message began, and the index of the last taken chunk, from 1; 0: none is taken.
	begin       lane.Cursor
	redelivered uint64
	last        int
	// This number of next messages was taken and given back, without their descriptors.
	givenBack uint64
}

// takenChunk is consecutive records that were taken and not released.
type takenChunk struct {
	in            *inLane
	offset, bytes uint64
	first         uint32
	messages      uint32
}

// flush is a call of FlushTo.
type flush struct {
	receiver *Receiver
	file     *RecordFile
	taken    []takenChunk
	bytes    uint64
	// When the oldest was taken.
	since time.Time
	// A sender may soon need the space of what is taken.
	isLarge bool
	// When to check next whether a sender waits for space.
	recheck time.Time
	chunks  []records.Chunk
	copies  []byte
}

// testHookWritten is called between a write and the release of its messages, if a test sets it.
var testHookWritten func()

// FlushTo writes all messages to the record file, and releases them once they are written, until the sender has
// closed or the context ends. The file gets each committed message once, in the order of its sender, also those of a
// sender that died, and, of a path channel, also after a kill of this process at any point: open the channel and the
// same file again. It closes descriptors that come with messages. The file's options say when it writes.
//
// It returns nil when the sender has closed; then everything is on the disk. When the context ends, it writes what has
// come. Errors: the context's, and those of [Receiver.Receive]: everything that came before is written. Those of
// [RecordFile.Append]: what is not written is not released either, and is received again. [ErrNotReleased]: release
// all received messages before.
func (r *Receiver) FlushTo(ctx context.Context, file *RecordFile) error {
	if err := r.guard.Enter(); err != nil {
		return err
	}
	defer r.leave()
	r.releaseReturned()
	if n := r.unreleased(); n > 0 {
		return fail.New(ErrNotReleased, "%d received messages are not released: release them before they are flushed", n)
	}
	f := flush{receiver: r, file: file}
	err := f.run(ctx)
	f.giveBack()
	if errors.Is(err, ErrClosed) {
		err = file.Sync()
	}
	return err
}

func (f *flush) run(ctx context.Context) error {
	for {
		ok, err := f.receiver.poll()
		if err == nil && ok {
			if err = f.take(); err == nil && !f.isDue() {
				continue
			}
		} else if err == nil && !f.mustWrite() {
			if err = f.wait(ctx); err == nil {
				continue
			}
		}
		if failed := f.write(); failed != nil {
			return failed
		}
		if err == nil {
			err = wait.Interrupted(ctx, &f.receiver.guard)
		}
		if err != nil {
			return err
		}
	}
}

// take takes the message that was found, and those that follow it.
func (f *flush) take() error {
	r := f.receiver
	in, record := r.lanes[r.current], r.found
	files, _ := in.takeFiles() // the file has only bytes
	in.Link.Discard(files)
	if in.flushed.file != f.file {
		last, err := f.file.lastSeq(in.ID)
		if err != nil {
			return err
		}
		// Limits the distance to the number of messages in a lane.
		if last != 0 && in.ID != (records.Lane{}) && uint64(last-record.Seq) < in.Consumer.Capacity()/8 {
			// Written before a kill.
			in.Consumer.Take(record)
			r.count(in)
			f.release(in)
			return nil
		}
		in.flushed.file = f.file
	}
	if in.flushed.last == 0 {
		in.flushed.begin, in.flushed.redelivered = in.Consumer.Cursor(), in.Redelivered
	}
	bytes, messages := in.Consumer.TakeChunk(record, max(uint64(f.file.options.FlushBytes)-f.bytes, 1))
	in.Redelivered -= min(in.Redelivered, uint64(messages))
	in.flushed.givenBack -= min(in.flushed.givenBack, uint64(messages))
	// The other lanes are next.
	r.inQuantum = quantum
	if len(f.taken) == 0 {
		f.since = time.Now()
	}
	if i := in.flushed.last; i > 0 && f.taken[i-1].offset+f.taken[i-1].bytes == record.Offset {
		f.taken[i-1].bytes += bytes
		f.taken[i-1].messages += messages
	} else {
		f.taken = append(f.taken, takenChunk{in, record.Offset, bytes, record.Seq, messages})
		in.flushed.last = len(f.taken)
	}
	f.bytes += bytes
	f.isLarge = f.isLarge || f.taken[in.flushed.last-1].bytes >= in.Consumer.Capacity()/4
	r.isUnwritten = true
	return nil
}

// isDue reports whether what is taken must be written now, even if more is there.
func (f *flush) isDue() bool {
	if len(f.taken) == 0 {
		return false
	}
	interval := f.file.options.FlushInterval
	return f.bytes >= uint64(f.file.options.FlushBytes) || f.isLarge || interval > 0 && time.Since(f.since) >= interval
}

// mustWrite reports whether what is taken must be written now that no more is there.
func (f *flush) mustWrite() bool {
	if len(f.taken) == 0 {
		return false
	}
	if f.isDue() || f.file.options.FlushInterval < 0 || f.receiver.isEndDeferred {
		return true
	}
	if time.Now().Before(f.recheck) {
		return false
	}
	f.recheck = time.Now().Add(recheckInterval)
	return slices.ContainsFunc(f.taken, func(t takenChunk) bool { return t.in.Consumer.IsProducerWaiting() })
}

// wait waits for a message; while any is taken, at most until it must be written, or checked.
func (f *flush) wait(ctx context.Context) error {
	if len(f.taken) == 0 {
		return f.receiver.find(ctx)
	}
	until := f.since.Add(f.file.options.FlushInterval)
	if f.recheck.Before(until) {
		until = f.recheck
	}
	short, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	err := f.receiver.find(short)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil
	}
	return err
}

// write writes what is taken, and releases it.
func (f *flush) write() error {
	if len(f.taken) == 0 {
		return nil
	}
	copied := uint64(0)
	for _, t := range f.taken {
		if f.mayChange(t.in) {
			copied += t.bytes
		}
	}
	f.chunks, f.copies = f.chunks[:0], slices.Grow(f.copies[:0], int(copied))
	for _, t := range f.taken {
		bytes := t.in.Consumer.Chunk(t.offset, t.bytes)
		if f.mayChange(t.in) {
			from := len(f.copies)
			f.copies = append(f.copies, bytes...)
			bytes = f.copies[from:]
		}
		var peer *kernel.Peer
		if t.in.Link.Peer.PID != 0 {
			peer = &t.in.Link.Peer
		}
		f.chunks = append(f.chunks, records.Chunk{Lane: t.in.ID, FirstSeq: t.first, Messages: t.messages, Peer: peer,
			Bytes: bytes})
	}
	if err := f.file.write(f.chunks); err != nil {
		return err
	}
	if testHookWritten != nil {
		testHookWritten()
	}
	for _, t := range f.taken {
		if t.in.flushed.last != 0 {
			t.in.flushed.last = 0
			f.release(t.in)
		}
	}
	f.forget()
	return nil
}

// mayChange reports whether a sender of another user may change the records, so that they are copied before their
// checksum is computed. A process of this user could do worse.
func (f *flush) mayChange(in *inLane) bool {
	return f.receiver.role != nil || in.Link.Peer.UID != os.Geteuid()
}

func (f *flush) release(in *inLane) {
	if in.Consumer.ReleaseTaken() == lane.Ring {
		in.WakePeer()
	}
}

func (f *flush) forget() {
	f.taken, f.bytes, f.isLarge = f.taken[:0], 0, false
	f.receiver.isUnwritten, f.receiver.isEndDeferred = false, false
}

// giveBack makes what is taken and not written the next messages again.
func (f *flush) giveBack() {
	for _, t := range f.taken {
		if t.in.flushed.last != 0 {
			t.in.flushed.last = 0
			t.in.flushed.givenBack += t.in.Consumer.Rewind(t.in.flushed.begin)
			t.in.Redelivered = t.in.flushed.redelivered
		}
	}
	f.forget()
}

// defersEnd reports whether FlushTo must write what it has taken before the end of a lane is reported.
func (r *Receiver) defersEnd() bool {
	r.isEndDeferred = r.isEndDeferred || r.isUnwritten
	return r.isUnwritten
}
