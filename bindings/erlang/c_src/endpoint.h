/* Senders, receivers, clients, services, listeners, publishers and subscribers: endpoint.c. */
#ifndef PELTON_ERLANG_ENDPOINT_H
#define PELTON_ERLANG_ENDPOINT_H

#include "nif.h"

/* A dirty scheduler, or the notifier thread, copies what is larger: some 50 us. */
#define COPY_MAX (256 << 10)

enum endpoint_kind { SENDER, RECEIVER, CLIENT, SERVICE, LISTENER, PUBLISHER, SUBSCRIBER };

/* As a set of kinds. */
#define ANY_KIND ((1u << (SUBSCRIBER + 1)) - 1)

/* A process that waits: for free space, for a message, for the completion of `call`, or for the endpoint to be open. */
struct waiter {
    struct waiter *next;
    ErlNifPid pid;
    ErlNifMonitor monitor;
    bool has_monitor;
    bool is_stream;     /* each part of its reply is sent */
    bool for_subscribers; /* of a publisher: it waits for them, and not for space */
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    uint64_t call;      /* 0: it does not wait for a call */
    ErlNifBinary parts; /* parts of its reply that have arrived */
    size_t parts_size;
    bool lacks_memory;  /* for the parts */
};

struct endpoint {
    enum watched watched;
    enum endpoint_kind kind;
    ErlNifMutex *lock;
    union {
        pelton_sender_opening *sender;
        pelton_receiver_opening *receiver;
        pelton_client_opening *client;
        pelton_subscriber_opening *subscriber;
        void *any;
    } opening; /* NULL, except while it opens */
    union {
        pelton_sender *sender;
        pelton_receiver *receiver;
        pelton_client *client;
        pelton_service *service;
        pelton_listener *listener;
        pelton_publisher *publisher;
        pelton_subscriber *subscriber;
        void *any;
    } handle; /* NULL before it is open, and after it is closed */
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct waiter *waiters;
    int64_t active; /* so many messages more are sent to the owner; below 0: no limit */
    bool is_once;   /* no pelton_passive follows */
    bool is_watched; /* the notifier thread has an event, or gets one: [watch] in endpoint.c */
    bool holds;     /* received binaries are the channel's memory */
    bool gives_traceparents; /* with each message */
    atomic_bool is_closing;     /* closed for everybody; the handle remains while `held` is above 0 */
    atomic_uint held;           /* binaries in the channel's memory, and operations */
    atomic_bool is_in_operation; /* on a file, or one that waits on a dirty scheduler */
    bool has_completion;        /* of a client: taken, not released; the notifier thread sends it first */
    pelton_completion completion;
    size_t wanted;              /* of a publisher: the smallest message that waits for space */
    bool has_delivery;          /* of a subscriber: received, not released; the next receive returns it */
    pelton_delivery delivery;
    bool copies;                /* of a subscriber: to receive is to copy, as its messages may be overwritten */
    bool is_large;              /* of a subscriber: the last delivery was larger than COPY_MAX */
    atomic_bool has_dead;       /* the owner or a waiter has ended */
    /* Under shared->lock: */
    struct endpoint *next, *previous; /* shared->endpoints */
    bool is_listed;
    bool is_released;                 /* the notifier thread has released the list's reference */
    struct endpoint *next_closed;     /* shared->closed_endpoints */
    bool is_to_recheck;
    struct endpoint *next_to_recheck; /* shared->endpoints_to_recheck */
};

/* A responder whose handle a thread uses now; one whose handle has been closed by the end of the call. */
enum responder_state { RESPONDER_OPEN, RESPONDER_IN_USE, RESPONDER_CLOSED };

struct responder {
    pelton_responder *handle;
    atomic_int state;
};

/* A message that remains in the channel's memory. */
struct held {
    struct endpoint *endpoint;
    pelton_held *handle;
    const void *data;
    size_t size;
};

/* ---- Life ---- */

/* A new endpoint of the process, without a handle, not listed. NULL: no lock. */
struct endpoint *endpoint_create(ErlNifEnv *env, enum endpoint_kind kind);
/* Watches the handle, which has just been set, and lists the endpoint. Returns 0 or an errno. Under the lock. */
int endpoint_opened(ErlNifEnv *env, struct endpoint *endpoint);
/* Has the notifier thread finish the opening, which has just been set; the calling process waits for {ok, Endpoint}
 * or an error. Returns 0 or an errno. Under the lock. */
int endpoint_opens(ErlNifEnv *env, struct endpoint *endpoint, ERL_NIF_TERM ref);
/* Continues the opening once: PELTON_AGAIN, or its result. Under the lock. */
int endpoint_finish_opening(struct endpoint *endpoint);
/* {error, {Atom, Detail}} of the code that a call has just returned. */
ERL_NIF_TERM endpoint_open_error(ErlNifEnv *env, int code);
/* Closes it, and notifies its waiters. Takes the lock's ownership, and unlocks. */
void endpoint_close(ErlNifEnv *caller, struct endpoint *endpoint);
/* Closes those whose owners have ended, or all. */
void endpoints_close(ErlNifEnv *caller, bool only_orphans);

/* ---- Use: under the lock, unless the comment says otherwise ---- */

/* Enters the endpoint that the term is, of one of these kinds (bits), locked. NULL: *result says why. */
struct endpoint *endpoint_at(ErlNifEnv *env, ERL_NIF_TERM term, unsigned kinds, ERL_NIF_TERM *result);
/* Unlocks, and returns the result. */
ERL_NIF_TERM endpoint_leave(struct endpoint *endpoint, ERL_NIF_TERM result);
/* The same, when others wait: the caller may have taken the wake-up that was for them. */
ERL_NIF_TERM endpoint_leave_to_waiters(struct endpoint *endpoint, ERL_NIF_TERM result);

/* The notifier thread checks the endpoint now. Also without the lock. */
void endpoint_recheck(struct endpoint *endpoint);
/* After an arm, whose result is given: the notifier thread checks the endpoint once its descriptor is readable.
 * False: the endpoint was not armed. */
bool endpoint_watch(struct endpoint *endpoint, int armed);
/* Arms a client for completions and free space. */
void endpoint_arm_client(struct endpoint *endpoint);

/* The calling process waits. */
struct waiter *endpoint_add_waiter(ErlNifEnv *env, struct endpoint *endpoint, ERL_NIF_TERM ref, uint64_t call);
/* Whether a process waits for a publisher's space. */
bool endpoint_waits_for_space(const struct endpoint *endpoint);
/* Removes the waiter at *at; then *at is the next one. */
void endpoint_remove_waiter(ErlNifEnv *env, struct endpoint *endpoint, struct waiter **at);

/* The received message as a term, released or held. A message above COPY_MAX is held unless may_copy; then
 * *needs_copy is true, and the term is for held_release. */
ERL_NIF_TERM endpoint_message(ErlNifEnv *env, struct endpoint *endpoint, const pelton_message *message, bool may_copy,
                              bool *needs_copy);
/* Receives the next message of a subscriber, or the one that is received already. */
int endpoint_receive_delivery(struct endpoint *endpoint, pelton_delivery *delivery);
/* {Tag..., Bytes, Number, Missed} of a delivery, copied. tag, and self unless it is 0, come first. */
ERL_NIF_TERM endpoint_delivery(ErlNifEnv *env, ERL_NIF_TERM tag, ERL_NIF_TERM self, const pelton_delivery *delivery);
/* The next endpoint_receive_delivery returns it again. */
void endpoint_keep_delivery(struct endpoint *endpoint, const pelton_delivery *delivery);
/* Releases the delivery that was received last. */
void endpoint_release_delivery(struct endpoint *endpoint);
/* A completion as the result of a call. waiter may be NULL. */
ERL_NIF_TERM endpoint_reply(ErlNifEnv *env, const pelton_completion *completion, const struct waiter *waiter);
/* {error, {lost, Reason}} */
ERL_NIF_TERM endpoint_lost(ErlNifEnv *env, int code);
/* Any thread, without the lock. */
void held_release(struct held *held);

/* ---- For operations that another thread completes, or that wait on a dirty scheduler ---- */

/* Gives the endpoint that the term is, of one of these kinds (bits), to an operation. NULL: *result says why. */
struct endpoint *endpoint_give_to_operation(ErlNifEnv *env, ERL_NIF_TERM term, unsigned kinds, ERL_NIF_TERM *result);
/* Returns it. Returns whether it was closed meanwhile. Any thread, under any lock except shared->lock. */
bool endpoint_return(struct endpoint *endpoint);

/* ---- For the notifier thread ---- */

void endpoint_ready(struct endpoint *endpoint);
void endpoints_recheck(void);
void endpoints_release_closed(void);

int endpoint_load(ErlNifEnv *env, ErlNifResourceFlags flags);

#endif
