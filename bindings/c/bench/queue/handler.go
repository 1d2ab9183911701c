// The handler in Go, in a C library with Go's runtime in it (go build -buildmode=c-shared). One goroutine pops by cgo:
// while there is no request it blocks in C, on the condition variable. It reads the request in place and writes the
// reply in place, so nothing is copied for Go. A call takes two crossings into C; a third if its reply needs memory.
package main

// #include "queue.h"
import "C"

import "unsafe"

//export queue_start_handler
func queue_start_handler(queue *C.struct_queue) C.int {
	go handle(queue)
	return 0
}

func handle(queue *C.struct_queue) {
	for {
		call := C.queue_pop(queue)
		if call == nil {
			return
		}
		size := call.request_size
		if (call.reply == nil || call.reply_capacity < size) && C.queue_reply_space(call, size) == nil {
			panic("no memory for a reply")
		}
		call.reply_size = size
		request := unsafe.Slice((*byte)(unsafe.Pointer(call.request)), size)
		copy(unsafe.Slice((*byte)(unsafe.Pointer(call.reply)), size), request)
		C.queue_reply(queue, call)
	}
}

func main() {}
