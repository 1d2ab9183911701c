package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func appendAll(t *testing.T, file *RecordFile, from, to int) {
	t.Helper()
	for n := from; n < to; n++ {
		if err := file.Append(payload(n, sizes[n%len(sizes)])); err != nil {
			t.Fatal(n, err)
		}
	}
}

// opened opens a record file, and closes it with the test.
func opened(t *testing.T, path string, options *RecordFileOptions) *RecordFile {
	t.Helper()
	file := must(OpenRecordFile(path, options))
	t.Cleanup(func() { file.Close() })
	return file
}

// reading opens a record file to read, and closes it with the test.
func reading(t *testing.T, path string) *RecordReader {
	t.Helper()
	reader := must(OpenRecordReader(path))
	t.Cleanup(func() { reader.Close() })
	return reader
}

// readsAll compares the messages of files with numbers from..to-1.
func readsAll(t *testing.T, from, to int, paths ...string) {
	t.Helper()
	for _, path := range paths {
		for record, err := range reading(t, path).Records() {
			if err != nil {
				t.Fatal(path, err)
			}
			if len(record.Bytes) != sizes[from%len(sizes)] || !isPayload(record.Bytes, from) {
				t.Fatalf("%s: %d bytes, expected message %d", path, len(record.Bytes), from)
			}
			from++
		}
	}
	if from != to {
		t.Fatalf("found messages up to %d, expected %d", from, to)
	}
}

func TestARecordFileHasWhatSeveralWritersAppendedOneAfterTheOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for writer := range 3 {
		file := must(OpenRecordFile(path, nil))
		appendAll(t, file, 100*writer, 100*writer+100)
		if err := errors.Join(file.Close(), file.Close()); err != nil {
			t.Fatal(err)
		}
		if err := file.Append(nil); !errors.Is(err, ErrClosedHandle) {
			t.Fatal(err)
		}
	}
	readsAll(t, 0, 300, path)
	lanes := map[[2]uint64]uint32{}
	for record, err := range reading(t, path).Records() {
		if err != nil || record.Peer != (Peer{os.Getpid(), os.Geteuid()}) || time.Since(record.Written) > time.Hour {
			t.Fatal(err, record)
		}
		if lanes[record.Lane]++; lanes[record.Lane] != record.Seq {
			t.Fatalf("number %d in its lane, expected %d", record.Seq, lanes[record.Lane])
		}
	}
	if len(lanes) != 3 {
		t.Fatal(lanes)
	}
}

func TestARecordFileHasOneWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	file := opened(t, path, nil)
	if _, err := OpenRecordFile(path, nil); !errors.Is(err, ErrRoleTaken) {
		t.Fatal(err)
	}
	// While it waits for the lock, the first writer ends.
	go func() {
		time.Sleep(50 * time.Millisecond)
		file.Close()
	}()
	opened(t, path, nil)
}

func TestAppendedMessagesAreWrittenWhenTheBufferIsFullAndAfterTheInterval(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	file := opened(t, path, &RecordFileOptions{FlushBytes: 4096, FlushInterval: -1})
	reader := reading(t, path)
	count := func() (found int) {
		for _, err := range reader.Records() {
			if err != nil {
				t.Fatal(err)
			}
			found++
		}
		return found
	}
	for range 3 {
		// 8 bytes of header and 1000 of payload: the fifth does not fit.
		for range 4 {
			if err := file.Append(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		if found := count(); found != 0 {
			t.Fatal(found)
		}
		if err := file.Append(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		if found := count(); found != 4 {
			t.Fatal(found)
		}
		if err := file.Flush(); err != nil {
			t.Fatal(err)
		}
		if found := count(); found != 1 {
			t.Fatal(found)
		}
	}
	if err := file.Append(make([]byte, 1<<20)); err != nil { // larger than the buffer
		t.Fatal(err)
	}
	file.Close()
	if found := count(); found != 1 {
		t.Fatal(found)
	}
	file = opened(t, path, &RecordFileOptions{FlushInterval: time.Millisecond, SyncInterval: time.Millisecond})
	if err := file.Append([]byte("soon")); err != nil {
		t.Fatal(err)
	}
	for ctx := soon(t); count() == 0; time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatal("it was not written")
		}
	}
}

func TestAppendedMessagesAreWrittenAndSyncedInTimeWhicheverIntervalIsLonger(t *testing.T) {
	path, ctx := filepath.Join(t.TempDir(), "file"), soon(t)
	until := func(what string, isDone func() bool) {
		t.Helper()
		for ; !isDone(); time.Sleep(time.Millisecond) {
			if ctx.Err() != nil {
				t.Fatal(what)
			}
		}
	}
	file := opened(t, path, &RecordFileOptions{FlushInterval: time.Millisecond, SyncInterval: time.Hour})
	reader := reading(t, path)
	for range 3 { // a sync is due in an hour, from the first on
		if err := file.Append([]byte("soon")); err != nil {
			t.Fatal(err)
		}
		until("it was not written", func() bool { _, err := reader.Next(); return err == nil })
	}
	file.Close()
	file = opened(t, path, &RecordFileOptions{FlushInterval: time.Hour, SyncInterval: time.Millisecond})
	for range 3 {
		if err := errors.Join(file.Append([]byte("soon")), file.Flush(), file.Append([]byte("later"))); err != nil {
			t.Fatal(err)
		}
		until("it was not synced", func() bool {
			file.mutex.Lock()
			defer file.mutex.Unlock()
			return file.file.Due().IsZero()
		})
	}
}

func TestARecordFileRotates(t *testing.T) {
	for _, sync := range []int64{0, EachWrite, 1000} {
		path := filepath.Join(t.TempDir(), "file")
		options := &RecordFileOptions{RotateBytes: 1 << 18, FlushBytes: 1 << 16, SyncBytes: sync}
		for writer := range 2 {
			file := must(OpenRecordFile(path, options))
			appendAll(t, file, 200*writer, 200*writer+200)
			if err := file.Close(); err != nil {
				t.Fatal(err)
			}
		}
		files := must(filepath.Glob(path + ".0*"))
		slices.Sort(files)
		if len(files) < 5 {
			t.Fatal(files)
		}
		for _, file := range files {
			if size := must(os.Stat(file)).Size(); size > options.RotateBytes {
				t.Fatal(file, size)
			}
		}
		readsAll(t, 0, 400, append(files, path)...)
		// A writer that was killed between the two renames leaves no file there.
		if err := os.Rename(path, fmt.Sprintf("%s.%06d", path, len(files)+1)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".pelton-next", []byte("a part"), 0o600); err != nil {
			t.Fatal(err)
		}
		file := must(OpenRecordFile(path, options))
		appendAll(t, file, 400, 410)
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
		readsAll(t, 400, 410, path)
		if left := must(filepath.Glob(path + ".pelton-next")); len(left) > 0 {
			t.Fatal(left)
		}
	}
}

func TestAnotherProgramMayRenameDeleteAndTruncateTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	file := opened(t, path, nil)
	write := func(from int) {
		t.Helper()
		appendAll(t, file, from, from+10)
		if err := file.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	write(0)
	whole := must(os.Stat(path)).Size()
	write(10)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(os.Rename(path, path+".1"))
	write(20)
	readsAll(t, 0, 20, path+".1")
	readsAll(t, 20, 30, path)
	check(os.Remove(path))
	write(30)
	readsAll(t, 30, 40, path)
	check(os.Truncate(path, 0))
	write(40)
	readsAll(t, 40, 50, path)
	// Behind a whole chunk, in the middle of one, and longer.
	check(file.Close())
	file = opened(t, path+".1", nil)
	check(os.Truncate(path+".1", whole))
	write(10)
	readsAll(t, 0, 20, path+".1")
	check(os.Truncate(path+".1", whole+100))
	write(10)
	readsAll(t, 0, 20, path+".1")
	foreign := must(os.OpenFile(path+".1", os.O_APPEND|os.O_WRONLY, 0))
	_, err := foreign.WriteString("foreign")
	check(errors.Join(err, foreign.Close()))
	write(20)
	readsAll(t, 0, 30, path+".1")
	// The file of another program stays as it is, and the messages are kept.
	check(os.Rename(path+".1", path+".2"))
	check(os.WriteFile(path+".1", []byte(strings.Repeat("another program's", 10)), 0o600))
	appendAll(t, file, 30, 40)
	if err := file.Flush(); !errors.Is(err, ErrNotARecordFile) {
		t.Fatal(err)
	}
	if text := must(os.ReadFile(path + ".1")); len(text) != 170 {
		t.Fatal(len(text))
	}
	check(os.Remove(path + ".1"))
	check(file.Flush())
	readsAll(t, 30, 40, path+".1")
}

func TestAReaderReportsATornEndThatTheNextWriterCutsOff(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	file := must(OpenRecordFile(path, nil))
	appendAll(t, file, 0, 10)
	file.Close()
	whole := must(os.ReadFile(path))
	file = must(OpenRecordFile(path, nil))
	appendAll(t, file, 10, 20)
	file.Close()
	all := must(os.ReadFile(path))
	for _, cut := range []int{1, 8, 100, len(all) - len(whole) - 1} {
		if err := os.WriteFile(path, all[:len(all)-cut], 0o600); err != nil {
			t.Fatal(err)
		}
		reader, read := reading(t, path), 0
		for _, err := range reader.Records() {
			if err != nil {
				if !errors.Is(err, ErrTorn) {
					t.Fatal(err)
				}
				break
			}
			read++
		}
		if read != 10 {
			t.Fatal(read)
		}
		file := must(OpenRecordFile(path, nil))
		if found, wanted := file.CutBytes(), int64(len(all)-cut-len(whole)); found != wanted {
			t.Fatalf("%d bytes were cut off, expected %d", found, wanted)
		}
		appendAll(t, file, 10, 20)
		file.Close()
		readsAll(t, 0, 20, path)
		// The same reader continues behind what was torn.
		for n := 10; ; n++ {
			record, err := reader.Next()
			if err == io.EOF && n == 20 {
				break
			}
			if err != nil || !isPayload(record.Bytes, n) {
				t.Fatal(n, err)
			}
		}
	}
	all[len(whole)-10]++ // in the first chunk
	if err := os.WriteFile(path, all, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenRecordFile(path, nil); !errors.Is(err, ErrDamaged) {
		t.Fatal(err)
	}
	reader := reading(t, path)
	if _, err := reader.Next(); !errors.Is(err, ErrDamaged) {
		t.Fatal(err)
	}
	if record, err := reader.Next(); err != nil || !isPayload(record.Bytes, 10) {
		t.Fatal(err)
	}
}

// killed starts "append FILE", kills it some time after it has written, and returns the last number that it had
// flushed.
func killed(t *testing.T, path string, after time.Duration) int {
	t.Helper()
	p := child(t, "append", path)
	p.says("10")
	timer := time.AfterFunc(after, func() { _ = p.Process.Kill() })
	defer timer.Stop()
	flushed := 10
	for {
		line, err := p.output.ReadString('\n')
		if err != nil {
			_ = p.end()
			if text := p.errors.String(); text != "" {
				t.Fatal(text)
			}
			return flushed
		}
		if flushed, err = strconv.Atoi(strings.TrimSpace(line)); err != nil {
			t.Fatal(line)
		}
	}
}

func TestAKilledWriterLosesNothingThatItHadWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	flushes, cuts := 0, 0
	for round := range 20 {
		flushed := killed(t, path, time.Duration(rand.IntN(60))*time.Millisecond)
		file := must(OpenRecordFile(path, nil))
		if file.CutBytes() > 0 {
			cuts++
		}
		file.Close()
		var lane [2]uint64
		last := 0
		for record, err := range reading(t, path).Records() {
			if err != nil {
				t.Fatal(round, err)
			}
			if record.Lane != lane {
				lane, last = record.Lane, 0
			}
			if last++; int(record.Seq) != last || !isPayload(record.Bytes, last) {
				t.Fatalf("round %d: message %d, expected %d", round, record.Seq, last)
			}
		}
		if last < flushed {
			t.Fatalf("round %d: the last message is %d, and %d was written", round, last, flushed)
		}
		flushes += flushed
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d messages were written, %d files torn", flushes, cuts)
}

// runFull is the child's side "full PATH DIRECTORY" in a mount namespace of its own: a tmpfs of 1 MiB at the directory
// becomes full while the file there is written, and has space again.
func runFull(ctx context.Context, channel, directory string) error {
	if err := unix.Mount("pelton", directory, "tmpfs", 0, "size=1M"); err != nil {
		return err
	}
	fill, path := filepath.Join(directory, "fill"), filepath.Join(directory, "file")
	if err := os.WriteFile(fill, make([]byte, 900<<10), 0o600); err != nil {
		return err
	}
	receiver, err := OpenReceiver(ctx, channel, nil)
	if err != nil {
		return err
	}
	file, err := OpenRecordFile(path, &RecordFileOptions{FlushBytes: 30_000})
	if err != nil {
		return err
	}
	size := int64(0)
	for range 3 { // the first fills it
		if err := receiver.FlushTo(ctx, file); !errors.Is(err, ErrNoSpace) || !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("the file system is full, and FlushTo returns %w", err)
		}
		found, err := os.Stat(path)
		if err != nil {
			return err
		}
		if size != 0 && found.Size() != size {
			return fmt.Errorf("the file has %d bytes, and had %d", found.Size(), size)
		}
		size = found.Size()
	}
	if size < 30_000 {
		return fmt.Errorf("the file has %d bytes", size)
	}
	if err := os.Remove(fill); err != nil {
		return err
	}
	if err := errors.Join(receiver.FlushTo(ctx, file), file.Close()); err != nil {
		return err
	}
	reader, err := OpenRecordReader(path)
	if err != nil {
		return err
	}
	n := 0
	for record, err := range reader.Records() {
		if err != nil || !isPayload(record.Bytes, n) || int(record.Seq) != n+1 {
			return fmt.Errorf("message %d: number %d, %w", n, record.Seq, err)
		}
		n++
	}
	fmt.Println("read", n)
	return nil
}

func TestAWriteThatFillsTheFileSystemLeavesNoPart(t *testing.T) {
	channel, ctx := channelPlace(t), soon(t)
	sender := must(CreateSender(ctx, channel, &Options{Capacity: 1 << 20}))
	for n := range 300 {
		if err := sender.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	sender.Close()
	p := prepare(t, childVariable+"="+fmt.Sprintln("full", channel, t.TempDir()), must(os.Executable()))
	p.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := p.begin(); errors.Is(err, unix.EPERM) {
		t.Skip("the kernel forbids mount namespaces: ./run test-go as root")
	} else if err != nil {
		t.Fatal(err)
	}
	p.says("read 300")
	p.exits(0)
}

// runUnsynced is the child's side "unsynced PATH": the system refuses each sync with an error of the disk.
func runUnsynced(path string) error {
	runtime.LockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: unix.SYS_FDATASYNC},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EIO)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, err := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); err != 0 {
		return err
	}
	file, err := OpenRecordFile(path, &RecordFileOptions{SyncBytes: 1, FlushInterval: -1})
	if err != nil {
		return err
	}
	if err := errors.Join(file.Append([]byte("one")), file.Flush()); err != nil {
		return err
	}
	time.Sleep(50 * time.Millisecond) // the sync fails meanwhile
	if err := file.Append([]byte("two")); err != nil {
		return err
	}
	if err := file.Close(); !errors.Is(err, ErrSystem) || !errors.Is(err, unix.EIO) {
		return fmt.Errorf("no sync succeeded, and Close returns %w", err)
	}
	fmt.Println("closed")
	return nil
}

func TestCloseWritesAlsoAfterAFailedSync(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	must(OpenRecordFile(path, nil)).Close() // a creation syncs too
	p := child(t, "unsynced", path)
	p.says("closed")
	p.exits(0)
	reader := reading(t, path)
	for _, wanted := range []string{"one", "two"} {
		if record, err := reader.Next(); err != nil || string(record.Bytes) != wanted {
			t.Fatalf("found %q, %v, wanted %q", record.Bytes, err, wanted)
		}
	}
}

func TestAReceiverIsFlushedToARecordFileUntilItsSenderCloses(t *testing.T) {
	ctx, path := soon(t), filepath.Join(t.TempDir(), "file")
	sender, receiver := pair(t, &Options{Capacity: 1 << 18})
	failed := make(chan error, 1)
	go func() {
		for n := range 2000 {
			var err error
			if n%100 == 0 { // descriptors are not written
				err = sender.SendFiles(ctx, payload(n, sizes[n%len(sizes)]), os.Stderr)
			} else {
				err = sender.Send(ctx, payload(n, sizes[n%len(sizes)]))
			}
			if err != nil {
				failed <- err
				return
			}
		}
		failed <- errors.Join(sender.WaitReleased(ctx), sender.Close())
	}()
	file := opened(t, path, nil)
	first := must(receiver.Receive(ctx))
	if err := receiver.FlushTo(ctx, file); !errors.Is(err, ErrNotReleased) {
		t.Fatal(err)
	}
	first.Release()
	if err := errors.Join(receiver.FlushTo(ctx, file), <-failed); err != nil {
		t.Fatal(err)
	}
	readsAll(t, 1, 2000, path)
	for record := range reading(t, path).Records() {
		if record.Peer != (Peer{os.Getpid(), os.Geteuid()}) || record.Lane == [2]uint64{} {
			t.Fatal(record)
		}
		break
	}
}

func TestManySendersAreFlushedAlsoThoseThatDie(t *testing.T) {
	path, name := filepath.Join(t.TempDir(), "file"), place(t)
	for _, options := range []*RecordFileOptions{nil, {FlushInterval: -1}, {FlushBytes: 1}, {FlushInterval: time.Hour}} {
		receiver := must(Gather(name, nil))
		file := must(OpenRecordFile(path, options))
		ctx, cancel := context.WithCancel(soon(t))
		done := make(chan error, 1)
		go func() { done <- receiver.FlushTo(ctx, file) }()
		var senders sync.WaitGroup
		for n := range 4 {
			senders.Add(1)
			go func() {
				defer senders.Done()
				p := child(t, "send", name, 0, 500, 300, []string{"close", "stay"}[n%2])
				p.says("connected")
				p.says("done 500")
				if n%2 == 1 {
					p.kill()
				} else {
					p.exits(0)
				}
			}()
		}
		senders.Wait()
		reader, next, found := reading(t, path), map[[2]uint64]int{}, 0
		for found < 2000 {
			record, err := reader.Next()
			if err == io.EOF || errors.Is(err, ErrTorn) {
				if ctx.Err() != nil {
					t.Fatal(found)
				}
				time.Sleep(time.Millisecond)
				continue
			}
			n := next[record.Lane]
			if err != nil || len(record.Bytes) != 300 || !isPayload(record.Bytes, n) || int(record.Seq) != n+1 ||
				record.Peer.PID == os.Getpid() {
				t.Fatal(n, record, err)
			}
			next[record.Lane]++
			found++
		}
		if len(next) != 4 {
			t.Fatal(next)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if err := errors.Join(receiver.Close(), file.Close(), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
	}
}

// A sender that always has one more message must not keep FlushTo from ending.
func TestAFlushUnderASteadyStreamEndsWithItsContextAndByClose(t *testing.T) {
	for _, wanted := range []error{context.Canceled, ErrClosedHandle} {
		sender, receiver := pair(t, &Options{Capacity: 1 << 16})
		file := opened(t, filepath.Join(t.TempDir(), "file"), &RecordFileOptions{FlushBytes: 1})
		ctx, cancel := context.WithCancel(soon(t))
		writes := 0
		testHookWritten = func() {
			if writes++; writes == 3 {
				if wanted == ErrClosedHandle {
					receiver.Close()
				}
				if wanted == context.Canceled {
					cancel()
				}
			}
			if writes < 100 {
				if err := sender.Send(context.Background(), []byte("more")); err != nil {
					t.Error(err)
				}
			}
		}
		err := errors.Join(sender.Send(ctx, []byte("first")), receiver.FlushTo(ctx, file))
		testHookWritten = nil
		cancel()
		if !errors.Is(err, wanted) || writes != 3 {
			t.Fatalf("found %v after %d writes, wanted %v after 3", err, writes, wanted)
		}
	}
}

func TestWhatCannotBeWrittenIsReceivedAgain(t *testing.T) {
	ctx, path := soon(t), filepath.Join(t.TempDir(), "file")
	sender, receiver := pair(t, &Options{Capacity: 1 << 18})
	file := opened(t, path, nil)
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	for n := range 20 {
		if err := sender.SendFiles(ctx, payload(n, sizes[n%len(sizes)]), os.Stderr); err != nil {
			t.Fatal(err)
		}
		if n == 9 {
			for range 3 { // a later call gets the same messages
				if err := receiver.FlushTo(ctx, file); !errors.Is(err, ErrNotARecordFile) {
					t.Fatal(err)
				}
			}
		}
	}
	if found := sender.Unreleased(); found != 20 {
		t.Fatal(found)
	}
	sender.Close()
	if err := receiver.FlushTo(ctx, file); !errors.Is(err, ErrNotARecordFile) {
		t.Fatal(err)
	}
	message := must(receiver.Receive(ctx))
	if !isPayload(message.Bytes(), 0) || message.Seq() != 1 || len(message.TakeFiles()) != 0 {
		t.Fatal(message)
	}
	message.Release()
	if err := errors.Join(os.Remove(path), receiver.FlushTo(ctx, file)); err != nil {
		t.Fatal(err)
	}
	readsAll(t, 1, 20, path)
}

// countedOnce reads files in which each message, the numbers from 1 on in 8 bytes, must be exactly once and in order.
func countedOnce(t *testing.T, paths ...string) (last uint64) {
	t.Helper()
	for _, path := range paths {
		for record, err := range reading(t, path).Records() {
			if err != nil {
				t.Fatal(path, err)
			}
			if n := binary.LittleEndian.Uint64(record.Bytes); n != last+1 || uint64(record.Seq) != n ||
				!isPayload(record.Bytes[8:], 0) {
				t.Fatalf("%s: message %d, number %d, after %d", path, n, record.Seq, last)
			}
			last++
		}
	}
	return last
}

// A sender that never stops, and flushes of Go and Rust that are killed in turn: each message is in the files once.
func TestEachMessageOfAPathChannelIsInTheFilesOnceWhicheverFlushWasKilled(t *testing.T) {
	channel, ctx, path := channelPlace(t), soon(t), filepath.Join(t.TempDir(), "file")
	must(CreateReceiver(ctx, channel, small)).Close()
	sends := child(t, "path-send", channel)
	program := os.Getenv("PELTON_TOOL")
	for round := range 16 {
		var p *process
		switch {
		case round%4 == 3 && program != "":
			p = tool(t, "flush", "--timeout", "10", "--rotate", "100K", "--buffer", "20K", "--interval", "0.001",
				"path:"+channel, path)
			time.Sleep(30*time.Millisecond + time.Duration(rand.IntN(60))*time.Millisecond)
		case round%4 == 0:
			p = child(t, "flush", channel, path, 0)
			p.says("open")
			time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		default:
			p = child(t, "flush", channel, path, 1+rand.IntN(30))
			p.says("open")
			p.exits(-1)
		}
		p.kill()
		if p.ProcessState.ExitCode() != -1 {
			t.Fatalf("round %d ended by itself: %s", round, p.errors.String())
		}
	}
	sends.kill()
	receiver := must(OpenReceiver(ctx, channel, nil))
	defer receiver.Close()
	file := opened(t, path, nil)
	done := make(chan error, 1)
	go func() {
		err := ErrPeerDied
		for errors.Is(err, ErrPeerDied) { // perhaps the killed sender's end
			err = receiver.FlushTo(ctx, file)
		}
		done <- err
	}()
	sender := must(OpenSender(ctx, channel, nil))
	number := uint64(sender.out.Lane.Tail().Seq)
	if err := errors.Join(sender.Send(ctx, binary.LittleEndian.AppendUint64(nil, number)), sender.Close(),
		<-done); err != nil {
		t.Fatal(err)
	}
	files := must(filepath.Glob(path + ".0*"))
	slices.Sort(files)
	last := countedOnce(t, append(files, path)...)
	if last != number || last < 100 || len(files) < 1 {
		t.Fatal(last, number, files)
	}
	t.Logf("%d messages in %d files", last, len(files)+1)
}

func TestRustReadsWhatGoWroteAndGoReadsWhatRustWrote(t *testing.T) {
	path, name, ctx := filepath.Join(t.TempDir(), "file"), place(t), soon(t)
	file := must(OpenRecordFile(path, nil))
	appendAll(t, file, 0, 100)
	file.Close()
	cat := tool(t, "cat", "--frame", "len32", path)
	readFrames(t, cat.output, 100, 0)
	cat.exits(0)
	tool(t, "cat", "--verify", path).exits(0)
	flush := tool(t, "flush", name, path)
	sender := must(ConnectSender(ctx, name, &Options{Await: true}))
	for n := 100; n < 300; n++ {
		if err := sender.Send(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
			t.Fatal(err)
		}
	}
	sender.Close()
	flush.exits(0)
	readsAll(t, 0, 300, path)
	file = must(OpenRecordFile(path, nil))
	appendAll(t, file, 300, 310)
	if _, err := OpenRecordReader(path); err != nil {
		t.Fatal(err)
	}
	// Rust's writer respects Go's lock, and Go's writer Rust's.
	tool(t, "flush", "--timeout", "1", name, path).exits(3)
	file.Close()
	holds := tool(t, "flush", name, path)
	for ; ; time.Sleep(10 * time.Millisecond) {
		file, err := OpenRecordFile(path, nil)
		if errors.Is(err, ErrRoleTaken) {
			break
		}
		if err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
		file.Close()
	}
	holds.kill()
	readsAll(t, 0, 310, path)
}
