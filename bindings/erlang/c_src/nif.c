/* Loading, taking over, and unloading; the atoms; the ferry. See nif.h. */
#include "nif.h"
#include <erl_driver.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct everything *all;

#define ATOM_(name) ERL_NIF_TERM atom_##name;
ATOMS(ATOM_)
#undef ATOM_

/* By its number: the emulator names them all. */
#define ERRNOS_COUNT 256
static ERL_NIF_TERM errnos[ERRNOS_COUNT];

ERL_NIF_TERM atom_of_errno(int number)
{
    return errnos[number < 0 || number >= ERRNOS_COUNT ? 0 : number];
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
    /* Renaming and removing a directory say the one, and `file` the other. */
    for (int i = 0; i < ERRNOS_COUNT; i++)
        errnos[i] = enif_make_atom(env, erl_errno_id(i == ENOTEMPTY ? EEXIST : i));
}

void took(ErlNifEnv *env, uint64_t bytes)
{
    uint64_t percent = bytes >> 16;
    if (percent)
        enif_consume_timeslice(env, percent > 100 ? 100 : (int)percent);
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

/* Those that end are joined by their successors. */
struct ferry {
    ErlNifTid thread;
    atomic_bool ends;
    struct ferry *before;
};

static void *ferry(void *argument)
{
    struct ferry *self = argument;
    self->thread = enif_thread_self();
    if (self->before) {
        atomic_store(&self->before->ends, true);
        ferry_wake();
        enif_thread_join(self->before->thread, NULL);
        enif_free(self->before);
    }
    for (int sleep = 0; !atomic_load(&self->ends); sleep = files_flush()) {
        struct epoll_event events[32];
        int count = epoll_wait(all->epoll, events, 32, sleep);
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
        files_cancel();
        files_bury();
        ends_bury();
    }
    /* What it heard may have been for its successor. */
    ferry_wake();
    return NULL;
}

/* In place of the one there is; that goes on if this fails. */
static int start_ferry(void)
{
    struct ferry *new = enif_alloc(sizeof *new);
    if (!new)
        return ENOMEM;
    *new = (struct ferry){.before = all->ferry};
    struct ferry *before = all->ferry;
    all->ferry = new;
    ErlNifTid thread;
    int failed = enif_thread_create("pelton_ferry", &thread, ferry, new, NULL);
    if (failed) {
        all->ferry = before;
        enif_free(new);
    }
    return failed;
}

static void free_everything(void)
{
    if (all->epoll >= 0)
        close(all->epoll);
    if (all->bell >= 0)
        close(all->bell);
    if (all->lock)
        enif_mutex_destroy(all->lock);
    if (all->flushed)
        enif_cond_destroy(all->flushed);
    enif_free(all->engines);
    enif_free(all);
    all = NULL;
}

static int begin(unsigned schedulers)
{
    all = enif_alloc(sizeof *all);
    if (!all)
        return ENOMEM;
    *all = (struct everything){.layout = LAYOUT, .bell_watched = WATCHED_BELL, .epoll = -1, .bell = -1, .next_due = INT64_MAX};
    atomic_flag_clear(&all->is_writing);
    all->lock = enif_mutex_create("pelton_all");
    all->flushed = enif_cond_create("pelton_flushed");
    all->epoll = epoll_create1(EPOLL_CLOEXEC);
    all->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    all->engine_count = schedulers;
    if (!all->lock || !all->flushed || all->epoll < 0 || all->bell < 0)
        return EMFILE;
    return ferry_watch(all->bell, &all->bell_watched);
}

static int open_types(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    int failed = files_load(env, flags);
    return failed ? failed : ends_load(env, flags);
}

/* Threads and the kernel come back to this library at any time: it is not unloaded as long as there is an object of its types. */
static void stay(void)
{
    ErlNifResourceType *types[] = {all->file_type, all->request_type, all->end_type, all->responder_type, all->held_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!enif_alloc_resource(types[i], 1))
            return;
}

static int load(ErlNifEnv *env, void **priv_data, ERL_NIF_TERM info)
{
    unsigned schedulers;
    if (!enif_get_uint(env, info, &schedulers) || schedulers == 0)
        return EINVAL;
    make_atoms(env);
    /* The module was deleted, and comes back: what is still open goes on, out of reach. */
    bool is_new = !all;
    int failed = is_new ? begin(schedulers) : 0;
    if (!failed)
        failed = open_types(env, ERL_NIF_RT_CREATE);
    if (!failed && is_new)
        failed = start_ferry();
    if (failed) {
        if (all && is_new)
            free_everything();
        return failed;
    }
    stay();
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
    int failed = open_types(env, ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER);
    if (!failed)
        failed = start_ferry();
    *priv_data = all;
    return failed;
}

/* What is open is closed; what comes later is as if nothing had been. */
static NIF(end_all)
{
    (void)env, (void)argc, (void)argv;
    files_end();
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

ERL_NIF_INIT(pelton_nif, functions, load, NULL, upgrade, NULL)
