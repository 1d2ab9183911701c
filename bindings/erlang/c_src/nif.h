/* What all parts of the NIF use: shared state, the notifier thread, terms.
 *
 * Each part includes headers and calls functions only of the parts above it, so there is no circle (run-tests checks
 * that):
 *
 *   terms.c            atoms, errors, binaries, reductions, the clock
 *   notifier.c         the notifier thread
 *   log.c              what libpelton logs, for one process
 *   buffer.c           the memory of delayed_write and read_ahead                                    file.h
 *   file.c             open files: users, owner, deferred close
 *   endpoint.c         senders, receivers, clients, services, listeners; their waiters            endpoint.h
 *   request.c          engines, and requests to them                                                 request.h
 *   buffered_io.c      reads and writes through a buffer
 *   fast_io.c          reads and writes that complete within the call
 *   file_background.c  flushes and closes that no process waits for
 *   file_nif.c         the other functions of pelton_file
 *   endpoint_nif.c     the functions of pelton
 *   nif.c              loading, upgrading; which part handles an event of the notifier thread
 *
 * WAITING. A function that a normal scheduler calls does not wait. If it cannot complete, it returns `pending`, and
 * the notifier thread, or the thread that completes it, sends {pelton, Ref, Result}. Functions that can wait run on
 * dirty schedulers. The exception is a small write, within the bound that fast_io.c describes.
 *
 * LOCKS. Each engine, endpoint and buffer has a lock. Nothing waits under it. Order: an engine's or an endpoint's,
 * then a buffer's, then shared->lock. A destructor takes at most shared->lock, so a resource may be released under
 * any other. */
#ifndef PELTON_NIF_H
#define PELTON_NIF_H

#include <errno.h>
#include <erl_nif.h>
#include <pelton.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- terms.c ---- */

#define ATOMS(X) \
    X(abandoned) X(badarg) X(busy) X(closed) X(device) X(directory) X(einval) X(enomem) X(eof) X(error) \
    X(failed) X(false) X(flush) X(full) X(in_operation) X(info) X(later) X(line) X(list) X(lost) X(none) X(noproc) \
    X(not_begun) X(not_owner) X(ok) X(once) X(other) X(part) X(pelton) X(pelton_closed) X(pelton_delivery) \
    X(pelton_log) \
    X(pelton_passive) X(pelton_request) X(pending) X(read) X(read_write) X(ready) X(regular) X(stream) X(symlink) X(timeout) \
    X(true) X(undefined) X(unknown) X(waits) X(warning) X(write)

#define ATOM_(name) extern ERL_NIF_TERM atom_##name;
ATOMS(ATOM_)
#undef ATOM_

void terms_load(ErlNifEnv *env);
/* The atom of an errno, the same as `file` returns. */
ERL_NIF_TERM atom_of_errno(int number);
/* The atom of a code of pelton.h; `timeout` for PELTON_TIMED_OUT. */
ERL_NIF_TERM atom_of_code(int code);
/* The atom's code, or 0. */
int code_of_atom(ERL_NIF_TERM atom);
/* {error, Reason} */
ERL_NIF_TERM error_of(ErlNifEnv *env, ERL_NIF_TERM reason);
/* {error, Atom} of a code. For PELTON_SYSTEM it is errno's. */
ERL_NIF_TERM error_of_code(ErlNifEnv *env, int code);
ERL_NIF_TERM bytes_of(ErlNifEnv *env, const void *data, size_t size);
/* The traceparent that a function of pelton.h has found, a binary; `undefined` if it has found none. */
ERL_NIF_TERM traceparent_of(ErlNifEnv *env, int found, const char *text);
/* A text that ends with 0, or NULL for `undefined`. */
bool text_at(ErlNifEnv *env, ERL_NIF_TERM term, const char **text);
uint64_t bytes_of_pieces(const ErlNifIOVec *pieces);
/* An offset, or PELTON_CURRENT for `undefined`. */
bool offset_at(ErlNifEnv *env, ERL_NIF_TERM term, uint64_t *offset);
/* Charges the calling process for bytes that were copied: 1 % of its time slice for 64 KiB, which take some 10 us. */
void charge_bytes(ErlNifEnv *env, uint64_t bytes);
/* Charges for microseconds: twice the time, because the memory and its collection cost as much again. Stores
 * fractions. */
void charge_us(ErlNifEnv *env, int64_t us);
int64_t now_us(void);
/* How often this thread has given up its processor, because it waited for something; not because another thread
 * got its turn. */
long sleeps_of_this_thread(void);
/* The same, less than a millisecond ago: sleeps_of_this_thread costs a tenth of a write. */
long recent_sleeps(int64_t now);

/* ---- notifier.c ---- *
 * One thread. It sleeps in epoll on the descriptors of all engines and endpoints, and sends results to processes. It
 * also closes what nobody refers to any more, because a destructor runs on whichever thread collects garbage. */

/* What the notifier thread watches begins with this. */
enum watched { WATCHED_DOORBELL, WATCHED_ENGINE, WATCHED_ENDPOINT };

struct notifier_events {
    /* A watched descriptor is readable. */
    void (*ready)(enum watched *watched);
    /* After each wake-up. Returns for how many milliseconds the thread may sleep, or -1: no limit. */
    int (*work)(void);
};

/* Replaces the running notifier thread, if there is one; that continues if this fails. Returns 0 or an errno. */
int notifier_start(struct notifier_events events);
/* The thread calls events.ready whenever fd is readable. Returns 0 or an errno. */
int notifier_watch(int fd, enum watched *watched);
/* The same once for each notifier_rewatch: none at first. */
int notifier_watch_once(int fd, enum watched *watched);
int notifier_rewatch(int fd, enum watched *watched);
void notifier_unwatch(int fd);
/* Wakes the thread for events.work. */
void notifier_wake(void);

/* ---- log.c ---- */

/* Sends the process what was logged since the last call. */
void log_send(void);

/* ---- Shared state ---- */

/* A new library takes this over unchanged. A change of a structure that it reaches needs a new number. */
#define LAYOUT 11
struct shared {
    unsigned layout;
    ErlNifMutex *lock; /* protects the lists below, and the creation of engines */
    int epoll;
    int doorbell;
    enum watched doorbell_watched;
    struct notifier *notifier;
    ErlNifResourceType *file_type, *request_type, *endpoint_type, *responder_type, *held_type;
    unsigned engine_count;
    struct engine *engines;
    struct waiting_engine *waiting_engines; /* unused ones */
    struct file *files;                     /* open ones */
    struct deferred_close *deferred_closes;
    struct file *delayed;                   /* files with unwritten bytes in their buffers */
    int64_t next_due;                       /* no flush is due before, in milliseconds */
    unsigned flushes;                       /* in progress: stopping waits for them */
    ErlNifCond *flushed;                    /* signalled when flushes is 0 */
    atomic_flag is_writing;                 /* a normal scheduler performs a measured write: fast_io.c */
    _Atomic int64_t writes_paused_until;    /* no measured write begins before, in now_us()'s time */
    atomic_bool has_closed;                 /* a file or endpoint was closed with requests in flight */
    struct endpoint *endpoints;             /* open ones */
    struct endpoint *closed_endpoints;
    struct endpoint *endpoints_to_recheck;
    ErlNifMutex *log_lock; /* protects what follows; nothing is locked under it */
    struct log_record *log_records;
    unsigned log_count;
    ErlNifPid log_receiver;
};
extern struct shared *shared;

#endif
