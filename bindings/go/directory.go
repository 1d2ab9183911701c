package pelton

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// A path channel's directory: which files it has, who may have made them, who has which role. What stands at the path is whole: a
// channel is made aside and renamed into place, a lane exists once it is counted. Nothing is used before it has been checked, and of
// what was checked the copy is used. What is not a channel's file is never removed. spec/protocol.md, "Path channels".

const (
	headerBytes        = 120
	lanesAt            = 128
	featuresRequiredAt = 136
	// What is allocated of a lane's data when it is made, and then at a time.
	firstBacked = lane.Window
	backedStep  = 1 << 20
	damaged     = "it is damaged: restore it, or remove the channel and make it anew"
)

var filesOfALane = []string{"producer", "consumer", "data", "bell", "life"}

func ofLane(number int, kind string) string { return strconv.Itoa(number) + "." + kind }

// isKnown says whether a channel has such a file.
func isKnown(name string) bool {
	switch name {
	case "channel", "receiver", "receiver.bell", "receiver.life":
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

// directory is an open channel.
type directory struct {
	path   string
	fd     int
	gid    int
	owners []int
	// Permission bits that its files may have.
	bits   uint32
	header channelHeader
	page   *segment
}

// access is which directories a side opens: of these users besides its own, with at most these permission bits.
type access struct {
	uids []int
	mode uint32
}

type channelHeader struct {
	capacity, bytesMax uint64
	lanesMax           uint32
	mode               uint32
	bootID             [16]byte
}

func (h *channelHeader) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 4096)
	lane.WritePreamble(b, lane.MagicChannel)
	le.PutUint64(b[64:], h.capacity)
	le.PutUint64(b[72:], h.bytesMax)
	le.PutUint32(b[80:], h.lanesMax)
	le.PutUint32(b[84:], h.mode)
	copy(b[96:], h.bootID[:])
	le.PutUint64(b[112:], checksum(b))
	le.PutUint32(b[lanesAt:], 1)
	return b
}

func checksum(b []byte) uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write(b[:112])
	return hash.Sum64()
}

func (h *channelHeader) problem() string {
	switch {
	case !lane.CapacityIsValid(h.capacity):
		return fmt.Sprintf("capacity %d, wanted a multiple of 64 from 4096 to 16 GiB", h.capacity)
	case h.bytesMax > lane.MessageBytesLimit(h.capacity):
		return fmt.Sprintf("a message limit of %d, wanted at most %d", h.bytesMax, lane.MessageBytesLimit(h.capacity))
	case h.lanesMax < 1 || h.lanesMax > 1024:
		return fmt.Sprintf("%d lanes, wanted 1 to 1024", h.lanesMax)
	case h.mode&^0o777 != 0 || h.mode&0o700 != 0o700:
		return fmt.Sprintf("mode %o, wanted 700 to 777", h.mode)
	}
	return ""
}

func bootID() (id [16]byte, err error) {
	const file = "/proc/sys/kernel/random/boot_id"
	text, err := os.ReadFile(file)
	if err == nil {
		var bytes []byte
		bytes, err = hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", ""))
		if err == nil && len(bytes) != len(id) {
			err = fmt.Errorf("found %q, wanted 32 hexadecimal digits", text)
		}
		copy(id[:], bytes)
	}
	return id, fail.System("reading "+file+", which tells reboots", err)
}

func (d *directory) refuse(format string, args ...any) error {
	return fail.New(fail.ErrNotAChannel, "%s cannot be used as a channel: %s", d.path, fmt.Sprintf(format, args...))
}

func (d *directory) failed(doing, name string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fail.With(err, fail.ErrNoSpace, "no space for %s/%s: free some, or have it elsewhere or smaller", d.path, name)
	case err == nil:
		return nil
	}
	return fail.System(fmt.Sprintf("%s %s/%s", doing, d.path, name), err)
}

func (d *directory) noChannel() error {
	return fail.New(fail.ErrNoChannel, "there is no channel at %s: create it, or set Await", d.path)
}

func (d *directory) taken(ctx context.Context, role string, pid uint32) error {
	process := "which has not said its process yet"
	if pid != 0 {
		process = fmt.Sprintf("process %d", pid)
	}
	return fail.With(ctx.Err(), fail.ErrRoleTaken, "%s has a %s already, %s: stop that process, or wait until it ends", d.path, role, process)
}

// openDirectory opens the channel at a path after checking it. nil: nothing is there.
func openDirectory(path string, access access) (*directory, error) {
	path, err := filepath.Abs(path)
	if err != nil || path == "/" {
		return nil, fail.New(fail.ErrNotAChannel, "%q does not end in a name: name a directory", path)
	}
	for {
		d, err := openWhatIsThere(path, access)
		// Removed while it was opened: there may be another by now, or none.
		if !errors.Is(err, fail.ErrNoChannel) {
			return d, err
		}
	}
}

func openWhatIsThere(path string, access access) (*directory, error) {
	mode := access.mode
	d := &directory{path: path, fd: -1, bits: 0o7777}
	var stat unix.Stat_t
	check := func() error {
		if stat.Mode&unix.S_IFMT != unix.S_IFDIR {
			return d.refuse("it is no directory: name a directory itself")
		}
		if why := unmapped(int(stat.Uid)); why != "" {
			return d.refuse("it belongs to %s", why)
		}
		if !isUser(int(stat.Uid), access.uids) {
			return d.refuse("it belongs to uid %d, wanted %d or %v: allow that uid in the options, or choose another path", stat.Uid, os.Geteuid(), access.uids)
		}
		if found := stat.Mode & 0o7777; found&^mode != 0 {
			return d.refuse("its mode is %o, this side permits at most %o: change it, or allow more in the options", found, mode)
		}
		return nil
	}
	// By name first: the kernel has fewer words for what is no directory.
	switch err := unix.Lstat(path, &stat); err {
	case nil:
		if err := check(); err != nil {
			return nil, err
		}
	case unix.ENOENT:
		return nil, nil
	default:
		return nil, d.refuse("it cannot be looked at: %v", err)
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
		d.owners = append([]int{os.Geteuid(), int(stat.Uid)}, access.uids...)
		err = d.readHeader(mode)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

// checkSize checks the lanes against what a receiver takes: there is no handshake in which the maker would learn it. A sender has no peer that writes to it.
func (d *directory) checkSize(most, memory uint64) error {
	bytes, lanes := d.header.capacity, uint64(d.header.lanesMax)
	if bytes <= most && (memory == 0 || bytes*lanes <= memory) {
		return nil
	}
	all := ""
	if memory > 0 {
		all = fmt.Sprintf(", and %d in all", memory)
	}
	return d.refuse("it has up to %d lanes of %d bytes, this receiver takes lanes of %d%s: raise its Memory", lanes, bytes, most, all)
}

func (d *directory) readHeader(mode uint32) error {
	fd, err := d.openToMap("channel", false)
	if err != nil {
		return err
	}
	if d.page, err = d.mapFile(fd, "channel", lane.SegmentBytes, false); err != nil {
		return err
	}
	b := aligned(headerBytes)
	copy(b, d.page.bytes)
	le := binary.LittleEndian
	if err := lane.CheckPreamble(b, lane.MagicChannel); err != nil {
		return d.refuse("its file channel: %v: %s", err, damaged)
	}
	if found := le.Uint64(b[112:]); found != checksum(b) {
		return d.refuse("its file channel has checksum %#x, its bytes come to %#x: %s", found, checksum(b), damaged)
	}
	h := channelHeader{capacity: le.Uint64(b[64:]), bytesMax: le.Uint64(b[72:]), lanesMax: le.Uint32(b[80:]), mode: le.Uint32(b[84:])}
	copy(h.bootID[:], b[96:])
	if problem := h.problem(); problem != "" {
		return d.refuse("its file channel says %s: %s", problem, damaged)
	}
	if h.mode&^mode != 0 {
		return d.refuse("it was made with mode %o, this side permits at most %o: allow more in the options", h.mode, mode)
	}
	if required := atomic.LoadUint64(word64(d.page.bytes[featuresRequiredAt:])); required != 0 {
		return d.refuse("it requires feature %d, which %s does not have: use the version that made it, or a later one", bits.TrailingZeros64(required), versionText)
	}
	d.header, d.bits = h, h.mode&0o666
	var stat unix.Stat_t
	if err := unix.Fstat(d.page.fd, &stat); err != nil {
		return d.failed("looking at", "channel", err)
	}
	if err := d.check("channel", unix.S_IFREG, &stat); err != nil {
		return err
	}
	running, err := bootID()
	if err != nil {
		return err
	}
	if running != h.bootID {
		return fail.New(fail.ErrRebooted, "%s was made before the last reboot: `pelton recover --repair %s` keeps what is whole of it", d.path, d.path)
	}
	_, err = d.lanes()
	return err
}

func (d *directory) isOwnUser() bool { return d.owners[1] == os.Geteuid() }

func (d *directory) close() {
	if d.page != nil {
		d.page.close()
		d.page = nil
	}
	unix.Close(d.fd)
}

// lanes is how many exist by now.
func (d *directory) lanes() (int, error) {
	count := atomic.LoadUint32(word32(d.page.bytes[lanesAt:]))
	if count == 0 || count > d.header.lanesMax {
		return 0, d.refuse("its file channel counts %d lanes, wanted 1 to %d: %s", count, d.header.lanesMax, damaged)
	}
	return int(count), nil
}

// check is what every file must be like.
func (d *directory) check(name string, kind uint32, stat *unix.Stat_t) error {
	if stat.Mode&unix.S_IFMT != kind {
		return d.refuse("its file %s is of type %#o, wanted %#o: %s", name, stat.Mode&unix.S_IFMT, kind, damaged)
	}
	if why := unmapped(int(stat.Uid)); why != "" {
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

// open opens a file after checking it. unix.ENXIO of a life: nobody holds it.
func (d *directory) open(name string, kind uint32, flags int) (int, error) {
	var stat unix.Stat_t
	// By name first: opening some devices does something, and a socket answers ENXIO too.
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

// missing tells a file that is not there from a channel that has been removed since it was opened.
func (d *directory) missing(name string, err error) error {
	if err != unix.ENOENT {
		return d.failed("opening", name, err)
	}
	var own, there unix.Stat_t
	if unix.Fstat(d.fd, &own) != nil || unix.Lstat(d.path, &there) != nil || own.Dev != there.Dev || own.Ino != there.Ino {
		return d.noChannel()
	}
	return d.refuse("it has no file %s: %s", name, damaged)
}

// mapFile takes the descriptor. A file has no seals: who may write it can also cut it short, and is trusted not to.
func (d *directory) mapFile(fd int, name string, bytes uint64, writable bool) (*segment, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || uint64(stat.Size) != bytes {
		unix.Close(fd)
		return nil, d.refuse("its file %s has %d bytes, wanted %d: %s", name, stat.Size, bytes, damaged)
	}
	s, err := mapSegment(fd, bytes, writable)
	if err != nil {
		unix.Close(fd)
	}
	return s, err
}

// openToMap opens a file for its mapping. An overlay file system copies a file of a lower layer when it is first opened for writing; a mapping made
// before that shows the lower file for ever, and nothing that the other side writes. So the file is opened for writing there, also to be read.
func (d *directory) openToMap(name string, writable bool) (int, error) {
	var stat unix.Statfs_t
	if writable || unix.Fstatfs(d.fd, &stat) == nil && stat.Type == unix.OVERLAYFS_SUPER_MAGIC {
		fd, err := d.open(name, unix.S_IFREG, unix.O_RDWR)
		// Nothing is copied where nothing can be written, and nobody writes.
		if writable || !errors.Is(err, unix.EROFS) {
			return fd, err
		}
	}
	return d.open(name, unix.S_IFREG, unix.O_RDONLY)
}

func (d *directory) segment(name string, bytes uint64, writable bool) (*segment, error) {
	fd, err := d.openToMap(name, writable)
	if err != nil {
		return nil, err
	}
	return d.mapFile(fd, name, bytes, writable)
}

func (d *directory) control(name string, magic uint64, writable bool) (*segment, error) {
	s, err := d.segment(name, lane.SegmentBytes, writable)
	if err != nil {
		return nil, err
	}
	if err := lane.CheckPreamble(s.bytes, magic); err != nil {
		s.close()
		return nil, d.refuse("its file %s: %v: %s", name, err, damaged)
	}
	return s, nil
}

func (d *directory) producer(number int, writable bool) (*segment, error) {
	name := ofLane(number, "producer")
	s, err := d.control(name, lane.MagicProducer, writable)
	if err != nil {
		return nil, err
	}
	capacity, bytesMax, cursors := lane.ProducerFigures(s.bytes)
	if capacity != d.header.capacity || bytesMax != d.header.bytesMax || cursors != 1 || lane.BootID(s.bytes) != d.header.bootID {
		s.close()
		return nil, d.refuse("its file %s says capacity %d, limit %d, %d cursors, or another boot than the channel's file: %s", name, capacity, bytesMax, cursors, damaged)
	}
	return s, nil
}

// lock takes the lock on byte 0 of a file, by a description of its own; -1 while somebody else has it, unless it is to wait.
func (d *directory) lock(name string, waits bool) (int, error) {
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDWR)
	if err != nil {
		return -1, err
	}
	command := unix.F_OFD_SETLK
	if waits {
		command = unix.F_OFD_SETLKW
	}
	for {
		err = unix.FcntlFlock(uintptr(fd), command, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
		if err != unix.EINTR {
			break
		}
	}
	if err == nil {
		var stat unix.Stat_t
		// Who removes the channel has all locks; what is locked after that is nobody's file.
		if err = unix.Fstat(fd, &stat); err == nil && stat.Nlink == 0 {
			unix.Close(fd)
			return -1, d.noChannel()
		}
	}
	if err == nil {
		return fd, nil
	}
	unix.Close(fd)
	// Linux reports a lock that another has by EAGAIN alone; EACCES is a security module's that permits no locks.
	if err == unix.EAGAIN {
		return -1, nil
	}
	return -1, d.failed("locking", name, err)
}

// unlock gives a lock back: said, not left to the closing, as a child on its way to exec may have the description for a moment longer.
func unlock(fd int) {
	_ = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Len: 1})
	unix.Close(fd)
}

// watch opens a life: it tells the end of who holds it. -1: nobody does.
func (d *directory) watch(name string) (int, error) {
	fd, err := d.open(name, unix.S_IFIFO, unix.O_WRONLY)
	if err == unix.ENXIO {
		return -1, nil
	}
	return fd, err
}

// sync has the channel's files, and that they are there, written to the disk.
func (d *directory) sync() error {
	parent, err := unix.Open(filepath.Dir(d.path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Fsync(d.page.fd), syncFile(d, "receiver"), unix.Fsync(d.fd), unix.Fsync(parent))
		unix.Close(parent)
	}
	return d.failed("syncing", "", err)
}

const (
	// A killed process keeps its locks until the kernel has ended it, and its successor may start before that. A guess.
	claimKilled = 200 * time.Millisecond
	// Between two attempts to claim a role, in that time and after it.
	claimRetry, claimRetryLater = time.Millisecond, 10 * time.Millisecond
)

// claim claims a role. While another process has it, and canWait says that waiting may help, it waits: until the context ends if isPatient,
// else for claimKilled. It returns -1 if the role is taken then.
func (d *directory) claim(ctx context.Context, isPatient bool, try func() (int, error), canWait func() (bool, error)) (int, error) {
	pause := claimRetry
	for deadline := time.Now().Add(claimKilled); ; {
		lock, err := try()
		if err != nil || lock >= 0 {
			return lock, err
		}
		if can, err := canWait(); err != nil || !can {
			return -1, err
		}
		if time.Now().After(deadline) {
			if !isPatient {
				return -1, nil
			}
			pause = claimRetryLater
		}
		select {
		case <-ctx.Done():
			return -1, nil
		case <-time.After(pause):
		}
	}
}

// claimReceiver returns the lock.
func (d *directory) claimReceiver(ctx context.Context, isPatient bool) (int, error) {
	lock, err := d.claim(ctx, isPatient, func() (int, error) { return d.lock("receiver", false) },
		func() (bool, error) { return true, nil })
	if err == nil && lock < 0 {
		// The receiver's own page has no room for it; the consumer page of the first lane is the receiver's, too.
		err = d.taken(ctx, "receiver", d.pid(ofLane(0, "consumer"), 260))
	}
	return lock, err
}

func (d *directory) pid(name string, at int64) uint32 {
	b := make([]byte, 4)
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDONLY)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	if n, err := unix.Pread(fd, b, at); n != 4 || err != nil {
		return 0
	}
	return binary.LittleEndian.Uint32(b)
}

// claimSender becomes the sender of the first lane that has none, or of a new one; answers its number and the lock.
func (d *directory) claimSender(ctx context.Context, isPatient bool) (number, lock int, err error) {
	free := func() (int, error) {
		lanes, err := d.lanes()
		for number = 0; err == nil && number < lanes; number++ {
			if lock, err = d.lock(ofLane(number, "producer"), false); lock >= 0 {
				return lock, nil
			}
		}
		return -1, err
	}
	lock, err = d.claim(ctx, isPatient, free, func() (bool, error) {
		lanes, err := d.lanes()
		return lanes == int(d.header.lanesMax), err
	})
	if err != nil || lock >= 0 {
		return number, lock, err
	}
	if lanes, err := d.lanes(); err != nil {
		return 0, -1, err
	} else if lanes == int(d.header.lanesMax) {
		return 0, -1, d.taken(ctx, fmt.Sprintf("sender on all %d lanes", lanes), d.pid(ofLane(0, "producer"), 388))
	}
	growth, err := d.lock("channel", true)
	if err != nil {
		return 0, -1, err
	}
	defer unlock(growth)
	// Others may have added lanes while this one waited, and left some.
	if lock, err = free(); err != nil || lock >= 0 {
		return number, lock, err
	}
	lanes, err := d.lanes()
	if err != nil {
		return 0, -1, err
	}
	if lanes == int(d.header.lanesMax) {
		return 0, -1, d.taken(ctx, fmt.Sprintf("sender on all %d lanes", lanes), d.pid(ofLane(0, "producer"), 388))
	}
	if lock, err = d.addLane(growth, lanes); err != nil {
		d.removeLane(lanes)
	}
	return lanes, lock, err
}

// addLane makes one more lane for this process. Only under the growth lock.
func (d *directory) addLane(growth, number int) (int, error) {
	// A predecessor that died here has left files, which nobody can be using: they were never counted.
	d.removeLane(number)
	if err := d.makeLane(number); err != nil {
		return -1, err
	}
	// The role before the count, so that nobody else finds the lane free.
	lock, err := d.lock(ofLane(number, "producer"), false)
	if err != nil || lock < 0 {
		return -1, errors.Join(err, d.refuse("somebody has locked its new lane %d: see lsof", number))
	}
	count := binary.LittleEndian.AppendUint32(nil, uint32(number+1))
	if _, err := unix.Pwrite(growth, count, lanesAt); err != nil {
		unlock(lock)
		return -1, d.failed("counting lanes in", "channel", err)
	}
	return lock, nil
}

func (d *directory) removeLane(number int) {
	for _, kind := range filesOfALane {
		_ = unix.Unlinkat(d.fd, ofLane(number, kind), 0)
	}
}

// makeFile makes one that is not there, with permission bits whatever the umask, and answers its descriptor.
func (d *directory) makeFile(name string, bytes uint64, contents []byte) (int, error) {
	fd, err := unix.Openat(d.fd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1, d.failed("making", name, err)
	}
	// So that a group that the directory lets in gets at the files of all its members; not allowed is no harm.
	_ = unix.Fchown(fd, -1, d.gid)
	if err = unix.Fchmod(fd, d.bits); err == nil {
		if err = checkFileSize(bytes); err == nil {
			err = unix.Ftruncate(fd, int64(bytes))
		}
	}
	// Written, not mapped: then the page has its place on the disk, and no store to it can fail.
	if err == nil {
		err = writeAt(fd, contents, 0)
	}
	if err != nil {
		unix.Close(fd)
		return -1, d.failed("making", name, err)
	}
	return fd, nil
}

func (d *directory) makeFIFO(name string) error {
	err := unix.Mknodat(d.fd, name, unix.S_IFIFO|0o600, 0)
	if err == nil {
		_ = unix.Fchownat(d.fd, name, -1, d.gid, unix.AT_SYMLINK_NOFOLLOW)
		err = unix.Fchmodat(d.fd, name, d.bits, 0)
	}
	return d.failed("making", name, err)
}

// aligned is memory whose words can be stored to as a page's.
func aligned(bytes int) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(make([]uint64, bytes/8)))), bytes)
}

func (d *directory) makeLane(number int) error {
	producer, consumer := aligned(4096), aligned(4096)
	lane.MakeProducerPage(producer, d.header.capacity, d.header.bytesMax, 0, 0)
	lane.SetBootID(producer, d.header.bootID)
	lane.MakeConsumerPage(consumer, lane.Start, 0)
	lane.MakeUnused(consumer)
	for _, file := range []struct {
		kind     string
		bytes    uint64
		contents []byte
	}{{"producer", lane.SegmentBytes, producer}, {"consumer", lane.SegmentBytes, consumer}, {"data", d.header.capacity, nil}} {
		fd, err := d.makeFile(ofLane(number, file.kind), file.bytes, file.contents)
		if err != nil {
			return err
		}
		if file.kind == "data" {
			err = d.failed("allocating", ofLane(number, file.kind), allocate(fd, 0, min(d.header.capacity, firstBacked)))
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	if err := d.makeFIFO(ofLane(number, "bell")); err != nil {
		return err
	}
	return d.makeFIFO(ofLane(number, "life"))
}

func checkFileSize(bytes uint64) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && limit.Cur < bytes {
		return unix.EFBIG
	}
	return nil
}

func writeAt(fd int, bytes []byte, offset int64) error {
	for len(bytes) > 0 {
		n, err := unix.Pwrite(fd, bytes, offset)
		if err != nil && err != unix.EINTR {
			return err
		}
		if err == nil {
			bytes, offset = bytes[n:], offset+int64(n)
		}
	}
	return nil
}

var zeros [64 << 10]byte

// allocate puts memory, or blocks of the disk, behind a range of a file, so that a store there cannot fail for want of them.
func allocate(fd int, from, to uint64) error {
	var stat unix.Statfs_t
	if err := unix.Fstatfs(fd, &stat); err != nil {
		return err
	}
	if stat.Type == tmpfsMagic {
		for piece := to - min(from, to); from < to; {
			err := unix.Fallocate(fd, 0, int64(from), int64(min(piece, to-from)))
			if err == nil {
				from += piece
			} else if err != unix.EINTR {
				return err
			} else {
				// A signal makes tmpfs take back what it had allocated, and this runtime sends itself many: smaller pieces get through.
				piece = max((piece/2+4095)&^4095, 4096)
			}
		}
		return nil
	}
	if err := checkFileSize(to); err != nil {
		return err
	}
	// On a disk the first store to what fallocate has allocated may want a block more: so zeros are written to holes.
	for from < to {
		hole, err := unix.Seek(fd, int64(from), unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		end := to
		if data, err := unix.Seek(fd, hole, unix.SEEK_DATA); err == nil {
			end = min(to, uint64(data))
		} else if err != unix.ENXIO {
			return err
		}
		for from = uint64(hole); from < end; {
			next := min(end, (from/uint64(len(zeros))+1)*uint64(len(zeros)))
			if err := writeAt(fd, zeros[:next-from], int64(from)); err != nil {
				return err
			}
			from = next
		}
	}
	return nil
}

// makers numbers the directories that this process makes aside.
var makers atomic.Uint32

// createDirectory makes the channel; where there is one already, opens that, whatever its sizes.
func createDirectory(path string, access access, makes limits, lanes int) (*directory, error) {
	header := channelHeader{capacity: makes.laneBytes, bytesMax: makes.messageBytes, lanesMax: uint32(max(lanes, 1)), mode: access.mode}
	var err error
	if header.bootID, err = bootID(); err != nil {
		return nil, err
	}
	if lanes < 0 {
		return nil, fail.New(fail.ErrOption, "Lanes is %d, wanted 1 to 1024", lanes)
	}
	if problem := header.problem(); problem != "" {
		return nil, fail.New(fail.ErrOption, "the options say %s", problem)
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, fail.New(fail.ErrNotAChannel, "%q is no path: %v", path, err)
	}
	for {
		if d, err := openDirectory(path, access); d != nil || err != nil {
			return d, err
		}
		sweep(path)
		// Whether it is this one or another maker's that stands there then, it is opened as anybody would.
		if err := makeChannel(path, header); err != nil {
			return nil, err
		}
	}
}

// makeChannel makes it aside and renames it into place, if nothing is there by then. nil as well where another maker, or a sweeper that
// took this one for dead, was first.
func makeChannel(path string, header channelHeader) error {
	aside := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.pelton-%d-%d", filepath.Base(path), os.Getpid(), makers.Add(1)-1))
	d := &directory{path: path, bits: header.mode & 0o666, header: header, gid: -1}
	switch err := unix.Mkdir(aside, 0o700); err {
	case nil:
	case unix.EEXIST:
		return nil
	case unix.ENOENT, unix.ENOTDIR:
		return d.refuse("the directory %s is not there: make it first", filepath.Dir(path))
	default:
		return d.failed("making", "", err)
	}
	defer unix.Rmdir(aside)
	var err error
	if err = unix.Chmod(aside, 0o700); err == nil {
		d.fd, err = unix.Open(aside, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	}
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return d.failed("making", "", err)
	}
	defer unix.Close(d.fd)
	var stat unix.Stat_t
	if err := unix.Fstat(d.fd, &stat); err != nil {
		return d.failed("making", "", err)
	}
	d.gid, d.owners = int(stat.Gid), []int{os.Geteuid()}
	// Empty and locked before anything else is there: from now on no creator removes it.
	fd, err := d.makeFile("channel", lane.SegmentBytes, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	// On the description that made it: nobody maps that.
	err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
	if err == nil {
		if err = unix.Fstat(fd, &stat); err == nil && stat.Nlink == 0 {
			err = unix.EAGAIN
		}
	}
	defer unlock(fd)
	if err == nil {
		if err = d.failed("writing", "channel", writeAt(fd, header.encode(), 0)); err == nil {
			err = d.makeReceiver()
		}
		if err == nil {
			err = d.makeLane(0)
		}
		if err == nil {
			err = d.failed("making", "", unix.Fchmod(d.fd, header.mode))
		}
		if err == nil {
			err = unix.Renameat2(unix.AT_FDCWD, aside, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
		}
	}
	if err == nil {
		return nil
	}
	clearDirectory(d.fd)
	switch {
	case errors.Is(err, unix.EEXIST), err == unix.EAGAIN, errors.Is(err, unix.ENOENT):
		return nil
	case err == unix.EINVAL, err == unix.ENOSYS:
		return d.refuse("its file system cannot rename without replacing: use tmpfs, ext4 or xfs")
	}
	var found *fail.Error
	if errors.As(err, &found) {
		return err
	}
	return d.failed("putting into place", "", err)
}

func (d *directory) makeReceiver() error {
	page := aligned(4096)
	lane.MakeReceiverPage(page)
	fd, err := d.makeFile("receiver", lane.SegmentBytes, page)
	if err != nil {
		return err
	}
	unix.Close(fd)
	if err := d.makeFIFO("receiver.bell"); err != nil {
		return err
	}
	return d.makeFIFO("receiver.life")
}

// clearDirectory removes a channel's files, and nothing else.
func clearDirectory(fd int) {
	again, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	file := os.NewFile(uintptr(again), "channel")
	defer file.Close()
	for {
		names, err := file.Readdirnames(1024)
		for _, name := range names {
			if isKnown(name) {
				_ = unix.Unlinkat(fd, name, 0)
			}
		}
		if err != nil || errors.Is(err, io.EOF) || len(names) == 0 {
			return
		}
	}
}

// sweep removes what makers that died have left beside a path.
func sweep(path string) {
	parent := filepath.Dir(path)
	entries, _ := os.ReadDir(parent)
	for _, entry := range entries {
		rest, ok := strings.CutPrefix(entry.Name(), "."+filepath.Base(path)+".pelton-")
		pid, count, both := strings.Cut(rest, "-")
		isNumber := func(text string) bool { return text != "" && strings.Trim(text, "0123456789") == "" }
		if ok && both && isNumber(pid) && isNumber(count) {
			sweepOne(filepath.Join(parent, entry.Name()))
		}
	}
}

func sweepOne(aside string) {
	fd, err := unix.Open(aside, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	var own, there unix.Stat_t
	if unix.Fstat(fd, &own) != nil || !isUser(int(own.Uid), nil) {
		return
	}
	channel, err := unix.Openat(fd, "channel", unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch err {
	case unix.ENOENT:
		// Empty, then, or not to be removed. A maker that has come no further begins anew.
	case nil:
		defer unix.Close(channel)
		if unix.FcntlFlock(uintptr(channel), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}) != nil {
			return
		}
		// It may have been put into place before it was locked here; then it is the channel.
		if unix.Lstat(aside, &there) != nil || own.Dev != there.Dev || own.Ino != there.Ino {
			return
		}
		clearDirectory(fd)
	default:
		return
	}
	_ = unix.Rmdir(aside)
}

func syncFile(d *directory, name string) error {
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}
