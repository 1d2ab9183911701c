/* For LD_PRELOAD: a file's name determines the behaviour of its file system. The name has words, with dashes between:
 *
 *   local    it is ext4                                foreign  it is an unknown one
 *   nowait   it supports RWF_NOWAIT for writes         busy     and always returns EAGAIN
 *   half     it moves half of the bytes                slow     a write, or a read with RWF_NOWAIT, sleeps for 20 ms
 *   spins    a read with RWF_NOWAIT takes 2 ms of the processor
 *   stuck    a write waits while there is a file of its name followed by .stuck
 *   logged   reads with RWF_NOWAIT are logged as well
 *
 * FILES_BY_NAME names the log. Each write of the NIF is logged when it begins: the scheduler, `dirty', `normal', or
 * `second' if another normal scheduler is writing; `nowait' with RWF_NOWAIT, or `plain'; and the file's name. While
 * there is a file of the log's name followed by .waits, getrusage reports a new voluntary switch at each call. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

static const char *name_of(int fd, char path[PATH_MAX])
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool is(const char *name, const char *word)
{
    size_t size = strlen(word);
    for (const char *at = name; (at = strstr(at, word)); at++)
        if ((at == name || at[-1] == '-') && (!at[size] || at[size] == '-'))
            return true;
    return false;
}

static struct iovec half_of(const struct iovec *pieces)
{
    return (struct iovec){pieces->iov_base, pieces->iov_len > 1 ? pieces->iov_len / 2 : pieces->iov_len};
}

/* As long as a read that other threads interrupt: without a voluntary switch. */
static void spin(void)
{
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - began.tv_sec) * 1000000000 + now.tv_nsec - began.tv_nsec < 2000000);
}

static void record(const char *scheduler, int flags, const char *name)
{
    char line[PATH_MAX];
    int size = snprintf(line, sizeof line, "%s %s %s\n", scheduler, flags & RWF_NOWAIT ? "nowait" : "plain", name);
    int log = open(getenv("FILES_BY_NAME"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 || syscall(SYS_write, log, line, (size_t)size) != size)
        abort();
    close(log);
}

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t, int);
    static atomic_int normal;
    if (!next)
        next = dlsym(RTLD_NEXT, "pwritev2");
    char path[PATH_MAX], thread[32];
    const char *name = name_of(fd, path);
    /* The name of a dirty I/O scheduler: 3_dirty_io_sche, or erts_dios_3. */
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    bool is_dirty = strstr(thread, "dirty_io") || strstr(thread, "dios");
    if (flags & RWF_NOWAIT) {
        record(is_dirty ? "dirty" : "normal", flags, name);
        if (!is(name, "nowait") || is(name, "busy")) {
            errno = is(name, "nowait") ? EAGAIN : EOPNOTSUPP;
            return -1;
        }
        struct iovec half = half_of(pieces);
        return is(name, "half") ? next(fd, &half, 1, offset, 0) : next(fd, pieces, count, offset, 0);
    }
    int others = is_dirty ? 0 : atomic_fetch_add(&normal, 1);
    record(is_dirty ? "dirty" : others ? "second" : "normal", flags, name);
    if (is(name, "slow"))
        usleep(20000);
    if (is(name, "stuck"))
        for (strcat(path, ".stuck"); access(path, F_OK) == 0;)
            usleep(1000);
    ssize_t done = next(fd, pieces, count, offset, flags);
    if (!is_dirty)
        atomic_fetch_sub(&normal, 1);
    return done;
}

/* The NIF writes one piece with these two. Other files, of the runtime, have other names. */
static bool is_ours(int fd)
{
    char path[PATH_MAX];
    const char *name = name_of(fd, path);
    return is(name, "local") || is(name, "foreign");
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    struct iovec piece = {(void *)data, size};
    return is_ours(fd) ? pwritev2(fd, &piece, 1, offset, 0) : syscall(SYS_pwrite64, fd, data, size, offset);
}

ssize_t write(int fd, const void *data, size_t size)
{
    struct iovec piece = {(void *)data, size};
    return is_ours(fd) ? pwritev2(fd, &piece, 1, -1, 0) : syscall(SYS_write, fd, data, size);
}

ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t, int);
    if (!next)
        next = dlsym(RTLD_NEXT, "preadv2");
    char path[PATH_MAX];
    struct iovec half = half_of(pieces);
    const char *name = name_of(fd, path);
    if (flags & RWF_NOWAIT && is(name, "logged"))
        record("normal", flags, name);
    if (flags & RWF_NOWAIT && is(name, "slow"))
        usleep(20000);
    if (flags & RWF_NOWAIT && is(name, "spins"))
        spin();
    if (flags & RWF_NOWAIT && is(name, "half"))
        return next(fd, &half, 1, offset, 0);
    return next(fd, pieces, count, offset, flags);
}

int getrusage(int target, struct rusage *found)
{
    static int (*next)(int, struct rusage *);
    static atomic_long waits;
    if (!next)
        next = dlsym(RTLD_NEXT, "getrusage");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.waits", getenv("FILES_BY_NAME"));
    int result = next(target, found);
    if (access(path, F_OK) == 0)
        found->ru_nvcsw += ++waits;
    return result;
}

int fstatfs(int fd, struct statfs *found)
{
    static int (*next)(int, struct statfs *);
    if (!next)
        next = dlsym(RTLD_NEXT, "fstatfs");
    char path[PATH_MAX];
    const char *name = name_of(fd, path);
    int result = next(fd, found);
    if (is(name, "local"))
        found->f_type = EXT4_SUPER_MAGIC;
    if (is(name, "foreign"))
        found->f_type = NFS_SUPER_MAGIC;
    return result;
}
