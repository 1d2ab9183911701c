// The conformance driver in Go. ../README.md has the command line, the messages and the report.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

// driver is one run: its arguments, and the report.
type driver struct {
	name  string
	count int
	sizes []int
	then  string
	// The alphabet, repeated: every message is a slice of it.
	letters []byte

	mutex    sync.Mutex
	messages int
	bytes    uint64
	checksum uint32
}

func (d *driver) message(i int) []byte { return d.letters[i%26:][:d.sizes[i%len(d.sizes)]] }

// add adds a message to the report.
func (d *driver) add(message []byte) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.messages++
	d.bytes += uint64(len(message))
	d.checksum += crc32.ChecksumIEEE(message)
}

// addExpected adds the next message, unless it is another one.
func (d *driver) addExpected(found []byte) error {
	if d.messages == d.count {
		return fmt.Errorf("found more than %d messages: %.40q", d.count, found)
	}
	if expected := d.message(d.messages); !bytes.Equal(found, expected) {
		return fmt.Errorf("message %d: found %d bytes %.40q, expected %d bytes %.40q", d.messages, len(found), found,
			len(expected), expected)
	}
	d.add(found)
	return nil
}

func (d *driver) isDone() bool {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.messages >= d.count
}

func (d *driver) checkCount() error {
	if d.messages != d.count {
		return fmt.Errorf("found %d messages, expected %d", d.messages, d.count)
	}
	return nil
}

// traceparent returns that of message i with `traced`, or "".
func (d *driver) traceparent(i int) string {
	if d.then != "traced" || i%3 == 0 {
		return ""
	}
	return fmt.Sprintf("00-%032x-%016x-%02x", i+1, i+1, i%256)
}

func (d *driver) send(ctx context.Context) error {
	var sender *pelton.Sender
	var err error
	isTraced := d.then == "traced"
	if directory, isPath := strings.CutPrefix(d.name, "path:"); isPath {
		sender, err = pelton.CreateSender(ctx, directory, &pelton.Options{Traced: isTraced}) // needs no receiver
	} else {
		// Waits for a receiver.
		sender, err = pelton.ConnectSender(ctx, d.name, &pelton.Options{Await: true, Traced: isTraced})
	}
	for err == nil {
		if d.messages < d.count {
			err = sender.SendTraced(ctx, d.message(d.messages), d.traceparent(d.messages))
			if err == nil {
				d.add(d.message(d.messages))
			}
		} else if d.then == "die" {
			return nil
		} else if err = sender.WaitReleased(ctx); err == nil { // until the receiver has released every message
			return sender.Close()
		}
		// The successor gets what the receiver that died has not released.
		if errors.Is(err, pelton.ErrPeerDied) && d.then == "resume" {
			err = sender.Resume(ctx)
		}
	}
	return err
}

func (d *driver) receiver(ctx context.Context) (*pelton.Receiver, error) {
	if directory, isPath := strings.CutPrefix(d.name, "path:"); isPath {
		return pelton.CreateReceiver(ctx, directory, &pelton.Options{Await: true, Traced: d.then == "traced"})
	}
	listener, err := pelton.Listen(d.name, nil)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	return listener.AcceptReceiver(ctx)
}

func (d *driver) recv(ctx context.Context) error {
	receiver, err := d.receiver(ctx)
	if err != nil {
		return err
	}
	var last []uint32 // of `rest`: the messages' checksums
	for d.then != "die" || d.messages < d.count {
		message, err := receiver.Receive(ctx)
		if d.then == "died" && errors.Is(err, pelton.ErrPeerDied) || d.then != "died" && errors.Is(err, pelton.ErrClosed) {
			break
		}
		switch {
		case err != nil:
			return err
		case d.then == "rest":
			d.add(message.Bytes())
			last = append(last, crc32.ChecksumIEEE(message.Bytes()))
		case message.Traceparent() != d.traceparent(d.messages):
			err = fmt.Errorf("message %d: found the traceparent %q, expected %q", d.messages, message.Traceparent(),
				d.traceparent(d.messages))
		default:
			err = d.addExpected(message.Bytes())
		}
		if err = errors.Join(err, message.Release()); err != nil {
			return err
		}
	}
	switch d.then {
	case "die":
		return nil
	case "rest":
		if len(last) == 0 || len(last) > d.count {
			return fmt.Errorf("found %d messages, expected the last of %d", len(last), d.count)
		}
		for i, found := range last {
			if n := d.count - len(last) + i; found != crc32.ChecksumIEEE(d.message(n)) {
				return fmt.Errorf("message %d of the last %d differs from message %d", i, len(last), n)
			}
		}
		return receiver.Close()
	}
	return errors.Join(d.checkCount(), receiver.Close())
}

func (d *driver) gather(ctx context.Context) error {
	receiver, err := pelton.Gather(d.name, nil)
	if err != nil {
		return err
	}
	defer receiver.Close()
	for range d.count {
		message, err := receiver.Receive(ctx) // of all senders, round-robin
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", message.Bytes()[:min(d.sizes[0], len(message.Bytes()))])
		d.add(message.Bytes())
		message.Release()
	}
	return nil
}

func (d *driver) call(ctx context.Context) error {
	client, err := pelton.ConnectClient(ctx, d.name, &pelton.Options{Await: true})
	if err != nil {
		return err
	}
	defer client.Close()
	for i := range d.count {
		reply, err := client.Call(ctx, d.message(i))
		if err == nil {
			err = d.addExpected(reply)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) stream(ctx context.Context) error {
	client, err := pelton.ConnectClient(ctx, d.name, &pelton.Options{Await: true})
	if err != nil {
		return err
	}
	defer client.Close()
	call, err := client.Submit(ctx, d.message(0))
	if err != nil {
		return err
	}
	for part, err := range call.Parts(ctx) {
		if err == nil {
			err = d.addExpected(part)
		}
		if err != nil {
			return err
		}
	}
	return d.checkCount()
}

// serving serves until the count is reached; then the service drains.
func (d *driver) serving(ctx context.Context, handle func(pelton.Request) error) error {
	service, err := pelton.ListenService(d.name, nil)
	if err != nil {
		return err
	}
	defer service.Close()
	err = service.Serve(ctx, func(request pelton.Request) { // a goroutine for each request
		if request.IsNotification() {
			return
		}
		if err := handle(request); err != nil {
			fmt.Fprintln(os.Stderr, "reply:", err) // the client has gone
		}
		if d.isDone() {
			service.Drain() // Serve returns when every client has its replies
		}
	})
	return errors.Join(err, d.checkCount())
}

func (d *driver) serve(ctx context.Context) error {
	var turn sync.Mutex
	return d.serving(ctx, func(request pelton.Request) error {
		turn.Lock()
		defer turn.Unlock()
		err := request.Reply(request.Bytes())
		if err == nil {
			d.add(request.Bytes())
		}
		return err
	})
}

func (d *driver) serveStream(ctx context.Context) error {
	return d.serving(ctx, func(request pelton.Request) error {
		for i := range d.count {
			if err := request.Part(ctx, d.message(i)); err != nil {
				return err
			}
			d.add(d.message(i))
		}
		return request.End()
	})
}

func (d *driver) writeRecords(context.Context) error {
	file, err := pelton.OpenRecordFile(d.name, nil)
	if err != nil {
		return err
	}
	for i := range d.count {
		if err := file.Append(d.message(i)); err != nil {
			return err
		}
		d.add(d.message(i))
	}
	return file.Close()
}

// readRecords reads the file to its end, and reports how it ends.
func (d *driver) readRecords() (report string, err error) {
	damaged, end := 0, "end"
	reader, err := pelton.OpenRecordReader(d.name)
	for err == nil {
		var record pelton.Record
		record, err = reader.Next()
		switch {
		case err == nil:
			d.add(record.Bytes)
		case errors.Is(err, pelton.ErrDamaged):
			damaged++
			err = nil
		}
	}
	switch {
	case errors.Is(err, pelton.ErrNotARecordFile):
		end = "refused"
	case errors.Is(err, pelton.ErrTorn):
		end = "torn"
	case errors.Is(err, pelton.ErrLaterVersion):
		end = "later"
	case err != io.EOF:
		return "", err
	}
	return fmt.Sprintf(" damaged %d %s", damaged, end), nil
}

// commands have each one's function and its values of THEN.
var commands = map[string]struct {
	run   func(*driver, context.Context) error
	thens []string
}{
	"send":          {(*driver).send, []string{"close", "die", "resume", "traced"}},
	"recv":          {(*driver).recv, []string{"close", "died", "die", "rest", "traced"}},
	"call":          {(*driver).call, nil},
	"serve":         {(*driver).serve, nil},
	"stream":        {(*driver).stream, nil},
	"serve-stream":  {(*driver).serveStream, nil},
	"gather":        {(*driver).gather, nil},
	"write-records": {(*driver).writeRecords, nil},
}

// parse reads the arguments; false: they are wrong.
func (d *driver) parse(arguments, thens []string) bool {
	if len(arguments) < 3 || len(arguments) > 4 {
		return false
	}
	d.name, d.then = arguments[0], "close"
	if len(arguments) == 4 {
		if d.then = arguments[3]; !slices.Contains(thens, d.then) {
			return false
		}
	}
	var err error
	if d.count, err = strconv.Atoi(arguments[1]); err != nil || d.count < 0 {
		return false
	}
	for text := range strings.SplitSeq(arguments[2], ",") {
		size, err := strconv.Atoi(text)
		if err != nil || size < 0 {
			return false
		}
		d.sizes = append(d.sizes, size)
	}
	d.letters = bytes.Repeat([]byte("abcdefghijklmnopqrstuvwxyz"), slices.Max(d.sizes)/26+2)
	return true
}

// fail ends the driver.
func fail(code int, format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	os.Exit(code)
}

func main() {
	d := driver{}
	verb := append(os.Args, "")[1]
	arguments := os.Args[min(2, len(os.Args)):]
	command, isCommand := commands[verb]
	switch {
	case verb == "vectors" || verb == "read-records":
		if len(arguments) != 1 {
			fail(2, "usage: driver %s PATH", verb)
		}
		if verb == "vectors" {
			files, err := replay(arguments[0])
			if err != nil {
				fail(1, "vectors: %v", err)
			}
			fmt.Printf("ok vectors %d files\n", files)
			return
		}
	case !isCommand:
		fmt.Printf("unsupported %s: this driver does not have it\n", verb)
		os.Exit(3)
	case len(arguments) > 0 && strings.HasPrefix(arguments[0], "path:") && command.thens == nil && verb != "write-records":
		fmt.Printf("unsupported %s path: a directory has one sender and one receiver\n", verb)
		os.Exit(3)
	case !d.parse(arguments, command.thens):
		fail(2, "usage: driver %s NAME COUNT SIZES %s", verb, strings.Join(command.thens, "|"))
	}
	seconds, err := strconv.Atoi(os.Getenv("PELTON_SECONDS"))
	if err != nil {
		seconds = 10
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds)*time.Second)
	defer cancel()
	end := ""
	if verb == "read-records" {
		d.name = arguments[0]
		end, err = d.readRecords()
	} else {
		err = command.run(&d, ctx)
	}
	if err != nil {
		fail(1, "%s, after %d messages: %v", verb, d.messages, err)
	}
	fmt.Printf("ok %s %d messages %d bytes checksum %08x%s\n", verb, d.messages, d.bytes, d.checksum, end)
	if d.then == "die" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}
