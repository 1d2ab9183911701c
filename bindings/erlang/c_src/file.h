/* Open files (file.c), and the buffers of delayed_write and read_ahead (buffer.c). */
#ifndef PELTON_ERLANG_FILE_H
#define PELTON_ERLANG_FILE_H

#include "nif.h"

/* ---- buffer.c ---- */

/* A file's buffer: `written` has the bytes to be written at the file's position, `ahead` those that were read beyond
 * what was requested; then the file's position is behind them. At most one of the two has bytes, because a write
 * first seeks back over what was read ahead. A pipe cannot seek, and may have both. */
struct buffer {
    ErlNifMutex *lock;
    bool has_position;
    bool is_flushing, is_filling, is_moving; /* the operation in progress at the file's position */
    ErlNifBinary written;
    size_t written_size;
    size_t written_max; /* fewer bytes than this are delayed, */
    int64_t delay_ms;
    int64_t due_ms;     /* until this time */
    int error;          /* of a flush that no process waited for: the next operation returns it */
    ErlNifBinary ahead;
    size_t from, to;    /* the unread bytes of it */
    size_t ahead_max;
    bool is_stale;      /* something was written during the fill */
    /* Under shared->lock: */
    bool is_listed;
    int64_t listed_due_ms;
    struct file *next, *previous; /* shared->delayed */
    struct file *next_due;        /* the notifier thread's list */
};

/* NULL: no memory. */
struct buffer *buffer_create(uint64_t written_max, uint64_t delay_ms, uint64_t ahead_max);
void buffer_free(struct buffer *buffer);

/* The others need the lock, or a closed file whose handle the caller has claimed. */

/* Appends a copy to the bytes to be written. False: no memory. */
bool buffer_append(struct buffer *buffer, const ErlNifIOVec *pieces, size_t size);
/* Moves the bytes to be written to *memory, and returns their number. buffer may be NULL. */
size_t buffer_take_written(struct buffer *buffer, ErlNifBinary *memory);
/* Seeks back over what was read ahead, and drops it. */
void buffer_seek_back(struct buffer *buffer, int fd);
/* Bytes up to the end of the first line that was read ahead; 0: there is no end of a line. */
size_t buffer_line(const struct buffer *buffer);
/* Takes `size` bytes of what was read ahead. False: no memory. */
bool buffer_take_ahead(struct buffer *buffer, size_t size, ErlNifBinary *taken);
/* Replaces what was read ahead by `size` bytes of memory. */
void buffer_set_ahead(struct buffer *buffer, ErlNifBinary memory, size_t size);

/* ---- file.c ---- */

#define FILE_CLOSED (1u << 31)

struct file {
    pelton_file *handle;
    int fd;                       /* the handle's: a read from the page cache needs no call of libpelton */
    atomic_uint users;            /* functions that use it, and FILE_CLOSED */
    atomic_flag is_claimed;       /* a thread closes the handle */
    atomic_int pending;           /* requests in flight */
    atomic_int cautious_reads;    /* so many more reads run on a dirty scheduler, because one lately waited */
    bool is_regular;
    atomic_bool has_no_fast_read; /* its file system does not support RWF_NOWAIT for reads */
    atomic_int write_mode;        /* enum write_mode, and what follows: fast_io.c */
    atomic_bool is_at_end;        /* its position */
    bool appends;
    unsigned block_bytes;
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct buffer *buffer;        /* NULL: unbuffered */
    struct file *next, *previous; /* shared->files */
};

/* A handle to be closed by the notifier thread, after `written_size` bytes of memory were written. */
struct deferred_close {
    pelton_file *handle;
    ErlNifBinary memory;
    size_t written_size;
    bool must_complete; /* a write to a regular file: never cancelled, and counted in shared->flushes */
    struct deferred_close *next;
};

/* The resource of a newly opened file, listed, of one reference. Takes over the handle and the buffer. */
struct file *file_create(pelton_file *handle, bool is_regular, struct buffer *buffer, const ErlNifPid *owner);
/* The process is the owner. If it has ended, the file is closed. */
void file_monitor_owner(ErlNifEnv *caller, struct file *file);

/* A function that uses the handle enters first, and leaves last. False: the file is closed. */
bool file_enter(struct file *file);
void file_leave(struct file *file);
/* Enters the file that the term is. NULL: *result says why. */
struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result);
/* The same, for an operation that leaves the position unchanged, or at the end of the file. */
struct file *file_at_for_write(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result);
bool file_is_closed(struct file *file);

/* Closes it for everybody. Returns the handle if the caller is to close it. NULL: it was closed before (*was_open is
 * false), or its last user closes it. */
pelton_file *file_close_handle(struct file *file, bool *was_open);
void file_unlist(struct file *file);
/* The notifier thread writes what the file's buffer has, then closes the handle. file may be NULL. */
void file_defer_close(struct file *file, pelton_file *handle);
/* The same of a file whose resource remains listed nowhere: for shared->lock's holder. */
void file_defer_close_locked(struct file *file, pelton_file *handle);
/* The next deferred close, or NULL; and puts one back. */
struct deferred_close *file_next_deferred(void);
void file_defer_again(struct deferred_close *deferred);

/* Something was written to it: what was read ahead is stale. */
void file_was_written(struct file *file);
/* Surround an operation on the position. False: another one is in progress. */
bool file_begin_move(struct file *file);
void file_end_move(struct file *file);

/* The notifier thread flushes the buffer when it is due. The list has a reference. Under the buffer's lock. */
void file_list_delayed(struct file *file);
/* Under shared->lock; the caller has the list's reference. */
void file_unlist_delayed(struct file *file);
/* No flush is due any more, of the file or of any. */
void file_forget_delayed(struct file *file);
void file_forget_all_delayed(void);

/* A flush that shared->flushes counts begins, and has completed. */
void file_flush_begins(void);
void file_flush_completed(void);

/* After a read: whether the next ones are tried in the call. */
void file_learn_read(struct file *file, bool has_waited);
/* The same after a read in the call, or its beginning, before which this thread had slept so often. Returns its
 * microseconds. */
int64_t file_learn_read_in_call(struct file *file, int64_t began_us, long sleeps);
/* The next reads run on a dirty scheduler. */
void file_read_cautiously(struct file *file);

int file_load(ErlNifEnv *env, ErlNifResourceFlags flags);

#endif
