// Package directory has a path channel's directory: its files, their checks, and the claimed roles. What exists at
// the path is complete: a channel is created under a temporary name and renamed, and a lane exists once it is
// counted. Each file is checked before use, and only the checked copy is used. A file that is not a channel's is
// never removed. spec/protocol.md, "Path channels".
package directory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// DoorbellFile and LivenessFile are those of a lane, see ofLane; the others are the receiver's.
const (
	DoorbellFile, LivenessFile         = "bell", "life"
	receiverDoorbell, receiverLiveness = "receiver." + DoorbellFile, "receiver." + LivenessFile
)

var filesOfALane = []string{"producer", "consumer", "data", DoorbellFile, LivenessFile}

func ofLane(number int, kind string) string { return strconv.Itoa(number) + "." + kind }

// isKnown reports whether a channel has a file of that name.
func isKnown(name string) bool {
	switch name {
	case "channel", "receiver", receiverDoorbell, receiverLiveness, publisherFile, publisherDoorbell, publisherLiveness,
		dataFile, tableFile:
		return true
	}
	number, kind, _ := strings.Cut(name, ".")
	n, err := strconv.Atoi(number)
	if err != nil || n < 0 || strconv.Itoa(n) != number {
		return false
	}
	for _, known := range filesOfALane {
		if kind == known {
			return true
		}
	}
	return false
}

// Directory is an open channel.
type Directory struct {
	Path   string
	fd     int
	gid    int
	owners []int
	// Permission bits that its files may have.
	bits   uint32
	header channelHeader
	page   *memory.Segment
}

// Access says which directories a side opens: of its own and these users, with at most these permission bits.
type Access struct {
	UIDs []int
	Mode uint32
}

func (d *Directory) refuse(format string, args ...any) error {
	return fail.New(fail.ErrNotAChannel, "%s cannot be used as a channel: %s", d.Path, fmt.Sprintf(format, args...))
}

func (d *Directory) failed(doing, name string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fail.With(err, fail.ErrNoSpace, "no space for %s/%s: free some, or have it elsewhere or smaller", d.Path,
			name)
	case err == nil:
		return nil
	}
	return fail.System(fmt.Sprintf("%s %s/%s", doing, d.Path, name), err)
}

// NoChannel returns the error that there is no channel at the path.
func (d *Directory) NoChannel() error {
	return fail.New(fail.ErrNoChannel, "there is no channel at %s: create it, or set Await", d.Path)
}

func (d *Directory) taken(ctx context.Context, role string, pid uint32) error {
	return fail.With(ctx.Err(), fail.ErrRoleTaken, "%s has a %s already, %s: stop that process, or wait until it ends",
		d.Path, role, process(pid))
}

func process(pid uint32) string {
	if pid == 0 {
		return "a process whose number is not known"
	}
	return fmt.Sprintf("process %d", pid)
}

// Open checks and opens the channel at a path. It returns nil if nothing is there.
func Open(path string, access Access) (*Directory, error) { return open(path, access, false) }

// open opens a broadcast, or a channel with a receiver.
func open(path string, access Access, isBroadcast bool) (*Directory, error) {
	path, err := filepath.Abs(path)
	if err != nil || path == "/" {
		return nil, fail.New(fail.ErrNotAChannel, "%q does not end in a name: name a directory", path)
	}
	for {
		d, err := openExisting(path, access, isBroadcast)
		// Removed while it was opened: there may be another by now, or none.
		if !errors.Is(err, fail.ErrNoChannel) {
			return d, err
		}
	}
}

func openExisting(path string, access Access, isBroadcast bool) (*Directory, error) {
	mode := access.Mode
	d := &Directory{Path: path, fd: -1, bits: 0o7777}
	var stat unix.Stat_t
	check := func() error {
		if stat.Mode&unix.S_IFMT != unix.S_IFDIR {
			return d.refuse("it is no directory: name a directory itself")
		}
		if why := kernel.Unmapped(int(stat.Uid)); why != "" {
			return d.refuse("it belongs to %s", why)
		}
		if !kernel.IsAllowed(int(stat.Uid), access.UIDs) {
			return d.refuse("it belongs to uid %d, wanted %d or %v: allow that uid in the options, or choose another path", stat.Uid, os.Geteuid(), access.UIDs)
		}
		if found := stat.Mode & 0o7777; found&^mode != 0 {
			return d.refuse("its mode is %o, this side permits at most %o: change it, or allow more in the options",
				found, mode)
		}
		return nil
	}
	// By name first, because the kernel's errors for other files are less specific.
	switch err := unix.Lstat(path, &stat); err {
	case nil:
		if err := check(); err != nil {
			return nil, err
		}
	case unix.ENOENT:
		return nil, nil
	default:
		return nil, d.refuse("it cannot be read: %v", err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, d.refuse("it cannot be opened: %v", err)
	}
	d.fd = fd
	if err = unix.Fstat(fd, &stat); err == nil {
		err = check()
	}
	if err == nil {
		d.gid = int(stat.Gid)
		d.owners = append([]int{os.Geteuid(), int(stat.Uid)}, access.UIDs...)
		err = d.readHeader(mode, isBroadcast)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// CheckSize checks the lanes against what a receiver takes: without a handshake, their creator does not know. No peer
// writes to a sender, which so needs no check.
func (d *Directory) CheckSize(most, memory uint64) error {
	bytes, lanes := d.header.capacity, uint64(d.header.lanesMax)
	if bytes <= most && (memory == 0 || bytes*lanes <= memory) {
		return nil
	}
	all := ""
	if memory > 0 {
		all = fmt.Sprintf(", and %d in all", memory)
	}
	return d.refuse("it has up to %d lanes of %d bytes, this receiver takes lanes of %d%s: raise its Memory", lanes,
		bytes, most, all)
}

// IsOwnUser reports whether the directory belongs to this process's user.
func (d *Directory) IsOwnUser() bool { return d.owners[1] == os.Geteuid() }

// Close closes the directory.
func (d *Directory) Close() {
	if d.page != nil {
		d.page.Close()
		d.page = nil
	}
	unix.Close(d.fd)
}

// Lanes returns the present number of lanes.
func (d *Directory) Lanes() (int, error) {
	count := atomic.LoadUint32(word32(d.page.Bytes[lanesAt:]))
	if count == 0 || count > d.header.lanesMax {
		return 0, d.refuse("its file channel counts %d lanes, wanted 1 to %d: %s", count, d.header.lanesMax, damaged)
	}
	return int(count), nil
}

// check checks what every file must satisfy.
func (d *Directory) check(name string, kind uint32, stat *unix.Stat_t) error {
	if stat.Mode&unix.S_IFMT != kind {
		return d.refuse("its file %s is of type %#o, wanted %#o: %s", name, stat.Mode&unix.S_IFMT, kind, damaged)
	}
	if why := kernel.Unmapped(int(stat.Uid)); why != "" {
		return d.refuse("its file %s belongs to %s", name, why)
	}
	if !slices.Contains(d.owners, int(stat.Uid)) {
		return d.refuse("its file %s belongs to uid %d, wanted one of %v: allow that uid in the options, or choose another path", name, stat.Uid, d.owners)
	}
	if found := stat.Mode & 0o7777; found&^d.bits != 0 {
		return d.refuse("its file %s has mode %o, the channel permits at most %o: change it", name, found, d.bits)
	}
	return nil
}

// open opens a file after it has checked it. For a liveness file unix.ENXIO means that no process holds it.
func (d *Directory) open(name string, kind uint32, flags int) (int, error) {
	var stat unix.Stat_t
	// By name first: opening a device may have effects, and a socket answers ENXIO too.
	if err := unix.Fstatat(d.fd, name, &stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return -1, d.missing(name, err)
	}
	if err := d.check(name, kind, &stat); err != nil {
		return -1, err
	}
	fd, err := unix.Openat(d.fd, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch {
	case err == unix.ENXIO:
		return -1, err
	case err == unix.EACCES:
		return -1, d.refuse("its file %s has mode %o and belongs to uid %d: make the channel with a mode that lets this user in", name, stat.Mode&0o7777, stat.Uid)
	case err != nil:
		return -1, d.missing(name, err)
	}
	if err := unix.Fstat(fd, &stat); err != nil {
		unix.Close(fd)
		return -1, d.failed("looking at", name, err)
	}
	if err := d.check(name, kind, &stat); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// missing returns the error for a file that is not there, or for a channel that was removed since it was opened.
func (d *Directory) missing(name string, err error) error {
	if err != unix.ENOENT {
		return d.failed("opening", name, err)
	}
	var own, there unix.Stat_t
	if unix.Fstat(d.fd, &own) != nil || unix.Lstat(d.Path, &there) != nil || own.Dev != there.Dev ||
		own.Ino != there.Ino {
		return d.NoChannel()
	}
	return d.refuse("it has no file %s: %s", name, damaged)
}

// mapFile owns fd. A file has no seals: a process that may write it could truncate it, and is trusted not to.
func (d *Directory) mapFile(fd int, name string, bytes uint64, writable bool) (*memory.Segment, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || uint64(stat.Size) != bytes {
		unix.Close(fd)
		return nil, d.refuse("its file %s has %d bytes, wanted %d: %s", name, stat.Size, bytes, damaged)
	}
	s, err := memory.Map(fd, bytes, writable)
	if err != nil {
		unix.Close(fd)
	}
	return s, err
}

// openToMap opens a file to map it. An overlay file system copies a file of a lower layer when it is first opened for
// writing; an earlier mapping shows the lower file for ever, and nothing that the other side writes. So the file is
// opened for writing there, even to be read.
func (d *Directory) openToMap(name string, writable bool) (int, error) {
	var stat unix.Statfs_t
	if writable || unix.Fstatfs(d.fd, &stat) == nil && stat.Type == unix.OVERLAYFS_SUPER_MAGIC {
		fd, err := d.open(name, unix.S_IFREG, unix.O_RDWR)
		// On a read-only file system nothing is copied, and nothing writes.
		if writable || !errors.Is(err, unix.EROFS) {
			return fd, err
		}
	}
	return d.open(name, unix.S_IFREG, unix.O_RDONLY)
}

func (d *Directory) segment(name string, bytes uint64, writable bool) (*memory.Segment, error) {
	fd, err := d.openToMap(name, writable)
	if err != nil {
		return nil, err
	}
	return d.mapFile(fd, name, bytes, writable)
}

func (d *Directory) control(name string, magic uint64, writable bool) (*memory.Segment, error) {
	s, err := d.segment(name, uint64(lane.BytesOf(magic)), writable)
	if err != nil {
		return nil, err
	}
	if err := lane.CheckPreamble(s.Bytes, magic); err != nil {
		s.Close()
		return nil, d.refuse("its file %s: %v: %s", name, err, damaged)
	}
	return s, nil
}

func (d *Directory) producer(number int, writable bool) (*memory.Segment, error) {
	return d.producerOf(ofLane(number, "producer"), lane.MagicProducer, 1, writable)
}

// producerOf maps a producer's page, and checks that it agrees with the channel's file.
func (d *Directory) producerOf(name string, magic uint64, wanted uint32, writable bool) (*memory.Segment, error) {
	s, err := d.control(name, magic, writable)
	if err != nil {
		return nil, err
	}
	capacity, bytesMax, cursors := lane.ProducerFigures(s.Bytes)
	if capacity != d.header.capacity || bytesMax != d.header.bytesMax || cursors != wanted ||
		lane.BootID(s.Bytes) != d.header.bootID {
		s.Close()
		return nil, d.refuse("its file %s says capacity %d, limit %d, %d cursors, or another boot than the channel's file: %s", name, capacity, bytesMax, cursors, damaged)
	}
	return s, nil
}

// Sync writes the channel's files and their entries to the disk.
func (d *Directory) Sync() error {
	parent, err := unix.Open(filepath.Dir(d.Path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Fsync(d.page.FD), syncFile(d, "receiver"), unix.Fsync(d.fd), unix.Fsync(parent))
		unix.Close(parent)
	}
	return d.failed("syncing", "", err)
}

func syncFile(d *Directory, name string) error {
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}
