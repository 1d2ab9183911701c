// Package names has the names of channels and the sockets behind them: a short name is a directory of sockets,
// unix:PATH is one socket.
package names

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Name is the parsed name of a channel.
type Name struct {
	text string
	// The path of a socket.
	Path string
	// For a short name: the directory of its sockets, and the parent of that.
	directory, base string
}

// Parse parses a name. Errors: [fail.ErrName].
func Parse(text string) (Name, error) {
	wrong := func(problem string) (Name, error) { return Name{}, fail.New(fail.ErrName, "%q %s", text, problem) }
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		if path == "" || strings.ContainsRune(path, 0) {
			return wrong("names no socket: write unix:PATH")
		}
		return Name{text: text, Path: path}, nil
	}
	if scheme, _, ok := strings.Cut(text, ":"); ok {
		if scheme == "path" {
			return wrong("is a channel in a directory, at which no side listens: open it by CreateSender, CreateReceiver, OpenSender or OpenReceiver; a service needs a short name or unix:PATH")
		}
		return wrong(fmt.Sprintf("begins with %q: write unix:PATH, or a short name without a colon", scheme))
	}
	fits := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("._-", c)
	}
	if text == "" || len(text) > 64 || text[0] == '.' ||
		strings.ContainsFunc(text, func(c rune) bool { return !fits(c) }) {
		return wrong("is no short name: use 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.', or unix:PATH")
	}
	base := os.Getenv("XDG_RUNTIME_DIR")
	if filepath.IsAbs(base) {
		base = filepath.Join(base, "pelton")
	} else {
		base = filepath.Join(os.TempDir(), fmt.Sprintf("pelton-%d", os.Geteuid()))
	}
	return Name{text: text, base: base, directory: filepath.Join(base, text)}, nil
}

// Where returns the name, and the directory of a short one: it depends on the user and the environment.
func (n Name) Where() string {
	if n.Path != "" {
		return n.text
	}
	return fmt.Sprintf("%s (a socket in %s)", n.text, n.directory)
}

// Failed returns the error of an operation on a socket's path.
func (n Name) Failed(what, path string, err error) error {
	switch {
	case errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, kernel.ErrTooLong):
		return fail.New(fail.ErrName, "%q is a socket path of %d bytes, a Unix socket's has at most 107: choose a shorter one", n.text, len(path))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return fail.New(fail.ErrName, "%q needs the directory of %s, which is not there: make it first", n.text, path)
	case errors.Is(err, fs.ErrPermission):
		path += " (this user needs access to the socket and its directory)"
	}
	return fail.System(what+" "+path, err)
}

func (n Name) notASocket(path string) error {
	return fail.New(fail.ErrName, "%q is %s, which exists and is not a socket: choose another path", n.text, path)
}

// Sockets returns the paths where a process may listen, sorted.
func (n Name) Sockets() ([]string, error) {
	if n.Path != "" {
		return []string{n.Path}, nil
	}
	if there, err := n.ownDirectory(n.base, false); err != nil || !there {
		return nil, err
	}
	entries, err := os.ReadDir(n.directory)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, n.Failed("reading", n.directory, err)
	}
	var paths []string
	for _, entry := range entries {
		if entry.Type()&fs.ModeSocket != 0 {
			paths = append(paths, filepath.Join(n.directory, entry.Name()))
		}
	}
	return paths, nil
}

// Connect connects to a live listener. It returns -1 if there is none.
func (n Name) Connect() (int, error) {
	paths, err := n.Sockets()
	if err != nil {
		return -1, err
	}
	for _, path := range paths {
		fd, err := kernel.ConnectTo(path)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.ECONNREFUSED) && !isSocket(path):
			return -1, n.notASocket(path)
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
			// It closed, never existed, or its process died; a full backlog is a busy listener.
		default:
			return -1, n.Failed("connecting to", path, err)
		}
	}
	return -1, nil
}

// isSocket reports whether path is a socket, or nothing.
func isSocket(path string) bool {
	found, err := os.Stat(path)
	return err != nil || found.Mode()&fs.ModeSocket != 0
}

// ownDirectory reports whether path is a directory that no other user can enter; with make, it creates it.
func (n Name) ownDirectory(path string, create bool) (bool, error) {
	wrong := func(format string, args ...any) (bool, error) {
		return false, fail.New(fail.ErrName, "%q needs "+format, append([]any{n.text}, args...)...)
	}
	if create {
		err := os.Mkdir(path, 0o700)
		if path != n.base && errors.Is(err, fs.ErrNotExist) {
			return false, errDirectoryGone
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return wrong("the directory %s, which cannot be made: %v", path, err)
		}
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		if err == unix.ENOENT {
			return false, nil
		}
		return wrong("the directory %s, which cannot be read: %v", path, err)
	}
	if why := kernel.Unmapped(int(stat.Uid)); why != "" {
		return wrong("%s, which belongs to %s", path, why)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR || int(stat.Uid) != os.Geteuid() || stat.Mode&0o077 != 0 {
		return wrong("%s to be a directory of uid %d with mode 700; found mode %o of uid %d: `chmod 700` it, or set XDG_RUNTIME_DIR",
			path, os.Geteuid(), stat.Mode, stat.Uid)
	}
	return true, nil
}
