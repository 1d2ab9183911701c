package records

import (
	"hash/crc32"

	"github.com/klauspost/compress/zstd"
)

// Compressed chunks: chunks of records in one frame of zstd, behind the last number of each of their lanes. This
// package reads them and writes none.

// nextInside returns the next chunk of the decompressed content. A chunk with a wrong header or checksum is damage of
// the whole rest: nothing says where the next one begins.
func (r *Reader) nextInside() (*FileChunk, error) {
	rest := r.content[r.contentAt:]
	header, wrong := decodeChunk(rest, int64(len(rest))-headerBytes, &r.scanner.header)
	if wrong == nil && header.kind != kindRecords {
		wrong = brokenAt("a chunk of kind %d in a frame", header.kind).want("%d", kindRecords)
	}
	if wrong == nil {
		wrong = header.checkChecksum(crc32.ChecksumIEEE(rest[headerBytes:header.allBytes()]))
	}
	if wrong != nil {
		r.content = r.content[:0]
		return nil, r.scanner.damaged(r.frameAt, wrong, r.at)
	}
	r.contentAt += int(header.allBytes())
	return r.checked(&header, rest[headerBytes:header.allBytes():header.allBytes()], r.frameAt)
}

// decompress sets the content to that of the compressed chunk that was just read; to nothing if it is damaged.
func (r *Reader) decompress(header *chunkHeader) *broken {
	r.content, r.contentAt = r.content[:0], 0
	if r.decoder == nil {
		// In the goroutine that reads. The content's size limits the memory.
		decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			return brokenAt("%v", err).want("a frame of zstd")
		}
		r.decoder = decoder
	}
	frame := r.records[header.entriesBytes():]
	size := frameBytes(frame)
	if size < 0 {
		return brokenAt("%d other bytes", len(frame)).want("a frame of zstd")
	}
	wanted := int(header.contentBytes())
	if cap(r.content) < wanted {
		r.content = make([]byte, 0, wanted)
	}
	content, err := r.decoder.DecodeAll(frame[:size], r.content[:0:wanted])
	if err != nil {
		return brokenAt("%v in a frame", err).want("a frame of zstd of %d bytes", wanted)
	}
	if len(content) != wanted {
		return brokenAt("a frame of %d bytes", len(content)).want("%d", wanted)
	}
	r.content = content
	return nil
}

// frameBytes returns the size of the frame of zstd at the beginning, behind which zeros may follow; -1 if there is
// none. It adds up the sizes of its blocks.
func frameBytes(b []byte) int {
	var header zstd.Header
	if header.Decode(b) != nil || header.Skippable {
		return -1
	}
	at := header.HeaderSize
	for isLast := false; !isLast; {
		if at+3 > len(b) {
			return -1
		}
		block := int(b[at]) | int(b[at+1])<<8 | int(b[at+2])<<16
		isLast = block&1 != 0
		at += 3
		if block>>1&3 == 1 { // one byte, repeated
			at++
		} else {
			at += block >> 3
		}
	}
	if header.HasCheckSum {
		at += 4
	}
	if at > len(b) {
		return -1
	}
	return at
}
