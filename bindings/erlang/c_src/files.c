/* pelton_file's part: engines, files, and what is asked of them.
 *
 * Each scheduler has an engine of its own, as far as threads go round. A request is submitted under the engine's lock, and what has come
 * by then is taken: its own answer is the function's result, made without a message; those of others are sent to them. Otherwise the
 * engine is armed, and the ferry sends the answer. A dirty NIF that reads has an engine of its thread's, for it waits in the system call. What needs no
 * engine at all is in at_once.c.
 *
 * WHO FREES. A request is a resource: of its operations until each has ended and let go of its memory, and of its completion.
 * A file's handle is closed by close/1, when its owner ends, or when nobody refers to it; `users` are the functions that are at it just
 * now, and the last of them has it closed if that was asked for meanwhile. */
#include "files.h"
#include <sys/stat.h>
#include <time.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* What the page cache has takes less, and waits for nothing. After a read that did not come from there, so many that did are as well done on a dirty
 * scheduler: even those that the kernel has read ahead begin the next, and that may wait in the disk's queue for tens of milliseconds. */
#define SLOW_US 500
#define WARY_MAX 64

/* ---- Files: who uses them, and their end ---- */

/* Under all->lock. */
static void list_as_doomed(struct doomed_file *doomed)
{
    doomed->next = all->doomed_files;
    all->doomed_files = doomed;
}

/* For the list. What is counted is so before the file is forgotten. Under all->lock, or its caller adds it to the list right away. */
static struct doomed_file *doomed_of(struct file *file, pelton_file *handle)
{
    struct doomed_file *doomed = enif_alloc(sizeof *doomed);
    if (!doomed)
        return NULL;
    *doomed = (struct doomed_file){.handle = handle};
    if (file && (doomed->kept = take_kept(file, &doomed->memory)))
        doomed->goes_on = file->is_regular;
    return doomed;
}

void doom_file(struct file *file, pelton_file *handle)
{
    struct doomed_file *doomed = doomed_of(file, handle);
    if (!doomed) {
        pelton_close(handle);
        return;
    }
    enif_mutex_lock(all->lock);
    all->flushes += doomed->goes_on;
    list_as_doomed(doomed);
    enif_mutex_unlock(all->lock);
    ferry_wake();
}

void doom(pelton_file *handle)
{
    doom_file(NULL, handle);
}

/* The handle, to whoever is to close it: to one only. */
static pelton_file *claim(struct file *file)
{
    return atomic_flag_test_and_set(&file->claimed) ? NULL : file->handle;
}

void leave_file(struct file *file)
{
    if (atomic_fetch_sub(&file->users, 1) == (CLOSED | 1)) {
        pelton_file *handle = claim(file);
        if (handle)
            doom_file(file, handle);
    }
}

bool enter_file(struct file *file)
{
    if (!(atomic_fetch_add(&file->users, 1) & CLOSED))
        return true;
    leave_file(file);
    return false;
}

void unlist(struct file *file)
{
    enif_mutex_lock(all->lock);
    if (file->previous)
        file->previous->next = file->next;
    else if (all->files == file)
        all->files = file->next;
    if (file->next)
        file->next->previous = file->previous;
    file->next = file->previous = NULL;
    enif_mutex_unlock(all->lock);
}

/* Cancelling goes through all that an engine has in flight: that is the ferry's. Under the engine's lock. */
static void give_up(struct request *request)
{
    if (request->goes_on)
        return;
    request->is_given_up = true;
    request->engine->gives_up = true;
}

void give_up_requests_of(struct file *file, struct end *end)
{
    for (unsigned i = 0; i < all->engine_count; i++) {
        struct engine *engine = &all->engines[i];
        enif_mutex_lock(engine->lock);
        for (struct request *request = engine->pending; request; request = request->next)
            if ((!file && !end) || (file && (request->file == file || request->to == file)) || (end && request->end == end))
                give_up(request);
        enif_mutex_unlock(engine->lock);
    }
    ferry_wake();
}

/* A turn's worth of what is given up; whether there is more. Under the lock. */
static bool cancel_some(struct engine *engine)
{
    unsigned left = 64;
    for (struct request *request = engine->gives_up ? engine->pending : NULL; request; request = request->next)
        for (unsigned i = 0; request->is_given_up && i < request->parts_count; i++) {
            struct part *part = &request->parts[i];
            if (part->has_ended || part->is_cancelled)
                continue;
            if (!left--)
                return true;
            part->is_cancelled = true;
            pelton_file_cancel(engine->handle, (uintptr_t)part);
        }
    return engine->gives_up = false;
}

void files_cancel(void)
{
    for (unsigned i = 0; i < all->engine_count; i++)
        for (bool more = true; more;) {
            enif_mutex_lock(all->engines[i].lock);
            more = cancel_some(&all->engines[i]);
            enif_mutex_unlock(all->engines[i].lock);
        }
}

pelton_file *end_file(struct file *file, bool *was_open)
{
    unsigned found = atomic_fetch_or(&file->users, CLOSED);
    *was_open = !(found & CLOSED);
    return !*was_open || found != 0 ? NULL : claim(file);
}

static void file_dies(ErlNifEnv *env, void *object)
{
    (void)env;
    struct file *file = object;
    unlist(file);
    bool was_open;
    pelton_file *handle = end_file(file, &was_open);
    if (handle)
        doom_file(file, handle);
    free_buffer(file->buffer);
}

static void owner_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct file *file = object;
    bool was_open;
    pelton_file *handle = end_file(file, &was_open);
    if (was_open && atomic_load(&file->pending))
        give_up_requests_of(file, NULL);
    if (handle)
        doom_file(file, handle);
    is_never_due(file);
}

/* ---- Requests ---- */

static void request_dies(ErlNifEnv *env, void *object)
{
    (void)env;
    struct request *request = object;
    for (unsigned i = 0; i < request->parts_count; i++)
        if (request->parts[i].has_memory)
            enif_release_binary(&request->parts[i].memory);
    if (request->has_text)
        enif_release_binary(&request->text);
    if (request->opened)
        doom(request->opened);
    free_buffer(request->buffer);
    if (request->end)
        take_back(request->end);
    if (request->env)
        enif_free_env(request->env);
    if (request->file)
        enif_release_resource(request->file);
    if (request->to)
        enif_release_resource(request->to);
}

/* Who asked has ended: what nobody else waits for is given up. */
static void asker_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct request *request = object;
    struct engine *engine = request->engine;
    enif_mutex_lock(engine->lock);
    if (request->is_pending)
        give_up(request);
    enif_mutex_unlock(engine->lock);
    ferry_wake();
}

static void part_is_released(void *context)
{
    enif_release_resource(context);
}

struct request *request_of(uint32_t kind, unsigned parts, struct file *file, struct file *to)
{
    size_t size = sizeof(struct request) + parts * sizeof(struct part);
    struct request *request = enif_alloc_resource(all->request_type, size);
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

static ERL_NIF_TERM build_open(ErlNifEnv *told, ErlNifEnv *env, struct request *request)
{
    struct stat found;
    /* Of a file that was just opened; it says what is known already. */
    if (fstat(pelton_fd(request->opened), &found))
        return error_of(env, atom_of_errno(errno));
    if (S_ISDIR(found.st_mode) && !request->may_be_directory)
        return error_of(env, atom_of_errno(EISDIR));
    struct file *file = enif_alloc_resource(all->file_type, sizeof *file);
    memset(file, 0, sizeof *file);
    atomic_flag_clear(&file->claimed);
    file->handle = request->opened;
    request->opened = NULL;
    file->is_regular = S_ISREG(found.st_mode);
    /* Nothing is known of it. */
    atomic_store(&file->wary, 1);
    file->buffer = request->buffer;
    request->buffer = NULL;
    if (file->buffer)
        file->buffer->has_position = lseek(pelton_fd(file->handle), 0, SEEK_CUR) >= 0;
    file->owner = request->pid;
    file->has_owner = true;
    enif_mutex_lock(all->lock);
    file->next = all->files;
    if (file->next)
        file->next->previous = file;
    all->files = file;
    enif_mutex_unlock(all->lock);
    ERL_NIF_TERM term = enif_make_resource(env, file);
    bool was_open;
    /* Ended meanwhile. */
    if (enif_monitor_process(told, file, &file->owner, &file->monitor)) {
        pelton_file *handle = end_file(file, &was_open);
        if (handle)
            doom(handle);
    }
    enif_release_resource(file);
    return enif_make_tuple3(env, atom_ok, term, enif_make_uint64(env, (uint64_t)found.st_size));
}

/* What this process may do with it, by its bits: the file system may say otherwise when it is asked. */
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

static ERL_NIF_TERM build_stat(ErlNifEnv *env, const pelton_stat *stat)
{
    static const struct {
        unsigned bits;
        ERL_NIF_TERM *type;
    } kinds[] = {{0, &atom_other}, {S_IFREG, &atom_regular}, {S_IFDIR, &atom_directory}, {S_IFLNK, &atom_symlink}, {S_IFIFO, &atom_other},
                 {S_IFSOCK, &atom_other}, {S_IFCHR, &atom_device}, {S_IFBLK, &atom_device}};
    unsigned kind = stat->kind < sizeof kinds / sizeof *kinds ? stat->kind : 0;
    /* Rounded down, as the system's own seconds are. */
    int64_t seconds[3] = {stat->accessed_ns, stat->modified_ns, stat->changed_ns};
    ERL_NIF_TERM times[3];
    for (int i = 0; i < 3; i++) {
        int64_t ns = seconds[i] % 1000000000;
        times[i] = enif_make_int64(env, seconds[i] / 1000000000 - (ns < 0));
    }
    return enif_make_tuple(env, 12, *kinds[kind].type, enif_make_uint64(env, stat->bytes), access_of(stat), times[0], times[1], times[2],
        enif_make_uint(env, stat->mode | kinds[kind].bits), enif_make_uint64(env, stat->links),
        enif_make_uint64(env, makedev(stat->device_major, stat->device_minor)), enif_make_uint64(env, stat->inode),
        enif_make_uint(env, stat->uid), enif_make_uint(env, stat->gid));
}

/* The bytes that were read, or eof; no bytes, where none are wanted, are no end only at the file's position: as `file` has it. */
static ERL_NIF_TERM build_bytes(ErlNifEnv *env, struct part *part)
{
    if (part->count == 0 && (part->wanted != 0 || part->offset != PELTON_CURRENT))
        return atom_eof;
    if (part->count < part->memory.size && !enif_realloc_binary(&part->memory, part->count)) {
        ERL_NIF_TERM bytes;
        memcpy(enif_make_new_binary(env, part->count, &bytes), part->memory.data, part->count);
        return bytes;
    }
    part->has_memory = false;
    return enif_make_binary(env, &part->memory);
}

/* A file of its was closed meanwhile. */
static bool was_closed(struct request *request)
{
    return (request->file && atomic_load(&request->file->users) & CLOSED) || (request->to && atomic_load(&request->to->users) & CLOSED);
}

static void count_pending(struct request *request, int change)
{
    if (request->file)
        atomic_fetch_add(&request->file->pending, change);
    if (request->to)
        atomic_fetch_add(&request->to->pending, change);
}

/* {error, Reason}, or {error, {Count, Reason}} after so many bytes. */
static ERL_NIF_TERM build_cut_short(ErlNifEnv *env, struct request *request)
{
    struct part *part = request->parts;
    ERL_NIF_TERM reason;
    if (part->error == ECANCELED && request->end_is_closed)
        reason = atom_closed;
    else if (part->code && part->code != PELTON_SYSTEM)
        reason = atom_of_code(env, part->code);
    else
        reason = atom_of_errno(part->error == ECANCELED && was_closed(request) ? EINVAL : part->error);
    return error_of(env, part->count ? enif_make_tuple2(env, enif_make_uint64(env, part->count), reason) : reason);
}

/* What came of it, as a term of env; told is the environment of the caller, NULL of the ferry. */
static ERL_NIF_TERM build(ErlNifEnv *told, ErlNifEnv *env, struct request *request)
{
    struct part *first = request->parts;
    for (unsigned i = 0; i < request->parts_count; i++) {
        int error = request->parts[i].error;
        if (error && (request->kind == PELTON_FILE_SEND || request->kind == PELTON_FILE_RECEIVE))
            return build_cut_short(env, request);
        if (error == ECANCELED && was_closed(request))
            error = EINVAL;
        if (error && !(request->kind == PELTON_FILE_CLOSE && error == EBUSY))
            return error_of(env, atom_of_errno(error));
    }
    switch (request->kind) {
    case PELTON_FILE_OPEN: return build_open(told, env, request);
    case PELTON_FILE_READ:
        if (request->fills) {
            bool has_text = request->has_text;
            request->has_text = false;
            if (has_text)
                return enif_make_tuple2(env, atom_ok, enif_make_binary(env, &request->text));
            return request->again ? atom_ok : atom_eof;
        } else if (request->is_list) {
            ERL_NIF_TERM list = enif_make_list(env, 0);
            for (unsigned i = request->parts_count; i-- > 0;)
                list = enif_make_list_cell(env, build_bytes(env, &request->parts[i]), list);
            return enif_make_tuple2(env, atom_ok, list);
        } else {
            ERL_NIF_TERM bytes = build_bytes(env, first);
            return enif_is_identical(bytes, atom_eof) ? bytes : enif_make_tuple2(env, atom_ok, bytes);
        }
    case PELTON_FILE_SEND:
    case PELTON_FILE_RECEIVE:
    case PELTON_FILE_COPY: return enif_make_tuple2(env, atom_ok, enif_make_uint64(env, first->count));
    case PELTON_FILE_STAT:
    case PELTON_FILE_STAT_LINK: return enif_make_tuple2(env, atom_ok, build_stat(env, &request->stat));
    case PELTON_FILE_LIST:
    case PELTON_FILE_READ_LINK:
        request->has_text = false;
        return enif_make_tuple2(env, atom_ok, enif_make_binary(env, &request->text));
    default: return atom_ok;
    }
}

/* Sends what came of it, and forgets it. Under the engine's lock. */
static void deliver(ErlNifEnv *told, struct request *request)
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
        enif_demonitor_process(told, request, &request->monitor);
    if (!enif_is_pid_undefined(&request->pid)) {
        ERL_NIF_TERM result = build(told, request->env, request);
        ERL_NIF_TERM message = enif_make_tuple3(request->env, atom_pelton, request->ref, result);
        enif_send(told, &request->pid, request->env, message);
    }
    enif_release_resource(request);
}

pelton_operation operation_of(struct part *part, uint32_t kind)
{
    pelton_operation operation;
    memset(&operation, 0, sizeof operation);
    operation.token = (uintptr_t)part;
    operation.kind = kind;
    /* Of others it is not called. */
    if (kind == PELTON_FILE_READ || kind == PELTON_FILE_WRITE)
        operation.release = part_is_released;
    operation.context = part->request;
    if (part->request->file)
        operation.file = part->request->file->handle;
    if (part->request->to)
        operation.to = part->request->to->handle;
    operation.memory = part->pieces;
    operation.memory_count = part->pieces_count;
    operation.offset = part->offset;
    return operation;
}

/* Submits what is given, of which each operation keeps the request until its memory is let go of. Under the lock. */
static void submit(struct engine *engine, const pelton_operation *operations, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (operations[i].release)
            enif_keep_resource(operations[i].context);
    size_t taken = 0;
    int code = pelton_file_submit(engine->handle, operations, count, &taken);
    int error = code == PELTON_SYSTEM ? errno : EIO;
    engine->in_flight += (unsigned)taken;
    for (size_t i = taken; i < count; i++) {
        struct part *part = (struct part *)(uintptr_t)operations[i].token;
        part->code = code;
        part->error = error;
        part->has_ended = true;
        part->request->left--;
        if (operations[i].release)
            enif_release_resource(part->request);
    }
}

/* Of what it has, what others wait for is back before it is told. */
static void has_ended(struct request *request)
{
    if (request->end)
        request->end_is_closed = take_back(request->end);
    request->end = NULL;
    buffered_has_ended(request);
}

static void part_has_ended(ErlNifEnv *told, struct engine *engine, const pelton_file_completion *completion, struct request *own)
{
    struct part *part = (struct part *)(uintptr_t)completion->token;
    struct request *request = part->request;
    engine->in_flight--;
    part->count = completion->count;
    /* What was read before an error is answered; the next read tells that. Nothing is asked after a write or a copy. */
    if (completion->code || (completion->error && request->kind != PELTON_FILE_READ))
        part->error = completion->error ? completion->error : EIO;
    part->code = completion->code;
    if (completion->file)
        request->opened = completion->file;
    if (completion->stat && !part->error)
        request->stat = *completion->stat;
    if ((request->kind == PELTON_FILE_LIST || request->kind == PELTON_FILE_READ_LINK) && !part->error) {
        if (enif_alloc_binary(completion->text_size, &request->text)) {
            memcpy(request->text.data, completion->text, completion->text_size);
            request->has_text = true;
        } else {
            part->error = ENOMEM;
        }
    }
    part->has_ended = true;
    if (--request->left)
        return;
    has_ended(request);
    if (request != own)
        deliver(told, request);
}

/* Takes what has come: an answer of its own is left to the caller. Under the lock. */
static void take_answers(ErlNifEnv *told, struct engine *engine, struct request *own)
{
    pelton_file_completion completions[16];
    size_t count = 0;
    /* Often enough for one turn: the descriptor stays readable while there is more. */
    for (int turn = 0; turn < 4; turn++) {
        if (pelton_file_completions(engine->handle, PELTON_NO_WAIT, completions, 16, &count))
            return;
        for (size_t i = 0; i < count; i++)
            part_has_ended(told, engine, &completions[i], own);
        if (count < 16 && (!own || own->left == 0))
            return;
    }
}

/* Has the ferry told of what comes; an answer of its own is left to the caller. Under the lock. */
static void arm(ErlNifEnv *told, struct engine *engine, struct request *own)
{
    for (int turn = 0; engine->in_flight && turn < 4; turn++) {
        engine->armed = true;
        if (pelton_arm(engine->handle) != PELTON_OK)
            return;
        take_answers(told, engine, own);
    }
    if (!engine->in_flight && engine->armed) {
        engine->armed = false;
        pelton_disarm(engine->handle);
    }
}

void files_ready(enum watched *watched)
{
    struct engine *engine = (struct engine *)watched;
    enif_mutex_lock(engine->lock);
    if (engine->handle) {
        take_answers(NULL, engine, NULL);
        /* Also where nothing is in flight any more: it takes back what made the descriptor readable. */
        if (pelton_arm(engine->handle) == PELTON_OK)
            take_answers(NULL, engine, NULL);
        engine->armed = engine->in_flight != 0;
        if (!engine->armed)
            pelton_disarm(engine->handle);
    }
    enif_mutex_unlock(engine->lock);
}

/* An engine whose lock is held, or NULL and an errno. */
static struct engine *engine_of_this_thread(int *error)
{
    struct engine *engine = &all->engines[slot_of_this_thread(all->engine_count)];
    enif_mutex_lock(engine->lock);
    if (engine->handle)
        return engine;
    pelton_options options = PELTON_OPTIONS_INIT;
    options.in_flight = IN_FLIGHT_MAX;
    *error = 0;
    if (pelton_engine_open(&options, &engine->handle)) {
        *error = errno ? errno : EMFILE;
        engine->handle = NULL;
    } else if ((*error = ferry_watch(pelton_fd(engine->handle), &engine->watched))) {
        pelton_close(engine->handle);
        engine->handle = NULL;
    }
    if (!*error)
        return engine;
    enif_mutex_unlock(engine->lock);
    return NULL;
}

int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t learn_of_read(struct file *file, int64_t began_us, bool has_waited)
{
    int wary = atomic_load_explicit(&file->wary, memory_order_relaxed);
    int64_t took_us = now_us() - began_us;
    if (has_waited || took_us > SLOW_US)
        atomic_store_explicit(&file->wary, WARY_MAX, memory_order_relaxed);
    else if (wary > 0)
        atomic_store_explicit(&file->wary, wary - 1, memory_order_relaxed);
    return took_us;
}

ERL_NIF_TERM result_of_run(ErlNifEnv *env, struct request *request, const pelton_file_completion *completion)
{
    struct part *part = request->parts;
    part->count = completion->count;
    if (completion->code)
        part->error = completion->error ? completion->error : EIO;
    ERL_NIF_TERM result = build(env, env, request);
    enif_release_resource(request);
    return result;
}

static void list_as_pending(struct request *request)
{
    struct engine *engine = request->engine;
    request->is_pending = true;
    request->next = engine->pending;
    if (request->next)
        request->next->previous = request;
    engine->pending = request;
    count_pending(request, 1);
}

ERL_NIF_TERM ask(ErlNifEnv *env, struct request *request, const pelton_operation *operations, ERL_NIF_TERM ref, bool sends)
{
    int error;
    struct engine *engine = engine_of_this_thread(&error);
    if (!engine) {
        bool closes = request->kind == PELTON_FILE_CLOSE;
        buffered_was_not_asked(request);
        enif_release_resource(request);
        return closes ? atom_full : error_of(env, atom_of_errno(error));
    }
    if (engine->in_flight + request->parts_count > IN_FLIGHT_MAX) {
        enif_mutex_unlock(engine->lock);
        buffered_was_not_asked(request);
        enif_release_resource(request);
        return atom_full;
    }
    request->engine = engine;
    enif_self(env, &request->pid);
    int64_t began_us = now_us();
    submit(engine, operations, request->parts_count);
    if (request->left == 0)
        has_ended(request);
    take_answers(env, engine, request);
    if (request->left)
        arm(env, engine, request);
    if (request->left == 0 && !sends) {
        enif_mutex_unlock(engine->lock);
        /* Twice what it took: as much goes into its memory, and collecting that. */
        int64_t percent = (now_us() - began_us) / 5;
        if (percent)
            enif_consume_timeslice(env, percent > 100 ? 100 : (int)percent);
        if (request->kind == PELTON_FILE_READ && request->file->is_regular)
            learn_of_read(request->file, began_us, false);
        ERL_NIF_TERM result = build(env, env, request);
        enif_release_resource(request);
        return result;
    }
    if (!request->env)
        request->env = enif_alloc_env();
    request->ref = enif_make_copy(request->env, ref);
    if (request->left == 0) {
        deliver(env, request);
    } else {
        list_as_pending(request);
        if (request->kind == PELTON_FILE_READ && request->file->is_regular)
            atomic_store_explicit(&request->file->wary, WARY_MAX, memory_order_relaxed);
        /* The end of a file's owner is known already, and closes it. */
        struct file *file = request->file;
        if (!file || enif_compare_pids(&file->owner, &request->pid) != 0)
            request->has_monitor = enif_monitor_process(env, request, &request->pid, &request->monitor) == 0;
        /* Whoever closed it may have looked before. */
        if (was_closed(request)) {
            give_up(request);
            ferry_wake();
        }
    }
    enif_mutex_unlock(engine->lock);
    return atom_pending;
}

enum asked ask_quietly(struct request *request, const pelton_operation *operation)
{
    int error;
    struct engine *engine = engine_of_this_thread(&error);
    if (!engine)
        return NOT_TAKEN;
    enum asked asked = engine->in_flight < IN_FLIGHT_MAX ? ASKED : NO_ROOM;
    if (asked == ASKED) {
        request->engine = engine;
        submit(engine, operation, 1);
        asked = request->left ? ASKED : NOT_TAKEN;
    }
    if (asked == ASKED) {
        list_as_pending(request);
        take_answers(NULL, engine, NULL);
        arm(NULL, engine, NULL);
    }
    enif_mutex_unlock(engine->lock);
    return asked;
}

/* Writes what was kept, and then comes again; or closes: by an engine, for both may wait. False: there is no room for now. */
static bool close_quietly(struct doomed_file *doomed)
{
    struct request *request = request_of(doomed->kept ? PELTON_FILE_WRITE : PELTON_FILE_CLOSE, 1, NULL, NULL);
    struct part *part = request->parts;
    if (doomed->kept) {
        part->memory = doomed->memory;
        part->has_memory = true;
        part->piece = (struct iovec){part->memory.data, doomed->kept};
        part->pieces = &part->piece;
        part->pieces_count = 1;
        part->offset = PELTON_CURRENT;
        request->goes_on = doomed->goes_on;
        request->opened = doomed->handle;
    }
    pelton_operation operation = operation_of(part, request->kind);
    operation.file = doomed->handle;
    enum asked asked = ask_quietly(request, &operation);
    if (asked == ASKED)
        return true;
    part->has_memory = asked == NOT_TAKEN && doomed->kept;
    request->opened = NULL;
    if (asked == NOT_TAKEN) {
        /* There is no engine to be had: here and now, so that there is one again. */
        ssize_t written = doomed->kept ? write(pelton_fd(doomed->handle), doomed->memory.data, doomed->kept) : 0;
        (void)written;
        pelton_close(doomed->handle);
        if (doomed->goes_on)
            flush_has_ended();
    }
    enif_release_resource(request);
    return asked == NOT_TAKEN;
}

void files_bury(void)
{
    for (;;) {
        enif_mutex_lock(all->lock);
        struct doomed_file *doomed = all->doomed_files;
        if (doomed)
            all->doomed_files = doomed->next;
        enif_mutex_unlock(all->lock);
        if (!doomed)
            return;
        if (!close_quietly(doomed)) {
            enif_mutex_lock(all->lock);
            list_as_doomed(doomed);
            enif_mutex_unlock(all->lock);
            return;
        }
        enif_free(doomed);
    }
}

struct waiting_engine *take_waiting_engine(void)
{
    enif_mutex_lock(all->lock);
    struct waiting_engine *engine = all->waiting_engines;
    if (engine)
        all->waiting_engines = engine->next;
    enif_mutex_unlock(all->lock);
    if (engine)
        return engine;
    pelton_options options = PELTON_OPTIONS_INIT;
    options.in_flight = options.threads = 1;
    engine = enif_alloc(sizeof *engine);
    if (engine && pelton_engine_open(&options, &engine->handle)) {
        enif_free(engine);
        engine = NULL;
    }
    return engine;
}

void give_back(struct waiting_engine *engine)
{
    enif_mutex_lock(all->lock);
    engine->next = all->waiting_engines;
    all->waiting_engines = engine;
    enif_mutex_unlock(all->lock);
}

void files_end(void)
{
    enif_mutex_lock(all->lock);
    for (struct file *file = all->files, *next; file; file = next) {
        next = file->next;
        file->next = file->previous = NULL;
        bool was_open;
        pelton_file *handle = end_file(file, &was_open);
        struct doomed_file *doomed = handle ? doomed_of(file, handle) : NULL;
        if (doomed) {
            all->flushes += doomed->goes_on;
            list_as_doomed(doomed);
        }
    }
    all->files = NULL;
    struct waiting_engine *waiting = all->waiting_engines;
    all->waiting_engines = NULL;
    enif_mutex_unlock(all->lock);
    give_up_requests_of(NULL, NULL);
    forget_what_is_due();
    enif_mutex_lock(all->lock);
    while (all->flushes)
        enif_cond_wait(all->flushed, all->lock);
    enif_mutex_unlock(all->lock);
    for (unsigned i = 0; i < all->engine_count; i++) {
        struct engine *engine = &all->engines[i];
        enif_mutex_lock(engine->lock);
        if (engine->handle && engine->in_flight == 0) {
            pelton_close(engine->handle);
            engine->handle = NULL;
        }
        enif_mutex_unlock(engine->lock);
    }
    for (struct waiting_engine *next; waiting; waiting = next) {
        next = waiting->next;
        pelton_close(waiting->handle);
        enif_free(waiting);
    }
}

int files_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit file = {.dtor = file_dies, .down = owner_is_down};
    ErlNifResourceTypeInit request = {.dtor = request_dies, .down = asker_is_down};
    all->file_type = enif_open_resource_type_x(env, "pelton_file", &file, flags, NULL);
    all->request_type = enif_open_resource_type_x(env, "pelton_file_request", &request, flags, NULL);
    if (!all->file_type || !all->request_type)
        return ENOMEM;
    if (all->engines)
        return 0;
    all->engines = enif_alloc(all->engine_count * sizeof *all->engines);
    if (!all->engines)
        return ENOMEM;
    for (unsigned i = 0; i < all->engine_count; i++) {
        all->engines[i] = (struct engine){.watched = WATCHED_ENGINE};
        all->engines[i].lock = enif_mutex_create("pelton_engine");
        if (!all->engines[i].lock)
            return ENOMEM;
    }
    return 0;
}

struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    struct file *file = entered(env, term, result);
    if (file)
        atomic_store_explicit(&file->is_at_end, false, memory_order_relaxed);
    return file;
}

struct file *entered(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    void *object;
    if (!enif_get_resource(env, term, all->file_type, &object)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    if (enter_file(object))
        return object;
    *result = error_of(env, atom_einval);
    return NULL;
}
