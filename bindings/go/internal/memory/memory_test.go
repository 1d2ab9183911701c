package memory

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pelton/internal/lane"
)

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
