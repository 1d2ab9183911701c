/* What the notifier thread does with files when no process waits for the result: it flushes buffers that are due, and
 * closes files whose owners have ended, or that nobody refers to. An engine does both, because both can wait. */
#include "request.h"
#include <unistd.h>

/* ---- Flush ---- */

static void list_again(struct file *file, int64_t due_ms)
{
    enif_mutex_lock(file->buffer->lock);
    file->buffer->due_ms = due_ms;
    if (file->buffer->written_size)
        file_list_delayed(file);
    enif_mutex_unlock(file->buffer->lock);
}

/* Flushes the buffer, unless it was flushed since, and has newer bytes. */
static void flush_file(struct file *file, int64_t now_ms)
{
    struct buffer *buffer = file->buffer;
    if (!file_enter(file))
        return;
    struct request *request = NULL;
    enif_mutex_lock(buffer->lock);
    if (buffer->written_size && buffer->due_ms > now_ms) {
        file_list_delayed(file);
    } else if (buffer->written_size) {
        request = request_create(PELTON_FILE_WRITE, 1, file, NULL);
        flush_begin(file, request);
    }
    enif_mutex_unlock(buffer->lock);
    if (request) {
        pelton_operation operation = part_operation(request->parts);
        if (request_submit_quietly(request, &operation) != SUBMITTED) {
            request->not_submitted(request);
            enif_release_resource(request);
            list_again(file, now_ms + 10);
        }
    }
    file_leave(file);
}

int files_flush_due(void)
{
    int64_t now_ms = now_us() / 1000, left;
    struct file *due = NULL;
    enif_mutex_lock(shared->lock);
    if (shared->next_due <= now_ms) {
        shared->next_due = INT64_MAX;
        for (struct file *file = shared->delayed, *next; file; file = next) {
            next = file->buffer->next;
            if (file->buffer->listed_due_ms > now_ms) {
                if (file->buffer->listed_due_ms < shared->next_due)
                    shared->next_due = file->buffer->listed_due_ms;
                continue;
            }
            file_unlist_delayed(file);
            file->buffer->next_due = due;
            due = file;
        }
    }
    enif_mutex_unlock(shared->lock);
    for (struct file *next; due; due = next) {
        next = due->buffer->next_due;
        flush_file(due, now_ms);
        enif_release_resource(due);
    }
    enif_mutex_lock(shared->lock);
    left = shared->next_due == INT64_MAX ? -1 : shared->next_due - now_ms;
    enif_mutex_unlock(shared->lock);
    return left < 0 ? -1 : left > 60000 ? 60000 : (int)left;
}

/* ---- Close ---- */

static void write_completed(struct request *request)
{
    if (request->must_complete)
        file_flush_completed();
}

/* Submits the write of the delayed bytes, after which the handle's close is deferred again; or the close. False: no
 * space in the engine. */
static bool continue_close(struct deferred_close *deferred)
{
    uint32_t kind = deferred->written_size ? PELTON_FILE_WRITE : PELTON_FILE_CLOSE;
    struct request *request = request_create(kind, 1, NULL, NULL);
    struct part *part = request->parts;
    if (deferred->written_size) {
        part->memory = deferred->memory;
        part->has_memory = true;
        part->piece = (struct iovec){part->memory.data, deferred->written_size};
        part->pieces = &part->piece;
        part->pieces_count = 1;
        part->offset = PELTON_CURRENT;
        request->completed = write_completed;
        request->must_complete = deferred->must_complete;
        /* The request's destructor closes it. */
        request->opened = deferred->handle;
    }
    pelton_operation operation = part_operation(part);
    operation.file = deferred->handle;
    enum submitted submitted = request_submit_quietly(request, &operation);
    if (submitted == SUBMITTED)
        return true;
    part->has_memory = submitted == NOT_ACCEPTED && deferred->written_size;
    request->opened = NULL;
    if (submitted == NOT_ACCEPTED) {
        /* No engine can be opened. This thread writes and closes, so that descriptors become free. */
        size_t size = deferred->written_size;
        ssize_t written = size ? write(pelton_file_fd(deferred->handle), deferred->memory.data, size) : 0;
        (void)written;
        pelton_close(deferred->handle);
        if (deferred->must_complete)
            file_flush_completed();
    }
    enif_release_resource(request);
    return submitted == NOT_ACCEPTED;
}

void files_close_deferred(void)
{
    for (struct deferred_close *deferred; (deferred = file_next_deferred());) {
        if (!continue_close(deferred)) {
            file_defer_again(deferred);
            return;
        }
        enif_free(deferred);
    }
}

void files_close(void)
{
    enif_mutex_lock(shared->lock);
    for (struct file *file = shared->files, *next; file; file = next) {
        next = file->next;
        file->next = file->previous = NULL;
        bool was_open;
        pelton_file *handle = file_close_handle(file, &was_open);
        if (handle)
            file_defer_close_locked(file, handle);
    }
    shared->files = NULL;
    enif_mutex_unlock(shared->lock);
    requests_cancel_all();
    file_forget_all_delayed();
    enif_mutex_lock(shared->lock);
    while (shared->flushes)
        enif_cond_wait(shared->flushed, shared->lock);
    enif_mutex_unlock(shared->lock);
    engines_close_idle();
}
