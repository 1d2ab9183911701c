package directory

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"math/bits"
	"os"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

const (
	headerBytes        = 120
	lanesAt            = 128
	featuresRequiredAt = 136
	// The first bytes of a lane's data are allocated when it is created, and then in these steps.
	firstBacked = lane.Window
	BackedStep  = 1 << 20
	// The smaller step where a whole one is not available.
	BackedStepMin = 64 << 10
	damaged       = "it is damaged: restore it, or remove the channel and make it anew"
)

type channelHeader struct {
	capacity, bytesMax uint64
	lanesMax           uint32
	mode               uint32
	bootID             [16]byte
	// It requires the feature of messages with a traceparent.
	isTraced bool
	// It requires the feature of broadcasts: it is one, and has other files.
	isBroadcast bool
}

func (h *channelHeader) features() (required uint64) {
	if h.isTraced {
		required |= packet.TracedMessages
	}
	if h.isBroadcast {
		required |= packet.BroadcastChannel
	}
	return required
}

func (h *channelHeader) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 4096)
	lane.WritePreamble(b, lane.MagicChannel)
	le.PutUint64(b[64:], h.capacity)
	le.PutUint64(b[72:], h.bytesMax)
	le.PutUint32(b[80:], h.lanesMax)
	le.PutUint32(b[84:], h.mode)
	copy(b[96:], h.bootID[:])
	le.PutUint64(b[112:], Checksum(b))
	le.PutUint32(b[lanesAt:], 1)
	le.PutUint64(b[featuresRequiredAt:], h.features())
	return b
}

// Checksum returns the checksum of a header, for its last word.
func Checksum(b []byte) uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write(b[:112])
	return hash.Sum64()
}

func (h *channelHeader) problem() string {
	limit := lane.MessageBytesLimit(h.capacity)
	if h.isTraced {
		limit = lane.TracedMessageBytesLimit(h.capacity)
	}
	switch {
	case !lane.CapacityIsValid(h.capacity):
		return fmt.Sprintf("capacity %d, wanted a multiple of 64 from 4096 to 16 GiB", h.capacity)
	case h.bytesMax > limit:
		return fmt.Sprintf("a message limit of %d, wanted at most %d", h.bytesMax, limit)
	case h.lanesMax < 1 || h.lanesMax > 1024:
		return fmt.Sprintf("%d lanes, wanted 1 to 1024", h.lanesMax)
	case h.mode&^0o777 != 0 || h.mode&0o700 != 0o700:
		return fmt.Sprintf("mode %o, wanted 700 to 777", h.mode)
	}
	return ""
}

func bootID() (id [16]byte, err error) {
	const file = "/proc/sys/kernel/random/boot_id"
	text, err := os.ReadFile(file)
	if err == nil {
		var bytes []byte
		bytes, err = hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", ""))
		if err == nil && len(bytes) != len(id) {
			err = fmt.Errorf("found %q, wanted 32 hexadecimal digits", text)
		}
		copy(id[:], bytes)
	}
	return id, fail.System("reading "+file+", which identifies a boot", err)
}

// readHeader reads the header of a broadcast, or of a channel with a receiver.
func (d *Directory) readHeader(mode uint32, isBroadcast bool) error {
	fd, err := d.openToMap("channel", false)
	if err != nil {
		return err
	}
	if d.page, err = d.mapFile(fd, "channel", lane.SegmentBytes, false); err != nil {
		return err
	}
	b := aligned(headerBytes)
	copy(b, d.page.Bytes)
	le := binary.LittleEndian
	if err := lane.CheckPreamble(b, lane.MagicChannel); err != nil {
		return d.refuse("its file channel: %v: %s", err, damaged)
	}
	if found := le.Uint64(b[112:]); found != Checksum(b) {
		return d.refuse("its file channel has checksum %#x, its bytes come to %#x: %s", found, Checksum(b), damaged)
	}
	h := channelHeader{capacity: le.Uint64(b[64:]), bytesMax: le.Uint64(b[72:]), lanesMax: le.Uint32(b[80:]),
		mode: le.Uint32(b[84:])}
	copy(h.bootID[:], b[96:])
	required := atomic.LoadUint64(word64(d.page.Bytes[featuresRequiredAt:]))
	h.isTraced, h.isBroadcast = required&packet.TracedMessages != 0, required&packet.BroadcastChannel != 0
	if problem := h.problem(); problem != "" {
		return d.refuse("its file channel says %s: %s", problem, damaged)
	}
	if h.mode&^mode != 0 {
		return d.refuse("it was made with mode %o, this side permits at most %o: allow more in the options", h.mode,
			mode)
	}
	if required &^= h.features(); required != 0 {
		return d.refuse("it requires feature %d, which %s does not have: use the version that made it, or a later one",
			bits.TrailingZeros64(required), packet.Version)
	}
	switch {
	case h.isBroadcast && !isBroadcast:
		return d.refuse("it is a broadcast: open it as a publisher or a subscriber")
	case !h.isBroadcast && isBroadcast:
		return d.refuse("it is no broadcast: open it as a sender or a receiver")
	}
	d.header, d.bits = h, h.mode&0o666
	var stat unix.Stat_t
	if err := unix.Fstat(d.page.FD, &stat); err != nil {
		return d.failed("looking at", "channel", err)
	}
	if err := d.check("channel", unix.S_IFREG, &stat); err != nil {
		return err
	}
	running, err := bootID()
	if err != nil {
		return err
	}
	if running != h.bootID && h.isBroadcast {
		return fail.New(fail.ErrRebooted, "%s was made before the last reboot: `pelton rm %s`, and make it anew", d.Path,
			d.Path)
	}
	if running != h.bootID {
		return fail.New(fail.ErrRebooted,
			"%s was made before the last reboot: `pelton recover --repair %s` keeps what is whole of it", d.Path, d.Path)
	}
	_, err = d.Lanes()
	return err
}

func word32(b []byte) *uint32 { return (*uint32)(unsafe.Pointer(&b[0])) }

func word64(b []byte) *uint64 { return (*uint64)(unsafe.Pointer(&b[0])) }
