package calls

import (
	"encoding/hex"
)

// TraceparentBytes is the size of a traceparent before a payload.
const TraceparentBytes = 32

// Traceparent is a position in a distributed trace, as it is before a payload: spec/call.md.
type Traceparent [TraceparentBytes]byte

const (
	atFlags = 1
	atSpan  = 8
	atTrace = 16
	// The version that this writes. A later one is read as this one, except the invalid 255.
	traceVersion   = 0
	invalidVersion = 255
)

// IsValid reports whether it is a position by W3C's rules. If not, it is as if there were none.
func (t *Traceparent) IsValid() bool {
	return t[0] != invalidVersion && [8]byte(t[atSpan:]) != [8]byte{} && [16]byte(t[atTrace:]) != [16]byte{}
}

// String returns the text of the header.
func (t *Traceparent) String() string {
	digits := hex.EncodeToString(t[atSpan:])
	return "00-" + digits[16:] + "-" + digits[:16] + "-" + hex.EncodeToString(t[atFlags:atFlags+1])
}

// ParseTraceparent reads the text of the header; false if that is not valid by W3C's rules.
func ParseTraceparent(text string) (t Traceparent, ok bool) {
	const size = len("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	if len(text) < size || text[2] != '-' || text[35] != '-' || text[52] != '-' {
		return t, false
	}
	version := [1]byte{}
	ok = digits(version[:], text[:2]) && digits(t[atTrace:], text[3:35]) && digits(t[atSpan:atTrace], text[36:52]) &&
		digits(t[atFlags:atFlags+1], text[53:size])
	isWhole := len(text) == size || version[0] > traceVersion && text[size] == '-'
	return t, ok && isWhole && version[0] != invalidVersion && t.IsValid()
}

// digits reads lower-case hexadecimal digits, two for each byte.
func digits(to []byte, text string) bool {
	for i := range text {
		if 'A' <= text[i] && text[i] <= 'F' {
			return false
		}
	}
	n, err := hex.Decode(to, []byte(text))
	return err == nil && n == len(to)
}
