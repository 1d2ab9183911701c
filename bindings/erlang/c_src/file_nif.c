/* The functions of pelton_file, without those of fast_io.c and buffered_io.c. */
#include "functions.h"
#include "request.h"
#include <fcntl.h>
#include <unistd.h>

/* A path: a binary whose only zero is its last byte. Otherwise NULL. */
static const char *path_at(ErlNifEnv *env, ERL_NIF_TERM term)
{
    ErlNifBinary path;
    bool is_path = enif_inspect_binary(env, term, &path) && path.size && strlen((char *)path.data) + 1 == path.size;
    return is_path ? (char *)path.data : NULL;
}

/* The bits of file_open's flags, as in src/pelton_file.erl. */
static uint32_t open_flags(unsigned flags)
{
    static const int others[] = {O_CREAT, O_TRUNC, O_EXCL, O_APPEND, O_SYNC, O_DIRECTORY};
    int found = (flags & 3) == 3 ? O_RDWR : flags & 2 ? O_WRONLY : O_RDONLY;
    for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
        if (flags & 4u << i)
            found |= others[i];
    return (uint32_t)found | O_CLOEXEC;
}

/* file_open(Path, Flags, MayBeDirectory, {WrittenMax, DelayMs, AheadMax}, Ref): zeros for no buffer */
NIF(file_open)
{
    (void)argc;
    unsigned flags;
    const char *path = path_at(env, argv[0]);
    const ERL_NIF_TERM *sizes;
    uint64_t written_max, delay_ms, ahead_max;
    int arity;
    if (!path || !enif_get_uint(env, argv[1], &flags) || !enif_get_tuple(env, argv[3], &arity, &sizes) || arity != 3 ||
        !enif_get_uint64(env, sizes[0], &written_max) || !enif_get_uint64(env, sizes[1], &delay_ms) ||
        !enif_get_uint64(env, sizes[2], &ahead_max))
        return enif_make_badarg(env);
    struct request *request = request_create(PELTON_FILE_OPEN, 1, NULL, NULL);
    if ((written_max || ahead_max) && !(request->buffer = buffer_create(written_max, delay_ms, ahead_max))) {
        enif_release_resource(request);
        return error_of(env, atom_enomem);
    }
    request->may_be_directory = enif_is_identical(argv[2], atom_true);
    pelton_operation operation = part_operation(request->parts);
    operation.path = path;
    operation.open_flags = open_flags(flags);
    operation.mode = 0666;
    return request_submit(env, request, &operation, argv[4], false);
}

/* file_close(File, Ref) */
NIF(file_close)
{
    (void)argc;
    void *object;
    if (!enif_get_resource(env, argv[0], shared->file_type, &object))
        return enif_make_badarg(env);
    struct file *file = object;
    bool was_open;
    pelton_file *handle = file_close_handle(file, &was_open);
    if (!was_open)
        return error_of(env, atom_einval);
    file_unlist(file);
    enif_demonitor_process(env, file, &file->monitor);
    file_forget_delayed(file);
    /* Another process uses it: the last one closes it. */
    if (!handle)
        return atom_ok;
    /* Written since the closing process had it flushed. */
    if (file->buffer && file->buffer->written_size) {
        file_defer_close(file, handle);
        return atom_ok;
    }
    struct request *request = request_create(PELTON_FILE_CLOSE, 1, NULL, NULL);
    pelton_operation operation = part_operation(request->parts);
    operation.file = handle;
    ERL_NIF_TERM result = request_submit(env, request, &operation, argv[1], false);
    if (!enif_is_identical(result, atom_busy))
        return result;
    file_defer_close(NULL, handle);
    return atom_ok;
}

/* file_pread(File, Offset, Size, Ref, IsSent): IsSent: as a message in any case, here and below */
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
    struct request *request = request_create(PELTON_FILE_READ, 1, file, NULL);
    request->parts->offset = offset;
    if (part_allocate(request->parts, size)) {
        pelton_operation operation = part_operation(request->parts);
        result = request_submit(env, request, &operation, argv[3], enif_is_identical(argv[4], atom_true));
    } else {
        enif_release_resource(request);
        result = error_of(env, atom_enomem);
    }
    file_leave(file);
    return result;
}

/* file_pread_list(File, [{Offset, Size}], Ref, IsSent): at most 256 of them */
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
    struct request *request = request_create(PELTON_FILE_READ, count, file, NULL);
    request->is_list = true;
    pelton_operation operations[256];
    result = 0;
    for (unsigned i = 0; !result && enif_get_list_cell(env, tail, &head, &tail); i++) {
        const ERL_NIF_TERM *pair;
        int arity;
        uint64_t size;
        struct part *part = &request->parts[i];
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !offset_at(env, pair[0], &part->offset) ||
            !enif_get_uint64(env, pair[1], &size))
            result = enif_make_badarg(env);
        else if (!part_allocate(part, size))
            result = error_of(env, atom_enomem);
        else
            operations[i] = part_operation(part);
    }
    if (result)
        enif_release_resource(request);
    else
        result = request_submit(env, request, operations, argv[2], enif_is_identical(argv[3], atom_true));
    file_leave(file);
    return result;
}

/* file_pwrite(File, Offset, Binaries, Ref, IsSent): at most 1024 of them */
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
    struct request *request = request_create(PELTON_FILE_WRITE, 1, file, NULL);
    struct part *part = request->parts;
    /* The environment keeps the binaries. */
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
        pelton_operation operation = part_operation(part);
        result = request_submit(env, request, &operation, argv[3], enif_is_identical(argv[4], atom_true));
    }
    file_leave(file);
    return result;
}

/* file_seek(File, Offset, Whence): 0 the beginning, 1 the position, 2 the end; or `busy`: another operation uses the
 * position */
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
    if (!file_begin_move(file)) {
        file_leave(file);
        return atom_busy;
    }
    int from = whence == 0 ? SEEK_SET : whence == 1 ? SEEK_CUR : SEEK_END;
    off_t found = lseek(file->fd, offset, from);
    if (found < 0)
        result = error_of(env, atom_of_errno(errno));
    else
        result = enif_make_tuple2(env, atom_ok, enif_make_uint64(env, (uint64_t)found));
    file_end_move(file);
    file_leave(file);
    return result;
}

static ERL_NIF_TERM leave_with(ErlNifEnv *env, struct file *file, int error)
{
    file_leave(file);
    return error ? error_of(env, atom_of_errno(error)) : atom_ok;
}

/* file_truncate(File): at its position; or `busy` */
NIF(file_truncate)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    if (!file_begin_move(file)) {
        file_leave(file);
        return atom_busy;
    }
    int fd = file->fd;
    off_t position = lseek(fd, 0, SEEK_CUR);
    int error = position < 0 || ftruncate(fd, position) ? errno : 0;
    file_end_move(file);
    return leave_with(env, file, error);
}

/* file_advise(File, Offset, Size, Advice) */
NIF(file_advise)
{
    (void)argc;
    ERL_NIF_TERM result;
    static const int advices[] = {POSIX_FADV_NORMAL,  POSIX_FADV_SEQUENTIAL, POSIX_FADV_RANDOM,
                                  POSIX_FADV_NOREUSE, POSIX_FADV_WILLNEED,   POSIX_FADV_DONTNEED};
    ErlNifSInt64 offset, size;
    unsigned advice;
    if (!enif_get_int64(env, argv[1], &offset) || !enif_get_int64(env, argv[2], &size) ||
        !enif_get_uint(env, argv[3], &advice) || advice > 5)
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    return leave_with(env, file, posix_fadvise(file->fd, offset, size, advices[advice]));
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
    if (!file)
        return result;
    return leave_with(env, file, fallocate(file->fd, 0, offset, size) ? errno : 0);
}

/* file_do(Kind, File, Ref, IsSent): sync, datasync, list, stat */
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
    struct request *request = request_create(kinds[kind], 1, file, NULL);
    pelton_operation operation = part_operation(request->parts);
    result = request_submit(env, request, &operation, argv[2], enif_is_identical(argv[3], atom_true));
    file_leave(file);
    return result;
}

/* file_copy(From, FromOffset, To, ToOffset, Bytes, Ref) */
NIF(file_copy)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, offset_to, bytes;
    if (!offset_at(env, argv[1], &offset) || !offset_at(env, argv[3], &offset_to) ||
        !enif_get_uint64(env, argv[4], &bytes))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[0], &result);
    if (!file)
        return result;
    struct file *to = file_at(env, argv[2], &result);
    if (to) {
        struct request *request = request_create(PELTON_FILE_COPY, 1, file, to);
        pelton_operation operation = part_operation(request->parts);
        operation.offset = offset;
        operation.offset_to = offset_to;
        operation.bytes = bytes;
        result = request_submit(env, request, &operation, argv[5], false);
        file_leave(to);
    }
    file_leave(file);
    return result;
}

/* file_transfer(IsReceive, File, Offset, Bytes, Endpoint, MessageBytes, Ref) */
NIF(file_transfer)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t offset, bytes, message_bytes;
    bool receives = enif_is_identical(argv[0], atom_true);
    if (!offset_at(env, argv[2], &offset) || !enif_get_uint64(env, argv[3], &bytes) ||
        !enif_get_uint64(env, argv[5], &message_bytes))
        return enif_make_badarg(env);
    struct file *file = file_at(env, argv[1], &result);
    if (!file)
        return result;
    struct endpoint *endpoint = endpoint_give_to_operation(env, argv[4], 1u << (receives ? RECEIVER : SENDER), &result);
    if (endpoint) {
        struct request *request = request_create(receives ? PELTON_FILE_RECEIVE : PELTON_FILE_SEND, 1, file, NULL);
        request->endpoint = endpoint;
        pelton_operation operation = part_operation(request->parts);
        operation.offset = offset;
        operation.bytes = bytes;
        if (receives)
            operation.receiver = endpoint->handle.receiver;
        else
            operation.sender = endpoint->handle.sender;
        operation.message_bytes = message_bytes;
        result = request_submit(env, request, &operation, argv[6], false);
    }
    file_leave(file);
    return result;
}

/* Nanoseconds, or PELTON_UNCHANGED for `undefined`. */
static bool time_at(ErlNifEnv *env, ERL_NIF_TERM term, int64_t *time)
{
    ErlNifSInt64 found = PELTON_UNCHANGED;
    bool is_time = enif_is_identical(term, atom_undefined) || enif_get_int64(env, term, &found);
    *time = found;
    return is_time;
}

/* path_do(Kind, Path, Other, Accessed, Modified, Ref): Other is a path or `undefined`, times are nanoseconds or
 * `undefined` */
NIF(path_do)
{
    (void)argc;
    static const uint32_t kinds[] = {PELTON_FILE_STAT,   PELTON_FILE_STAT_LINK,        PELTON_FILE_SET_TIMES,
                                     PELTON_FILE_UNLINK, PELTON_FILE_REMOVE_DIRECTORY, PELTON_FILE_RENAME,
                                     PELTON_FILE_LINK,   PELTON_FILE_SYMLINK,          PELTON_FILE_READ_LINK,
                                     PELTON_FILE_MAKE_DIRECTORY};
    unsigned kind;
    const char *path = path_at(env, argv[1]), *other = path_at(env, argv[2]);
    int64_t accessed, modified;
    bool has_paths = path && (other || enif_is_identical(argv[2], atom_undefined));
    if (!enif_get_uint(env, argv[0], &kind) || kind > 9 || !has_paths || !time_at(env, argv[3], &accessed) ||
        !time_at(env, argv[4], &modified))
        return enif_make_badarg(env);
    struct request *request = request_create(kinds[kind], 1, NULL, NULL);
    pelton_operation operation = part_operation(request->parts);
    operation.path = path;
    operation.path_to = other;
    operation.mode = 0777;
    operation.accessed_ns = accessed;
    operation.modified_ns = modified;
    return request_submit(env, request, &operation, argv[5], false);
}
