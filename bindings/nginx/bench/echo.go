// Echo answers each request on a Unix stream socket with its own bytes: a length in four little-endian bytes, and the
// payload. It is bindings/go/examples/echo without pelton.
//
//	echo PATH
package main

import (
	"bufio"
	"encoding/binary"
	"io"
	"log"
	"net"
	"os"
)

func main() {
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go serve(connection)
	}
}

func serve(connection net.Conn) {
	defer connection.Close()
	reader := bufio.NewReaderSize(connection, 1<<17)
	message := make([]byte, 4)
	for {
		message = message[:4]
		if _, err := io.ReadFull(reader, message); err != nil {
			return
		}
		size := 4 + int(binary.LittleEndian.Uint32(message))
		if cap(message) < size {
			message = append(make([]byte, 0, size), message...)
		}
		message = message[:size]
		if _, err := io.ReadFull(reader, message[4:]); err != nil {
			return
		}
		if _, err := connection.Write(message); err != nil {
			return
		}
	}
}
