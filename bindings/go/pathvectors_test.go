package pelton

import (
	"bytes"
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
}

// create creates the channel's directory as the vector has it.
func (v *pathVector) create(t *testing.T, fresh map[string][]pathWord, path string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(os.Mkdir(path, 0o700))
	boot := must(hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(
		string(must(os.ReadFile("/proc/sys/kernel/random/boot_id")))), "-", "")))
	write := func(name, like string) {
		content := make([]byte, 1<<16)
		if name == "channel" || strings.HasSuffix(name, ".producer") {
			copy(content[96:], boot)
		}
		for _, word := range append(slices.Clone(fresh[like]), v.Words[name]...) {
			at, bytes := word.decode()
			copy(content[at:], bytes)
		}
		if name == "channel" {
			binary.LittleEndian.PutUint64(content[112:], directory.Checksum(content)^v.ChecksumXor)
		}
		check(os.WriteFile(filepath.Join(path, name), content, 0o600))
	}
	write("channel", "channel")
	write("receiver", "receiver")
	owners := []string{"receiver"}
	for number := range max(v.Lanes, 1) {
		owner := strconv.Itoa(number)
		owners = append(owners, owner)
		for _, kind := range []string{".producer", ".consumer", ".data"} {
			write(owner+kind, "0"+kind)
		}
	}
	for _, owner := range owners {
		for _, kind := range []string{directory.DoorbellFile, directory.LivenessFile} {
			check(unix.Mkfifo(filepath.Join(path, owner+"."+kind), 0o600))
		}
	}
	if v.Mode != "" {
		check(os.Chmod(path, os.FileMode(must(strconv.ParseUint(v.Mode, 8, 32)))))
	}
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
	if s.Is == "refused" {
		for _, refusal := range []error{ErrNotAChannel, ErrRebooted, ErrCorrupt, ErrRefused} {
			if errors.Is(err, refusal) {
				wanted = refusal
			}
		}
	}
	if !errors.Is(err, wanted) {
		t.Errorf("found %v, wanted %v", err, wanted)
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
			v.create(t, all.Fresh, path)
			for i := range v.Steps {
				v.Steps[i].take(t, &v, path)
			}
			for file, words := range v.After {
				content := must(os.ReadFile(filepath.Join(path, file)))
				for _, word := range words {
					if at, wanted := word.decode(); !bytes.Equal(content[at:][:len(wanted)], wanted) {
						t.Errorf("%s at %d: %x, wanted %x", file, at, content[at:][:len(wanted)], wanted)
					}
				}
			}
		})
	}
}
