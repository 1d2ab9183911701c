package lane

import "unsafe"

// words returns memory of Go's own, aligned to 8. The race detector sees accesses to it, and not those to mapped
// memory: it checks only Go's heap and data.
func words(bytes uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(make([]uint64, bytes/8)))), bytes)
}

// fresh returns the memory of a lane before any side has attached.
func fresh(capacity, bytesMax uint64, start Position) Memory {
	m := Memory{words(512), words(512), words(512), words(capacity)}
	MakeProducerPage(m.Producer, capacity, bytesMax, 1, 1)
	MakeConsumerPage(m.Consumer, start, 2)
	MakeReceiverPage(m.Receiver)
	return m
}

// fill writes the payload of the vectors' rule.
func fill(payload []byte, seq uint32) {
	first := byte((uint64(seq) * 0x9e3779b97f4a7c15) >> 32)
	for i := range payload {
		payload[i] = first ^ byte(i) ^ byte(len(payload))
	}
}

func isFilled(payload []byte, seq uint32) bool {
	first := byte((uint64(seq) * 0x9e3779b97f4a7c15) >> 32)
	for i, b := range payload {
		if b != first^byte(i)^byte(len(payload)) {
			return false
		}
	}
	return true
}

func yes() bool { return true }
