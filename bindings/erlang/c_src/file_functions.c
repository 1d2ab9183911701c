/* What pelton_file asks of files.c, and of the system at once. */
#include "files.h"
#include <fcntl.h>
#include <unistd.h>

/* A path: a binary that ends with a zero, and has no other. */
static const char *path_at(ErlNifEnv *env, ERL_NIF_TERM term)
{
    ErlNifBinary path;
    return enif_inspect_binary(env, term, &path) && path.size && strlen((char *)path.data) + 1 == path.size ? (char *)path.data : NULL;
}

bool offset_at(ErlNifEnv *env, ERL_NIF_TERM term, uint64_t *offset)
{
    if (enif_is_identical(term, atom_undefined)) {
        *offset = PELTON_CURRENT;
        return true;
    }
    return enif_get_uint64(env, term, offset) && *offset <= INT64_MAX;
}

/* file_open(Path, Flags, MayBeDirectory, {WriteMax, Delay, AheadMax}, Ref): zeros where nothing is kept */
NIF(file_open)
{
    (void)argc;
    unsigned flags;
    const char *path = path_at(env, argv[0]);
    const ERL_NIF_TERM *sizes;
    uint64_t write_max, delay, ahead_max;
    int arity;
    if (!path || !enif_get_uint(env, argv[1], &flags) || !enif_get_tuple(env, argv[3], &arity, &sizes) || arity != 3 ||
        !enif_get_uint64(env, sizes[0], &write_max) || !enif_get_uint64(env, sizes[1], &delay) || !enif_get_uint64(env, sizes[2], &ahead_max))
        return enif_make_badarg(env);
    struct request *request = request_of(PELTON_FILE_OPEN, 1, NULL, NULL);
    if ((write_max || ahead_max) && !(request->buffer = buffer_of(write_max, delay, ahead_max))) {
        enif_release_resource(request);
        return error_of(env, atom_enomem);
    }
    request->may_be_directory = enif_is_identical(argv[2], atom_true);
    pelton_operation operation = operation_of(request->parts, PELTON_FILE_OPEN);
    operation.path = path;
    operation.open_flags = ((flags & 3) == 3 ? O_RDWR : (flags & 2) ? O_WRONLY : O_RDONLY) | (flags & 4 ? O_CREAT : 0) |
        (flags & 8 ? O_TRUNC : 0) | (flags & 16 ? O_EXCL : 0) | (flags & 32 ? O_APPEND : 0) | (flags & 64 ? O_SYNC : 0) |
        (flags & 128 ? O_DIRECTORY : 0) | O_CLOEXEC;
    operation.mode = 0666;
    return ask(env, request, &operation, argv[4], false);
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
        give_up_requests_of(file, NULL);
    is_never_due(file);
    /* Another process is at it: the last closes it. */
    if (!handle)
        return atom_ok;
    /* Written since who closes had it flushed. */
    if (file->buffer && file->buffer->kept) {
        doom_file(file, handle);
        return atom_ok;
    }
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

/* file_read_waiting(File, Offset, Size): {ok, Bytes} or eof. Waits in the system call, on a dirty scheduler. */
NIF(file_read_waiting)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, size;
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct waiting_engine *engine = take_waiting_engine();
    struct request *request = request_of(PELTON_FILE_READ, 1, file, NULL);
    if (!engine || !offset_at(env, argv[1], &offset) || !enif_get_uint64(env, argv[2], &size) || !memory_for(request->parts, size)) {
        enif_release_resource(request);
        result = error_of(env, engine ? atom_enomem : atom_of_errno(EMFILE));
    } else {
        request->parts->offset = offset;
        pelton_operation operation = operation_of(request->parts, PELTON_FILE_READ);
        operation.release = NULL;
        pelton_file_completion completion = {0};
        long waits = waits_of_this_thread();
        int64_t began_us = now_us();
        int code = pelton_file_run(engine->handle, &operation, PELTON_FOREVER, &completion);
        completion.code = code;
        learn_of_read(file, began_us, waits_of_this_thread() != waits);
        result = result_of_run(env, request, &completion);
    }
    if (engine)
        give_back(engine);
    leave_file(file);
    return result;
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

uint64_t bytes_of_pieces(const ErlNifIOVec *pieces)
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
        part->wanted = bytes_of_pieces(pieces);
        part->pieces = (struct iovec *)pieces->iov;
        part->pieces_count = pieces->iovcnt;
        pelton_operation operation = operation_of(part, PELTON_FILE_WRITE);
        result = ask(env, request, &operation, argv[3], enif_is_identical(argv[4], atom_true));
    }
    leave_file(file);
    return result;
}

/* file_seek(File, Offset, Whence): 0 the beginning, 1 the position, 2 the end; or `full`: something else is at its position */
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
    if (!begin_move(file)) {
        leave_file(file);
        return atom_full;
    }
    off_t found = lseek(pelton_fd(file->handle), offset, whence == 0 ? SEEK_SET : whence == 1 ? SEEK_CUR : SEEK_END);
    result = found < 0 ? error_of(env, atom_of_errno(errno)) : enif_make_tuple2(env, atom_ok, enif_make_uint64(env, (uint64_t)found));
    end_move(file);
    leave_file(file);
    return result;
}

static ERL_NIF_TERM said(ErlNifEnv *env, struct file *file, int error)
{
    leave_file(file);
    return error ? error_of(env, atom_of_errno(error)) : atom_ok;
}

/* file_truncate(File): at its position; or `full` */
NIF(file_truncate)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    if (!begin_move(file)) {
        leave_file(file);
        return atom_full;
    }
    int fd = pelton_fd(file->handle);
    off_t position = lseek(fd, 0, SEEK_CUR);
    int error = position < 0 || ftruncate(fd, position) ? errno : 0;
    end_move(file);
    return said(env, file, error);
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

/* file_do(Kind, File, Ref, Sends): sync, datasync, list, stat */
NIF(file_do)
{
    (void)argc;
    static const uint32_t kinds[] = {PELTON_FILE_SYNC, PELTON_FILE_SYNC_DATA, PELTON_FILE_LIST, PELTON_FILE_STAT};
    ERL_NIF_TERM result;
    unsigned kind;
    if (!enif_get_uint(env, argv[0], &kind) || kind > 3)
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

/* file_pump(IsReceive, File, Offset, Bytes, End, MessageBytes, Ref) */
NIF(file_pump)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, bytes, message_bytes;
    bool receives = enif_is_identical(argv[0], atom_true);
    if (!offset_at(env, argv[2], &offset) || !enif_get_uint64(env, argv[3], &bytes) || !enif_get_uint64(env, argv[5], &message_bytes))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[1], &result);
    if (!file)
        return result;
    struct end *end;
    void *channel = lend(env, argv[4], receives, &end, &result);
    if (channel) {
        struct request *request = request_of(receives ? PELTON_FILE_RECEIVE : PELTON_FILE_SEND, 1, file, NULL);
        request->end = end;
        pelton_operation operation = operation_of(request->parts, request->kind);
        operation.offset = offset;
        operation.bytes = bytes;
        operation.channel = channel;
        operation.message_bytes = message_bytes;
        result = ask(env, request, &operation, argv[6], false);
    }
    leave_file(file);
    return result;
}

/* Nanoseconds, or the atom `undefined`: as it is. */
static bool time_at(ErlNifEnv *env, ERL_NIF_TERM term, int64_t *time)
{
    ErlNifSInt64 found = PELTON_UNCHANGED;
    bool is_time = enif_is_identical(term, atom_undefined) || enif_get_int64(env, term, &found);
    *time = found;
    return is_time;
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
    int64_t accessed, modified;
    if (!enif_get_uint(env, argv[0], &kind) || kind > 9 || !path || (!other && !enif_is_identical(argv[2], atom_undefined)) ||
        !time_at(env, argv[3], &accessed) || !time_at(env, argv[4], &modified))
        return enif_make_badarg(env);
    struct request *request = request_of(kinds[kind], 1, NULL, NULL);
    pelton_operation operation = operation_of(request->parts, kinds[kind]);
    operation.path = path;
    operation.path_to = other;
    operation.mode = 0777;
    operation.accessed_ns = accessed;
    operation.modified_ns = modified;
    return ask(env, request, &operation, argv[5], false);
}
