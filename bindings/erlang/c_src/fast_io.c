/* Reads and writes that complete within the call: a read from the page cache, and a small write to it.
 *
 * Reads use RWF_NOWAIT, and so do writes where the file system supports that: then the kernel promises not to wait.
 * ext4 and tmpfs do not support it for writes. There nearly every write takes microseconds, but one may wait for the
 * journal, or for dirty pages. Such a write is MEASURED. After one that took long because it waited, on any
 * scheduler, no write begins in a call for a hundred times as long. At most one scheduler at a time performs such a
 * write, and never the only one. So one scheduler of the node waits, at most a hundredth of the time. That is a
 * bound, not a promise that none does.
 *
 * Some writes are known to wait, and are never tried: the first write to a file, files that are not regular, O_SYNC
 * and similar flags, other file systems, blocks that must be read first, and files with another operation in
 * progress.
 *
 * docs/decisions/0024-erlang-writes.md has the measurements. */
#include "functions.h"
#include "request.h"
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

/* The largest read in a call. */
#define READ_MAX (256 << 10)
/* The largest write in a call: the copy takes at most some 50 us. */
#define WRITE_MAX (64 << 10)
/* A write that waits, and takes longer, is slow; then writes pause for so many times as long. */
#define SLOW_WRITE_US 200
#define PAUSE 100

/* Where small writes to a file run: on a dirty scheduler while this is unknown, or if they wait; else in the call. */
enum write_mode { UNKNOWN, WAITS, TRIED, MEASURED };

/* ---- Reading ---- */

/* file_read(File, Offset, Size): {ok, Bytes}; {part, Bytes}: the first of them, at the file's position; `later`: it
 * cannot complete in the call; or an error */
NIF(file_read)
{
    ERL_NIF_TERM result;
    uint64_t offset, size;
    if (!offset_at(env, argv[1], &offset) || !enif_get_uint64(env, argv[2], &size))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    ErlNifBinary bytes;
    if (!file->is_regular || size == 0 || size > READ_MAX) {
        file_leave(file);
        return atom_later;
    }
    if (atomic_load_explicit(&file->cautious_reads, memory_order_relaxed) > 0) {
        file_leave(file);
        return enif_schedule_nif(
            env, "file_read_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, nif_file_read_waiting, argc, argv);
    }
    if (atomic_load_explicit(&file->has_no_fast_read, memory_order_relaxed) || !enif_alloc_binary(size, &bytes)) {
        file_leave(file);
        return atom_later;
    }
    int64_t began_us = now_us();
    long sleeps = recent_sleeps(began_us);
    struct iovec piece = {bytes.data, size};
    ssize_t count = preadv2(file->fd, &piece, 1, (off_t)offset, RWF_NOWAIT);
    if (count < 0 && errno == EOPNOTSUPP)
        atomic_store_explicit(&file->has_no_fast_read, true, memory_order_relaxed);
    else
        charge_us(env, file_learn_read_in_call(file, began_us, sleeps));
    file_leave(file);
    if (count > 0 && (uint64_t)count == size)
        return enif_make_tuple2(env, atom_ok, enif_make_binary(env, &bytes));
    /* The engine reads the rest, or finds the end: with RWF_NOWAIT, 0 need not mean the end. */
    result = atom_later;
    if (count > 0 && offset == PELTON_CURRENT)
        result = enif_make_tuple2(env, atom_part, bytes_of(env, bytes.data, (size_t)count));
    enif_release_binary(&bytes);
    return result;
}

/* file_read_waiting(File, Offset, Size): {ok, Bytes}, eof or an error. Waits in the system call, on a dirty
 * scheduler. */
NIF(file_read_waiting)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, size;
    if (!offset_at(env, argv[1], &offset) || !enif_get_uint64(env, argv[2], &size))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct request *request = request_create(PELTON_FILE_READ, 1, file, NULL);
    if (part_allocate(request->parts, size)) {
        request->parts->offset = offset;
        pelton_operation operation = part_operation(request->parts);
        operation.release = NULL;
        result = request_run(env, request, &operation);
    } else {
        enif_release_resource(request);
        result = error_of(env, atom_enomem);
    }
    file_leave(file);
    return result;
}

/* ---- Writing ---- */

/* After a small write of this thread, before which it had slept so often. Pauses writes if it was slow. Returns its
 * microseconds. A sleep between recent_sleeps and the write is attributed to the write. */
static int64_t learn_write(int64_t began_us, long sleeps)
{
    int64_t ended_us = now_us(), took_us = ended_us - began_us;
    if (took_us <= SLOW_WRITE_US || sleeps_of_this_thread() == sleeps)
        return took_us;
    int64_t until = ended_us + PAUSE * took_us, found = atomic_load(&shared->writes_paused_until);
    while (found < until && !atomic_compare_exchange_weak(&shared->writes_paused_until, &found, until))
        ;
    return took_us;
}

/* Whether no block must be read before a part of it is written: the write covers whole blocks, or begins at the end
 * of the file. A position at the end remains there until another function uses the file. */
static bool needs_no_read(struct file *file, uint64_t offset, uint64_t size)
{
    bool is_current = offset == PELTON_CURRENT;
    if (file->appends)
        return true;
    if (is_current && atomic_load_explicit(&file->is_at_end, memory_order_relaxed))
        return true;
    if (!is_current && (offset | size) % file->block_bytes == 0)
        return true;
    int fd = file->fd;
    uint64_t at = is_current ? (uint64_t)lseek(fd, 0, SEEK_CUR) : offset;
    struct stat found;
    bool is_at_end = !fstat(fd, &found) && at >= (uint64_t)found.st_size;
    if (is_current)
        atomic_store_explicit(&file->is_at_end, is_at_end, memory_order_relaxed);
    return is_at_end || (at | size) % file->block_bytes == 0;
}

static bool is_measurable(struct file *file, uint64_t offset, uint64_t size)
{
    return size <= WRITE_MAX && atomic_load_explicit(&file->write_mode, memory_order_acquire) == MEASURED &&
        needs_no_read(file, offset, size);
}

/* Drops the first bytes of the pieces. */
static void skip(struct iovec **pieces, int *count, size_t bytes)
{
    for (; *count && bytes >= (*pieces)->iov_len; (*pieces)++, (*count)--)
        bytes -= (*pieces)->iov_len;
    if (*count) {
        (*pieces)->iov_base = (char *)(*pieces)->iov_base + bytes;
        (*pieces)->iov_len -= bytes;
    }
}

/* Continues a write, of which the call has written `done` bytes, on a dirty scheduler. */
static ERL_NIF_TERM write_rest(ErlNifEnv *env, ERL_NIF_TERM file, uint64_t offset, uint64_t size,
                               const ErlNifIOVec *iovec, size_t done)
{
    ERL_NIF_TERM bytes;
    struct iovec *pieces = (struct iovec *)iovec->iov;
    int count = iovec->iovcnt;
    skip(&pieces, &count, done);
    unsigned char *rest = enif_make_new_binary(env, size - done, &bytes);
    for (int i = 0; i < count; rest += pieces[i++].iov_len)
        memcpy(rest, pieces[i].iov_base, pieces[i].iov_len);
    ERL_NIF_TERM rest_offset = offset == PELTON_CURRENT ? atom_undefined : enif_make_uint64(env, offset + done);
    ERL_NIF_TERM arguments[] = {file, rest_offset, enif_make_list1(env, bytes)};
    return enif_schedule_nif(
        env, "file_write_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, nif_file_write_waiting, 3, arguments);
}

/* As pwritev2; for one piece the cheaper system call. */
static ssize_t write_pieces(int fd, uint64_t offset, const ErlNifIOVec *pieces)
{
    const void *data = pieces->iov[0].iov_base;
    size_t size = pieces->iov[0].iov_len;
    if (pieces->iovcnt != 1)
        return pwritev2(fd, (struct iovec *)pieces->iov, pieces->iovcnt, (off_t)offset, 0);
    return offset == PELTON_CURRENT ? write(fd, data, size) : pwrite(fd, data, size, (off_t)offset);
}

/* The bytes written, or a negative errno; 0 for those that only mean: not in the call. */
static ssize_t count_or_error(ssize_t count)
{
    return count >= 0 ? count : errno == EAGAIN || errno == EOPNOTSUPP || errno == EINTR ? 0 : -errno;
}

/* Writes in the call, if that is allowed. Returns the bytes written, 0 for none, or a negative errno. */
static ssize_t write_fast(ErlNifEnv *env, struct file *file, uint64_t offset, const ErlNifIOVec *pieces, uint64_t size)
{
    int mode = atomic_load_explicit(&file->write_mode, memory_order_acquire);
    /* Another operation may have the inode's lock for long. */
    if (size == 0 || size > WRITE_MAX || mode < TRIED || atomic_load(&file->users) != 1 || atomic_load(&file->pending))
        return 0;
    int fd = file->fd;
    if (mode == TRIED)
        return count_or_error(pwritev2(fd, (struct iovec *)pieces->iov, pieces->iovcnt, (off_t)offset, RWF_NOWAIT));
    ssize_t count = 0;
    int64_t began_us = now_us();
    if (shared->engine_count == 1 || began_us <= atomic_load(&shared->writes_paused_until) ||
        atomic_flag_test_and_set(&shared->is_writing))
        return 0;
    if (needs_no_read(file, offset, size)) {
        long sleeps = recent_sleeps(began_us);
        count = count_or_error(write_pieces(fd, offset, pieces));
        charge_us(env, learn_write(began_us, sleeps));
    }
    atomic_flag_clear(&shared->is_writing);
    return count;
}

/* file_write(File, Offset, Binaries): ok, or an error; `stream`: the engine must write it, because it may wait for a
 * reader */
NIF(file_write)
{
    ERL_NIF_TERM result, head, tail;
    uint64_t offset;
    ErlNifBinary binary;
    SysIOVec piece;
    ErlNifIOVec one = {.iovcnt = 1, .iov = &piece}, *pieces = &one;
    /* Usually one binary, which needs no allocation. */
    if (enif_get_list_cell(env, argv[2], &head, &tail) && enif_is_empty_list(env, tail) &&
        enif_inspect_binary(env, head, &binary))
        piece = (SysIOVec){(char *)binary.data, binary.size};
    else
        pieces = NULL;
    if (!offset_at(env, argv[1], &offset) || (!pieces && !enif_inspect_iovec(env, PIECES_MAX, argv[2], &tail, &pieces)))
        return enif_make_badarg(env);
    struct file *file = file_at_for_write(env, argv[0], &result);
    if (!file)
        return result;
    uint64_t size = bytes_of_pieces(pieces);
    ssize_t count = enif_is_empty_list(env, tail) ? write_fast(env, file, offset, pieces, size) : 0;
    if (count > 0)
        file_was_written(file);
    file_leave(file);
    if (count < 0)
        return error_of(env, atom_of_errno((int)-count));
    if (count && (uint64_t)count == size)
        return atom_ok;
    if (count)
        return write_rest(env, argv[0], offset, size, pieces, (size_t)count);
    return enif_schedule_nif(env, "file_write_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, nif_file_write_waiting, argc, argv);
}

/* Performs the first write to a file, and finds its mode. Returns the bytes written. */
static ssize_t write_first(struct file *file, uint64_t offset, struct iovec *pieces, int count)
{
    int fd = file->fd, flags = fcntl(fd, F_GETFL);
    struct statfs found;
    enum write_mode mode = WAITS;
    ssize_t written = -1;
    /* With these flags RWF_NOWAIT only means that queueing the request does not wait: the call waits for the disk. */
    if (file->is_regular && flags >= 0 && !(flags & (O_DSYNC | O_DIRECT)) && !fstatfs(fd, &found) &&
        !(found.f_flags & ST_SYNCHRONOUS)) {
        written = pwritev2(fd, pieces, count, (off_t)offset, RWF_NOWAIT);
        bool is_known = found.f_type == EXT4_SUPER_MAGIC || found.f_type == TMPFS_MAGIC;
        mode = written >= 0 || errno == EAGAIN ? TRIED : is_known && found.f_bsize > 0 ? MEASURED : WAITS;
        file->block_bytes = (unsigned)found.f_bsize;
        file->appends = flags & O_APPEND;
    }
    atomic_store_explicit(&file->write_mode, mode, memory_order_release);
    return written < 0 ? 0 : written;
}

/* Writes everything, and waits. Returns 0 or an errno. */
static int write_all(struct file *file, uint64_t offset, struct iovec *pieces, int count)
{
    ssize_t written = atomic_load(&file->write_mode) == UNKNOWN ? write_first(file, offset, pieces, count) : 0;
    for (;;) {
        if (offset != PELTON_CURRENT)
            offset += (uint64_t)written;
        skip(&pieces, &count, (size_t)written);
        if (!count)
            return 0;
        written = pwritev2(file->fd, pieces, count, (off_t)offset, 0);
        if (written == 0 || (written < 0 && errno != EINTR))
            return written ? errno : EIO;
        if (written < 0)
            written = 0;
    }
}

/* The same for a list of binaries; -1: it is none. */
static int write_list(ErlNifEnv *env, struct file *file, uint64_t offset, ERL_NIF_TERM list)
{
    int error = 0;
    while (!error && !enif_is_empty_list(env, list)) {
        ErlNifIOVec *pieces = NULL;
        if (!enif_inspect_iovec(env, PIECES_MAX, list, &list, &pieces))
            return -1;
        uint64_t size = bytes_of_pieces(pieces);
        bool is_measured = is_measurable(file, offset, size);
        long sleeps = is_measured ? sleeps_of_this_thread() : 0;
        int64_t began_us = is_measured ? now_us() : 0;
        error = write_all(file, offset, (struct iovec *)pieces->iov, pieces->iovcnt);
        if (is_measured)
            learn_write(began_us, sleeps);
        if (offset != PELTON_CURRENT)
            offset += size;
    }
    return error;
}

/* file_write_waiting(File, Offset, Binaries), or (File, list, [{Offset, Binaries}]): ok; {error, Reason}, for a list
 * {error, {Done, Reason}}; `stream`, as file_write. Waits in the system call, on a dirty scheduler. */
NIF(file_write_waiting)
{
    (void)argc;
    ERL_NIF_TERM result, head, tail = argv[2];
    uint64_t offset = 0;
    bool is_list = enif_is_identical(argv[1], atom_list);
    if (!is_list && !offset_at(env, argv[1], &offset))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    /* It would occupy the dirty scheduler for as long as nobody reads. */
    if (!file->is_regular && offset == PELTON_CURRENT && !enif_is_empty_list(env, tail)) {
        file_leave(file);
        return atom_stream;
    }
    int error = 0;
    unsigned done = 0;
    if (!is_list)
        error = write_list(env, file, offset, tail);
    for (; is_list && !error && enif_get_list_cell(env, tail, &head, &tail); done += !error) {
        const ERL_NIF_TERM *pair;
        int arity;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !offset_at(env, pair[0], &offset))
            error = -1;
        else
            error = write_list(env, file, offset, pair[1]);
    }
    file_was_written(file);
    file_leave(file);
    if (error <= 0)
        return error ? enif_make_badarg(env) : atom_ok;
    ERL_NIF_TERM reason = atom_of_errno(error);
    return error_of(env, is_list ? enif_make_tuple2(env, enif_make_uint(env, done), reason) : reason);
}
