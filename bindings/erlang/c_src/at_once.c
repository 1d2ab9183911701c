/* What is done in the call itself: a read that the page cache has, and a small write that it takes.
 *
 * Reads are asked with RWF_NOWAIT, writes likewise where the file system knows that: then the kernel promises not to wait. ext4 and tmpfs do not know it
 * of writes, and most often take one within microseconds; but a write may wait for the journal, or while too much is not on the disk yet. So there
 * it is MEASURED: after one that took long, on whatever scheduler, none is begun in the call for a hundred times as long; and one scheduler at a
 * time is at one, and not the only one there is. So one of a node's schedulers waits, for a hundredth of the time: that is a bound, no promise that none
 * does. What is known to wait is not tried: the first write to a file, what is not regular, O_SYNC and the like, other file systems, blocks
 * that would have to be read first, and files that somebody else is at. */
#include "files.h"
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* So much is copied in some 50 us at most. */
#define WRITE_MAX (64 << 10)
/* A write that takes longer, and waits, was slow: for so many times as long the others wait elsewhere. */
#define SLOW_US 200
#define PENALTY 100

/* How small writes to a file are done: on a dirty scheduler as long as nothing is known, or as they wait; else in the call. */
enum manner { UNKNOWN, WAITS, TRIED, MEASURED };

/* Counts time as reductions: twice what it took, as much goes into its memory, and collecting that. What is too short to be said is kept. */
static void spent(ErlNifEnv *env, int64_t us)
{
    static _Thread_local int64_t untold;
    untold += us;
    int64_t percent = untold / 5;
    untold %= 5;
    if (percent)
        enif_consume_timeslice(env, percent > 100 ? 100 : (int)percent);
}

/* file_read(File, Offset, Size): {ok, Bytes}, {part, Bytes}: so much at the file's position; `later`: not at once. Or an error. */
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
    if (!file->is_regular || size == 0 || size > NOW_MAX) {
        leave_file(file);
        return atom_later;
    }
    if (atomic_load_explicit(&file->wary, memory_order_relaxed) > 0) {
        leave_file(file);
        return enif_schedule_nif(env, "file_read_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, file_read_waiting, argc, argv);
    }
    if (atomic_load_explicit(&file->reads_wait, memory_order_relaxed) || !enif_alloc_binary(size, &bytes)) {
        leave_file(file);
        return atom_later;
    }
    int64_t began_us = now_us();
    struct iovec piece = {bytes.data, size};
    ssize_t count = preadv2(pelton_fd(file->handle), &piece, 1, (off_t)offset, RWF_NOWAIT);
    if (count < 0 && errno == EOPNOTSUPP)
        atomic_store_explicit(&file->reads_wait, true, memory_order_relaxed);
    else
        spent(env, learn_of_read(file, began_us, false));
    leave_file(file);
    if (count > 0 && (uint64_t)count == size)
        return enif_make_tuple2(env, atom_ok, enif_make_binary(env, &bytes));
    /* The rest, or whether there is any, is asked of the engine: 0 is not to be believed here. */
    result = atom_later;
    if (count > 0 && offset == PELTON_CURRENT)
        result = enif_make_tuple2(env, enif_make_atom(env, "part"), bytes_of(env, bytes.data, (size_t)count));
    enif_release_binary(&bytes);
    return result;
}

/* ---- Writing ---- */

long waits_of_this_thread(void)
{
    struct rusage usage = {0};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* Asking costs a tenth of a write, so what was found less than a millisecond ago does: at worst what it waited for since is taken for the write's. */
static long waits_lately(int64_t now)
{
    static _Thread_local int64_t found_us;
    static _Thread_local long found;
    if (now - found_us > 1000) {
        found = waits_of_this_thread();
        found_us = now;
    }
    return found;
}

/* Of a small write that this thread has just done; before it had waited so often. Answers how long it took. */
static int64_t learn_of_write(int64_t began_us, long waits)
{
    int64_t ended_us = now_us(), took_us = ended_us - began_us;
    if (took_us <= SLOW_US || waits_of_this_thread() == waits)
        return took_us;
    int64_t until = ended_us + PENALTY * took_us, found = atomic_load(&all->writes_wait_until);
    while (found < until && !atomic_compare_exchange_weak(&all->writes_wait_until, &found, until))
        ;
    return took_us;
}

/* Whether no block has to be read before it is written in part: whole blocks, or behind the end; which a file's position stays if it was there, and
 * nobody else has used the file since. */
static bool needs_no_read(struct file *file, uint64_t offset, uint64_t size)
{
    bool is_current = offset == PELTON_CURRENT;
    if (file->appends || (is_current ? atomic_load_explicit(&file->is_at_end, memory_order_relaxed) : (offset | size) % file->block_bytes == 0))
        return true;
    int fd = pelton_fd(file->handle);
    uint64_t at = is_current ? (uint64_t)lseek(fd, 0, SEEK_CUR) : offset;
    struct stat found;
    bool is_at_end = !fstat(fd, &found) && at >= (uint64_t)found.st_size;
    if (is_current)
        atomic_store_explicit(&file->is_at_end, is_at_end, memory_order_relaxed);
    return is_at_end || (at | size) % file->block_bytes == 0;
}

static bool may_be_measured(struct file *file, uint64_t offset, uint64_t size)
{
    return size <= WRITE_MAX && atomic_load_explicit(&file->manner, memory_order_acquire) == MEASURED && needs_no_read(file, offset, size);
}

/* What is written, without the first bytes. */
static void skip(struct iovec **pieces, int *count, size_t bytes)
{
    for (; *count && bytes >= (*pieces)->iov_len; (*pieces)++, (*count)--)
        bytes -= (*pieces)->iov_len;
    if (*count) {
        (*pieces)->iov_base = (char *)(*pieces)->iov_base + bytes;
        (*pieces)->iov_len -= bytes;
    }
}

/* The rest of a write of which some was done in the call. */
static ERL_NIF_TERM write_rest(ErlNifEnv *env, ERL_NIF_TERM file, uint64_t offset, uint64_t size, struct iovec *pieces, int count, size_t done)
{
    ERL_NIF_TERM bytes;
    skip(&pieces, &count, done);
    unsigned char *rest = enif_make_new_binary(env, size - done, &bytes);
    for (int i = 0; i < count; rest += pieces[i++].iov_len)
        memcpy(rest, pieces[i].iov_base, pieces[i].iov_len);
    ERL_NIF_TERM place = offset == PELTON_CURRENT ? atom_undefined : enif_make_uint64(env, offset + done);
    ERL_NIF_TERM arguments[] = {file, place, enif_make_list1(env, bytes)};
    return enif_schedule_nif(env, "file_write_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, file_write_waiting, 3, arguments);
}

/* As pwritev2; of one piece sooner. */
static ssize_t write_plainly(int fd, uint64_t offset, const ErlNifIOVec *pieces)
{
    const void *data = pieces->iov[0].iov_base;
    size_t size = pieces->iov[0].iov_len;
    if (pieces->iovcnt != 1)
        return pwritev2(fd, (struct iovec *)pieces->iov, pieces->iovcnt, (off_t)offset, 0);
    return offset == PELTON_CURRENT ? write(fd, data, size) : pwrite(fd, data, size, (off_t)offset);
}

/* What was written, or below 0 an errno; 0 for those by which it is merely not done now. */
static ssize_t or_error(ssize_t count)
{
    return count >= 0 ? count : errno == EAGAIN || errno == EOPNOTSUPP || errno == EINTR ? 0 : -errno;
}

/* Does it in the call, if that may be. Answers how much was written; 0: nothing, below: an errno. */
static ssize_t write_at_once(ErlNifEnv *env, struct file *file, uint64_t offset, const ErlNifIOVec *pieces, uint64_t size)
{
    int manner = atomic_load_explicit(&file->manner, memory_order_acquire);
    /* Somebody else at it may have its lock for long. */
    if (size == 0 || size > WRITE_MAX || manner < TRIED || atomic_load(&file->users) != 1 || atomic_load(&file->pending))
        return 0;
    int fd = pelton_fd(file->handle);
    if (manner == TRIED)
        return or_error(pwritev2(fd, (struct iovec *)pieces->iov, pieces->iovcnt, (off_t)offset, RWF_NOWAIT));
    ssize_t count = 0;
    int64_t began_us = now_us();
    if (all->engine_count == 1 || began_us <= atomic_load(&all->writes_wait_until) || atomic_flag_test_and_set(&all->is_writing))
        return 0;
    if (needs_no_read(file, offset, size)) {
        long waits = waits_lately(began_us);
        count = or_error(write_plainly(fd, offset, pieces));
        spent(env, learn_of_write(began_us, waits));
    }
    atomic_flag_clear(&all->is_writing);
    return count;
}

/* file_write(File, Offset, Binaries): ok, or an error, or `stream`: it is nothing that can be written now */
NIF(file_write)
{
    ERL_NIF_TERM result, head, tail;
    uint64_t offset;
    ErlNifBinary binary;
    SysIOVec piece;
    ErlNifIOVec one = {.iovcnt = 1, .iov = &piece}, *pieces = &one;
    /* One binary, most often, which need not be looked after. */
    if (enif_get_list_cell(env, argv[2], &head, &tail) && enif_is_empty_list(env, tail) && enif_inspect_binary(env, head, &binary))
        piece = (SysIOVec){(char *)binary.data, binary.size};
    else
        pieces = NULL;
    if (!offset_at(env, argv[1], &offset) || (!pieces && !enif_inspect_iovec(env, PIECES_MAX, argv[2], &tail, &pieces)))
        return enif_make_badarg(env);
    struct file *file = entered(env, argv[0], &result);
    if (!file)
        return result;
    uint64_t size = bytes_of_pieces(pieces);
    ssize_t count = enif_is_empty_list(env, tail) ? write_at_once(env, file, offset, pieces, size) : 0;
    if (count > 0)
        is_written(file);
    leave_file(file);
    if (count < 0)
        return error_of(env, atom_of_errno((int)-count));
    if (count && (uint64_t)count == size)
        return atom_ok;
    if (count)
        return write_rest(env, argv[0], offset, size, (struct iovec *)pieces->iov, pieces->iovcnt, (size_t)count);
    return enif_schedule_nif(env, "file_write_waiting", ERL_NIF_DIRTY_JOB_IO_BOUND, file_write_waiting, argc, argv);
}

/* Finds out how small writes are done, by one: answers what came of it. */
static ssize_t write_first(struct file *file, uint64_t offset, struct iovec *pieces, int count)
{
    int fd = pelton_fd(file->handle), flags = fcntl(fd, F_GETFL);
    struct statfs found;
    enum manner manner = WAITS;
    ssize_t written = -1;
    /* With these RWF_NOWAIT says that the request is queued without waiting, and the call waits for the disk. */
    if (file->is_regular && flags >= 0 && !(flags & (O_DSYNC | O_DIRECT)) && !fstatfs(fd, &found) && !(found.f_flags & ST_SYNCHRONOUS)) {
        written = pwritev2(fd, pieces, count, (off_t)offset, RWF_NOWAIT);
        bool is_known = found.f_type == EXT4_SUPER_MAGIC || found.f_type == TMPFS_MAGIC;
        manner = written >= 0 || errno == EAGAIN ? TRIED : is_known && found.f_bsize > 0 ? MEASURED : WAITS;
        file->block_bytes = (unsigned)found.f_bsize;
        file->appends = flags & O_APPEND;
    }
    atomic_store_explicit(&file->manner, manner, memory_order_release);
    return written < 0 ? 0 : written;
}

/* Writes all of it, waiting; 0 or an errno. */
static int write_pieces(struct file *file, uint64_t offset, struct iovec *pieces, int count)
{
    ssize_t written = atomic_load(&file->manner) == UNKNOWN ? write_first(file, offset, pieces, count) : 0;
    for (;;) {
        if (offset != PELTON_CURRENT)
            offset += (uint64_t)written;
        skip(&pieces, &count, (size_t)written);
        if (!count)
            return 0;
        written = pwritev2(pelton_fd(file->handle), pieces, count, (off_t)offset, 0);
        if (written == 0 || (written < 0 && errno != EINTR))
            return written ? errno : EIO;
        if (written < 0)
            written = 0;
    }
}

/* The same of a list of binaries; -1: it is none. */
static int write_list(ErlNifEnv *env, struct file *file, uint64_t offset, ERL_NIF_TERM list)
{
    int error = 0;
    while (!error && !enif_is_empty_list(env, list)) {
        ErlNifIOVec *pieces = NULL;
        if (!enif_inspect_iovec(env, PIECES_MAX, list, &list, &pieces))
            return -1;
        uint64_t size = bytes_of_pieces(pieces);
        bool is_measured = may_be_measured(file, offset, size);
        long waits = is_measured ? waits_of_this_thread() : 0;
        int64_t began_us = is_measured ? now_us() : 0;
        error = write_pieces(file, offset, (struct iovec *)pieces->iov, pieces->iovcnt);
        if (is_measured)
            learn_of_write(began_us, waits);
        if (offset != PELTON_CURRENT)
            offset += size;
    }
    return error;
}

/* file_write_waiting(File, Offset, Binaries), or (File, list, [{Offset, Binaries}]): ok, or {error, Reason}, of a list {error, {Done, Reason}}; or
 * `stream`: it is nothing that can be done now. Waits in the system call, on a dirty scheduler. */
NIF(file_write_waiting)
{
    (void)argc;
    ERL_NIF_TERM result, head, tail = argv[2];
    uint64_t offset = 0;
    bool is_list = enif_is_identical(argv[1], enif_make_atom(env, "list"));
    if (!is_list && !offset_at(env, argv[1], &offset))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    /* That would keep the scheduler for as long as nobody reads. */
    if (!file->is_regular && offset == PELTON_CURRENT && !enif_is_empty_list(env, tail)) {
        leave_file(file);
        return enif_make_atom(env, "stream");
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
    is_written(file);
    leave_file(file);
    if (error <= 0)
        return error ? enif_make_badarg(env) : atom_ok;
    ERL_NIF_TERM reason = atom_of_errno(error);
    return error_of(env, is_list ? enif_make_tuple2(env, enif_make_uint(env, done), reason) : reason);
}
