/* Loading, taking over, and unloading; the atoms; the ferry. See nif.h. */
#include "nif.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct everything *all;

#define ATOM_(name) ERL_NIF_TERM atom_##name;
ATOMS(ATOM_)
#undef ATOM_

#define ERRNOS(X) \
    X(E2BIG, "e2big") X(EACCES, "eacces") X(EADDRINUSE, "eaddrinuse") X(EAGAIN, "eagain") X(EBADF, "ebadf") X(EBADMSG, "ebadmsg") \
    X(EBUSY, "ebusy") X(ECANCELED, "ecanceled") X(EDEADLK, "edeadlk") X(EDOM, "edom") X(EDQUOT, "edquot") X(EEXIST, "eexist") \
    X(EFAULT, "efault") X(EFBIG, "efbig") X(EINTR, "eintr") X(EINVAL, "einval") X(EIO, "eio") X(EISDIR, "eisdir") X(ELOOP, "eloop") \
    X(EMFILE, "emfile") X(EMLINK, "emlink") X(EMSGSIZE, "emsgsize") X(ENAMETOOLONG, "enametoolong") X(ENFILE, "enfile") \
    X(ENODATA, "enodata") X(ENODEV, "enodev") X(ENOENT, "enoent") X(ENOEXEC, "enoexec") X(ENOLCK, "enolck") X(ENOLINK, "enolink") \
    X(ENOMEM, "enomem") X(ENOSPC, "enospc") X(ENOSYS, "enosys") X(ENOTBLK, "enotblk") X(ENOTDIR, "enotdir") \
    X(ENOTEMPTY, "eexist") X(ENOTSUP, "enotsup") X(ENOTTY, "enotty") X(ENXIO, "enxio") X(EOVERFLOW, "eoverflow") X(EPERM, "eperm") \
    X(EPIPE, "epipe") X(EPROTO, "eproto") X(ERANGE, "erange") X(EROFS, "erofs") X(ESPIPE, "espipe") X(ESRCH, "esrch") \
    X(ESTALE, "estale") X(ETIMEDOUT, "etimedout") X(ETXTBSY, "etxtbsy") X(EXDEV, "exdev") X(EREMOTEIO, "eremoteio")

static struct {
    int number;
    const char *name;
    ERL_NIF_TERM atom;
} errnos[] = {
#define ERRNO_(number, name) {number, name, 0},
    ERRNOS(ERRNO_)
#undef ERRNO_
};
#define ERRNOS_COUNT (sizeof errnos / sizeof *errnos)
static ERL_NIF_TERM atom_unknown;

ERL_NIF_TERM atom_of_errno(int number)
{
    for (size_t i = 0; i < ERRNOS_COUNT; i++)
        if (errnos[i].number == number)
            return errnos[i].atom;
    return atom_unknown;
}

ERL_NIF_TERM error_of(ErlNifEnv *env, ERL_NIF_TERM reason)
{
    return enif_make_tuple2(env, atom_error, reason);
}

static void make_atoms(ErlNifEnv *env)
{
#define ATOM_(name) atom_##name = enif_make_atom(env, #name);
    ATOMS(ATOM_)
#undef ATOM_
    for (size_t i = 0; i < ERRNOS_COUNT; i++)
        errnos[i].atom = enif_make_atom(env, errnos[i].name);
    atom_unknown = enif_make_atom(env, "unknown");
}

unsigned slot_of_this_thread(unsigned count)
{
    static atomic_uint threads;
    static _Thread_local unsigned number; /* from 1 on */
    if (!number)
        number = 1 + atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed);
    return (number - 1) % count;
}

int ferry_watch(int fd, enum watched *what)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    return epoll_ctl(all->epoll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

void ferry_wake(void)
{
    /* Fails only where it is rung often enough already. */
    if (eventfd_write(all->bell, 1))
        return;
}

static void *ferry(void *nothing)
{
    (void)nothing;
    while (!atomic_load(&all->ferry_ends)) {
        struct epoll_event events[32];
        int count = epoll_wait(all->epoll, events, 32, -1);
        for (int i = 0; i < count; i++) {
            enum watched *what = events[i].data.ptr;
            eventfd_t rung;
            switch (*what) {
            case WATCHED_BELL:
                if (eventfd_read(all->bell, &rung))
                    break;
                break;
            case WATCHED_ENGINE: files_ready(what); break;
            case WATCHED_END: ends_ready(what); break;
            }
        }
        /* Only now: an event of these may have been among those. */
        ends_look();
        files_bury();
        ends_bury();
    }
    return NULL;
}

static int start_ferry(void)
{
    atomic_store(&all->ferry_ends, false);
    int failed = enif_thread_create("pelton_ferry", &all->ferry, ferry, NULL, NULL);
    all->ferry_runs = !failed;
    return failed;
}

static void stop_ferry(void)
{
    if (!all->ferry_runs)
        return;
    atomic_store(&all->ferry_ends, true);
    ferry_wake();
    enif_thread_join(all->ferry, NULL);
    all->ferry_runs = false;
}

static void free_everything(void)
{
    if (all->epoll >= 0)
        close(all->epoll);
    if (all->bell >= 0)
        close(all->bell);
    if (all->lock)
        enif_mutex_destroy(all->lock);
    enif_free(all->engines);
    enif_free(all);
    all = NULL;
}

static int begin(unsigned schedulers)
{
    all = enif_alloc(sizeof *all);
    if (!all)
        return ENOMEM;
    *all = (struct everything){.layout = LAYOUT, .bell_watched = WATCHED_BELL, .epoll = -1, .bell = -1};
    all->lock = enif_mutex_create("pelton_all");
    all->epoll = epoll_create1(EPOLL_CLOEXEC);
    all->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    all->engine_count = schedulers;
    if (!all->lock || all->epoll < 0 || all->bell < 0)
        return EMFILE;
    return ferry_watch(all->bell, &all->bell_watched);
}

static int load(ErlNifEnv *env, void **priv_data, ERL_NIF_TERM info)
{
    unsigned schedulers;
    if (!enif_get_uint(env, info, &schedulers) || schedulers == 0)
        return EINVAL;
    make_atoms(env);
    int failed = begin(schedulers);
    if (!failed)
        failed = files_load(env, ERL_NIF_RT_CREATE);
    if (!failed)
        failed = ends_load(env, ERL_NIF_RT_CREATE);
    if (!failed)
        failed = start_ferry();
    if (failed) {
        if (all)
            free_everything();
        return failed;
    }
    all->loads = 1;
    *priv_data = all;
    return 0;
}

/* A new version of the module: what is open, and in flight, goes on by the new code. */
static int upgrade(ErlNifEnv *env, void **priv_data, void **old_priv_data, ERL_NIF_TERM info)
{
    (void)info;
    struct everything *found = *old_priv_data;
    if (!found || found->layout != LAYOUT)
        return EINVAL;
    all = found;
    make_atoms(env);
    /* The old code has no thread any more. */
    stop_ferry();
    int failed = files_load(env, ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER);
    if (!failed)
        failed = ends_load(env, ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER);
    if (!failed)
        failed = start_ferry();
    if (failed)
        return failed;
    all->loads++;
    *priv_data = all;
    return 0;
}

static void unload(ErlNifEnv *env, void *priv_data)
{
    (void)env;
    all = priv_data;
    if (--all->loads)
        return;
    files_end(true);
    ends_end();
    stop_ferry();
    ends_look();
    files_bury();
    ends_bury();
}

/* What is open is closed; what comes later is as if nothing had been. */
static NIF(end_all)
{
    (void)env, (void)argc, (void)argv;
    files_end(false);
    ends_end();
    return atom_ok;
}

static ErlNifFunc functions[] = {
    {"end_all", 0, end_all, ERL_NIF_DIRTY_JOB_IO_BOUND},
#define FUNCTION_(name, arity, flags) {#name, arity, name, flags},
    FILES_FUNCTIONS(FUNCTION_)
    ENDS_FUNCTIONS(FUNCTION_)
#undef FUNCTION_
};

ERL_NIF_INIT(pelton_nif, functions, load, NULL, upgrade, unload)
