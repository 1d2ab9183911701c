package records

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

const (
	magic   = "pelton-F"
	version = 1
	// headerBytes is the size of the file's header, and of each chunk's.
	headerBytes = 64

	chunkMagic = "pchk"
	// The kinds of chunks. A reader may skip unknown ones from kindOptional on.
	kindRecords    = 0
	kindLast       = 1
	kindCompressed = 2
	kindOptional   = 0x8000
	flagPeer       = 1
	// BytesMax is the largest size of a chunk's records: the largest lane's capacity.
	BytesMax = lane.CapacityMax

	// lastEntry is the size of an entry of a chunk of last numbers or of a compressed one, and lastEntriesMax the most
	// of them: eight times as many as a receiver has lanes.
	lastEntry      = 24
	lastEntriesMax = 8192
	// contentBytesMax is the most bytes that a compressed chunk contains.
	contentBytesMax = 64 << 20
)

var le = binary.LittleEndian

// fileHeader is the header of a file.
type fileHeader struct {
	// Nanoseconds since 1970.
	created uint64
	// The file's place in its rotation: 1 for the first.
	number uint64
	// Random. The checksums of chunk headers begin with it, so a process that chooses only payloads cannot forge a
	// header, and a chunk of another file does not pass as one of this.
	id uint64
}

func (h *fileHeader) encode() []byte {
	b := make([]byte, headerBytes)
	copy(b, magic)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], headerBytes)
	le.PutUint64(b[16:], h.created)
	le.PutUint64(b[24:], h.number)
	le.PutUint64(b[32:], h.id)
	le.PutUint32(b[60:], crc32.ChecksumIEEE(b[:60]))
	return b
}

// decodeFile decodes the beginning of a file; or it returns what is wrong with it.
func decodeFile(b []byte) (h fileHeader, problem string) {
	if len(b) < headerBytes {
		return h, fmt.Sprintf("it has %d bytes, a record file at least %d: move it away", len(b), headerBytes)
	}
	if string(b[:8]) != magic {
		return h, fmt.Sprintf("it begins with %q, a record file with %q: move it away", b[:8], magic)
	}
	if found, wanted := le.Uint32(b[60:]), crc32.ChecksumIEEE(b[:60]); found != wanted {
		return h, fmt.Sprintf("the checksum of its header is %#08x, wanted %#08x: move it away", found, wanted)
	}
	if found := le.Uint32(b[8:]); found != version || le.Uint32(b[12:]) != headerBytes {
		return h, fmt.Sprintf("it has version %d, this program knows %d: use a pelton as new as its writer", found,
			version)
	}
	if required := le.Uint64(b[40:]); required != 0 {
		return h, fmt.Sprintf("it requires feature %d, which this program does not know: use a pelton as new as its writer",
			bits.TrailingZeros64(required))
	}
	return fileHeader{le.Uint64(b[16:]), le.Uint64(b[24:]), le.Uint64(b[32:])}, ""
}

// Lane identifies a lane among all that ever existed.
type Lane = [2]uint64

// Chunk is consecutive records of one lane: for each a header, a little-endian u64 of seq << 32 | size, the payload,
// and padding to a multiple of 8.
type Chunk struct {
	Lane     Lane
	FirstSeq uint32
	// At least 1.
	Messages uint32
	// The sender; nil if it is unknown.
	Peer *kernel.Peer
	// The records. No other process may change them.
	Bytes []byte
}

// lastSeq returns the number of the chunk's last message: 1 follows 2^32 - 1.
func lastSeq(first, messages uint32) uint32 {
	last := uint64(first) + uint64(messages) - 1
	if last > 1<<32-1 {
		last -= 1<<32 - 1
	}
	return uint32(last)
}

// AppendRecord appends a message to the bytes of a chunk.
func AppendRecord(to []byte, seq uint32, message []byte) []byte {
	to = le.AppendUint64(to, uint64(seq)<<32|uint64(len(message)))
	to = append(to, message...)
	return append(to, make([]byte, -len(message)&7)...)
}

// NextRecord returns the payload of the first record, and the rest of the chunk. The records must be checked.
func NextRecord(b []byte) (payload, rest []byte) {
	size := uint64(le.Uint32(b))
	return b[8:][:size:size], b[lane.RecordBytes(size):]
}

// chunkHeader is the header before a chunk's records.
type chunkHeader struct {
	kind     uint16
	bytes    uint64
	lane     Lane
	first    uint32
	messages uint32
	peer     *kernel.Peer
	// Nanoseconds since 1970.
	written  uint64
	checksum uint32
}

// allBytes returns the size of the chunk with its header.
func (h *chunkHeader) allBytes() int64 { return headerBytes + int64(h.bytes) }

// contentBytes returns how many bytes a compressed chunk contains, entriesBytes the size of its list of lanes.
func (h *chunkHeader) contentBytes() uint64 { return h.lane[1] }

func (h *chunkHeader) entriesBytes() uint64 { return uint64(h.first) * lastEntry }

// hasRecords returns whether the chunk has records, compressed or not.
func (h *chunkHeader) hasRecords() bool { return h.kind == kindRecords || h.kind == kindCompressed }

// isFrame returns whether the header of a compressed chunk is valid.
func (h *chunkHeader) isFrame() bool {
	content := h.contentBytes()
	return h.first >= 1 && h.first <= lastEntriesMax && content >= headerBytes && content <= contentBytesMax &&
		h.bytes >= h.entriesBytes() && h.bytes < content+2*lastEntry*lastEntriesMax && h.messages > 0
}

func headerOf(c *Chunk, written uint64) chunkHeader {
	return chunkHeader{kind: kindRecords, bytes: uint64(len(c.Bytes)), lane: c.Lane, first: c.FirstSeq,
		messages: c.Messages, peer: c.Peer, written: written, checksum: crc32.ChecksumIEEE(c.Bytes)}
}

func (h *chunkHeader) encode(file *fileHeader) []byte {
	b := make([]byte, headerBytes)
	copy(b, chunkMagic)
	le.PutUint16(b[4:], h.kind)
	le.PutUint64(b[8:], h.bytes)
	le.PutUint64(b[16:], h.lane[0])
	le.PutUint64(b[24:], h.lane[1])
	le.PutUint32(b[32:], h.first)
	le.PutUint32(b[36:], h.messages)
	if h.peer != nil {
		le.PutUint16(b[6:], flagPeer)
		le.PutUint32(b[40:], uint32(h.peer.PID))
		le.PutUint32(b[44:], uint32(h.peer.UID))
	}
	le.PutUint64(b[48:], h.written)
	le.PutUint32(b[56:], h.checksum)
	le.PutUint32(b[60:], headerChecksum(file, b))
	return b
}

func headerChecksum(file *fileHeader, b []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(le.AppendUint64(nil, file.id)), crc32.IEEETable, b[:60])
}

// broken is what was found and what is valid there; nil: everything is valid.
type broken struct{ found, wanted string }

func brokenAt(found string, args ...any) *broken {
	return &broken{found: fmt.Sprintf(found, args...)}
}

func (b *broken) want(wanted string, args ...any) *broken {
	b.wanted = fmt.Sprintf(wanted, args...)
	return b
}

// decodeChunk decodes a chunk's header, behind which the file has so many bytes.
func decodeChunk(b []byte, behind int64, file *fileHeader) (h chunkHeader, _ *broken) {
	if len(b) < headerBytes {
		return h, brokenAt("%d bytes", len(b)).want("a chunk's header of %d", headerBytes)
	}
	if string(b[:4]) != chunkMagic {
		return h, brokenAt("%q", b[:4]).want("a chunk, %q", chunkMagic)
	}
	if found, wanted := le.Uint32(b[60:]), headerChecksum(file, b); found != wanted {
		return h, brokenAt("a chunk's header of checksum %#08x", found).want("%#08x", wanted)
	}
	h = chunkHeader{kind: le.Uint16(b[4:]), bytes: le.Uint64(b[8:]), lane: Lane{le.Uint64(b[16:]), le.Uint64(b[24:])},
		first: le.Uint32(b[32:]), messages: le.Uint32(b[36:]), written: le.Uint64(b[48:]), checksum: le.Uint32(b[56:])}
	if le.Uint16(b[6:])&flagPeer != 0 {
		h.peer = &kernel.Peer{PID: int(le.Uint32(b[40:])), UID: int(le.Uint32(b[44:]))}
	}
	switch {
	case h.bytes > uint64(behind):
		return h, brokenAt("%d bytes of a chunk's records", behind).want("%d", h.bytes)
	case h.bytes%8 != 0 || h.bytes > BytesMax:
		return h, brokenAt("a chunk of %d bytes", h.bytes).want("a multiple of 8, at most %d", uint64(BytesMax))
	case h.kind == kindRecords && (h.first == 0 || h.messages == 0):
		return h, brokenAt("%d messages from number %d", h.messages, h.first).want("at least one, from 1 on")
	case h.kind == kindLast && (h.bytes%lastEntry != 0 || h.bytes > lastEntry*lastEntriesMax):
		return h, brokenAt("%d bytes of last numbers", h.bytes).want("a multiple of %d, at most %d", lastEntry,
			lastEntry*lastEntriesMax)
	case h.kind == kindCompressed && !h.isFrame():
		return h, brokenAt("%d bytes of %d lanes, compressed to %d", h.contentBytes(), h.first, h.bytes).
			want("at most %d and %d", contentBytesMax, lastEntriesMax)
	}
	return h, nil
}

func (h *chunkHeader) checkChecksum(found uint32) *broken {
	if found == h.checksum {
		return nil
	}
	return brokenAt("a chunk's records of checksum %#08x", found).want("%#08x", h.checksum)
}

// checkRecords checks the records against their chunk's header.
func (h *chunkHeader) checkRecords(records []byte) *broken {
	rest, seq := records, h.first
	for range h.messages {
		at := len(records) - len(rest)
		if len(rest) < 8 {
			return brokenAt("the end of the chunk at byte %d of its records", at).want("message %d", seq)
		}
		bytes, found := uint64(le.Uint32(rest)), le.Uint32(rest[4:])
		if found != seq {
			return brokenAt("message %d at byte %d of the chunk's records", found, at).want("message %d", seq)
		}
		if bytes >= 1<<31 || lane.RecordBytes(bytes) > uint64(len(rest)) {
			return brokenAt("message %d of %d bytes at byte %d of the chunk's records", seq, bytes, at).
				want("at most %d", len(rest)-8)
		}
		rest, seq = rest[lane.RecordBytes(bytes):], lane.SeqAfter(seq)
	}
	if len(rest) > 0 {
		return brokenAt("%d bytes after a chunk's last message", len(rest)).want("none")
	}
	return nil
}

func now() uint64 { return uint64(time.Now().UnixNano()) }

// indexOfChunk returns where in b, at a multiple of 8, a chunk may begin; -1 if nowhere.
func indexOfChunk(b []byte) int {
	for at := 0; ; at++ {
		next := bytes.Index(b[at:], []byte(chunkMagic))
		if next < 0 {
			return -1
		}
		if at += next; at%8 == 0 {
			return at
		}
	}
}
