/* Open files.
 *
 * A file's handle is closed by close/1, when the owner ends, or when nobody refers to the file. `users` counts the
 * functions that use the handle now. If it is closed meanwhile, the last of them has the notifier thread close the
 * handle.
 *
 *   [claim]  The thread that sets is_claimed closes the handle: a closer that finds no user, or the last user that
 *            finds FILE_CLOSED. It has the buffer alone. */
#include "file.h"
#include <unistd.h>

/* After a read in a call that waited, and took longer, so many reads run on a dirty scheduler, also those from the page
 * cache: these begin the kernel's next readahead, which can wait in the disk's queue for tens of milliseconds. A read
 * that took longer because other threads had the processor says nothing about the disk. On a busy machine a dirty
 * scheduler then makes it worse: each way to it and back lasts until those threads have had their turn. */
#define SLOW_READ_US 500
#define CAUTIOUS_READS 64

/* ---- Deferred close ---- */

static struct deferred_close *deferred_close_of(struct file *file, pelton_file *handle)
{
    struct deferred_close *deferred = enif_alloc(sizeof *deferred);
    if (!deferred)
        return NULL;
    *deferred = (struct deferred_close){.handle = handle};
    if (file && (deferred->written_size = buffer_take_written(file->buffer, &deferred->memory)))
        deferred->must_complete = file->is_regular;
    return deferred;
}

static void list_deferred(struct deferred_close *deferred)
{
    deferred->next = shared->deferred_closes;
    shared->deferred_closes = deferred;
}

void file_defer_close_locked(struct file *file, pelton_file *handle)
{
    struct deferred_close *deferred = deferred_close_of(file, handle);
    if (!deferred)
        return;
    shared->flushes += deferred->must_complete;
    list_deferred(deferred);
}

void file_defer_close(struct file *file, pelton_file *handle)
{
    struct deferred_close *deferred = deferred_close_of(file, handle);
    if (!deferred) {
        pelton_close(handle);
        return;
    }
    enif_mutex_lock(shared->lock);
    shared->flushes += deferred->must_complete;
    list_deferred(deferred);
    enif_mutex_unlock(shared->lock);
    notifier_wake();
}

struct deferred_close *file_next_deferred(void)
{
    enif_mutex_lock(shared->lock);
    struct deferred_close *deferred = shared->deferred_closes;
    if (deferred)
        shared->deferred_closes = deferred->next;
    enif_mutex_unlock(shared->lock);
    return deferred;
}

void file_defer_again(struct deferred_close *deferred)
{
    enif_mutex_lock(shared->lock);
    list_deferred(deferred);
    enif_mutex_unlock(shared->lock);
}

void file_flush_begins(void)
{
    enif_mutex_lock(shared->lock);
    shared->flushes++;
    enif_mutex_unlock(shared->lock);
}

void file_flush_completed(void)
{
    enif_mutex_lock(shared->lock);
    if (--shared->flushes == 0)
        enif_cond_broadcast(shared->flushed);
    enif_mutex_unlock(shared->lock);
}

/* ---- Users ---- */

static pelton_file *claim(struct file *file)
{
    return atomic_flag_test_and_set(&file->is_claimed) ? NULL : file->handle;
}

void file_leave(struct file *file)
{
    if (atomic_fetch_sub(&file->users, 1) == (FILE_CLOSED | 1)) {
        pelton_file *handle = claim(file);
        if (handle)
            file_defer_close(file, handle);
    }
}

bool file_enter(struct file *file)
{
    if (!(atomic_fetch_add(&file->users, 1) & FILE_CLOSED))
        return true;
    file_leave(file);
    return false;
}

struct file *file_at_for_write(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    void *object;
    if (!enif_get_resource(env, term, shared->file_type, &object)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    if (file_enter(object))
        return object;
    *result = error_of(env, atom_einval);
    return NULL;
}

struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    struct file *file = file_at_for_write(env, term, result);
    if (file)
        atomic_store_explicit(&file->is_at_end, false, memory_order_relaxed);
    return file;
}

bool file_is_closed(struct file *file)
{
    return atomic_load(&file->users) & FILE_CLOSED;
}

pelton_file *file_close_handle(struct file *file, bool *was_open)
{
    unsigned found = atomic_fetch_or(&file->users, FILE_CLOSED);
    *was_open = !(found & FILE_CLOSED);
    if (*was_open && atomic_load(&file->pending)) {
        atomic_store(&shared->has_closed, true);
        notifier_wake();
    }
    return !*was_open || found != 0 ? NULL : claim(file);
}

/* ---- Owner and list ---- */

struct file *file_create(pelton_file *handle, bool is_regular, struct buffer *buffer, const ErlNifPid *owner)
{
    struct file *file = enif_alloc_resource(shared->file_type, sizeof *file);
    memset(file, 0, sizeof *file);
    atomic_flag_clear(&file->is_claimed);
    file->handle = handle;
    file->fd = pelton_file_fd(handle);
    file->is_regular = is_regular;
    /* Nothing is known about its first read. */
    atomic_store(&file->cautious_reads, 1);
    file->buffer = buffer;
    if (buffer)
        buffer->has_position = lseek(file->fd, 0, SEEK_CUR) >= 0;
    file->owner = *owner;
    enif_mutex_lock(shared->lock);
    file->next = shared->files;
    if (file->next)
        file->next->previous = file;
    shared->files = file;
    enif_mutex_unlock(shared->lock);
    return file;
}

void file_monitor_owner(ErlNifEnv *caller, struct file *file)
{
    if (!enif_monitor_process(caller, file, &file->owner, &file->monitor))
        return;
    bool was_open;
    pelton_file *handle = file_close_handle(file, &was_open);
    if (handle)
        file_defer_close(NULL, handle);
}

void file_unlist(struct file *file)
{
    enif_mutex_lock(shared->lock);
    if (file->previous)
        file->previous->next = file->next;
    else if (shared->files == file)
        shared->files = file->next;
    if (file->next)
        file->next->previous = file->previous;
    file->next = file->previous = NULL;
    enif_mutex_unlock(shared->lock);
}

static void destroy_file(ErlNifEnv *env, void *object)
{
    (void)env;
    struct file *file = object;
    file_unlist(file);
    bool was_open;
    pelton_file *handle = file_close_handle(file, &was_open);
    if (handle)
        file_defer_close(file, handle);
    buffer_free(file->buffer);
}

static void owner_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct file *file = object;
    bool was_open;
    pelton_file *handle = file_close_handle(file, &was_open);
    if (handle)
        file_defer_close(file, handle);
    file_forget_delayed(file);
}

/* ---- Position ---- */

void file_was_written(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !file_enter(file))
        return;
    enif_mutex_lock(buffer->lock);
    if (buffer->is_filling)
        buffer->is_stale = true;
    else if (!buffer->is_moving)
        buffer_seek_back(buffer, file->fd);
    enif_mutex_unlock(buffer->lock);
    file_leave(file);
}

bool file_begin_move(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !buffer->has_position)
        return true;
    enif_mutex_lock(buffer->lock);
    bool may_move = !buffer->is_flushing && !buffer->is_filling && !buffer->is_moving && !buffer->written_size;
    if (may_move) {
        buffer->is_moving = true;
        buffer_seek_back(buffer, file->fd);
    }
    enif_mutex_unlock(buffer->lock);
    return may_move;
}

void file_end_move(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer || !buffer->has_position)
        return;
    enif_mutex_lock(buffer->lock);
    buffer->is_moving = false;
    enif_mutex_unlock(buffer->lock);
}

/* ---- Delayed writes ---- */

void file_list_delayed(struct file *file)
{
    struct buffer *buffer = file->buffer;
    enif_mutex_lock(shared->lock);
    bool is_next = !buffer->is_listed && buffer->due_ms < shared->next_due;
    if (!buffer->is_listed) {
        enif_keep_resource(file);
        buffer->is_listed = true;
        buffer->listed_due_ms = buffer->due_ms;
        buffer->previous = NULL;
        buffer->next = shared->delayed;
        if (buffer->next)
            buffer->next->buffer->previous = file;
        shared->delayed = file;
    }
    if (is_next)
        shared->next_due = buffer->due_ms;
    enif_mutex_unlock(shared->lock);
    if (is_next)
        notifier_wake();
}

void file_unlist_delayed(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (buffer->previous)
        buffer->previous->buffer->next = buffer->next;
    else
        shared->delayed = buffer->next;
    if (buffer->next)
        buffer->next->buffer->previous = buffer->previous;
    buffer->is_listed = false;
}

void file_forget_delayed(struct file *file)
{
    struct buffer *buffer = file->buffer;
    if (!buffer)
        return;
    enif_mutex_lock(shared->lock);
    bool was_listed = buffer->is_listed;
    if (was_listed)
        file_unlist_delayed(file);
    enif_mutex_unlock(shared->lock);
    if (was_listed)
        enif_release_resource(file);
}

void file_forget_all_delayed(void)
{
    for (struct file *file = NULL;; enif_release_resource(file)) {
        enif_mutex_lock(shared->lock);
        file = shared->delayed;
        if (file)
            file_unlist_delayed(file);
        enif_mutex_unlock(shared->lock);
        if (!file)
            return;
    }
}

/* ---- Cautious reads ---- */

void file_learn_read(struct file *file, bool has_waited)
{
    int cautious = atomic_load_explicit(&file->cautious_reads, memory_order_relaxed);
    if (has_waited)
        file_read_cautiously(file);
    else if (cautious > 0)
        atomic_store_explicit(&file->cautious_reads, cautious - 1, memory_order_relaxed);
}

int64_t file_learn_read_in_call(struct file *file, int64_t began_us, long sleeps)
{
    int64_t took_us = now_us() - began_us;
    file_learn_read(file, took_us > SLOW_READ_US && sleeps_of_this_thread() != sleeps);
    return took_us;
}

void file_read_cautiously(struct file *file)
{
    atomic_store_explicit(&file->cautious_reads, CAUTIOUS_READS, memory_order_relaxed);
}

int file_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit type = {.dtor = destroy_file, .down = owner_is_down};
    shared->file_type = enif_open_resource_type_x(env, "pelton_file", &type, flags, NULL);
    return shared->file_type ? 0 : ENOMEM;
}
