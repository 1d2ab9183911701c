package records

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

// chunksOf returns a chunk with message 1 for each of so many lanes.
func chunksOf(lanes int) (chunks []Chunk) {
	for n := range lanes {
		chunks = append(chunks, Chunk{Lane: Lane{uint64(n), 1}, FirstSeq: 1, Messages: 1, Bytes: AppendRecord(nil, 1, nil)})
	}
	return chunks
}

func TestABeginningWithoutSpaceLeavesAnEmptyFileThatBeginsWithTheLastNumbersLater(t *testing.T) {
	const lanes = 1000
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	directory := t.TempDir()
	if err := unix.Mount("pelton", directory, "tmpfs", 0, "size=256K"); err != nil {
		t.Skip("no permission to mount: ./run test-go as root", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(directory, unix.MNT_DETACH) })
	path, fill := filepath.Join(directory, "file"), filepath.Join(directory, "fill")
	file, err := Open(path, Options{})
	check(err)
	defer func() { file.Close() }()
	check(file.Write(chunksOf(lanes)))
	// Another program truncates the file, and space is left for a part of the beginning.
	check(os.Truncate(path, 0))
	if err := os.WriteFile(fill, make([]byte, 512<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	filled, err := os.Stat(fill)
	check(err)
	check(os.Truncate(fill, filled.Size()-4096))
	for range 2 {
		if err := file.Write(chunksOf(1)); !errors.Is(err, fail.ErrNoSpace) {
			t.Fatal(err)
		}
		if found, err := os.Stat(path); err != nil || found.Size() != 0 {
			t.Fatal(found, err)
		}
	}
	check(os.Remove(fill))
	check(file.Write(chunksOf(1)))
	check(file.Close())
	file, err = Open(path, Options{})
	check(err)
	for n := range lanes {
		if last := file.LastSeq(Lane{uint64(n), 1}); last != 1 {
			t.Fatalf("the last number of lane %d is %d", n, last)
		}
	}
}
