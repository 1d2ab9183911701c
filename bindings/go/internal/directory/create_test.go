package directory

import (
	"bytes"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

func TestAControlFileIsWrittenInWholePagesOfAnySize(t *testing.T) {
	contents := bytes.Repeat([]byte{7}, 4096)
	for _, page := range []int{4 << 10, 16 << 10, 64 << 10} {
		found := inWholePages(bytes.Clone(contents), page)
		if len(found) != page || len(found) > lane.SegmentBytes || !bytes.HasPrefix(found, contents) ||
			len(bytes.Trim(found[len(contents):], "\x00")) != 0 {
			t.Errorf("pages of %d bytes: %d bytes are written", page, len(found))
		}
		if found := inWholePages(nil, page); len(found) != 0 {
			t.Errorf("pages of %d bytes: %d bytes of nothing are written", page, len(found))
		}
	}
}
