/* What the parts of the NIF share. nif.c loads it, has the atoms and the ferry; files.c, file_functions.c, at_once.c and buffers.c are pelton_file's part,
 * ends.c and end_functions.c are pelton's.
 *
 * No function that a normal scheduler calls waits: what is not there at once is told by a message, {pelton, Ref, Result}, from the
 * ferry or from whichever thread finds it. What may wait is a dirty NIF, or a small write within the bound that at_once.c has.
 *
 * THE FERRY is one thread. It sleeps in epoll on the descriptors of all engines and ends, takes what has come, and sends it to
 * the processes. It also closes what nobody refers to any more, for a destructor runs wherever garbage is collected.
 *
 * LOCKS. Each engine, each end and each buffer has one, held for microseconds: nothing waits under it. Order: an engine's or an end's, then
 * a buffer's, then all->lock. A destructor takes all->lock at most, so a resource may be released under any other. */
#ifndef PELTON_NIF_H
#define PELTON_NIF_H

#include <errno.h>
#include <erl_nif.h>
#include <pelton.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define ATOMS(X) \
    X(ok) X(error) X(eof) X(pending) X(full) X(pelton) X(undefined) X(true) X(false) X(badarg) X(terminated) X(device) X(directory) \
    X(other) X(regular) X(symlink) X(read) X(write) X(read_write) X(none) X(enomem) X(einval) X(ready) X(closed) X(lost) X(failed) X(abandoned) X(waits) X(later)

#define ATOM_(name) extern ERL_NIF_TERM atom_##name;
ATOMS(ATOM_)
#undef ATOM_

/* The atom of an errno, as `file` has it. */
ERL_NIF_TERM atom_of_errno(int number);
ERL_NIF_TERM error_of(ErlNifEnv *env, ERL_NIF_TERM reason);
ERL_NIF_TERM bytes_of(ErlNifEnv *env, const void *data, size_t size);

/* Counts bytes that were copied, as reductions of the process that calls: some 10 us for each hundredth of its time. */
void took(ErlNifEnv *env, uint64_t bytes);

/* What the ferry watches begins with this. */
enum watched { WATCHED_BELL, WATCHED_ENGINE, WATCHED_END };

/* All there is. A new version of the library takes it over as it is: whoever changes a struct raises LAYOUT. */
#define LAYOUT 4
struct everything {
    unsigned layout;
    ErlNifMutex *lock; /* for the lists below, and the engines' making */
    int epoll;
    int bell;
    enum watched bell_watched;
    struct ferry *ferry;
    ErlNifResourceType *file_type, *request_type, *end_type, *responder_type, *held_type;
    unsigned engine_count;
    struct engine *engines;
    struct waiting_engine *waiting_engines; /* that nobody uses just now */
    struct file *files;                     /* that are open */
    struct doomed_file *doomed_files;
    struct file *delayed;                   /* that keep what was written */
    int64_t next_due;                       /* when the first of them is due, at the earliest */
    unsigned flushes;                       /* that are done before all is closed, */
    ErlNifCond *flushed;                    /* which this tells */
    atomic_flag is_writing;                 /* a normal scheduler, where that is measured: see at_once.c */
    _Atomic int64_t writes_wait_until;      /* none is begun so before, in now_us()'s time */
    struct end *ends;                       /* that are open */
    struct end *doomed_ends;
    struct end *ends_to_look_at;
    struct opening *openings;               /* of ends, whose threads have ended */
};
extern struct everything *all;

/* Has the ferry watch a descriptor, and be told by `what`; 0 or an errno. */
int ferry_watch(int fd, enum watched *what);
/* Has the ferry look at what is doomed. */
void ferry_wake(void);
/* Which of `count` this thread uses. */
unsigned slot_of_this_thread(unsigned count);

/* files.c */
int files_load(ErlNifEnv *env, ErlNifResourceFlags flags);
void files_ready(enum watched *engine);
/* Cancels what was given up, and closes what was doomed: the ferry's. */
void files_cancel(void);
void files_bury(void);
/* Writes what was kept for as long as it should be: the ferry's. Answers for how many milliseconds there is no more of that; -1: for ever. */
int files_flush(void);
/* Closes every file, when what it keeps is written, and every engine that does nothing. */
void files_end(void);

/* ends.c. Each of these but the first and the last is the ferry's. */
int ends_load(ErlNifEnv *env, ErlNifResourceFlags flags);
void ends_ready(enum watched *end);
/* Looks at those that asked for it, once. */
void ends_look(void);
void ends_bury(void);
/* Closes every end. */
void ends_end(void);
/* The handle of a sender, or a receiver, for an operation on a file: nobody else uses it meanwhile. NULL: the result says why not. */
struct end;
void *lend(ErlNifEnv *env, ERL_NIF_TERM term, bool receives, struct end **end, ERL_NIF_TERM *result);
/* Answers whether it was closed meanwhile. Any thread, under any lock but all->lock. */
bool take_back(struct end *end);
ERL_NIF_TERM atom_of_code(ErlNifEnv *env, int code);
/* Has the ferry cancel what is in flight of a file, or by an end, or all: files.c. Takes the engines' locks. */
struct file;
void give_up_requests_of(struct file *file, struct end *end);

#define NIF(name) ERL_NIF_TERM name(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[])

#define FILES_FUNCTIONS(X) \
    X(file_open, 5, 0) X(file_close, 2, 0) X(file_pread, 5, 0) X(file_pread_list, 4, 0) X(file_pwrite, 5, 0) \
    X(file_read, 3, 0) X(file_read_waiting, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_write, 3, 0) \
    X(file_write_waiting, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_seek, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    X(file_truncate, 1, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_advise, 4, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    X(file_allocate, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_do, 4, 0) X(file_copy, 6, 0) X(path_do, 6, 0) \
    X(file_pump, 7, 0) X(buffer_write, 3, 0) X(buffer_flush, 2, 0) X(buffer_read, 3, 0)
#define ENDS_FUNCTIONS(X) \
    X(end_open, 4, 0) X(end_close, 1, 0) X(end_send, 3, 0) X(end_send_large, 3, ERL_NIF_DIRTY_JOB_CPU_BOUND) \
    X(end_receive, 2, 0) X(end_set, 4, 0) X(end_give, 2, 0) X(end_call, 4, 0) X(end_call_large, 4, ERL_NIF_DIRTY_JOB_CPU_BOUND) \
    X(end_cancel, 2, 0) X(end_reply, 3, 0) X(end_reply_large, 3, ERL_NIF_DIRTY_JOB_CPU_BOUND)
#define DECLARE_(name, arity, flags) NIF(name);
FILES_FUNCTIONS(DECLARE_)
ENDS_FUNCTIONS(DECLARE_)
#undef DECLARE_

#endif
