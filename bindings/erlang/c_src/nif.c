/* Loading and upgrading the library; what the notifier thread does. See nif.h. */
#include "endpoint.h"
#include "functions.h"
#include "request.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- The notifier thread ---- */

static void on_ready(enum watched *watched)
{
    if (*watched == WATCHED_ENGINE)
        engine_ready((struct engine *)watched);
    else
        endpoint_ready((struct endpoint *)watched);
}

/* Endpoints are released last, after all events of this wake-up: an event may name one of them ([closed],
 * endpoint.c). */
static int on_wake(void)
{
    log_send();
    endpoints_recheck();
    requests_cancel();
    files_close_deferred();
    endpoints_release_closed();
    return files_flush_due();
}

static int start_notifier(void)
{
    return notifier_start((struct notifier_events){.ready = on_ready, .work = on_wake});
}

/* ---- Loading ---- */

static void free_shared(void)
{
    if (shared->epoll >= 0)
        close(shared->epoll);
    if (shared->doorbell >= 0)
        close(shared->doorbell);
    if (shared->lock)
        enif_mutex_destroy(shared->lock);
    if (shared->log_lock)
        enif_mutex_destroy(shared->log_lock);
    if (shared->flushed)
        enif_cond_destroy(shared->flushed);
    enif_free(shared->engines);
    enif_free(shared);
    shared = NULL;
}

static int create_shared(unsigned schedulers)
{
    shared = enif_alloc(sizeof *shared);
    if (!shared)
        return ENOMEM;
    *shared = (struct shared){.layout = LAYOUT, .doorbell_watched = WATCHED_DOORBELL, .next_due = INT64_MAX};
    atomic_flag_clear(&shared->is_writing);
    shared->lock = enif_mutex_create("pelton_shared");
    shared->log_lock = enif_mutex_create("pelton_log");
    shared->flushed = enif_cond_create("pelton_flushed");
    shared->epoll = epoll_create1(EPOLL_CLOEXEC);
    shared->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    shared->engine_count = schedulers;
    if (!shared->lock || !shared->log_lock || !shared->flushed || shared->epoll < 0 || shared->doorbell < 0)
        return EMFILE;
    return notifier_watch(shared->doorbell, &shared->doorbell_watched);
}

static int open_types(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    int error = file_load(env, flags);
    if (!error)
        error = request_load(env, flags);
    return error ? error : endpoint_load(env, flags);
}

/* Threads and the kernel return to this library at any time. A resource of each type, never released, keeps it
 * loaded. */
static void keep_loaded(void)
{
    ErlNifResourceType *types[] = {shared->file_type, shared->request_type, shared->endpoint_type,
                                   shared->responder_type, shared->held_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!enif_alloc_resource(types[i], 1))
            return;
}

static int load(ErlNifEnv *env, void **priv_data, ERL_NIF_TERM info)
{
    unsigned schedulers;
    if (!enif_get_uint(env, info, &schedulers) || schedulers == 0)
        return EINVAL;
    terms_load(env);
    /* The module was deleted, and is loaded again. What is still open continues, but no term refers to it. */
    bool is_new = !shared;
    int error = is_new ? create_shared(schedulers) : 0;
    if (!error)
        error = open_types(env, ERL_NIF_RT_CREATE);
    if (!error && is_new)
        error = start_notifier();
    if (error) {
        if (shared && is_new)
            free_shared();
        return error;
    }
    keep_loaded();
    *priv_data = shared;
    return 0;
}

/* A new version of the module: its library takes over what is open and in flight. */
static int upgrade(ErlNifEnv *env, void **priv_data, void **old_priv_data, ERL_NIF_TERM info)
{
    (void)info;
    struct shared *found = *old_priv_data;
    if (!found || found->layout != LAYOUT)
        return EINVAL;
    shared = found;
    terms_load(env);
    int error = open_types(env, ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER);
    if (!error)
        error = start_notifier();
    *priv_data = shared;
    return error;
}

/* close_all(): closes everything that is open. What is opened later is not affected. */
static ERL_NIF_TERM close_all(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[])
{
    (void)argc, (void)argv;
    files_close();
    endpoints_close(env, false);
    return atom_ok;
}

static ErlNifFunc functions[] = {
    {"close_all", 0, close_all, ERL_NIF_DIRTY_JOB_IO_BOUND},
#define FUNCTION_(name, arity, flags) {#name, arity, nif_##name, flags},
    FUNCTIONS(FUNCTION_)
#undef FUNCTION_
};

ERL_NIF_INIT(pelton_nif, functions, load, NULL, upgrade, NULL)
