/* delayed_write and read_ahead: what is kept beside a file.
 *
 * `written` is what is to be written at the file's position, `ahead` what was read beyond what was asked for: the position is behind it. There are
 * never both, for a write gives back first what was read ahead, by seeking back; but of what has no position, as a pipe, which keeps its `ahead`.
 *
 * What is there, and what there is room for, is copied in the call, under the buffer's lock. Else one thing at a time is at the position: a flush, which
 * writes what is kept, a fill, which reads, or a move. Whoever comes meanwhile is told `full`, and comes again. At what has no position a flush and a
 * fill go side by side, as a pipe's two ends do.
 *
 * A flush is a request, of who writes, or does something else; or the ferry's, when it is due. It is one of the file's users: who closes comes
 * after it, and has the ferry write what is kept even then. To a regular file it is never given up, whoever ends meanwhile.
 *
 * LOCKS. A buffer's comes between an engine's and all->lock. Who has claimed a closed file's handle is alone with the buffer. */
#include "files.h"
#include <time.h>
#include <unistd.h>

/* So much is set aside at first for what is written, and looked for at least for a line. */
#define KEPT_MIN (64 << 10)
#define LINE_MIN 256

struct buffer *buffer_of(uint64_t write_max, uint64_t delay, uint64_t ahead_max)
{
    struct buffer *buffer = enif_alloc(sizeof *buffer);
    if (!buffer)
        return NULL;
    *buffer = (struct buffer){.write_max = write_max, .delay = (int64_t)delay, .ahead_max = ahead_max};
    buffer->lock = enif_mutex_create("pelton_buffer");
    if (!buffer->lock) {
        enif_free(buffer);
        return NULL;
    }
    return buffer;
}

static void free_binary(ErlNifBinary *binary)
{
    if (binary->data)
        enif_release_binary(binary);
    *binary = (ErlNifBinary){0};
}

void free_buffer(struct buffer *buffer)
{
    if (!buffer)
        return;
    free_binary(&buffer->written);
    free_binary(&buffer->ahead);
    enif_mutex_destroy(buffer->lock);
    enif_free(buffer);
}

size_t take_kept(struct file *file, ErlNifBinary *memory)
{
    struct buffer *buffer = file->buffer;
    size_t kept = buffer ? buffer->kept : 0;
    if (kept) {
        *memory = buffer->written;
        buffer->written = (ErlNifBinary){0};
        buffer->kept = 0;
    }
    return kept;
}

/* ---- What was read ahead ---- */

/* The file's position is where the reader is. Under the lock, by a user. */
static void give_back_ahead(struct file *file)
{
    struct buffer *buffer = file->buffer;
    off_t left = (off_t)(buffer->to - buffer->from);
    if (left && lseek(pelton_fd(file->handle), -left, SEEK_CUR) < 0)
        return;
    buffer->from = buffer->to = 0;
    free_binary(&buffer->ahead);
}

void is_written(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !enter_file(file))
        return;
    enif_mutex_lock(buffer->lock);
    if (buffer->fills)
        buffer->is_stale = true;
    else if (!buffer->moves)
        give_back_ahead(file);
    enif_mutex_unlock(buffer->lock);
    leave_file(file);
}

bool begin_move(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !buffer->has_position)
        return true;
    enif_mutex_lock(buffer->lock);
    bool may = !buffer->flushes && !buffer->fills && !buffer->moves && !buffer->kept;
    if (may) {
        buffer->moves = true;
        give_back_ahead(file);
    }
    enif_mutex_unlock(buffer->lock);
    return may;
}

void end_move(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !buffer->has_position)
        return;
    enif_mutex_lock(buffer->lock);
    buffer->moves = false;
    enif_mutex_unlock(buffer->lock);
}

/* So many bytes of what is there are to be told, the rest stays. The smaller part is copied, as long as nothing was told of it. Under the lock. */
static bool split(struct buffer *buffer, size_t size, ErlNifBinary *told)
{
    size_t left = buffer->to - buffer->from - size;
    if (size <= left || buffer->from) {
        if (!enif_alloc_binary(size, told))
            return false;
        memcpy(told->data, buffer->ahead.data + buffer->from, size);
        buffer->from += size;
        return true;
    }
    ErlNifBinary rest = {0};
    if (left && !enif_alloc_binary(left, &rest))
        return false;
    if (left)
        memcpy(rest.data, buffer->ahead.data + size, left);
    *told = buffer->ahead;
    buffer->ahead = rest;
    buffer->from = 0;
    buffer->to = left;
    if (told->size != size && !enif_realloc_binary(told, size)) {
        enif_release_binary(told);
        return false;
    }
    return true;
}

/* How much of what is there is a line; 0: no end of one is there. */
static size_t line_of(struct buffer *buffer)
{
    size_t size = buffer->to - buffer->from;
    unsigned char *begin = buffer->ahead.data + buffer->from, *end = size ? memchr(begin, '\n', size) : NULL;
    return end ? (size_t)(end - begin) + 1 : 0;
}

/* A line's end is one byte. */
static bool shorten(ErlNifBinary *line)
{
    if (line->size < 2 || memcmp(line->data + line->size - 2, "\r\n", 2) != 0)
        return true;
    line->data[line->size - 2] = '\n';
    return enif_realloc_binary(line, line->size - 1);
}

static void fill_has_ended(struct request *request)
{
    struct part *part = request->parts;
    struct buffer *buffer = request->file->buffer;
    bool may_seek = enter_file(request->file);
    enif_mutex_lock(buffer->lock);
    buffer->fills = false;
    if (part->count) {
        free_binary(&buffer->ahead);
        buffer->ahead = part->memory;
        part->has_memory = false;
        buffer->from = 0;
        buffer->to = request->before + part->count;
    }
    /* Who has gone is told nothing, and the next has it. */
    if (request->is_given_up)
        part->error = ECANCELED;
    size_t size = buffer->to - buffer->from, line = request->wants_line ? line_of(buffer) : 0;
    request->again = request->wants_line && !line && part->count;
    if (line)
        size = line;
    else if (!request->wants_line && request->wanted < size)
        size = request->wanted;
    if (!part->error && !request->again && size) {
        request->has_text = split(buffer, size, &request->text);
        if (!request->has_text || (line && !shorten(&request->text)))
            part->error = ENOMEM;
    }
    if (buffer->is_stale && may_seek)
        give_back_ahead(request->file);
    buffer->is_stale = false;
    enif_mutex_unlock(buffer->lock);
    if (may_seek)
        leave_file(request->file);
}

/* ---- What was written ---- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Has the ferry come then. The list has a reference. Under the lock. */
static void list_as_due(struct file *file)
{
    struct buffer *buffer = file->buffer;
    enif_mutex_lock(all->lock);
    bool is_next = !buffer->is_listed && buffer->due < all->next_due;
    if (!buffer->is_listed) {
        enif_keep_resource(file);
        buffer->is_listed = true;
        buffer->listed_due = buffer->due;
        buffer->previous = NULL;
        buffer->next = all->delayed;
        if (buffer->next)
            buffer->next->buffer->previous = file;
        all->delayed = file;
    }
    if (is_next)
        all->next_due = buffer->due;
    enif_mutex_unlock(all->lock);
    if (is_next)
        ferry_wake();
}

/* Under all->lock. */
static void take_off_list(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (buffer->previous)
        buffer->previous->buffer->next = buffer->next;
    else
        all->delayed = buffer->next;
    if (buffer->next)
        buffer->next->buffer->previous = buffer->previous;
    buffer->is_listed = false;
}

void is_never_due(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer)
        return;
    enif_mutex_lock(all->lock);
    bool was_listed = buffer->is_listed;
    if (was_listed)
        take_off_list(file);
    enif_mutex_unlock(all->lock);
    if (was_listed)
        enif_release_resource(file);
}

void forget_what_is_due(void)
{
    for (struct file *file = NULL;; enif_release_resource(file)) {
        enif_mutex_lock(all->lock);
        file = all->delayed;
        if (file)
            take_off_list(file);
        enif_mutex_unlock(all->lock);
        if (!file)
            return;
    }
}

/* Keeps a copy. Under the lock. */
static bool keep(struct buffer *buffer, const ErlNifIOVec *pieces, size_t size)
{
    size_t wanted = buffer->kept + size;
    if (!buffer->written.data) {
        if (!enif_alloc_binary(wanted > KEPT_MIN ? wanted : buffer->write_max < KEPT_MIN ? buffer->write_max : KEPT_MIN, &buffer->written))
            return false;
    } else if (buffer->written.size < wanted && !enif_realloc_binary(&buffer->written, wanted * 2)) {
        return false;
    }
    for (int i = 0; i < pieces->iovcnt; i++) {
        memcpy(buffer->written.data + buffer->kept, pieces->iov[i].iov_base, pieces->iov[i].iov_len);
        buffer->kept += pieces->iov[i].iov_len;
    }
    return true;
}

/* The request takes what is kept, before what it has. Under the lock, by a user. */
static void begin_flush(struct file *file, struct request *request)
{
    struct part *part = request->parts;
    file->buffer->flushes = true;
    give_back_ahead(file);
    atomic_fetch_add(&file->users, 1);
    request->flushes = true;
    request->goes_on = file->is_regular;
    part->offset = PELTON_CURRENT;
    part->piece.iov_len = take_kept(file, &part->memory);
    part->piece.iov_base = part->memory.data;
    part->has_memory = part->piece.iov_len != 0;
    if (!part->pieces) {
        part->pieces = &part->piece;
        part->pieces_count = 1;
    } else if (part->has_memory) {
        part->pieces[0] = part->piece;
    } else {
        part->pieces++;
        part->pieces_count--;
    }
    if (request->goes_on) {
        enif_mutex_lock(all->lock);
        all->flushes++;
        enif_mutex_unlock(all->lock);
    }
}

void flush_has_ended(void)
{
    enif_mutex_lock(all->lock);
    if (--all->flushes == 0)
        enif_cond_broadcast(all->flushed);
    enif_mutex_unlock(all->lock);
}

static void end_flush(struct request *request)
{
    struct file *file = request->file;
    enif_mutex_lock(file->buffer->lock);
    file->buffer->flushes = false;
    /* Who asks next is told what nobody has waited for. */
    if (request->parts->error && enif_is_pid_undefined(&request->pid))
        file->buffer->error = request->parts->error;
    enif_mutex_unlock(file->buffer->lock);
    leave_file(file);
    if (request->goes_on)
        flush_has_ended();
}

void buffered_has_ended(struct request *request)
{
    if (request->flushes)
        end_flush(request);
    else if (request->fills)
        fill_has_ended(request);
    else if (request->goes_on)
        flush_has_ended();
    else if (request->kind == PELTON_FILE_WRITE && request->file)
        is_written(request->file);
    else if (request->kind == PELTON_FILE_RECEIVE)
        is_written(request->file);
    else if (request->kind == PELTON_FILE_COPY)
        is_written(request->to);
}

void buffered_was_not_asked(struct request *request)
{
    if (!request->flushes && !request->fills)
        return;
    struct buffer *buffer = request->file->buffer;
    struct part *part = request->parts;
    enif_mutex_lock(buffer->lock);
    if (request->fills) {
        buffer->fills = buffer->is_stale = false;
    } else if (part->has_memory) {
        buffer->written = part->memory;
        buffer->kept = part->piece.iov_len;
        part->has_memory = false;
    }
    if (request->flushes)
        buffer->flushes = false;
    enif_mutex_unlock(buffer->lock);
    if (!request->flushes)
        return;
    leave_file(request->file);
    if (request->goes_on)
        flush_has_ended();
}

/* What is due of a file is written, and nobody is told. */
static void flush_when_due(struct file *file, int64_t now)
{
    struct buffer *buffer = file->buffer;
    if (!enter_file(file))
        return;
    struct request *request = NULL;
    enif_mutex_lock(buffer->lock);
    if (buffer->kept && buffer->due > now) {
        list_as_due(file);
    } else if (buffer->kept) {
        request = request_of(PELTON_FILE_WRITE, 1, file, NULL);
        begin_flush(file, request);
    }
    enif_mutex_unlock(buffer->lock);
    if (request) {
        pelton_operation operation = operation_of(request->parts, PELTON_FILE_WRITE);
        if (ask_quietly(request, &operation) != ASKED) {
            buffered_was_not_asked(request);
            enif_release_resource(request);
            enif_mutex_lock(buffer->lock);
            buffer->due = now + 10;
            if (buffer->kept)
                list_as_due(file);
            enif_mutex_unlock(buffer->lock);
        }
    }
    leave_file(file);
}

int files_flush(void)
{
    int64_t now = now_ms(), left;
    struct file *due = NULL;
    enif_mutex_lock(all->lock);
    if (all->next_due <= now) {
        all->next_due = INT64_MAX;
        for (struct file *file = all->delayed, *next; file; file = next) {
            next = file->buffer->next;
            if (file->buffer->listed_due > now) {
                if (file->buffer->listed_due < all->next_due)
                    all->next_due = file->buffer->listed_due;
                continue;
            }
            take_off_list(file);
            file->buffer->next_due = due;
            due = file;
        }
    }
    enif_mutex_unlock(all->lock);
    for (struct file *next; due; due = next) {
        next = due->buffer->next_due;
        flush_when_due(due, now);
        enif_release_resource(due);
    }
    enif_mutex_lock(all->lock);
    left = all->next_due == INT64_MAX ? -1 : all->next_due - now;
    enif_mutex_unlock(all->lock);
    return left < 0 ? -1 : left > 60000 ? 60000 : (int)left;
}

/* ---- The functions ---- */

/* The file, whose buffer's lock is held; NULL: the result says why not. */
static struct file *buffered_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    struct file *file = file_at(env, term, result);
    if (!file)
        return NULL;
    if (!file->buffer) {
        *result = enif_make_badarg(env);
        leave_file(file);
        return NULL;
    }
    enif_mutex_lock(file->buffer->lock);
    int error = file->buffer->error;
    if (!error)
        return file;
    file->buffer->error = 0;
    enif_mutex_unlock(file->buffer->lock);
    leave_file(file);
    *result = error_of(env, atom_of_errno(error));
    return NULL;
}

static ERL_NIF_TERM leave_buffered(struct file *file, ERL_NIF_TERM result)
{
    enif_mutex_unlock(file->buffer->lock);
    leave_file(file);
    return result;
}

/* Gives up the lock. */
static ERL_NIF_TERM ask_buffered(ErlNifEnv *env, struct file *file, struct request *request, ERL_NIF_TERM ref)
{
    enif_mutex_unlock(file->buffer->lock);
    pelton_operation operation = operation_of(request->parts, request->kind);
    ERL_NIF_TERM result = ask(env, request, &operation, ref, false);
    leave_file(file);
    return result;
}

/* buffer_write(File, Binaries, Ref): fewer than 1024 of them */
NIF(buffer_write)
{
    (void)argc;
    ERL_NIF_TERM result, tail;
    ErlNifIOVec *pieces = NULL;
    if (!enif_inspect_iovec(env, PIECES_MAX - 1, argv[1], &tail, &pieces) || !enif_is_empty_list(env, tail))
        return enif_make_badarg(env);
    struct file *file = buffered_at(env, argv[0], &result);
    if (!file)
        return result;
    struct buffer *buffer = file->buffer;
    if (buffer->flushes || buffer->moves || (buffer->fills && buffer->has_position))
        return leave_buffered(file, atom_full);
    size_t size = bytes_of_pieces(pieces), before = buffer->kept;
    if (before + size < buffer->write_max) {
        give_back_ahead(file);
        if (!keep(buffer, pieces, size))
            return leave_buffered(file, error_of(env, atom_enomem));
        if (!before) {
            buffer->due = now_ms() + buffer->delay;
            list_as_due(file);
        }
        took(env, size);
        return leave_buffered(file, atom_ok);
    }
    /* Those stay as long as the environment, which has an array for them as well. */
    struct request *request = request_of(PELTON_FILE_WRITE, 1, file, NULL);
    struct part *part = request->parts;
    request->env = enif_alloc_env();
    enif_inspect_iovec(request->env, PIECES_MAX - 1, enif_make_copy(request->env, argv[1]), &tail, &pieces);
    part->pieces_count = (size_t)pieces->iovcnt + 1;
    part->pieces = (struct iovec *)enif_make_new_binary(request->env, part->pieces_count * sizeof *part->pieces, &tail);
    memcpy(part->pieces + 1, pieces->iov, (size_t)pieces->iovcnt * sizeof *part->pieces);
    part->wanted = before + size;
    begin_flush(file, request);
    return ask_buffered(env, file, request, argv[2]);
}

/* buffer_flush(File, Ref): what is kept is written */
NIF(buffer_flush)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct file *file = buffered_at(env, argv[0], &result);
    if (!file)
        return result;
    if (file->buffer->flushes)
        return leave_buffered(file, atom_full);
    if (!file->buffer->kept)
        return leave_buffered(file, atom_ok);
    struct request *request = request_of(PELTON_FILE_WRITE, 1, file, NULL);
    begin_flush(file, request);
    return ask_buffered(env, file, request, argv[1]);
}

/* buffer_read(File, Size, Ref), or of a line, if Size is `line`: {ok, Bytes} or eof; `ok`: to be called again; `flush`: something is kept */
NIF(buffer_read)
{
    (void)argc;
    ERL_NIF_TERM result;
    uint64_t wanted = 0;
    bool wants_line = enif_is_identical(argv[1], enif_make_atom(env, "line"));
    if (!wants_line && !enif_get_uint64(env, argv[1], &wanted))
        return enif_make_badarg(env);
    struct file *file = buffered_at(env, argv[0], &result);
    if (!file)
        return result;
    struct buffer *buffer = file->buffer;
    if (buffer->fills || buffer->moves || (buffer->flushes && buffer->has_position))
        return leave_buffered(file, atom_full);
    if (buffer->kept)
        return leave_buffered(file, enif_make_atom(env, "flush"));
    size_t have = buffer->to - buffer->from, line = wants_line ? line_of(buffer) : 0;
    if (line || (!wants_line && have >= wanted)) {
        size_t size = line ? line : wanted;
        unsigned char *bytes = buffer->ahead.data + buffer->from;
        buffer->from += size;
        took(env, size);
        if (line > 1 && bytes[line - 2] == '\r')
            bytes[--size - 1] = '\n';
        unsigned char *told = enif_make_new_binary(env, size, &result);
        if (size)
            memcpy(told, bytes, size);
        return leave_buffered(file, enif_make_tuple2(env, atom_ok, result));
    }
    /* A line that is longer than expected is longer still. */
    size_t line_more = have > buffer->ahead_max ? have : buffer->ahead_max;
    size_t more = wants_line ? (line_more > LINE_MIN ? line_more : LINE_MIN) : wanted - have + buffer->ahead_max;
    struct request *request = request_of(PELTON_FILE_READ, 1, file, NULL);
    struct part *part = request->parts;
    if (!enif_alloc_binary(have + more, &part->memory)) {
        enif_release_resource(request);
        return leave_buffered(file, error_of(env, atom_enomem));
    }
    part->has_memory = true;
    if (have)
        memcpy(part->memory.data, buffer->ahead.data + buffer->from, have);
    part->piece = (struct iovec){part->memory.data + have, more};
    part->pieces = &part->piece;
    part->pieces_count = 1;
    part->offset = PELTON_CURRENT;
    part->wanted = more;
    request->fills = buffer->fills = true;
    request->before = have;
    request->wanted = wanted;
    request->wants_line = wants_line;
    return ask_buffered(env, file, request, argv[2]);
}
