/* Engines, and requests to them.
 *
 * Each scheduler has an engine, as far as threads are distributed evenly. A request is submitted under the engine's
 * lock, and completions that are there are taken at once. The request's own result is then the function's result,
 * without a message; others are sent to their processes. Otherwise the engine is armed, and the notifier thread sends
 * the result.
 *
 * Cancelling walks through all pending requests of an engine, so only the notifier thread does it.
 *
 *   [cancel]  A closer sets FILE_CLOSED or is_closing, then shared->has_closed if something is in flight. A submitter
 *             lists the request as pending, then checks whether its file or endpoint is closed. One of the two sees
 *             the other. */
#include "request.h"
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* ---- Requests ---- */

static void destroy_request(ErlNifEnv *env, void *object)
{
    (void)env;
    struct request *request = object;
    for (unsigned i = 0; i < request->parts_count; i++)
        if (request->parts[i].has_memory)
            enif_release_binary(&request->parts[i].memory);
    if (request->has_text)
        enif_release_binary(&request->text);
    if (request->opened)
        file_defer_close(NULL, request->opened);
    buffer_free(request->buffer);
    if (request->endpoint)
        endpoint_return(request->endpoint);
    if (request->env)
        enif_free_env(request->env);
    if (request->file)
        enif_release_resource(request->file);
    if (request->to)
        enif_release_resource(request->to);
}

/* Under the engine's lock. */
static void request_cancel(struct request *request)
{
    if (request->must_complete)
        return;
    request->is_cancelled = true;
    request->engine->has_cancelled = true;
}

/* The process that waits for the result has ended. */
static void waiter_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct request *request = object;
    struct engine *engine = request->engine;
    enif_mutex_lock(engine->lock);
    if (request->is_pending)
        request_cancel(request);
    enif_mutex_unlock(engine->lock);
    notifier_wake();
}

struct request *request_create(uint32_t kind, unsigned parts, struct file *file, struct file *to)
{
    size_t size = sizeof(struct request) + parts * sizeof(struct part);
    struct request *request = enif_alloc_resource(shared->request_type, size);
    memset(request, 0, size);
    enif_set_pid_undefined(&request->pid);
    request->kind = kind;
    request->left = request->parts_count = parts;
    request->file = file;
    request->to = to;
    if (file)
        enif_keep_resource(file);
    if (to)
        enif_keep_resource(to);
    for (unsigned i = 0; i < parts; i++)
        request->parts[i].request = request;
    return request;
}

bool part_allocate(struct part *part, uint64_t size)
{
    if (!enif_alloc_binary(size, &part->memory))
        return false;
    part->has_memory = true;
    part->wanted = size;
    part->piece = (struct iovec){part->memory.data, size};
    part->pieces = &part->piece;
    part->pieces_count = 1;
    return true;
}

static void release_part(void *context)
{
    enif_release_resource(context);
}

pelton_operation part_operation(struct part *part)
{
    struct request *request = part->request;
    pelton_operation operation;
    memset(&operation, 0, sizeof operation);
    operation.token = (uintptr_t)part;
    operation.kind = request->kind;
    /* The engine calls it only for these. */
    if (request->kind == PELTON_FILE_READ || request->kind == PELTON_FILE_WRITE)
        operation.release = release_part;
    operation.context = request;
    if (request->file)
        operation.file = request->file->handle;
    if (request->to)
        operation.to = request->to->handle;
    operation.memory = part->pieces;
    operation.memory_count = part->pieces_count;
    operation.offset = part->offset;
    return operation;
}

/* A file or endpoint of it was closed. */
static bool was_closed(const struct request *request)
{
    return (request->file && file_is_closed(request->file)) || (request->to && file_is_closed(request->to)) ||
        (request->endpoint && atomic_load(&request->endpoint->is_closing));
}

static void count_pending(struct request *request, int change)
{
    if (request->file)
        atomic_fetch_add(&request->file->pending, change);
    if (request->to)
        atomic_fetch_add(&request->to->pending, change);
}

/* ---- Results ---- */

static ERL_NIF_TERM open_result(ErlNifEnv *caller, ErlNifEnv *env, struct request *request)
{
    struct stat found;
    /* The file was just opened, so this does not wait. */
    if (fstat(pelton_file_fd(request->opened), &found))
        return error_of(env, atom_of_errno(errno));
    if (S_ISDIR(found.st_mode) && !request->may_be_directory)
        return error_of(env, atom_of_errno(EISDIR));
    struct file *file = file_create(request->opened, S_ISREG(found.st_mode), request->buffer, &request->pid);
    request->opened = NULL;
    request->buffer = NULL;
    ERL_NIF_TERM term = enif_make_resource(env, file);
    file_monitor_owner(caller, file);
    enif_release_resource(file);
    return enif_make_tuple3(env, atom_ok, term, enif_make_uint64(env, (uint64_t)found.st_size));
}

/* What this process may do with the file, by its permission bits: the file system may decide otherwise. */
static ERL_NIF_TERM access_of(const pelton_stat *stat)
{
    unsigned bits = stat->mode & 7;
    if (geteuid() == 0)
        bits = 6;
    else if (stat->uid == geteuid())
        bits = stat->mode >> 6 & 7;
    else {
        gid_t groups[256];
        int count = getgroups(256, groups);
        bool is_ours = stat->gid == getegid();
        for (int i = 0; i < count; i++)
            is_ours |= groups[i] == stat->gid;
        if (is_ours)
            bits = stat->mode >> 3 & 7;
    }
    return bits & 4 ? bits & 2 ? atom_read_write : atom_read : bits & 2 ? atom_write : atom_none;
}

static ERL_NIF_TERM stat_term(ErlNifEnv *env, const pelton_stat *stat)
{
    static const struct {
        unsigned bits;
        ERL_NIF_TERM *type;
    } kinds[] = {
        {0, &atom_other},       {S_IFREG, &atom_regular}, {S_IFDIR, &atom_directory}, {S_IFLNK, &atom_symlink},
        {S_IFIFO, &atom_other}, {S_IFSOCK, &atom_other},  {S_IFCHR, &atom_device},    {S_IFBLK, &atom_device},
    };
    unsigned kind = stat->kind < sizeof kinds / sizeof *kinds ? stat->kind : 0;
    /* Rounded down, as the kernel's own seconds are. */
    int64_t nanoseconds[3] = {stat->accessed_ns, stat->modified_ns, stat->changed_ns};
    ERL_NIF_TERM times[3];
    for (int i = 0; i < 3; i++) {
        bool is_before = nanoseconds[i] % 1000000000 < 0;
        times[i] = enif_make_int64(env, nanoseconds[i] / 1000000000 - is_before);
    }
    return enif_make_tuple(env, 12, *kinds[kind].type, enif_make_uint64(env, stat->bytes), access_of(stat), times[0],
        times[1], times[2], enif_make_uint(env, stat->mode | kinds[kind].bits), enif_make_uint64(env, stat->links),
        enif_make_uint64(env, makedev(stat->device_major, stat->device_minor)), enif_make_uint64(env, stat->inode),
        enif_make_uint(env, stat->uid), enif_make_uint(env, stat->gid));
}

/* The bytes that were read, or eof. As in `file`, reading 0 bytes at the file's position is never eof. */
static ERL_NIF_TERM bytes_or_eof(ErlNifEnv *env, struct part *part)
{
    if (part->count == 0 && (part->wanted != 0 || part->offset != PELTON_CURRENT))
        return atom_eof;
    if (part->count < part->memory.size && !enif_realloc_binary(&part->memory, part->count))
        return bytes_of(env, part->memory.data, part->count);
    part->has_memory = false;
    return enif_make_binary(env, &part->memory);
}

static ERL_NIF_TERM text_term(ErlNifEnv *env, struct request *request)
{
    request->has_text = false;
    return enif_make_tuple2(env, atom_ok, enif_make_binary(env, &request->text));
}

static ERL_NIF_TERM read_result(ErlNifEnv *env, struct request *request)
{
    if (request->fills) {
        if (request->has_text)
            return text_term(env, request);
        return request->again ? atom_ok : atom_eof;
    }
    if (request->is_list) {
        ERL_NIF_TERM list = enif_make_list(env, 0);
        for (unsigned i = request->parts_count; i-- > 0;)
            list = enif_make_list_cell(env, bytes_or_eof(env, &request->parts[i]), list);
        return enif_make_tuple2(env, atom_ok, list);
    }
    ERL_NIF_TERM bytes = bytes_or_eof(env, request->parts);
    return enif_is_identical(bytes, atom_eof) ? bytes : enif_make_tuple2(env, atom_ok, bytes);
}

/* {error, Reason}, or after Count bytes {error, {Reason, Count}}. */
static ERL_NIF_TERM transfer_error(ErlNifEnv *env, const struct request *request)
{
    const struct part *part = request->parts;
    ERL_NIF_TERM reason;
    if (part->error == ECANCELED && request->endpoint_was_closed)
        reason = atom_closed;
    else if (part->code && part->code != PELTON_SYSTEM)
        reason = atom_of_code(part->code);
    else
        reason = atom_of_errno(part->error == ECANCELED && was_closed(request) ? EINVAL : part->error);
    return error_of(env, part->count ? enif_make_tuple2(env, reason, enif_make_uint64(env, part->count)) : reason);
}

/* The result, as a term of env. caller is the environment of the calling process, NULL in the notifier thread. */
static ERL_NIF_TERM result_of(ErlNifEnv *caller, ErlNifEnv *env, struct request *request)
{
    struct part *first = request->parts;
    for (unsigned i = 0; i < request->parts_count; i++) {
        int error = request->parts[i].error;
        if (error && (request->kind == PELTON_FILE_SEND || request->kind == PELTON_FILE_RECEIVE))
            return transfer_error(env, request);
        if (error == ECANCELED && was_closed(request))
            error = EINVAL;
        if (error && !(request->kind == PELTON_FILE_CLOSE && error == EBUSY))
            return error_of(env, atom_of_errno(error));
    }
    switch (request->kind) {
    case PELTON_FILE_OPEN: return open_result(caller, env, request);
    case PELTON_FILE_READ: return read_result(env, request);
    case PELTON_FILE_SEND:
    case PELTON_FILE_RECEIVE:
    case PELTON_FILE_COPY: return enif_make_tuple2(env, atom_ok, enif_make_uint64(env, first->count));
    case PELTON_FILE_STAT:
    case PELTON_FILE_STAT_LINK: return enif_make_tuple2(env, atom_ok, stat_term(env, &request->stat));
    case PELTON_FILE_LIST:
    case PELTON_FILE_READ_LINK: return text_term(env, request);
    default: return atom_ok;
    }
}

/* ---- Completions: under the engine's lock ---- */

static void list_pending(struct request *request)
{
    struct engine *engine = request->engine;
    request->is_pending = true;
    request->next = engine->pending;
    if (request->next)
        request->next->previous = request;
    engine->pending = request;
    count_pending(request, 1);
}

/* Sends the result, and releases the request. */
static void send_result(ErlNifEnv *caller, struct request *request)
{
    if (request->is_pending) {
        request->is_pending = false;
        if (request->previous)
            request->previous->next = request->next;
        else
            request->engine->pending = request->next;
        if (request->next)
            request->next->previous = request->previous;
        count_pending(request, -1);
    }
    if (request->has_monitor)
        enif_demonitor_process(caller, request, &request->monitor);
    if (!enif_is_pid_undefined(&request->pid)) {
        ERL_NIF_TERM result = result_of(caller, request->env, request);
        ERL_NIF_TERM message = enif_make_tuple3(request->env, atom_pelton, request->ref, result);
        enif_send(caller, &request->pid, request->env, message);
    }
    enif_release_resource(request);
}

/* Before the result is sent: others may use the endpoint and the buffer again. */
static void request_completed(struct request *request)
{
    if (request->endpoint)
        request->endpoint_was_closed = endpoint_return(request->endpoint);
    request->endpoint = NULL;
    if (request->completed)
        request->completed(request);
    else if (request->file && (request->kind == PELTON_FILE_WRITE || request->kind == PELTON_FILE_RECEIVE))
        file_was_written(request->file);
    else if (request->to)
        file_was_written(request->to);
}

static void part_completed(ErlNifEnv *caller, struct engine *engine, const pelton_file_completion *completion,
                           struct request *own)
{
    struct part *part = (struct part *)(uintptr_t)completion->token;
    struct request *request = part->request;
    engine->in_flight--;
    part->count = completion->count;
    /* A read returns the bytes before an error, and the next read returns the error. After a write or a copy there is
     * no next operation. */
    if (completion->code || (completion->error && request->kind != PELTON_FILE_READ))
        part->error = completion->error ? completion->error : EIO;
    part->code = completion->code;
    if (completion->file)
        request->opened = completion->file;
    if (completion->stat && !part->error)
        request->stat = *completion->stat;
    if ((request->kind == PELTON_FILE_LIST || request->kind == PELTON_FILE_READ_LINK) && !part->error) {
        request->has_text = enif_alloc_binary(completion->text_size, &request->text);
        if (request->has_text)
            memcpy(request->text.data, completion->text, completion->text_size);
        else
            part->error = ENOMEM;
    }
    part->has_completed = true;
    if (--request->left)
        return;
    request_completed(request);
    if (request != own)
        send_result(caller, request);
}

/* Takes completions, a few batches: the descriptor remains readable while there are more. The result of `own` is left
 * to the caller. */
static void take_completions(ErlNifEnv *caller, struct engine *engine, struct request *own)
{
    pelton_file_completion completions[16];
    size_t count = 0;
    for (int batch = 0; batch < 4; batch++) {
        if (pelton_engine_completions(engine->handle, PELTON_NO_WAIT, completions, 16, &count))
            return;
        for (size_t i = 0; i < count; i++)
            part_completed(caller, engine, &completions[i], own);
        if (count < 16 && (!own || own->left == 0))
            return;
    }
}

/* Arms the engine while something is in flight. As take_completions. */
static void arm(ErlNifEnv *caller, struct engine *engine, struct request *own)
{
    for (int batch = 0; engine->in_flight && batch < 4; batch++) {
        engine->is_armed = true;
        if (pelton_engine_arm(engine->handle) != PELTON_READY)
            return;
        take_completions(caller, engine, own);
    }
    if (!engine->in_flight && engine->is_armed) {
        engine->is_armed = false;
        pelton_engine_disarm(engine->handle);
    }
}

void engine_ready(struct engine *engine)
{
    enif_mutex_lock(engine->lock);
    if (engine->handle) {
        take_completions(NULL, engine, NULL);
        /* Also with nothing in flight: arming resets the descriptor's readiness. */
        if (pelton_engine_arm(engine->handle) == PELTON_READY)
            take_completions(NULL, engine, NULL);
        engine->is_armed = engine->in_flight != 0;
        if (!engine->is_armed)
            pelton_engine_disarm(engine->handle);
    }
    enif_mutex_unlock(engine->lock);
}

/* Cancels some requests, so that the lock is free in between. Returns whether there are more. */
static bool cancel_some(struct engine *engine)
{
    unsigned left = 64;
    for (struct request *request = engine->has_cancelled ? engine->pending : NULL; request; request = request->next)
        for (unsigned i = 0; request->is_cancelled && i < request->parts_count; i++) {
            struct part *part = &request->parts[i];
            if (part->has_completed || part->is_cancelled)
                continue;
            if (!left--)
                return true;
            part->is_cancelled = true;
            pelton_engine_cancel(engine->handle, (uintptr_t)part);
        }
    return engine->has_cancelled = false;
}

/* Marks all pending requests as cancelled, or those with a closed file or endpoint. */
static void mark_cancelled(bool only_closed)
{
    for (unsigned i = 0; i < shared->engine_count; i++) {
        struct engine *engine = &shared->engines[i];
        enif_mutex_lock(engine->lock);
        for (struct request *request = engine->pending; request; request = request->next)
            if (!only_closed || was_closed(request))
                request_cancel(request);
        enif_mutex_unlock(engine->lock);
    }
}

void requests_cancel(void)
{
    if (atomic_exchange(&shared->has_closed, false))
        mark_cancelled(true);
    for (unsigned i = 0; i < shared->engine_count; i++)
        for (bool more = true; more;) {
            enif_mutex_lock(shared->engines[i].lock);
            more = cancel_some(&shared->engines[i]);
            enif_mutex_unlock(shared->engines[i].lock);
        }
}

void requests_cancel_all(void)
{
    mark_cancelled(false);
    notifier_wake();
}

/* ---- Submitting ---- */

/* Which of the engines this thread uses. */
static unsigned engine_index(void)
{
    static atomic_uint threads;
    static _Thread_local unsigned number; /* from 1 */
    if (!number)
        number = 1 + atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed);
    return (number - 1) % shared->engine_count;
}

/* This thread's engine, locked, or NULL and an errno. */
static struct engine *lock_engine(int *error)
{
    struct engine *engine = &shared->engines[engine_index()];
    enif_mutex_lock(engine->lock);
    if (engine->handle)
        return engine;
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    options.in_flight_max = IN_FLIGHT_MAX;
    *error = 0;
    if (pelton_engine_open(&options, &engine->handle)) {
        *error = errno ? errno : EMFILE;
        engine->handle = NULL;
    } else if ((*error = notifier_watch(pelton_engine_fd(engine->handle), &engine->watched))) {
        pelton_close(engine->handle);
        engine->handle = NULL;
    }
    if (!*error)
        return engine;
    enif_mutex_unlock(engine->lock);
    return NULL;
}

/* Each operation has a reference to the request until its memory is released. */
static void submit(struct engine *engine, const pelton_operation *operations, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (operations[i].release)
            enif_keep_resource(operations[i].context);
    size_t taken = 0;
    int code = pelton_engine_submit(engine->handle, operations, count, &taken);
    int error = code == PELTON_SYSTEM ? errno : EIO;
    engine->in_flight += (unsigned)taken;
    for (size_t i = taken; i < count; i++) {
        struct part *part = (struct part *)(uintptr_t)operations[i].token;
        part->code = code;
        part->error = error;
        part->has_completed = true;
        part->request->left--;
        if (operations[i].release)
            enif_release_resource(part->request);
    }
}

static void drop_unsubmitted(struct request *request)
{
    if (request->not_submitted)
        request->not_submitted(request);
    enif_release_resource(request);
}

ERL_NIF_TERM request_submit(ErlNifEnv *env, struct request *request, const pelton_operation *operations,
                            ERL_NIF_TERM ref, bool sent)
{
    int error;
    struct engine *engine = lock_engine(&error);
    if (!engine) {
        bool closes = request->kind == PELTON_FILE_CLOSE;
        drop_unsubmitted(request);
        return closes ? atom_busy : error_of(env, atom_of_errno(error));
    }
    if (engine->in_flight + request->parts_count > IN_FLIGHT_MAX) {
        enif_mutex_unlock(engine->lock);
        drop_unsubmitted(request);
        return atom_busy;
    }
    request->engine = engine;
    enif_self(env, &request->pid);
    bool is_regular_read = request->kind == PELTON_FILE_READ && request->file->is_regular;
    int64_t began_us = now_us();
    long sleeps = recent_sleeps(began_us);
    submit(engine, operations, request->parts_count);
    if (request->left == 0)
        request_completed(request);
    take_completions(env, engine, request);
    if (request->left)
        arm(env, engine, request);
    if (request->left == 0 && !sent) {
        enif_mutex_unlock(engine->lock);
        charge_us(env, now_us() - began_us);
        if (is_regular_read)
            file_learn_read_in_call(request->file, began_us, sleeps);
        ERL_NIF_TERM result = result_of(env, env, request);
        enif_release_resource(request);
        return result;
    }
    if (!request->env)
        request->env = enif_alloc_env();
    request->ref = enif_make_copy(request->env, ref);
    if (request->left == 0) {
        send_result(env, request);
    } else {
        list_pending(request);
        if (is_regular_read)
            file_read_cautiously(request->file);
        /* The file monitors its owner already, and is closed when that ends. */
        struct file *file = request->file;
        if (!file || enif_compare_pids(&file->owner, &request->pid) != 0)
            request->has_monitor = enif_monitor_process(env, request, &request->pid, &request->monitor) == 0;
        if (was_closed(request)) {
            request_cancel(request);
            notifier_wake();
        }
    }
    enif_mutex_unlock(engine->lock);
    return atom_pending;
}

enum submitted request_submit_quietly(struct request *request, const pelton_operation *operation)
{
    int error;
    struct engine *engine = lock_engine(&error);
    if (!engine)
        return NOT_ACCEPTED;
    enum submitted submitted = engine->in_flight < IN_FLIGHT_MAX ? SUBMITTED : NO_SPACE;
    if (submitted == SUBMITTED) {
        request->engine = engine;
        submit(engine, operation, 1);
        submitted = request->left ? SUBMITTED : NOT_ACCEPTED;
    }
    if (submitted == SUBMITTED) {
        list_pending(request);
        take_completions(NULL, engine, NULL);
        arm(NULL, engine, NULL);
    }
    enif_mutex_unlock(engine->lock);
    return submitted;
}

/* ---- Engines for waiting threads ---- */

static struct waiting_engine *take_waiting_engine(void)
{
    enif_mutex_lock(shared->lock);
    struct waiting_engine *engine = shared->waiting_engines;
    if (engine)
        shared->waiting_engines = engine->next;
    enif_mutex_unlock(shared->lock);
    if (engine)
        return engine;
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    options.in_flight_max = options.threads_max = 1;
    engine = enif_alloc(sizeof *engine);
    if (engine && pelton_engine_open(&options, &engine->handle)) {
        enif_free(engine);
        engine = NULL;
    }
    return engine;
}

static void put_back_waiting_engine(struct waiting_engine *engine)
{
    enif_mutex_lock(shared->lock);
    engine->next = shared->waiting_engines;
    shared->waiting_engines = engine;
    enif_mutex_unlock(shared->lock);
}

ERL_NIF_TERM request_run(ErlNifEnv *env, struct request *request, const pelton_operation *operation)
{
    struct waiting_engine *engine = take_waiting_engine();
    if (!engine) {
        enif_release_resource(request);
        return error_of(env, atom_of_errno(EMFILE));
    }
    struct part *part = request->parts;
    pelton_file_completion completion = {0};
    long sleeps = sleeps_of_this_thread();
    int code = pelton_engine_run(engine->handle, operation, PELTON_FOREVER, &completion);
    file_learn_read(request->file, sleeps_of_this_thread() != sleeps);
    part->count = completion.count;
    if (code)
        part->error = completion.error ? completion.error : EIO;
    put_back_waiting_engine(engine);
    ERL_NIF_TERM result = result_of(env, env, request);
    enif_release_resource(request);
    return result;
}

void engines_close_idle(void)
{
    for (unsigned i = 0; i < shared->engine_count; i++) {
        struct engine *engine = &shared->engines[i];
        enif_mutex_lock(engine->lock);
        if (engine->handle && engine->in_flight == 0) {
            pelton_close(engine->handle);
            engine->handle = NULL;
        }
        enif_mutex_unlock(engine->lock);
    }
    enif_mutex_lock(shared->lock);
    struct waiting_engine *waiting = shared->waiting_engines, *next;
    shared->waiting_engines = NULL;
    enif_mutex_unlock(shared->lock);
    for (; waiting; waiting = next) {
        next = waiting->next;
        pelton_close(waiting->handle);
        enif_free(waiting);
    }
}

int request_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit type = {.dtor = destroy_request, .down = waiter_is_down};
    shared->request_type = enif_open_resource_type_x(env, "pelton_file_request", &type, flags, NULL);
    if (!shared->request_type)
        return ENOMEM;
    if (shared->engines)
        return 0;
    shared->engines = enif_alloc(shared->engine_count * sizeof *shared->engines);
    if (!shared->engines)
        return ENOMEM;
    for (unsigned i = 0; i < shared->engine_count; i++) {
        shared->engines[i] = (struct engine){.watched = WATCHED_ENGINE};
        shared->engines[i].lock = enif_mutex_create("pelton_engine");
        if (!shared->engines[i].lock)
            return ENOMEM;
    }
    return 0;
}
