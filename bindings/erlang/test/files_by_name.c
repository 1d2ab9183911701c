/* A file system's behaviour by the file's name, for LD_PRELOAD. A name has words with dashes between:
 *
 *   local    it is ext4                        foreign  it is one that nobody knows
 *   asked    it knows RWF_NOWAIT of writes     busy     and answers that it would have to wait
 *   half     and moves half of what is asked   slow     a write takes 20 ms
 *   stuck    a write ends when there is no file of that name with .stuck behind any more
 *
 *   told     reads with RWF_NOWAIT are told of as writes are
 *
 * Each of the NIF's writes is told of in FILES_BY_NAME, when it begins: who writes, `dirty', `normal', or `beside' where another normal scheduler is at a
 * write; whether it is `asked', with RWF_NOWAIT, or `plain'; and the file's name. As long as there is a file of that name with
 * .waits behind, threads seem to wait in whatever they do. */
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

static void tell(const char *who, int flags, const char *name)
{
    char line[PATH_MAX];
    int size = snprintf(line, sizeof line, "%s %s %s\n", who, flags & RWF_NOWAIT ? "asked" : "plain", name);
    int told = open(getenv("FILES_BY_NAME"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (told < 0 || syscall(SYS_write, told, line, (size_t)size) != size)
        abort();
    close(told);
}

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t, int);
    static atomic_int normal;
    if (!next)
        next = dlsym(RTLD_NEXT, "pwritev2");
    char path[PATH_MAX], thread[32];
    const char *name = name_of(fd, path);
    /* 3_dirty_io_sche, or erts_dios_3 */
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    bool is_dirty = strstr(thread, "dirty_io") || strstr(thread, "dios");
    if (flags & RWF_NOWAIT) {
        tell(is_dirty ? "dirty" : "normal", flags, name);
        if (!is(name, "asked") || is(name, "busy")) {
            errno = is(name, "asked") ? EAGAIN : EOPNOTSUPP;
            return -1;
        }
        struct iovec half = half_of(pieces);
        return is(name, "half") ? next(fd, &half, 1, offset, 0) : next(fd, pieces, count, offset, 0);
    }
    int beside = is_dirty ? 0 : atomic_fetch_add(&normal, 1);
    tell(is_dirty ? "dirty" : beside ? "beside" : "normal", flags, name);
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

/* The NIF's, of one piece; and everybody else's, who has files of other names. */
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
    if (flags & RWF_NOWAIT && is(name, "told"))
        tell("normal", flags, name);
    return flags & RWF_NOWAIT && is(name, "half") ? next(fd, &half, 1, offset, 0) : next(fd, pieces, count, offset, flags);
}

int getrusage(int who, struct rusage *found)
{
    static int (*next)(int, struct rusage *);
    static atomic_long waits;
    if (!next)
        next = dlsym(RTLD_NEXT, "getrusage");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.waits", getenv("FILES_BY_NAME"));
    int result = next(who, found);
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
