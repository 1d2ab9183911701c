package memory

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"golang.org/x/sys/unix"
)

func TestACopyAllocatesOnlyWhatWasWritten(t *testing.T) {
	const bytes = 1 << 20
	var segments [2]*Segment
	for i := range segments {
		made, err := NewData(bytes, "")
		if err != nil {
			t.Fatal(err)
		}
		defer made.Close()
		segments[i] = made
	}
	from, to := segments[0], segments[1]
	blocks := func(s *Segment) int64 {
		var stat unix.Stat_t
		if err := unix.Fstat(s.FD, &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Blocks
	}
	for _, at := range []int{100, 300_000, 700_000} {
		from.Bytes[at] = 1
	}
	// The system may allocate more than a page at a time.
	written := blocks(from)
	if written >= bytes/512 {
		t.Fatalf("%d blocks were allocated for three bytes", written)
	}
	if err := from.CopyTo(to, 0, 300_000); err != nil {
		t.Fatal(err)
	}
	if to.Bytes[100] != 1 || to.Bytes[300_000] != 0 {
		t.Fatal("not the bytes of the range")
	}
	if err := from.CopyTo(to, 300_000, bytes); err != nil {
		t.Fatal(err)
	}
	if after, copied := blocks(from), blocks(to); after != written || copied > written {
		t.Errorf("%d blocks before; %d, and %d in the copy", written, after, copied)
	}
	if !slices.Equal(from.Bytes, to.Bytes) {
		t.Fatal("not all was copied")
	}
}

func TestTheMemoryOfALaneIsInNoCoreDumpAndAControlSegmentIs(t *testing.T) {
	for _, bytes := range []uint64{1 << 20, lane.SegmentBytes} {
		made, err := Create("pelton-test", SizeSeals, bytes, func([]byte) {})
		if err != nil {
			t.Fatal(err)
		}
		mappings, err := os.ReadFile("/proc/self/smaps")
		if err != nil {
			t.Fatal(err)
		}
		_, mapping, _ := strings.Cut(string(mappings), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(&made.Bytes[0]))))
		_, flags, _ := strings.Cut(mapping, "\nVmFlags: ")
		flags, _, _ = strings.Cut(flags, "\n")
		if isLeftOut := slices.Contains(strings.Fields(flags), "dd"); isLeftOut != (bytes > lane.SegmentBytes) {
			t.Errorf("%d bytes: flags %q", bytes, flags)
		}
		made.Close()
	}
}
