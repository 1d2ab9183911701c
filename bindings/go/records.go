package pelton

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"math"
	"os"
	"sync"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/records"
)

// RecordFileOptions configure a [RecordFile]. nil and the zero value have the defaults.
type RecordFileOptions struct {
	// RotateBytes: a write beyond this size begins a new file. The old one is renamed to PATH.000001 and so on. 0:
	// never.
	RotateBytes int64
	// SyncBytes syncs to the disk after each such number of bytes; later writes do not wait for it. [EachWrite]: a
	// write returns only after its sync. 0: not by size.
	SyncBytes int64
	// SyncInterval syncs to the disk this long after a write. 0: not by time.
	SyncInterval time.Duration
	// FlushBytes is how many bytes of records are written at once: at most 1 GiB. 0: 1 MiB. An appended message that
	// would exceed it writes those before it.
	FlushBytes int
	// FlushInterval writes at the latest so long after a message came. 0: 100 ms. Negative: appended messages not by
	// time; a receiver's once no more are there.
	FlushInterval time.Duration
}

// EachWrite is the value of [RecordFileOptions.SyncBytes] that syncs each write.
const EachWrite = records.EachWrite

const (
	flushBytesMax = 1 << 30
	// recheckInterval: how often an operation that is due and not possible yet is tried again.
	recheckInterval = 10 * time.Millisecond
)

// RecordFile appends messages to a file, whose format is spec/record-file.md. [RecordReader] and `pelton cat` read it.
// It buffers messages, and writes them together. What is written survives this process; it survives a failure of the
// machine after Sync, or as the options say. A failed write has no effect, and can be tried again.
//
// If another program renames, deletes or truncates the file, as logrotate does, the next write continues in the file
// at the path. Any number of goroutines use it.
type RecordFile struct {
	options RecordFileOptions
	cut     int64

	mutex sync.Mutex
	// nil once it is closed.
	file *records.File
	// Of the messages that this process appends. The others are in buffer, from number first on.
	lane     records.Lane
	next     uint32
	buffer   []byte
	first    uint32
	messages uint32
	// When the first of them was appended.
	since time.Time
	// When the timer next writes or syncs, zero: not; and, after it could not, not before that time.
	timer        *time.Timer
	wakes, retry time.Time
	// The error of a write by time, for the next caller.
	unreported error
}

// OpenRecordFile opens a record file to write to, or creates it with mode 0640. It cuts off the torn end that a killed
// writer left: see [RecordFile.CutBytes]. It waits up to a second while another writer has the file, as a killed
// process keeps it for a moment.
//
// Errors: [ErrRoleTaken]: it has another writer. [ErrDamaged]: it is damaged in the middle: move it away.
// [ErrNotARecordFile], [ErrLaterVersion]; [ErrOption], [ErrNoSpace], [ErrSystem].
func OpenRecordFile(path string, options *RecordFileOptions) (*RecordFile, error) {
	var o RecordFileOptions
	if options != nil {
		o = *options
	}
	if o.FlushBytes == 0 {
		o.FlushBytes = 1 << 20
	}
	if o.FlushInterval == 0 {
		o.FlushInterval = 100 * time.Millisecond
	}
	if o.FlushBytes < 0 || o.FlushBytes > flushBytesMax {
		return nil, fail.New(ErrOption, "FlushBytes is %d, wanted 0 to %d", o.FlushBytes, flushBytesMax)
	}
	if o.RotateBytes < 0 || o.SyncBytes < EachWrite || o.SyncInterval < 0 {
		return nil, fail.New(ErrOption,
			"RotateBytes is %d, SyncBytes %d and SyncInterval %v, wanted 0 or more; SyncBytes also EachWrite",
			o.RotateBytes, o.SyncBytes, o.SyncInterval)
	}
	file, err := records.Open(path, records.Options{RotateBytes: o.RotateBytes, SyncBytes: o.SyncBytes,
		SyncInterval: o.SyncInterval})
	if err != nil {
		return nil, err
	}
	var id [16]byte
	_, _ = rand.Read(id[:])
	f := &RecordFile{options: o, cut: file.CutBytes, file: file, next: 1,
		lane: records.Lane{binary.LittleEndian.Uint64(id[:]), binary.LittleEndian.Uint64(id[8:])}}
	f.schedule()
	return f, nil
}

// CutBytes returns how many bytes of an unfinished write opening cut off.
func (f *RecordFile) CutBytes() int64 { return f.cut }

// Append appends a message. It waits only when the buffer is full, for the file. Of one goroutine, messages are in
// order; each file's messages that are appended since it was opened are one lane.
//
// Errors: those of writing: [ErrNoSpace], [ErrSystem], and [ErrNotARecordFile], [ErrDamaged] or [ErrRoleTaken] if
// another file is at the path by now. This message is not appended then, and earlier ones are kept. [ErrTooLarge] for
// 2 GiB or more; [ErrClosedHandle].
func (f *RecordFile) Append(message []byte) error {
	if uint64(len(message)) > math.MaxInt32 {
		return fail.New(ErrTooLarge, "a message of %d bytes is larger than %d, the most of a record", len(message),
			math.MaxInt32)
	}
	return f.with(func() error {
		if f.messages > 0 && len(f.buffer)+len(message)+8 > f.options.FlushBytes {
			if err := f.flush(); err != nil {
				return err
			}
		}
		if f.messages == 0 {
			f.first, f.since = f.next, time.Now()
		}
		f.buffer = records.AppendRecord(f.buffer, f.next, message)
		f.next, f.messages = lane.SeqAfter(f.next), f.messages+1
		return nil
	})
}

// Flush writes what was appended: it survives this process. Errors: as Append.
func (f *RecordFile) Flush() error { return f.with(f.flush) }

// Sync writes what was appended, and waits until everything is on the disk. Errors: as Append. [ErrSystem]: what was
// written before may not be on the disk.
func (f *RecordFile) Sync() error {
	return f.with(func() error {
		if err := f.flush(); err != nil {
			return err
		}
		return f.file.Sync()
	})
}

// Close does the same as Sync, and closes the file in any case: call Sync before, if an error must lose nothing. No
// [Receiver.FlushTo] may use it. Closing twice does nothing.
func (f *RecordFile) Close() error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.file == nil {
		return nil
	}
	// The empty write reports an earlier sync that failed, which would keep the next write from writing.
	err := errors.Join(f.unreported, f.file.Write(nil), f.flush(), f.file.Sync(), f.file.Close())
	f.file = nil
	if f.timer != nil {
		f.timer.Stop()
	}
	return err
}

// with performs work on the open file.
func (f *RecordFile) with(work func() error) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.file == nil {
		return fail.New(ErrClosedHandle, "the record file is closed: open it again")
	}
	if err := f.unreported; err != nil {
		f.unreported = nil
		return err
	}
	defer f.schedule()
	return work()
}

// flush writes what was appended.
func (f *RecordFile) flush() error {
	if f.messages == 0 {
		return f.file.Write(nil)
	}
	own := kernel.Peer{PID: os.Getpid(), UID: os.Geteuid()}
	err := f.file.Write([]records.Chunk{{Lane: f.lane, FirstSeq: f.first, Messages: f.messages, Peer: &own,
		Bytes: f.buffer}})
	if err != nil {
		return err
	}
	f.messages, f.buffer = 0, f.buffer[:0]
	if cap(f.buffer) > 2*f.options.FlushBytes { // one large message
		f.buffer = nil
	}
	return nil
}

// due returns when something must be written or synced; zero: nothing.
func (f *RecordFile) due() time.Time {
	due := f.file.Due()
	if f.messages > 0 && f.options.FlushInterval > 0 {
		if flush := f.since.Add(f.options.FlushInterval); due.IsZero() || flush.Before(due) {
			due = flush
		}
	}
	return due
}

// schedule makes a goroutine write or sync when that is due.
func (f *RecordFile) schedule() {
	at := f.due()
	if at.IsZero() {
		return
	}
	if at.Before(f.retry) {
		at = f.retry
	}
	if !f.wakes.IsZero() && !at.Before(f.wakes) {
		return
	}
	f.wakes = at
	if f.timer == nil {
		f.timer = time.AfterFunc(time.Until(at), f.wake)
	} else {
		f.timer.Reset(time.Until(at))
	}
}

// wake writes or syncs, in the timer's goroutine.
func (f *RecordFile) wake() {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.wakes = time.Time{}
	if f.file == nil {
		return
	}
	if err := f.flush(); err != nil {
		f.unreported = err
	}
	if due, now := f.due(), time.Now(); !due.IsZero() && !due.After(now) {
		// It failed, or a sync is under way.
		f.retry = now.Add(recheckInterval)
	}
	f.schedule()
}

// write writes a receiver's chunks.
func (f *RecordFile) write(chunks []records.Chunk) error {
	return f.with(func() error { return f.file.Write(chunks) })
}

// lastSeq returns the number of the lane's last message in the files; 0 if there is none.
func (f *RecordFile) lastSeq(of records.Lane) (last uint32, err error) {
	err = f.with(func() error { last = f.file.LastSeq(of); return nil })
	return last, err
}

// Record is a message in a record file.
type Record struct {
	// Bytes are valid until the next call with the reader.
	Bytes []byte
	// Lane identifies its sender's lane among all that ever existed, and Seq is its number there.
	Lane [2]uint64
	Seq  uint32
	// Peer is the process that sent it. PID 0: unknown.
	Peer Peer
	// Written is the time of writing, by the writer's clock.
	Written time.Time
}

// RecordReader reads a record file, compressed or not. Whatever the file contains, it returns valid records or errors.
// One goroutine at a time uses it.
type RecordReader struct {
	reader *records.Reader
	// The unread bytes of the current chunk.
	next Record
	rest []byte
}

// OpenRecordReader opens a record file to read. A writer may continue meanwhile.
//
// Errors: [ErrNotARecordFile], [ErrSystem].
func OpenRecordReader(path string) (*RecordReader, error) {
	reader, err := records.OpenReader(path)
	if err != nil {
		return nil, err
	}
	return &RecordReader{reader: reader}, nil
}

// Next returns the next message, in the order of writing; its checksum was verified.
//
// Errors: io.EOF at the end of the file: a writer may append more, which a later call returns. [ErrTorn]: the rest is
// a part of a write; a later call checks it again. [ErrDamaged]: a damaged part was skipped; the next call continues
// behind it. [ErrLaterVersion], [ErrSystem].
func (r *RecordReader) Next() (Record, error) {
	if len(r.rest) == 0 {
		chunk, err := r.reader.NextChunk()
		if err != nil {
			return Record{}, err
		}
		if chunk == nil {
			return Record{}, io.EOF
		}
		r.next, r.rest = Record{Lane: chunk.Lane, Seq: chunk.FirstSeq, Written: chunk.Written}, chunk.Bytes
		if chunk.Peer != nil {
			r.next.Peer = Peer(*chunk.Peer)
		}
	}
	record := r.next
	record.Bytes, r.rest = records.NextRecord(r.rest)
	r.next.Seq = lane.SeqAfter(record.Seq)
	return record, nil
}

// Records iterates over the messages up to the end of the file. To follow a file that grows, iterate again: it
// continues. An error comes without a message; behind [ErrDamaged] it continues, others are the last.
func (r *RecordReader) Records() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for {
			record, err := r.Next()
			if err == io.EOF || !yield(record, err) || err != nil && !errors.Is(err, ErrDamaged) {
				return
			}
		}
	}
}

// Close ends the reading.
func (r *RecordReader) Close() error { return fail.System("closing a record file", r.reader.Close()) }
