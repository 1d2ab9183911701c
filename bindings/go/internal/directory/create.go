package directory

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"golang.org/x/sys/unix"
)

// makeFile creates a file with the channel's permission bits, whatever the umask, and returns its descriptor.
func (d *Directory) makeFile(name string, bytes uint64, contents []byte) (int, error) {
	fd, err := unix.Openat(d.fd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1, d.failed("making", name, err)
	}
	// So that the members of a permitted group can open the files of all others. Not permitted is no harm.
	_ = unix.Fchown(fd, -1, d.gid)
	if err = unix.Fchmod(fd, d.bits); err == nil {
		if err = checkFileSize(bytes); err == nil {
			err = unix.Ftruncate(fd, int64(bytes))
		}
	}
	// Written, not mapped: so the page has its block on the disk, and no store to it can fail.
	if err == nil {
		err = writeAt(fd, inWholePages(contents, unix.Getpagesize()), 0)
	}
	if err != nil {
		unix.Close(fd)
		return -1, d.failed("making", name, err)
	}
	return fd, nil
}

func (d *Directory) makeFIFO(name string) error {
	if err := unix.Mknodat(d.fd, name, unix.S_IFIFO|0o600, 0); err != nil {
		return d.failed("making", name, err)
	}
	return d.permitFIFO(name)
}

// permitFIFO gives a new FIFO the channel's permission bits.
func (d *Directory) permitFIFO(name string) error {
	_ = unix.Fchownat(d.fd, name, -1, d.gid, unix.AT_SYMLINK_NOFOLLOW)
	return d.failed("making", name, unix.Fchmodat(d.fd, name, d.bits, 0))
}

// inWholePages returns the contents followed by zeros, up to the end of their last page of memory: the disk then has a
// block for each byte of it, whatever the page size is.
func inWholePages(contents []byte, page int) []byte {
	bytes := min((len(contents)+page-1)/page*page, lane.SegmentBytes)
	return append(contents, make([]byte, bytes-len(contents))...)
}

// aligned returns memory with the alignment of a page's words.
func aligned(bytes int) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(make([]uint64, bytes/8)))), bytes)
}

// newFile is a file to be made.
type newFile struct {
	name     string
	bytes    uint64
	contents []byte
	// The first bytes, for which it has memory, or blocks of the disk.
	allocated uint64
}

// makeFiles makes files, and the two FIFOs of the side, or of the lane, with that name.
func (d *Directory) makeFiles(of string, files ...newFile) error {
	for _, file := range files {
		fd, err := d.makeFile(file.name, file.bytes, file.contents)
		if err != nil {
			return err
		}
		if file.allocated > 0 {
			err = d.failed("allocating", file.name, allocate(fd, 0, file.allocated))
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	if err := d.makeFIFO(of + "." + DoorbellFile); err != nil {
		return err
	}
	return d.makeFIFO(of + "." + LivenessFile)
}

// dataFile is the data of a lane.
func (d *Directory) dataFile(name string) newFile {
	return newFile{name, d.header.capacity, nil, min(d.header.capacity, firstBacked)}
}

func (d *Directory) makeLane(number int) error {
	producer, consumer := aligned(4096), aligned(4096)
	lane.MakeProducerPage(producer, d.header.capacity, d.header.bytesMax, 0, 0)
	lane.SetBootID(producer, d.header.bootID)
	lane.MakeConsumerPage(consumer, lane.Start, 0)
	lane.MakeUnused(consumer)
	return d.makeFiles(strconv.Itoa(number), newFile{ofLane(number, "producer"), lane.SegmentBytes, producer, 0},
		newFile{ofLane(number, "consumer"), lane.SegmentBytes, consumer, 0}, d.dataFile(ofLane(number, "data")))
}

// temporaryCount numbers this process's temporary directories.
var temporaryCount atomic.Uint32

// IsTraced reports whether the channel's messages may carry a traceparent.
func (d *Directory) IsTraced() bool { return d.header.isTraced }

// Create creates the channel, or opens an existing one with the sizes that it was created with.
func Create(path string, access Access, makes limits.Limits, lanes int, isTraced bool) (*Directory, error) {
	if lanes < 0 {
		return nil, fail.New(fail.ErrOption, "Lanes is %d, wanted 1 to 1024", lanes)
	}
	return create(path, access, channelHeader{capacity: makes.LaneBytes, bytesMax: makes.MessageBytes,
		lanesMax: uint32(max(lanes, 1)), isTraced: isTraced})
}

func create(path string, access Access, header channelHeader) (*Directory, error) {
	header.mode = access.Mode
	var err error
	if header.bootID, err = bootID(); err != nil {
		return nil, err
	}
	if problem := header.problem(); problem != "" {
		return nil, fail.New(fail.ErrOption, "the options say %s", problem)
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, fail.New(fail.ErrNotAChannel, "%q is no path: %v", path, err)
	}
	for {
		if d, err := open(path, access, header.isBroadcast); d != nil || err != nil {
			return d, err
		}
		sweep(path)
		// Whichever process created it, it is opened like any other.
		if err := createTemporary(path, header); err != nil {
			return nil, err
		}
	}
}

// createTemporary creates a channel under a temporary name and renames it, if nothing exists at the path by then. It
// also returns nil if another process was first, or took this one for dead and removed the temporary directory.
func createTemporary(path string, header channelHeader) error {
	temporary := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.pelton-%d-%d", filepath.Base(path), os.Getpid(),
		temporaryCount.Add(1)-1))
	d := &Directory{Path: path, bits: header.mode & 0o666, header: header, gid: -1}
	switch err := unix.Mkdir(temporary, 0o700); err {
	case nil:
	case unix.EEXIST:
		return nil
	case unix.ENOENT, unix.ENOTDIR:
		return d.refuse("the directory %s is not there: make it first", filepath.Dir(path))
	default:
		return d.failed("making", "", err)
	}
	defer unix.Rmdir(temporary)
	var err error
	if err = unix.Chmod(temporary, 0o700); err == nil {
		d.fd, err = unix.Open(temporary, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
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
	// Locked before any other file exists: from now on no other creator removes it.
	fd, err := d.makeFile("channel", lane.SegmentBytes, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	// On the description that created it, which nothing maps.
	err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
	if err == nil {
		if err = unix.Fstat(fd, &stat); err == nil && stat.Nlink == 0 {
			err = unix.EAGAIN
		}
	}
	defer unlock(fd)
	if err == nil {
		contents := inWholePages(header.encode(), unix.Getpagesize())
		err = d.failed("writing", "channel", writeAt(fd, contents, 0))
		switch {
		case err != nil:
		case header.isBroadcast:
			err = d.makeBroadcast()
		default:
			if err = d.makeReceiver(); err == nil {
				err = d.makeLane(0)
			}
		}
		if err == nil {
			err = d.failed("making", "", unix.Fchmod(d.fd, header.mode))
		}
		if err == nil {
			err = unix.Renameat2(unix.AT_FDCWD, temporary, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
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

func (d *Directory) makeReceiver() error {
	page := aligned(4096)
	lane.MakeReceiverPage(page)
	return d.makeFiles("receiver", newFile{"receiver", lane.SegmentBytes, page, 0})
}

// clearDirectory removes a channel's files, and no others.
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

// sweep removes temporary directories that dead creators left beside a path.
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

func sweepOne(temporary string) {
	fd, err := unix.Open(temporary, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	var own, there unix.Stat_t
	if unix.Fstat(fd, &own) != nil || !kernel.IsAllowed(int(own.Uid), nil) {
		return
	}
	channel, err := unix.Openat(fd, "channel", unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch err {
	case unix.ENOENT:
		// Empty, then, or not a channel's. A creator that died so early left nothing else.
	case nil:
		defer unix.Close(channel)
		if unix.FcntlFlock(uintptr(channel), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}) != nil {
			return
		}
		// It may have been renamed before it was locked here: then it is the channel.
		if unix.Lstat(temporary, &there) != nil || own.Dev != there.Dev || own.Ino != there.Ino {
			return
		}
		clearDirectory(fd)
	default:
		return
	}
	_ = unix.Rmdir(temporary)
}
