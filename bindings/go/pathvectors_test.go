package pelton

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
	"golang.org/x/sys/unix"
)

// pathWord is bytes at an offset: [offset, "0x" and a little-endian word, or hexadecimal bytes].
type pathWord [2]any

func (w pathWord) decode() (at int, found []byte) {
	digits, isWord := strings.CutPrefix(w[1].(string), "0x")
	found = must(hex.DecodeString(digits))
	if isWord {
		slices.Reverse(found)
	}
	return int(w[0].(float64)), found
}

type pathStep struct {
	Do, Count, Sizes, Then string
	Is                     any
}

type pathVector struct {
	Name, Mode   string
	Lanes        int
	Words, After map[string][]pathWord
	ChecksumXor  uint64 `json:"checksum_xor"`
	Redelivered  *int
	Steps        []pathStep
	// Of a broadcast: the sizes of its files, and the sides that open it, each with its result.
	Bytes map[string]int
	Opens [][2]any
}

// create creates the directory as the vector has it: these files, each like a fresh one, and the owners' FIFOs.
func (v *pathVector) create(t *testing.T, fresh map[string][]pathWord, path string, like map[string]string,
	owners []string) {
	t.Helper()
	failed := os.Mkdir(path, 0o700)
	boot := must(hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(
		string(must(os.ReadFile("/proc/sys/kernel/random/boot_id")))), "-", "")))
	for name, like := range like {
		usual := map[string]int{"cursors": lane.TableBytes}[name]
		content := make([]byte, cmp.Or(v.Bytes[name], usual, 1<<16))
		if slices.Contains([]string{"channel", "0.producer", "publisher"}, like) {
			copy(content[96:], boot)
		}
		for _, word := range append(slices.Clone(fresh[like]), v.Words[name]...) {
			at, bytes := word.decode()
			copy(content[at:], bytes)
		}
		if name == "channel" {
			binary.LittleEndian.PutUint64(content[112:], directory.Checksum(content)^v.ChecksumXor)
		}
		failed = errors.Join(failed, os.WriteFile(filepath.Join(path, name), content, 0o600))
	}
	for _, owner := range owners {
		for _, kind := range []string{directory.DoorbellFile, directory.LivenessFile} {
			failed = errors.Join(failed, unix.Mkfifo(filepath.Join(path, owner+"."+kind), 0o600))
		}
	}
	if v.Mode != "" {
		failed = errors.Join(failed, os.Chmod(path, os.FileMode(must(strconv.ParseUint(v.Mode, 8, 32)))))
	}
	if failed != nil {
		t.Fatal(failed)
	}
}

// createChannel creates a channel with a receiver.
func (v *pathVector) createChannel(t *testing.T, fresh map[string][]pathWord, path string) {
	t.Helper()
	like, owners := map[string]string{"channel": "channel", "receiver": "receiver"}, []string{"receiver"}
	for number := range max(v.Lanes, 1) {
		owner := strconv.Itoa(number)
		owners = append(owners, owner)
		for _, kind := range []string{".producer", ".consumer", ".data"} {
			like[owner+kind] = "0" + kind
		}
	}
	v.create(t, fresh, path, like, owners)
}

// checkAfter checks the files after the last step.
func (v *pathVector) checkAfter(t *testing.T, path string) {
	t.Helper()
	for file, words := range v.After {
		content := must(os.ReadFile(filepath.Join(path, file)))
		for _, word := range words {
			if at, wanted := word.decode(); !bytes.Equal(content[at:][:len(wanted)], wanted) {
				t.Errorf("%s at %d: %x, wanted %x", file, at, content[at:][:len(wanted)], wanted)
			}
		}
	}
}

// isRefusal reports whether opening is refused because of what the files say.
func isRefusal(err error) bool {
	return slices.ContainsFunc([]error{ErrNotAChannel, ErrRebooted, ErrCorrupt, ErrRefused},
		func(refusal error) bool { return errors.Is(err, refusal) })
}

// lettersOf returns message i by the rule of conformance/README.md.
func lettersOf(i int, sizes string) []byte {
	all := strings.Split(sizes, ",")
	size := must(strconv.Atoi(all[i%len(all)]))
	return bytes.Repeat([]byte("abcdefghijklmnopqrstuvwxyz"), size/26+2)[i%26:][:size]
}

// receive receives until an error, and returns it with the number of redelivered messages.
func (s *pathStep) receive(t *testing.T, path string) (redelivered int, err error) {
	t.Helper()
	ctx := soon(t)
	receiver, err := CreateReceiver(ctx, path, nil)
	if err != nil {
		return 0, err
	}
	defer receiver.Close()
	count := must(strconv.Atoi(s.Count))
	first := 0
	if last, isNumber := s.Is.(float64); isNumber {
		first = count - int(last)
	}
	for i := first; ; i++ {
		message, err := receiver.Receive(ctx)
		if err != nil {
			if i != count && s.Is != "refused" {
				t.Errorf("%d of %d messages", i, count)
			}
			return redelivered, err
		}
		if !bytes.Equal(message.Bytes(), lettersOf(i, s.Sizes)) {
			t.Fatalf("message %d: %q", i, message.Bytes())
		}
		if message.Redelivered() {
			redelivered++
		}
		message.Release()
	}
}

// take takes the step.
func (s *pathStep) take(t *testing.T, v *pathVector, path string) {
	t.Helper()
	var err error
	redelivered := 0
	switch {
	case s.Do == "recv":
		redelivered, err = s.receive(t, path)
	case s.Is == "refused":
		_, err = CreateSender(soon(t), path, nil)
	default:
		p := child(t, "path-letters", path, s.Count, s.Sizes)
		p.says("done " + s.Count)
		p.kill()
		return
	}
	wanted := ErrClosed
	if s.Then == "died" {
		wanted = ErrPeerDied
	}
	if isAsSaid := errors.Is(err, wanted); s.Is == "refused" && !isRefusal(err) || s.Is != "refused" && !isAsSaid {
		t.Errorf("found %v, wanted %v, %v", err, s.Is, wanted)
	}
	if v.Redelivered != nil && redelivered != *v.Redelivered {
		t.Errorf("%d messages were redelivered, wanted %d", redelivered, *v.Redelivered)
	}
}

func TestPathChannelsAreOpenedAndReceivedAsTheVectorsSay(t *testing.T) {
	var all struct {
		Fresh       map[string][]pathWord
		Directories []pathVector
	}
	if vectors.Read(t, "paths.json", &all); len(all.Directories) < 20 {
		t.Fatal("too few vectors")
	}
	for _, v := range all.Directories {
		t.Run(v.Name, func(t *testing.T) {
			path := channelPlace(t)
			v.createChannel(t, all.Fresh, path)
			for i := range v.Steps {
				v.Steps[i].take(t, &v, path)
			}
			v.checkAfter(t, path)
		})
	}
}

// The directories of broadcast.json.
func TestTheDirectoriesOfBroadcastsAreOpenedAsTheVectorsSay(t *testing.T) {
	var all struct {
		Fresh       map[string][]pathWord
		Directories []pathVector
	}
	if vectors.Read(t, "broadcast.json", &all); len(all.Directories) < 20 {
		t.Fatal("too few vectors")
	}
	like := map[string]string{"channel": "channel", "publisher": "publisher", "data": "data", "cursors": "cursors"}
	for _, v := range all.Directories {
		t.Run(v.Name, func(t *testing.T) {
			path, ctx := channelPlace(t), soon(t)
			v.create(t, all.Fresh, path, like, []string{"publisher"})
			for _, open := range v.Opens {
				next, err := uint64(0), error(nil)
				if open[0] == "subscriber" {
					var subscriber *Subscriber
					if subscriber, err = OpenSubscriber(ctx, path, &Options{StartFrom: FromOldest}); err == nil {
						next = subscriber.sub.Consumer.Number()
						subscriber.Close()
					}
				} else {
					var publisher *Publisher
					if publisher, err = CreatePublisher(ctx, path, nil); err == nil {
						next = publisher.lane.Number()
						publisher.Close()
					}
				}
				if open[1] == "refused" && !isRefusal(err) || open[1] != "refused" && (err != nil || float64(next) != open[1]) {
					t.Errorf("%v: %d, %v", open, next, err)
				}
			}
			v.checkAfter(t, path)
		})
	}
}
