package pelton

import (
	"pelton/internal/calls"
)

// noMemory is the failure of a call of which so many bytes cannot be kept, as the client takes it, and the error that says so here.
func (c *session) noMemory(id uint64, bytes int) (calls.Header, []byte, error) {
	err := c.kept.NoMemory(bytes)
	text := []byte(err.Error())
	return calls.Header{Id: id, Kind: calls.KindFailed, Code: failedMemory}, text[:min(uint64(len(text)), c.bytesMax)], err
}
