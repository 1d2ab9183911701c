/* Reads and writes through a file's buffer: delayed_write and read_ahead.
 *
 * Bytes that are in the buffer, or fit into it, are copied in the call, under the buffer's lock. Otherwise one
 * operation at a time uses the file's position: a flush, which writes the delayed bytes, a fill, which reads, or a
 * move. Callers that come meanwhile get `busy`, and try again. A pipe has no position: a flush and a fill of it run
 * side by side.
 *
 * A flush is a request of the process that writes, or of the notifier thread when it is due. It is one of the file's
 * users, so a close comes after it, and has the notifier thread write what was delayed meanwhile. A flush to a
 * regular file is never cancelled. */
#include "functions.h"
#include "request.h"

/* A line is read in steps of at least this. */
#define LINE_MIN 256

/* ---- Fill ---- */

static void fill_completed(struct request *request)
{
    struct part *part = request->parts;
    struct buffer *buffer = request->file->buffer;
    bool is_user = file_enter(request->file);
    enif_mutex_lock(buffer->lock);
    buffer->is_filling = false;
    if (part->count) {
        buffer_set_ahead(buffer, part->memory, request->before + part->count);
        part->has_memory = false;
    }
    /* The process has ended: the bytes are for the next one. */
    if (request->is_cancelled)
        part->error = ECANCELED;
    size_t size = buffer->to - buffer->from, line = request->wants_line ? buffer_line(buffer) : 0;
    request->again = request->wants_line && !line && part->count;
    if (line)
        size = line;
    else if (!request->wants_line && request->wanted < size)
        size = request->wanted;
    if (!part->error && !request->again && size) {
        request->has_text = buffer_take_ahead(buffer, size, &request->text);
        /* A line ends with one byte. */
        bool has_return = request->has_text && line > 1 && memcmp(request->text.data + line - 2, "\r\n", 2) == 0;
        if (has_return) {
            request->text.data[line - 2] = '\n';
            has_return = !enif_realloc_binary(&request->text, line - 1);
        }
        if (!request->has_text || has_return)
            part->error = ENOMEM;
    }
    if (buffer->is_stale && is_user)
        buffer_seek_back(buffer, request->file->fd);
    buffer->is_stale = false;
    enif_mutex_unlock(buffer->lock);
    if (is_user)
        file_leave(request->file);
}

static void fill_not_submitted(struct request *request)
{
    struct buffer *buffer = request->file->buffer;
    enif_mutex_lock(buffer->lock);
    buffer->is_filling = buffer->is_stale = false;
    enif_mutex_unlock(buffer->lock);
}

/* ---- Flush ---- */

static void flush_completed(struct request *request)
{
    struct file *file = request->file;
    enif_mutex_lock(file->buffer->lock);
    file->buffer->is_flushing = false;
    /* The next operation returns an error that no process has waited for. */
    if (request->parts->error && enif_is_pid_undefined(&request->pid))
        file->buffer->error = request->parts->error;
    enif_mutex_unlock(file->buffer->lock);
    file_leave(file);
    if (request->must_complete)
        file_flush_completed();
}

static void flush_not_submitted(struct request *request)
{
    struct file *file = request->file;
    struct part *part = request->parts;
    enif_mutex_lock(file->buffer->lock);
    if (part->has_memory) {
        file->buffer->written = part->memory;
        file->buffer->written_size = part->piece.iov_len;
        part->has_memory = false;
    }
    file->buffer->is_flushing = false;
    enif_mutex_unlock(file->buffer->lock);
    file_leave(file);
    if (request->must_complete)
        file_flush_completed();
}

void flush_begin(struct file *file, struct request *request)
{
    struct part *part = request->parts;
    file->buffer->is_flushing = true;
    buffer_seek_back(file->buffer, file->fd);
    atomic_fetch_add(&file->users, 1);
    request->completed = flush_completed;
    request->not_submitted = flush_not_submitted;
    request->must_complete = file->is_regular;
    part->offset = PELTON_CURRENT;
    part->piece.iov_len = buffer_take_written(file->buffer, &part->memory);
    part->piece.iov_base = part->memory.data;
    part->has_memory = part->piece.iov_len != 0;
    /* The caller left the first of its pieces free. */
    if (!part->pieces) {
        part->pieces = &part->piece;
        part->pieces_count = 1;
    } else if (part->has_memory) {
        part->pieces[0] = part->piece;
    } else {
        part->pieces++;
        part->pieces_count--;
    }
    if (request->must_complete)
        file_flush_begins();
}

/* ---- The functions ---- */

/* The file, whose buffer's lock is held. NULL: *result says why. */
static struct file *lock_buffered(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    struct file *file = file_at(env, term, result);
    if (!file)
        return NULL;
    if (!file->buffer) {
        *result = enif_make_badarg(env);
        file_leave(file);
        return NULL;
    }
    enif_mutex_lock(file->buffer->lock);
    int error = file->buffer->error;
    if (!error)
        return file;
    file->buffer->error = 0;
    enif_mutex_unlock(file->buffer->lock);
    file_leave(file);
    *result = error_of(env, atom_of_errno(error));
    return NULL;
}

static ERL_NIF_TERM leave_buffered(struct file *file, ERL_NIF_TERM result)
{
    enif_mutex_unlock(file->buffer->lock);
    file_leave(file);
    return result;
}

/* Unlocks. */
static ERL_NIF_TERM submit_buffered(ErlNifEnv *env, struct file *file, struct request *request, ERL_NIF_TERM ref)
{
    enif_mutex_unlock(file->buffer->lock);
    pelton_operation operation = part_operation(request->parts);
    ERL_NIF_TERM result = request_submit(env, request, &operation, ref, false);
    file_leave(file);
    return result;
}

/* buffer_write(File, Binaries, Ref): at most 1023 of them */
NIF(buffer_write)
{
    (void)argc;
    ERL_NIF_TERM result, tail;
    ErlNifIOVec *pieces = NULL;
    if (!enif_inspect_iovec(env, PIECES_MAX - 1, argv[1], &tail, &pieces) || !enif_is_empty_list(env, tail))
        return enif_make_badarg(env);
    struct file *file = lock_buffered(env, argv[0], &result);
    if (!file)
        return result;
    struct buffer *buffer = file->buffer;
    if (buffer->is_flushing || buffer->is_moving || (buffer->is_filling && buffer->has_position))
        return leave_buffered(file, atom_busy);
    size_t size = bytes_of_pieces(pieces), before = buffer->written_size;
    if (before + size < buffer->written_max) {
        buffer_seek_back(buffer, file->fd);
        if (!buffer_append(buffer, pieces, size))
            return leave_buffered(file, error_of(env, atom_enomem));
        if (!before) {
            buffer->due_ms = now_us() / 1000 + buffer->delay_ms;
            file_list_delayed(file);
        }
        charge_bytes(env, size);
        return leave_buffered(file, atom_ok);
    }
    /* The request's environment keeps the binaries, and the array of pieces, of which the first is for the delayed
     * bytes. */
    struct request *request = request_create(PELTON_FILE_WRITE, 1, file, NULL);
    struct part *part = request->parts;
    request->env = enif_alloc_env();
    enif_inspect_iovec(request->env, PIECES_MAX - 1, enif_make_copy(request->env, argv[1]), &tail, &pieces);
    part->pieces_count = (size_t)pieces->iovcnt + 1;
    part->pieces = (struct iovec *)enif_make_new_binary(request->env, part->pieces_count * sizeof *part->pieces, &tail);
    memcpy(part->pieces + 1, pieces->iov, (size_t)pieces->iovcnt * sizeof *part->pieces);
    part->wanted = before + size;
    flush_begin(file, request);
    return submit_buffered(env, file, request, argv[2]);
}

/* buffer_flush(File, Ref): writes the delayed bytes */
NIF(buffer_flush)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct file *file = lock_buffered(env, argv[0], &result);
    if (!file)
        return result;
    if (file->buffer->is_flushing)
        return leave_buffered(file, atom_busy);
    if (!file->buffer->written_size)
        return leave_buffered(file, atom_ok);
    struct request *request = request_create(PELTON_FILE_WRITE, 1, file, NULL);
    flush_begin(file, request);
    return submit_buffered(env, file, request, argv[1]);
}

/* Copies `size` bytes of what was read ahead. Under the lock. */
static ERL_NIF_TERM copy_ahead(ErlNifEnv *env, struct buffer *buffer, size_t size, bool is_line)
{
    unsigned char *ahead = buffer->ahead.data + buffer->from;
    buffer->from += size;
    charge_bytes(env, size);
    if (is_line && size > 1 && ahead[size - 2] == '\r')
        ahead[--size - 1] = '\n';
    return enif_make_tuple2(env, atom_ok, bytes_of(env, ahead, size));
}

/* buffer_read(File, Size | line, Ref): {ok, Bytes} or eof; `ok`: call it again; `flush`: flush first */
NIF(buffer_read)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t wanted = 0;
    bool wants_line = enif_is_identical(argv[1], atom_line);
    if (!wants_line && !enif_get_uint64(env, argv[1], &wanted))
        return enif_make_badarg(env);
    struct file *file = lock_buffered(env, argv[0], &result);
    if (!file)
        return result;
    struct buffer *buffer = file->buffer;
    if (buffer->is_filling || buffer->is_moving || (buffer->is_flushing && buffer->has_position))
        return leave_buffered(file, atom_busy);
    if (buffer->written_size)
        return leave_buffered(file, atom_flush);
    size_t have = buffer->to - buffer->from, line = wants_line ? buffer_line(buffer) : 0;
    if (line || (!wants_line && have >= wanted))
        return leave_buffered(file, copy_ahead(env, buffer, wants_line ? line : wanted, wants_line));
    /* The steps grow with the length of the line, so that a long one is copied a few times only. */
    size_t line_step = have > buffer->ahead_max ? have : buffer->ahead_max;
    if (line_step < LINE_MIN)
        line_step = LINE_MIN;
    size_t more = wants_line ? line_step : wanted - have + buffer->ahead_max;
    struct request *request = request_create(PELTON_FILE_READ, 1, file, NULL);
    struct part *part = request->parts;
    if (!part_allocate(part, have + more)) {
        enif_release_resource(request);
        return leave_buffered(file, error_of(env, atom_enomem));
    }
    if (have)
        memcpy(part->memory.data, buffer->ahead.data + buffer->from, have);
    part->piece = (struct iovec){part->memory.data + have, more};
    part->offset = PELTON_CURRENT;
    part->wanted = more;
    request->fills = buffer->is_filling = true;
    request->completed = fill_completed;
    request->not_submitted = fill_not_submitted;
    request->before = have;
    request->wanted = wanted;
    request->wants_line = wants_line;
    return submit_buffered(env, file, request, argv[2]);
}
