// Crashtest is Go's sides in the crash test, crates/crash-test: senders and receivers of a path channel that
// are killed at random moments. verify/controls/README.md, at the repository's root, has the protocol.
//
//	go build -o crashtest.out ./crashtest && cargo run --release -p pelton-crash-test -- --kills 1000 --against ./crashtest.out
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
	"golang.org/x/sys/unix"
)

// The journal's words.
const (
	state = iota
	stop
	first
	pending
	done
	taken
	waiting
	ends
	endNs
	endUnreleased
	garbage  = 12
	messages = 15
	total    = 16
	jumps    = 17
	jumpsAt  = 64
	jumpsMax = 64
	textAt   = 256
)

const headerBytes = 16

type plan struct {
	Role, Place, Journal string
	Seed                 uint64
	BytesMin             uint64 `json:"bytes_min"`
	BytesMax             uint64 `json:"bytes_max"`
	Capacity             int
	PauseEvery           uint64 `json:"pause_every"`
	PauseUs              int    `json:"pause_us"`
	Next                 uint64
	journal              []byte
	pattern              []byte
}

func main() {
	if text := os.Getenv("PELTON_CRASHTEST_SIDE"); text != "" {
		side(text)
		return
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	// A side ends with the thread that started it.
	runtime.LockOSThread()
	var sides []*exec.Cmd
	places, ended := map[string]bool{}, make(chan struct{})
	for lines := bufio.NewReader(os.Stdin); ; {
		line, err := lines.ReadString('\n')
		if err != nil {
			break
		}
		var p plan
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			panic(err)
		}
		places[p.Place] = true
		process := exec.Command(self)
		process.Env = append(os.Environ(), "PELTON_CRASHTEST_SIDE="+strings.TrimSpace(line))
		process.Stderr = os.Stderr
		process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := process.Start(); err != nil {
			panic(err)
		}
		go func() { _ = process.Wait(); ended <- struct{}{} }()
		fmt.Println(process.Process.Pid)
		sides = append(sides, process)
	}
	for _, process := range sides {
		_ = process.Process.Kill()
		<-ended
	}
	for place := range places {
		_ = os.RemoveAll(place + "/channel")
	}
}

func side(text string) {
	p := &plan{}
	if err := json.Unmarshal([]byte(text), p); err != nil {
		panic(err)
	}
	file, err := os.OpenFile(p.Journal, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	if p.journal, err = unix.Mmap(int(file.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		panic(err)
	}
	p.pattern = make([]byte, p.BytesMax+2*251)
	for i := range p.pattern {
		p.pattern[i] = byte(i % 251)
	}
	if p.Role == "send" {
		err = p.send()
	} else {
		err = p.receive()
	}
	if err != nil {
		p.explain(err.Error())
		p.set(state, 3)
		os.Exit(1)
	}
	p.set(state, 2)
}

func (p *plan) word(at int) *uint64      { return (*uint64)(unsafe.Pointer(&p.journal[8*at])) }
func (p *plan) set(at int, value uint64) { atomic.StoreUint64(p.word(at), value) }
func (p *plan) get(at int) uint64        { return atomic.LoadUint64(p.word(at)) }
func (p *plan) explain(text string)      { copy(p.journal[8*textAt:8*textAt+999], text) }

func mix(z uint64) uint64 {
	z *= 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func (p *plan) size(number uint64) uint64 {
	drawn := mix(p.Seed + number)
	extent := max((p.BytesMax-p.BytesMin+1)>>(drawn>>61), 1)
	return p.BytesMin + (drawn&0xffffffff)%extent
}

// write makes message number, of its size.
func (p *plan) write(room []byte, number uint64) {
	binary.LittleEndian.PutUint64(room, number)
	binary.LittleEndian.PutUint32(room[8:], uint32(len(room)))
	rest := p.pattern[number%251:][:len(room)-headerBytes]
	binary.LittleEndian.PutUint32(room[12:], crc32.Update(crc32.ChecksumIEEE(room[:12]), crc32.IEEETable, rest))
	copy(room[headerBytes:], rest)
}

func (p *plan) numberOf(message []byte) (uint64, error) {
	if len(message) < headerBytes {
		return 0, fmt.Errorf("a message of %d bytes", len(message))
	}
	number := binary.LittleEndian.Uint64(message)
	found := crc32.Update(crc32.ChecksumIEEE(message[:12]), crc32.IEEETable, message[headerBytes:])
	if uint64(len(message)) != p.size(number) || uint32(len(message)) != binary.LittleEndian.Uint32(message[8:]) ||
		found != binary.LittleEndian.Uint32(message[12:]) {
		return 0, fmt.Errorf("message %d has %d bytes and CRC %08x", number, len(message), found)
	}
	return number, nil
}

func (p *plan) pause() {
	if p.PauseEvery != 0 && p.get(messages)%p.PauseEvery == 0 {
		time.Sleep(time.Duration(p.PauseUs) * time.Microsecond)
	}
}

// noteEnd records the reported end of the other side. It returns any other error.
func (p *plan) noteEnd(err error) error {
	var ended *pelton.EndError
	if !errors.As(err, &ended) || ended.Err != pelton.ErrPeerDied && ended.Err != pelton.ErrClosed {
		return err
	}
	if ended.Err == pelton.ErrPeerDied {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		p.set(endUnreleased, ended.Unreleased)
		p.set(endNs, uint64(now.Nano()))
		p.set(ends, p.get(ends)+1)
	}
	return nil
}

// soon ends a wait, so that this side sees the crash test's word to stop.
func soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 50*time.Millisecond)
}

func (p *plan) send() error {
	options := &pelton.Options{Capacity: p.Capacity}
	sender, err := pelton.CreateSender(context.Background(), p.Place+"/channel", options)
	if err != nil {
		return err
	}
	number := p.Next
	p.set(pending, number-1)
	p.set(done, number-1)
	p.set(first, number)
	p.set(state, 1)
	for p.get(stop) == 0 {
		size := int(p.size(number))
		p.set(pending, number)
		ctx, cancel := soon()
		p.set(waiting, 1)
		room, err := sender.Reserve(ctx, size)
		p.set(waiting, 0)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		if err != nil {
			if err := p.noteEnd(err); err != nil {
				return err
			}
			continue
		}
		p.write(room, number)
		if err := sender.Commit(size); err != nil {
			return err
		}
		p.set(done, number)
		p.set(messages, p.get(messages)+1)
		p.set(total, p.get(total)+uint64(size))
		number++
		p.pause()
	}
	return sender.Close()
}

func (p *plan) receive() error {
	receiver, err := pelton.CreateReceiver(context.Background(), p.Place+"/channel",
		&pelton.Options{Capacity: p.Capacity})
	if err != nil {
		return err
	}
	p.set(state, 1)
	for p.get(stop) == 0 || p.get(taken)+1 < p.get(stop) {
		last := p.get(taken)
		p.set(pending, last+1)
		ctx, cancel := soon()
		p.set(waiting, 1)
		message, err := receiver.Receive(ctx)
		p.set(waiting, 0)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		if err != nil {
			if err := p.noteEnd(err); err != nil {
				return err
			}
			continue
		}
		number, err := p.numberOf(message.Bytes())
		if err != nil {
			p.set(garbage, p.get(garbage)+1)
			p.explain(err.Error())
			_ = message.Release()
			continue
		}
		if p.get(first) == 0 {
			p.set(done, number-1)
			p.set(pending, number)
			p.set(first, number)
		} else if number != last+1 {
			if n := int(p.get(jumps)); n < jumpsMax {
				p.set(jumpsAt+2*n, last+1)
				p.set(jumpsAt+2*n+1, number)
			}
			p.set(jumps, p.get(jumps)+1)
		}
		size := len(message.Bytes())
		p.set(taken, number)
		p.set(pending, number)
		if err := message.Release(); err != nil {
			return err
		}
		p.set(done, number)
		p.set(messages, p.get(messages)+1)
		p.set(total, p.get(total)+uint64(size))
		p.pause()
	}
	return receiver.Close()
}
