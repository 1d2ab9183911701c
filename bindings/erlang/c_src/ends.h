/* What pelton's parts share: ends.c has the ends, who waits at them and what the ferry does; end_functions.c what is asked of them. */
#ifndef PELTON_ENDS_H
#define PELTON_ENDS_H

#include "nif.h"

/* What is larger is copied by a dirty scheduler, or the ferry: some 50 us. */
#define COPY_MAX (256 << 10)

enum kind { SENDER, RECEIVER, CLIENT, SERVICE };

struct waiter {
    struct waiter *next;
    ErlNifPid pid;
    ErlNifMonitor monitor;
    bool has_monitor;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    uint64_t call;      /* of a client's: which is awaited; 0: it waits for room */
    ErlNifBinary parts; /* of its answer, that have come */
    size_t parts_size;
    bool lacks_memory;  /* for them */
};

struct end {
    enum watched watched;
    enum kind kind;
    ErlNifMutex *lock;
    void *handle; /* NULL once it is closed */
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct waiter *waiters;
    int64_t active; /* how many messages more come by themselves; below 0: no end of them */
    bool once;
    bool holds;             /* messages are not copied */
    atomic_bool is_closing; /* it is closed for everybody; the handle stays as long as messages of its are held */
    atomic_uint held;
    atomic_bool is_lent; /* to an operation on a file */
    bool has_answer; /* a client's, that was taken and is not released: the ferry tells it, and nothing else is done before */
    pelton_completion answer;
    unsigned patience, attempts;
    atomic_bool has_dead;      /* a process that was watched has ended: its owner, or one that waits */
    struct end *next, *previous; /* under all->lock, as all that follows: all->ends */
    bool is_listed;
    bool is_buried;            /* the ferry has let go of it */
    struct end *next_doomed;   /* it is to */
    bool is_to_be_looked_at;
    struct end *next_to_look_at;
};

struct responder {
    pelton_responder *handle;
    atomic_flag is_used;
};

struct held {
    struct end *end;
    pelton_held *handle;
    const void *data;
    size_t size;
};

/* ---- Results ---- */

/* {error, Code}; of what the system refused the errno's. */
ERL_NIF_TERM failed(ErlNifEnv *env, int code);
/* What came of a call, as the function's result. */
ERL_NIF_TERM answered(ErlNifEnv *env, const pelton_completion *answer, struct waiter *waiter);
/* What was received last, as a term; it is released, or held: then, if is_held, the term is for let_go_of. */
ERL_NIF_TERM received(ErlNifEnv *env, struct end *end, const pelton_message *message, bool may_copy, bool *is_held);
/* Lets go of a held message. */
void let_go_of(struct held *held);

/* ---- Waiting: all under the end's lock ---- */

/* Has the ferry look at the end now. Also without the lock. */
void look_again(struct end *end);
/* Has the ferry look at the end when there is something; false: there is already, or never will be. */
bool watch(struct end *end, int armed);
/* The calling process waits for room, or a message, or if `call` is not 0 for its answer. */
struct waiter *add_waiter(ErlNifEnv *env, struct end *end, ERL_NIF_TERM ref, uint64_t call);
/* Forgets one; the next one is in its place. */
void remove_waiter(ErlNifEnv *env, struct end *end, struct waiter **at);
void keep_part(struct waiter *waiter, const pelton_completion *answer);
/* Has the ferry hear of answers, and write what waits to be written. */
void arm_client(struct end *end);
/* Closes what is open; what waits is told. Gives up the lock. */
void close_end(ErlNifEnv *told, struct end *end);

/* Lists a new end. The list has a reference, which the ferry gives up after the close. */
void list_end(struct end *end);

/* A thread that opens an end, and begins with this. */
struct opening {
    ErlNifTid thread;
    struct opening *next;
};
/* Its last act: the ferry joins and frees it. */
void opening_has_ended(struct opening *opening);

#endif
