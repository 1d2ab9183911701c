/* pelton_file's part: engines, files, and what is asked of them.
 *
 * Each scheduler has an engine of its own, as far as threads go round. A request is submitted under the engine's lock, and what has come
 * by then is taken: its own answer is the function's result, made without a message; those of others are sent to them. Otherwise the
 * engine is armed, and the ferry sends the answer. A dirty NIF that writes has an engine of its thread's, for it waits in the system call.
 *
 * WHO FREES. A request is a resource: of its operations until each has ended and let go of its memory, and of its completion.
 * A file's handle is closed by close/1, when its owner ends, or when nobody refers to it; `users` are the functions that are at it just
 * now, and the last of them has it closed if that was asked for meanwhile. */
#include "nif.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define IN_FLIGHT_MAX 4096
#define PIECES_MAX 1024 /* IOV_MAX */
#define CLOSED (1u << 31)

struct engine {
    enum watched watched;
    ErlNifMutex *lock;
    pelton_engine *handle; /* NULL until it is needed */
    struct request *pending;
    unsigned in_flight;
    bool armed;
};

struct file {
    pelton_file *handle;
    atomic_uint users; /* and CLOSED */
    atomic_flag claimed;
    atomic_int pending; /* requests */
    bool is_regular;
    bool has_owner;
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct file *next, *previous; /* all->files */
};

struct waiting_engine {
    pelton_engine *handle;
    struct waiting_engine *next;
};

struct doomed_file {
    pelton_file *handle;
    struct doomed_file *next;
};

struct part {
    struct request *request;
    ErlNifBinary memory; /* what is read */
    bool has_memory;
    bool has_ended;
    int error;
    uint64_t wanted, count;
    uint64_t offset;
    struct iovec piece;
    struct iovec *pieces;
    size_t pieces_count;
};

struct request {
    struct engine *engine;
    struct request *next, *previous; /* engine->pending */
    struct file *file, *to;
    uint32_t kind;
    bool is_list;
    bool is_pending;
    bool has_monitor;
    bool may_be_directory;
    ErlNifPid pid; /* undefined: nobody is told */
    ErlNifMonitor monitor;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    unsigned left; /* parts that have not ended */
    pelton_file *opened;
    pelton_stat stat;
    ErlNifBinary text;
    bool has_text;
    unsigned parts_count;
    struct part parts[];
};

/* ---- Files: who uses them, and their end ---- */

static void doom(pelton_file *handle)
{
    struct doomed_file *doomed = enif_alloc(sizeof *doomed);
    doomed->handle = handle;
    enif_mutex_lock(all->lock);
    doomed->next = all->doomed_files;
    all->doomed_files = doomed;
    enif_mutex_unlock(all->lock);
    ferry_wake();
}

/* The handle, to whoever is to close it: to one only. */
static pelton_file *claim(struct file *file)
{
    return atomic_flag_test_and_set(&file->claimed) ? NULL : file->handle;
}

static void leave_file(struct file *file)
{
    if (atomic_fetch_sub(&file->users, 1) == (CLOSED | 1)) {
        pelton_file *handle = claim(file);
        if (handle)
            doom(handle);
    }
}

static bool enter_file(struct file *file)
{
    if (!(atomic_fetch_add(&file->users, 1) & CLOSED))
        return true;
    leave_file(file);
    return false;
}

static void unlist(struct file *file)
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

/* Cancels what is in flight of a file, or of all. */
static void cancel_requests_of(struct file *file)
{
    for (unsigned i = 0; i < all->engine_count; i++) {
        struct engine *engine = &all->engines[i];
        enif_mutex_lock(engine->lock);
        for (struct request *request = engine->pending; request; request = request->next) {
            if (file && request->file != file && request->to != file)
                continue;
            for (unsigned part = 0; part < request->parts_count; part++)
                if (!request->parts[part].has_ended)
                    pelton_file_cancel(engine->handle, (uintptr_t)&request->parts[part]);
        }
        enif_mutex_unlock(engine->lock);
    }
}

/* The handle, if it is to be closed now; NULL if that is done already, or by the last of those that are at it. */
static pelton_file *end_file(struct file *file, bool *was_open)
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
    if (!handle)
        return;
    if (all->ferry_runs)
        doom(handle);
    else
        pelton_close(handle);
}

static void owner_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct file *file = object;
    bool was_open;
    pelton_file *handle = end_file(file, &was_open);
    if (was_open && atomic_load(&file->pending))
        cancel_requests_of(file);
    if (handle)
        doom(handle);
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
    for (unsigned i = 0; request->is_pending && i < request->parts_count; i++)
        if (!request->parts[i].has_ended)
            pelton_file_cancel(engine->handle, (uintptr_t)&request->parts[i]);
    enif_mutex_unlock(engine->lock);
}

static void part_is_released(void *context)
{
    enif_release_resource(context);
}

static struct request *request_of(uint32_t kind, unsigned parts, struct file *file, struct file *to)
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
    if (part->count < part->memory.size && !enif_realloc_binary(&part->memory, part->count))
        return atom_enomem;
    part->has_memory = false;
    return enif_make_binary(env, &part->memory);
}

/* What came of it, as a term of env; told is the environment of the caller, NULL of the ferry. */
static ERL_NIF_TERM build(ErlNifEnv *told, ErlNifEnv *env, struct request *request)
{
    struct part *first = request->parts;
    for (unsigned i = 0; i < request->parts_count; i++) {
        int error = request->parts[i].error;
        /* A file that was closed meanwhile. */
        if (error == ECANCELED && request->file && atomic_load(&request->file->users) & CLOSED)
            error = EINVAL;
        if (error && !(request->kind == PELTON_FILE_CLOSE && error == EBUSY))
            return error_of(env, atom_of_errno(error));
    }
    switch (request->kind) {
    case PELTON_FILE_OPEN: return build_open(told, env, request);
    case PELTON_FILE_READ:
        if (request->is_list) {
            ERL_NIF_TERM list = enif_make_list(env, 0);
            for (unsigned i = request->parts_count; i-- > 0;)
                list = enif_make_list_cell(env, build_bytes(env, &request->parts[i]), list);
            return enif_make_tuple2(env, atom_ok, list);
        } else {
            ERL_NIF_TERM bytes = build_bytes(env, first);
            return enif_is_identical(bytes, atom_eof) ? bytes : enif_make_tuple2(env, atom_ok, bytes);
        }
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
        if (request->file)
            atomic_fetch_sub(&request->file->pending, 1);
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

static pelton_operation operation_of(struct part *part, uint32_t kind)
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
        part->error = error;
        part->has_ended = true;
        part->request->left--;
        if (operations[i].release)
            enif_release_resource(part->request);
    }
}

static void part_has_ended(ErlNifEnv *told, struct engine *engine, const pelton_file_completion *completion, struct request *own)
{
    struct part *part = (struct part *)(uintptr_t)completion->token;
    struct request *request = part->request;
    engine->in_flight--;
    part->count = completion->count;
    /* What was read before an error is answered; the next read tells that. */
    if (completion->code || (completion->error && request->kind == PELTON_FILE_WRITE))
        part->error = completion->error ? completion->error : EIO;
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
    if (--request->left == 0 && request != own)
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

/* Has the ferry told of what comes. Under the lock. */
static void arm(ErlNifEnv *told, struct engine *engine)
{
    for (int turn = 0; engine->in_flight && turn < 4; turn++) {
        engine->armed = true;
        if (pelton_arm(engine->handle) != PELTON_OK)
            return;
        take_answers(told, engine, NULL);
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

/* Asks. Answers the result, if it is there at once and `sends` is not wanted; else `pending`, and it is sent to who calls; or `full`: nothing
 * was asked. Takes over the request. */
static ERL_NIF_TERM ask(ErlNifEnv *env, struct request *request, const pelton_operation *operations, ERL_NIF_TERM ref, bool sends)
{
    int error;
    struct file *file = request->file;
    struct engine *engine = engine_of_this_thread(&error);
    if (!engine) {
        bool closes = request->kind == PELTON_FILE_CLOSE;
        enif_release_resource(request);
        return closes ? atom_full : error_of(env, atom_of_errno(error));
    }
    if (engine->in_flight + request->parts_count > IN_FLIGHT_MAX) {
        enif_mutex_unlock(engine->lock);
        enif_release_resource(request);
        return atom_full;
    }
    request->engine = engine;
    enif_self(env, &request->pid);
    submit(engine, operations, request->parts_count);
    take_answers(env, engine, request);
    if (request->left == 0 && !sends) {
        enif_mutex_unlock(engine->lock);
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
        request->is_pending = true;
        request->next = engine->pending;
        if (request->next)
            request->next->previous = request;
        engine->pending = request;
        if (file)
            atomic_fetch_add(&file->pending, 1);
        /* The end of a file's owner is known already, and closes it. */
        if (!file || enif_compare_pids(&file->owner, &request->pid) != 0)
            request->has_monitor = enif_monitor_process(env, request, &request->pid, &request->monitor) == 0;
        /* It was closed meanwhile, and whoever did that may have looked before. */
        if (file && atomic_load(&file->users) & CLOSED)
            for (unsigned i = 0; i < request->parts_count; i++)
                if (!request->parts[i].has_ended)
                    pelton_file_cancel(engine->handle, (uintptr_t)&request->parts[i]);
        arm(env, engine);
    }
    enif_mutex_unlock(engine->lock);
    return atom_pending;
}

/* Closes by an engine, for that may wait; nobody is told. False: there is no room for now. */
static bool close_quietly(pelton_file *handle)
{
    int error;
    struct engine *engine = engine_of_this_thread(&error);
    if (!engine) {
        pelton_close(handle);
        return true;
    }
    bool has_room = engine->in_flight < IN_FLIGHT_MAX;
    if (has_room) {
        struct request *request = request_of(PELTON_FILE_CLOSE, 1, NULL, NULL);
        request->engine = engine;
        pelton_operation operation = operation_of(request->parts, PELTON_FILE_CLOSE);
        operation.file = handle;
        submit(engine, &operation, 1);
        if (request->left == 0) {
            enif_release_resource(request);
            pelton_close(handle);
        }
        take_answers(NULL, engine, NULL);
        arm(NULL, engine);
    }
    enif_mutex_unlock(engine->lock);
    return has_room;
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
        if (!all->ferry_runs) {
            pelton_close(doomed->handle);
        } else if (!close_quietly(doomed->handle)) {
            enif_mutex_lock(all->lock);
            doomed->next = all->doomed_files;
            all->doomed_files = doomed;
            enif_mutex_unlock(all->lock);
            return;
        }
        enif_free(doomed);
    }
}

void files_end(bool for_good)
{
    enif_mutex_lock(all->lock);
    for (struct file *file = all->files, *next; file; file = next) {
        next = file->next;
        file->next = file->previous = NULL;
        bool was_open;
        pelton_file *handle = end_file(file, &was_open);
        struct doomed_file *doomed = handle ? enif_alloc(sizeof *doomed) : NULL;
        if (doomed) {
            *doomed = (struct doomed_file){handle, all->doomed_files};
            all->doomed_files = doomed;
        }
    }
    all->files = NULL;
    enif_mutex_unlock(all->lock);
    cancel_requests_of(NULL);
    ferry_wake();
    for (unsigned i = 0; i < all->engine_count; i++) {
        struct engine *engine = &all->engines[i];
        for (bool again = true; again;) {
            again = false;
            enif_mutex_lock(engine->lock);
            if (engine->handle && engine->in_flight == 0) {
                pelton_close(engine->handle);
                engine->handle = NULL;
            } else {
                again = for_good && engine->handle;
            }
            enif_mutex_unlock(engine->lock);
            if (again)
                usleep(1000);
        }
        if (for_good)
            enif_mutex_destroy(engine->lock);
    }
    while (for_good && all->waiting_engines) {
        struct waiting_engine *engine = all->waiting_engines;
        all->waiting_engines = engine->next;
        pelton_close(engine->handle);
        enif_free(engine);
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
    for (unsigned i = 0; i < all->engine_count; i++) {
        all->engines[i] = (struct engine){.watched = WATCHED_ENGINE};
        all->engines[i].lock = enif_mutex_create("pelton_engine");
        if (!all->engines[i].lock)
            return ENOMEM;
    }
    return 0;
}

/* ---- The functions ---- */

/* Enters the file that is the first argument; NULL: it is closed, and the result says so. */
static struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
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

/* A path: a binary that ends with a zero, and has no other. */
static const char *path_at(ErlNifEnv *env, ERL_NIF_TERM term)
{
    ErlNifBinary path;
    return enif_inspect_binary(env, term, &path) && path.size && strlen((char *)path.data) + 1 == path.size ? (char *)path.data : NULL;
}

/* An offset, or the atom `undefined`: the file's own position. */
static bool offset_at(ErlNifEnv *env, ERL_NIF_TERM term, uint64_t *offset)
{
    if (enif_is_identical(term, atom_undefined)) {
        *offset = PELTON_CURRENT;
        return true;
    }
    return enif_get_uint64(env, term, offset) && *offset <= INT64_MAX;
}

/* file_open(Path, Flags, MayBeDirectory, Ref) */
NIF(file_open)
{
    (void)argc;
    unsigned flags;
    const char *path = path_at(env, argv[0]);
    if (!path || !enif_get_uint(env, argv[1], &flags))
        return enif_make_badarg(env);
    struct request *request = request_of(PELTON_FILE_OPEN, 1, NULL, NULL);
    request->may_be_directory = enif_is_identical(argv[2], atom_true);
    pelton_operation operation = operation_of(request->parts, PELTON_FILE_OPEN);
    operation.path = path;
    operation.open_flags = ((flags & 3) == 3 ? O_RDWR : (flags & 2) ? O_WRONLY : O_RDONLY) | (flags & 4 ? O_CREAT : 0) |
        (flags & 8 ? O_TRUNC : 0) | (flags & 16 ? O_EXCL : 0) | (flags & 32 ? O_APPEND : 0) | (flags & 64 ? O_SYNC : 0) |
        (flags & 128 ? O_DIRECTORY : 0) | O_CLOEXEC;
    operation.mode = 0666;
    return ask(env, request, &operation, argv[3], false);
}

/* file_close(File, Ref) */
NIF(file_close)
{
    (void)argc;
    void *object;
    if (!enif_get_resource(env, argv[0], all->file_type, &object))
        return enif_make_badarg(env);
    struct file *file = object;
    bool was_open;
    pelton_file *handle = end_file(file, &was_open);
    if (!was_open)
        return error_of(env, atom_einval);
    unlist(file);
    if (file->has_owner)
        enif_demonitor_process(env, file, &file->monitor);
    if (atomic_load(&file->pending))
        cancel_requests_of(file);
    /* Another process is at it: the last closes it. */
    if (!handle)
        return atom_ok;
    struct request *request = request_of(PELTON_FILE_CLOSE, 1, NULL, NULL);
    pelton_operation operation = operation_of(request->parts, PELTON_FILE_CLOSE);
    operation.file = handle;
    ERL_NIF_TERM result = ask(env, request, &operation, argv[1], false);
    if (!enif_is_identical(result, atom_full))
        return result;
    doom(handle);
    return atom_ok;
}

static bool memory_for(struct part *part, uint64_t size)
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

/* file_pread(File, Offset, Size, Ref, Sends) */
NIF(file_pread)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, size;
    if (!offset_at(env, argv[1], &offset) || !enif_get_uint64(env, argv[2], &size))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct request *request = request_of(PELTON_FILE_READ, 1, file, NULL);
    request->parts->offset = offset;
    if (memory_for(request->parts, size)) {
        pelton_operation operation = operation_of(request->parts, PELTON_FILE_READ);
        result = ask(env, request, &operation, argv[3], enif_is_identical(argv[4], atom_true));
    } else {
        enif_release_resource(request);
        result = error_of(env, atom_enomem);
    }
    leave_file(file);
    return result;
}

/* file_pread_list(File, [{Offset, Size}], Ref, Sends): at most 256 of them */
NIF(file_pread_list)
{
    (void)argc;
    ERL_NIF_TERM result, head, tail = argv[1];
    unsigned count;
    if (!enif_get_list_length(env, argv[1], &count) || count == 0 || count > 256)
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct request *request = request_of(PELTON_FILE_READ, count, file, NULL);
    request->is_list = true;
    pelton_operation operations[256];
    result = 0;
    for (unsigned i = 0; !result && enif_get_list_cell(env, tail, &head, &tail); i++) {
        const ERL_NIF_TERM *pair;
        int arity;
        uint64_t size;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !offset_at(env, pair[0], &request->parts[i].offset) ||
            !enif_get_uint64(env, pair[1], &size))
            result = enif_make_badarg(env);
        else if (!memory_for(&request->parts[i], size))
            result = error_of(env, atom_enomem);
        else
            operations[i] = operation_of(&request->parts[i], PELTON_FILE_READ);
    }
    if (result)
        enif_release_resource(request);
    else
        result = ask(env, request, operations, argv[2], enif_is_identical(argv[3], atom_true));
    leave_file(file);
    return result;
}

static uint64_t bytes_of(const ErlNifIOVec *pieces)
{
    uint64_t bytes = 0;
    for (int i = 0; i < pieces->iovcnt; i++)
        bytes += pieces->iov[i].iov_len;
    return bytes;
}

/* file_pwrite(File, Offset, Binaries, Ref, Sends): at most 1024 of them */
NIF(file_pwrite)
{
    (void)argc;
    ERL_NIF_TERM result, tail;
    uint64_t offset;
    if (!offset_at(env, argv[1], &offset))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct request *request = request_of(PELTON_FILE_WRITE, 1, file, NULL);
    struct part *part = request->parts;
    /* The binaries stay as long as the environment. */
    request->env = enif_alloc_env();
    ErlNifIOVec *pieces = NULL;
    if (!enif_inspect_iovec(request->env, PIECES_MAX, enif_make_copy(request->env, argv[2]), &tail, &pieces) ||
        !enif_is_empty_list(request->env, tail)) {
        enif_release_resource(request);
        result = enif_make_badarg(env);
    } else {
        part->offset = offset;
        part->wanted = bytes_of(pieces);
        part->pieces = (struct iovec *)pieces->iov;
        part->pieces_count = pieces->iovcnt;
        pelton_operation operation = operation_of(part, PELTON_FILE_WRITE);
        result = ask(env, request, &operation, argv[3], enif_is_identical(argv[4], atom_true));
    }
    leave_file(file);
    return result;
}

/* The engine of a thread that waits in what it does: nobody else's, until all is unloaded. */
static pelton_engine *waiting_engine(void)
{
    static _Thread_local struct {
        struct everything *of;
        pelton_engine *handle;
    } mine;
    if (mine.of == all)
        return mine.handle;
    pelton_options options = PELTON_OPTIONS_INIT;
    options.in_flight = options.threads = 1;
    struct waiting_engine *engine = enif_alloc(sizeof *engine);
    if (pelton_engine_open(&options, &engine->handle)) {
        enif_free(engine);
        return NULL;
    }
    enif_mutex_lock(all->lock);
    engine->next = all->waiting_engines;
    all->waiting_engines = engine;
    enif_mutex_unlock(all->lock);
    mine.of = all;
    return mine.handle = engine->handle;
}

static int write_pieces(pelton_engine *engine, struct file *file, uint64_t offset, const ErlNifIOVec *pieces)
{
    pelton_operation operation = {.kind = PELTON_FILE_WRITE, .file = file->handle, .memory = (const struct iovec *)pieces->iov,
                                  .memory_count = (size_t)pieces->iovcnt, .offset = offset};
    pelton_file_completion completion = {0};
    int code = pelton_file_run(engine, &operation, PELTON_FOREVER, &completion);
    return completion.error ? completion.error : code ? EIO : 0;
}

/* file_write_now(File, Offset, Binaries), or (File, list, [{Offset, Binaries}]): ok, or {error, Reason}, of a list {error, {Done, Reason}}; or `stream`:
 * it is nothing that can be done now. Waits in the system call, on a dirty scheduler. */
NIF(file_write_now)
{
    (void)argc;
    ERL_NIF_TERM result, head, tail = argv[2];
    uint64_t offset = 0;
    bool is_list = enif_is_identical(argv[1], enif_make_atom(env, "list"));
    if (!is_list && !offset_at(env, argv[1], &offset))
        return enif_make_badarg(env);
    pelton_engine *engine = waiting_engine();
    if (!engine)
        return error_of(env, atom_of_errno(EMFILE));
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
    result = 0;
    if (is_list) {
        for (; !error && enif_get_list_cell(env, tail, &head, &tail); done += !error) {
            const ERL_NIF_TERM *pair;
            int arity;
            ErlNifIOVec *pieces = NULL;
            ERL_NIF_TERM rest;
            if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !offset_at(env, pair[0], &offset)) {
                result = enif_make_badarg(env);
                break;
            }
            for (rest = pair[1]; !error && !enif_is_empty_list(env, rest);) {
                pieces = NULL;
                if (!enif_inspect_iovec(env, PIECES_MAX, rest, &rest, &pieces)) {
                    result = enif_make_badarg(env);
                    break;
                }
                uint64_t bytes = bytes_of(pieces);
                error = write_pieces(engine, file, offset, pieces);
                if (offset != PELTON_CURRENT)
                    offset += bytes;
            }
            if (result)
                break;
        }
    } else {
        while (!error && !enif_is_empty_list(env, tail)) {
            ErlNifIOVec *pieces = NULL;
            if (!enif_inspect_iovec(env, PIECES_MAX, tail, &tail, &pieces)) {
                result = enif_make_badarg(env);
                break;
            }
            uint64_t bytes = bytes_of(pieces);
            error = write_pieces(engine, file, offset, pieces);
            if (offset != PELTON_CURRENT)
                offset += bytes;
        }
    }
    leave_file(file);
    if (result)
        return result;
    if (!error)
        return atom_ok;
    ERL_NIF_TERM reason = atom_of_errno(error);
    return error_of(env, is_list ? enif_make_tuple2(env, enif_make_uint(env, done), reason) : reason);
}

/* file_seek(File, Offset, Whence): 0 the beginning, 1 the position, 2 the end */
NIF(file_seek)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifSInt64 offset;
    int whence;
    if (!enif_get_int64(env, argv[1], &offset) || !enif_get_int(env, argv[2], &whence))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    off_t found = lseek(pelton_fd(file->handle), offset, whence == 0 ? SEEK_SET : whence == 1 ? SEEK_CUR : SEEK_END);
    result = found < 0 ? error_of(env, atom_of_errno(errno)) : enif_make_tuple2(env, atom_ok, enif_make_uint64(env, (uint64_t)found));
    leave_file(file);
    return result;
}

static ERL_NIF_TERM said(ErlNifEnv *env, struct file *file, int error)
{
    leave_file(file);
    return error ? error_of(env, atom_of_errno(error)) : atom_ok;
}

/* file_truncate(File): at its position */
NIF(file_truncate)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    int fd = pelton_fd(file->handle);
    off_t position = lseek(fd, 0, SEEK_CUR);
    return said(env, file, position < 0 || ftruncate(fd, position) ? errno : 0);
}

/* file_advise(File, Offset, Size, Advice) */
NIF(file_advise)
{
    (void)argc;
    ERL_NIF_TERM result;
    static const int advices[] = {POSIX_FADV_NORMAL, POSIX_FADV_SEQUENTIAL, POSIX_FADV_RANDOM, POSIX_FADV_NOREUSE, POSIX_FADV_WILLNEED,
                                  POSIX_FADV_DONTNEED};
    ErlNifSInt64 offset, size;
    unsigned advice;
    if (!enif_get_int64(env, argv[1], &offset) || !enif_get_int64(env, argv[2], &size) || !enif_get_uint(env, argv[3], &advice) ||
        advice > 5)
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    return file ? said(env, file, posix_fadvise(pelton_fd(file->handle), offset, size, advices[advice])) : result;
}

/* file_allocate(File, Offset, Size) */
NIF(file_allocate)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifSInt64 offset, size;
    if (!enif_get_int64(env, argv[1], &offset) || !enif_get_int64(env, argv[2], &size))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    return file ? said(env, file, fallocate(pelton_fd(file->handle), 0, offset, size) ? errno : 0) : result;
}

/* file_do(Kind, File, Ref, Sends): sync, datasync, list */
NIF(file_do)
{
    (void)argc;
    static const uint32_t kinds[] = {PELTON_FILE_SYNC, PELTON_FILE_SYNC_DATA, PELTON_FILE_LIST};
    ERL_NIF_TERM result;
    unsigned kind;
    if (!enif_get_uint(env, argv[0], &kind) || kind > 2)
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[1], &result);
    if (!file)
        return result;
    struct request *request = request_of(kinds[kind], 1, file, NULL);
    pelton_operation operation = operation_of(request->parts, kinds[kind]);
    result = ask(env, request, &operation, argv[2], enif_is_identical(argv[3], atom_true));
    leave_file(file);
    return result;
}

/* file_copy(From, FromOffset, To, ToOffset, Bytes, Ref) */
NIF(file_copy)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, offset_to, bytes;
    if (!offset_at(env, argv[1], &offset) || !offset_at(env, argv[3], &offset_to) || !enif_get_uint64(env, argv[4], &bytes))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct file *to = file_at(env, argv[2], &result);
    if (to) {
        struct request *request = request_of(PELTON_FILE_COPY, 1, file, to);
        pelton_operation operation = operation_of(request->parts, PELTON_FILE_COPY);
        operation.offset = offset;
        operation.offset_to = offset_to;
        operation.bytes = bytes;
        result = ask(env, request, &operation, argv[5], false);
        leave_file(to);
    }
    leave_file(file);
    return result;
}

/* path_do(Kind, Path, Other, Accessed, Modified, Ref): Other is a path or `undefined`, times are nanoseconds or `undefined` */
NIF(path_do)
{
    (void)argc;
    static const uint32_t kinds[] = {PELTON_FILE_STAT, PELTON_FILE_STAT_LINK, PELTON_FILE_SET_TIMES, PELTON_FILE_UNLINK, PELTON_FILE_REMOVE_DIRECTORY,
                                     PELTON_FILE_RENAME, PELTON_FILE_LINK, PELTON_FILE_SYMLINK, PELTON_FILE_READ_LINK,
                                     PELTON_FILE_MAKE_DIRECTORY};
    unsigned kind;
    const char *path = path_at(env, argv[1]), *other = path_at(env, argv[2]);
    if (!enif_get_uint(env, argv[0], &kind) || kind > 9 || !path || (!other && !enif_is_identical(argv[2], atom_undefined)))
        return enif_make_badarg(env);
    struct request *request = request_of(kinds[kind], 1, NULL, NULL);
    pelton_operation operation = operation_of(request->parts, kinds[kind]);
    operation.path = path;
    operation.path_to = other;
    operation.mode = 0777;
    ErlNifSInt64 accessed, modified;
    operation.accessed_ns = enif_get_int64(env, argv[3], &accessed) ? accessed : PELTON_UNCHANGED;
    operation.modified_ns = enif_get_int64(env, argv[4], &modified) ? modified : PELTON_UNCHANGED;
    return ask(env, request, &operation, argv[5], false);
}
