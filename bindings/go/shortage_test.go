package pelton

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// A process that listens and runs out of descriptors: it refuses new peers, keeps those that it has, and continues
// once it can.

// runShort is the child's side: "short NAME KIND" listens, and prints what it receives. On its input, "leave N"
// leaves it N descriptors, "free" all of them, and "open N" opens N files and closes them.
func runShort(ctx context.Context, name, kind string) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = 100
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	options := &Options{Capacity: 1 << 16}
	serve := func(receiver *Receiver) error {
		for {
			message, err := receiver.Receive(ctx)
			if err != nil {
				return err
			}
			fmt.Println("received", string(message.Bytes()))
			message.Release()
		}
	}
	ended := make(chan error, 1)
	switch kind {
	case "gather":
		receiver, err := Gather(name, options)
		if err != nil {
			return err
		}
		go func() { ended <- serve(receiver) }()
	case "service":
		service, err := ListenService(name, options)
		if err != nil {
			return err
		}
		go func() {
			ended <- service.Serve(ctx, func(request Request) { _ = request.Reply(request.Bytes()) })
		}()
	case "accept":
		listener, err := Listen(name, options)
		if err != nil {
			return err
		}
		go func() {
			for {
				receiver, err := listener.AcceptReceiver(ctx)
				if err != nil {
					ended <- err
					return
				}
				go func() { _ = serve(receiver) }()
			}
		}()
	}
	fmt.Println("listening")
	go func() {
		var taken []int
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			if count, ok := strings.CutPrefix(lines.Text(), "open "); ok {
				fmt.Println(opensFiles(must(strconv.Atoi(count))))
				continue
			}
			wanted, err := strconv.Atoi(strings.TrimPrefix(lines.Text(), "leave "))
			if err != nil {
				kernel.CloseAll(taken)
				taken = nil
				fmt.Println("free")
				continue
			}
			// Repeatedly: another goroutine may just hold one for a moment, as the one that begins to accept.
			for range 5 {
				for {
					fd, err := unix.Dup(2)
					if err != nil {
						break
					}
					taken = append(taken, fd)
				}
				time.Sleep(2 * time.Millisecond)
			}
			kernel.CloseAll(taken[len(taken)-wanted:])
			taken = taken[:len(taken)-wanted]
			fmt.Println("left", wanted)
		}
	}()
	return <-ended
}

// opensFiles opens and closes this number of files, as a program does.
func opensFiles(count int) string {
	for n := range count {
		file, err := os.Open("/dev/null")
		if err != nil {
			return fmt.Sprintf("file %d: %v", n, err)
		}
		defer file.Close()
	}
	return fmt.Sprint("opened ", count)
}

func (p *process) command(command string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.input, command); err != nil {
		p.t.Fatal(err)
	}
	p.says(map[bool]string{true: "free", false: strings.Replace(command, "leave", "left", 1)}[command == "free"])
}

func (p *process) descriptors() int {
	return len(must(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid))))
}

// processor returns the processor time of the process so far.
func (p *process) processor() time.Duration {
	stat := string(must(os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))))
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+2:])
	// Of 100 ticks a second.
	return time.Duration(must(strconv.Atoi(fields[11]))+must(strconv.Atoi(fields[12]))) * 10 * time.Millisecond
}

func TestAListenerWithoutDescriptorsRefusesAndContinues(t *testing.T) {
	for _, kind := range []string{"gather", "service", "accept"} {
		t.Run(kind, func(t *testing.T) {
			name, ctx := place(t), soon(t)
			listens := child(t, "short", name, kind)
			listens.says("listening")
			options := &Options{Capacity: 1 << 16}
			// connect connects, and returns a function that uses the connection.
			connect := func() (func(text string), error) {
				if kind == "service" {
					client, err := ConnectClient(ctx, name, options)
					if err != nil {
						return nil, err
					}
					t.Cleanup(func() { client.Close() })
					return func(text string) {
						if reply, err := client.Call(ctx, []byte(text)); err != nil || string(reply) != text {
							t.Fatal(string(reply), err)
						}
					}, nil
				}
				sender, err := ConnectSender(ctx, name, options)
				if err != nil {
					return nil, err
				}
				t.Cleanup(func() { sender.Close() })
				return func(text string) {
					if err := sender.Send(ctx, []byte(text)); err != nil {
						t.Fatal(err)
					}
					listens.says("received " + text)
				}, nil
			}
			says := fmt.Sprintf("process %d has no descriptor left for one more peer (RLIMIT_NOFILE is 100): raise it there, or connect again later", listens.Process.Pid)
			isRefused := func() {
				t.Helper()
				if _, err := connect(); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), says) {
					t.Fatal(err)
				}
			}
			// No peer is there yet, so nothing else happens in that process.
			listens.command("leave 0")
			begun, before := time.Now(), listens.processor()
			isRefused()
			if took := time.Since(begun); took < shortageMax-shortageRetry {
				t.Errorf("refused after %v, before it could have got better", took)
			}
			if spent := listens.processor() - before; spent > 300*time.Millisecond {
				t.Errorf("it spent %v of processor time on waiting", spent)
			}
			// A waiting peer is served once there are descriptors, without any other event.
			use := make(chan func(string), 1)
			go func() {
				for {
					found, err := connect()
					if err != nil && strings.Contains(err.Error(), says) {
						// It came while the one before it was refused.
						continue
					}
					if err != nil {
						t.Error(err)
					}
					use <- found
					return
				}
			}()
			waitsInBacklog(t, name)
			listens.command("free")
			first := <-use
			if first == nil {
				return
			}
			first("first")
			// A handshake that runs out of them. Those of the last one are closed first.
			settled := listens.descriptors()
			for left := range 4 {
				for until := time.Now().Add(10 * time.Second); listens.descriptors() > settled; {
					if time.Now().After(until) {
						t.Fatal("descriptors of a refused peer are left")
					}
				}
				listens.command(fmt.Sprint("leave ", left))
				isRefused()
				first(fmt.Sprint("with ", left))
				listens.command("free")
			}
			second, err := connect()
			if err != nil {
				t.Fatal(err)
			}
			second("second")
			first("last")
		})
	}
}

// With as many peers as a process takes, an eighth of its descriptors is left to its program, also while others
// connect.
func TestPeersLeaveTheProgramItsDescriptors(t *testing.T) {
	for _, kind := range []string{"gather", "service"} {
		t.Run(kind, func(t *testing.T) {
			name, ctx := place(t), soon(t)
			listens := child(t, "short", name, kind)
			listens.says("listening")
			// Of 100.
			opens := func() {
				t.Helper()
				if _, err := fmt.Fprintln(listens.input, "open 12"); err != nil {
					t.Fatal(err)
				}
				listens.says("opened 12")
			}
			options := &Options{Capacity: 1 << 16}
			connect := func() (io.Closer, error) {
				if kind == "service" {
					return ConnectClient(ctx, name, options)
				}
				return ConnectSender(ctx, name, options)
			}
			var mutex sync.Mutex
			var peers []io.Closer
			t.Cleanup(func() {
				for _, peer := range peers {
					peer.Close()
				}
			})
			says := fmt.Sprintf("process %d has no descriptor left for one more peer (RLIMIT_NOFILE is 100): raise it there, or connect again later", listens.Process.Pid)
			// All connect until one is refused.
			var connecting sync.WaitGroup
			for range 16 {
				connecting.Go(func() {
					for {
						peer, err := connect()
						if err != nil {
							if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), says) {
								t.Error(err)
							}
							return
						}
						mutex.Lock()
						peers = append(peers, peer)
						mutex.Unlock()
					}
				})
			}
			over := make(chan struct{})
			go func() { connecting.Wait(); close(over) }()
			t.Cleanup(func() { <-over })
			for isOver := false; !isOver; {
				select {
				case <-over:
					isOver = true
				default:
				}
				opens()
			}
			// 4 or 5 descriptors each, of those that are not the program's.
			if len(peers) < 10 {
				t.Fatal(len(peers), "peers were taken")
			}
			for _, peer := range peers[:4] {
				peer.Close()
			}
			peers = peers[4:]
			// The process detects it soon.
			for {
				peer, err := connect()
				if err == nil {
					peers = append(peers, peer)
					break
				}
				if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), says) {
					t.Fatal(err)
				}
			}
			opens()
		})
	}
}

// What a peer costs the process that it connects to. Consider a change of these well: 1,024 peers are common.
func TestTheDescriptorsThatAPeerCosts(t *testing.T) {
	for kind, wanted := range map[string]int{
		// A socket, its process, its doorbell.
		"gather": 3,
		// And the doorbell that it rings when there is space for replies, on which no goroutine has slept. Before
		// Linux 6.10, one more.
		"service": 4,
	} {
		name, ctx := place(t), soon(t)
		listens := child(t, "short", name, kind)
		listens.says("listening")
		options := &Options{Capacity: 1 << 16}
		connect := func() {
			t.Helper()
			if kind == "service" {
				client := must(ConnectClient(ctx, name, options))
				t.Cleanup(func() { client.Close() })
				must(client.Call(ctx, nil))
				return
			}
			sender := must(ConnectSender(ctx, name, options))
			t.Cleanup(func() { sender.Close() })
			if err := sender.Send(ctx, []byte("x")); err != nil {
				t.Fatal(err)
			}
			listens.says("received x")
		}
		connect()
		before := listens.descriptors()
		for range 5 {
			connect()
		}
		if cost := (listens.descriptors() - before) / 5; cost != wanted &&
			(kind == "gather" || kernel.IsSameFile(0, 0) || cost != wanted+1) {
			t.Errorf("%s: %d descriptors for each peer, expected %d", kind, cost, wanted)
		}
	}
}

// waitsInBacklog waits until a peer has connected that is not accepted.
func waitsInBacklog(t *testing.T, name string) {
	t.Helper()
	path := strings.TrimPrefix(name, "unix:")
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); {
		// State 2, SS_CONNECTING, with the listener's path: in its backlog.
		for line := range strings.Lines(string(must(os.ReadFile("/proc/net/unix")))) {
			if fields := strings.Fields(line); len(fields) == 8 && fields[7] == path && fields[5] == "02" {
				return
			}
		}
	}
	t.Fatal("nobody connects")
}
