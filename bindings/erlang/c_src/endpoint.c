/* Senders, receivers, clients, services, listeners, publishers and subscribers.
 *
 * An endpoint lives until it is closed, or its owner ends. Any process may use it. A function that cannot complete
 * adds a waiter, arms the endpoint, and has the notifier thread watch it once. The notifier thread then sends the
 * waiter the reply of its call, or `ready`: it may try again. What an active endpoint receives, it sends to the
 * owner.
 *
 * Opening is the same: the notifier thread watches the opening's descriptor, and sends {ok, Endpoint} to the waiter.
 *
 * The notifier thread watches a publisher all the time, and admits its subscribers.
 *
 *   [watch]   The kernel reports an armed descriptor once. While is_watched, that is still to come, or the notifier
 *             thread is about to handle it, with all waiters that are there by then. So watching again needs no
 *             system call.
 *   [closed]  After its close an endpoint's memory remains until the notifier thread has released the list's
 *             reference, because an event that epoll_wait has already returned may name it. After the close there is
 *             no other event: the descriptor is no longer watched. */
#include "endpoint.h"

/* The notifier thread's quantum at one endpoint: so many messages, or so many bytes. */
#define QUANTUM 64
#define QUANTUM_BYTES (1 << 20)

/* ---- Dispatch by kind ---- */

static int endpoint_fd(const struct endpoint *endpoint)
{
    switch (endpoint->kind) {
    case SENDER: return pelton_sender_fd(endpoint->handle.sender);
    case RECEIVER: return pelton_receiver_fd(endpoint->handle.receiver);
    case CLIENT: return pelton_client_fd(endpoint->handle.client);
    case SERVICE: return pelton_service_fd(endpoint->handle.service);
    case PUBLISHER: return pelton_publisher_fd(endpoint->handle.publisher);
    case SUBSCRIBER: return pelton_subscriber_fd(endpoint->handle.subscriber);
    default: return pelton_listener_fd(endpoint->handle.listener);
    }
}

static int opening_fd(const struct endpoint *endpoint)
{
    switch (endpoint->kind) {
    case SENDER: return pelton_sender_opening_fd(endpoint->opening.sender);
    case RECEIVER: return pelton_receiver_opening_fd(endpoint->opening.receiver);
    case SUBSCRIBER: return pelton_subscriber_opening_fd(endpoint->opening.subscriber);
    default: return pelton_client_opening_fd(endpoint->opening.client);
    }
}

int endpoint_finish_opening(struct endpoint *endpoint)
{
    int code;
    switch (endpoint->kind) {
    case SENDER: code = pelton_sender_opening_finish(endpoint->opening.sender, &endpoint->handle.sender); break;
    case RECEIVER: code = pelton_receiver_opening_finish(endpoint->opening.receiver, &endpoint->handle.receiver); break;
    case SUBSCRIBER:
        code = pelton_subscriber_opening_finish(endpoint->opening.subscriber, &endpoint->handle.subscriber);
        break;
    default: code = pelton_client_opening_finish(endpoint->opening.client, &endpoint->handle.client); break;
    }
    if (code)
        endpoint->handle.any = NULL;
    return code;
}

/* ---- Held messages ---- */

static ERL_NIF_TERM held_term(ErlNifEnv *env, struct endpoint *endpoint, pelton_held *handle,
                              const pelton_message *message, bool as_binary)
{
    struct held *held = enif_alloc_resource(shared->held_type, sizeof *held);
    *held = (struct held){endpoint, handle, message->data, message->size};
    enif_keep_resource(endpoint);
    atomic_fetch_add(&endpoint->held, 1);
    ERL_NIF_TERM term =
        as_binary ? enif_make_resource_binary(env, held, held->data, held->size) : enif_make_resource(env, held);
    enif_release_resource(held);
    return term;
}

void held_release(struct held *held)
{
    if (!held->handle)
        return;
    pelton_close(held->handle);
    held->handle = NULL;
    /* A closed endpoint's handle is closed after the last one. */
    if (atomic_fetch_sub(&held->endpoint->held, 1) == 1 && atomic_load(&held->endpoint->is_closing))
        endpoint_recheck(held->endpoint);
    enif_release_resource(held->endpoint);
}

/* ---- Waiters ---- */

void endpoint_recheck(struct endpoint *endpoint)
{
    enif_mutex_lock(shared->lock);
    if (!endpoint->is_to_recheck && !endpoint->is_released) {
        endpoint->is_to_recheck = true;
        endpoint->next_to_recheck = shared->endpoints_to_recheck;
        shared->endpoints_to_recheck = endpoint;
    }
    enif_mutex_unlock(shared->lock);
    notifier_wake();
}

bool endpoint_watch(struct endpoint *endpoint, int armed)
{
    if (armed != PELTON_OK)
        return false;
    if (!endpoint->is_watched) {
        endpoint->is_watched = !notifier_rewatch(endpoint_fd(endpoint), &endpoint->watched);
        if (!endpoint->is_watched)
            endpoint_recheck(endpoint);
    }
    return true;
}

struct waiter *endpoint_add_waiter(ErlNifEnv *env, struct endpoint *endpoint, ERL_NIF_TERM ref, uint64_t call)
{
    struct waiter *waiter = enif_alloc(sizeof *waiter);
    *waiter = (struct waiter){.next = endpoint->waiters, .env = enif_alloc_env(), .call = call};
    enif_self(env, &waiter->pid);
    waiter->ref = enif_make_copy(waiter->env, ref);
    endpoint->waiters = waiter;
    waiter->has_monitor = enif_monitor_process(env, endpoint, &waiter->pid, &waiter->monitor) == 0;
    if (!waiter->has_monitor) {
        atomic_store(&endpoint->has_dead, true);
        endpoint_recheck(endpoint);
    }
    return waiter;
}

bool endpoint_waits_for_space(const struct endpoint *endpoint)
{
    const struct waiter *waiter = endpoint->waiters;
    while (waiter && waiter->for_subscribers)
        waiter = waiter->next;
    return waiter;
}

void endpoint_remove_waiter(ErlNifEnv *env, struct endpoint *endpoint, struct waiter **at)
{
    struct waiter *waiter = *at;
    *at = waiter->next;
    if (waiter->has_monitor)
        enif_demonitor_process(env, endpoint, &waiter->monitor);
    if (waiter->parts.data)
        enif_release_binary(&waiter->parts);
    enif_free_env(waiter->env);
    enif_free(waiter);
}

/* Sends the result, and removes the waiter. */
static void send_result(ErlNifEnv *caller, struct endpoint *endpoint, struct waiter *waiter, ERL_NIF_TERM result)
{
    struct waiter **at = &endpoint->waiters;
    while (*at != waiter)
        at = &(*at)->next;
    enif_send(caller, &waiter->pid, waiter->env, enif_make_tuple3(waiter->env, atom_pelton, waiter->ref, result));
    endpoint_remove_waiter(caller, endpoint, at);
}

/* All that do not wait for a call may try again. */
static void send_ready(struct endpoint *endpoint)
{
    for (struct waiter *waiter = endpoint->waiters, *next; waiter; waiter = next) {
        next = waiter->next;
        if (!waiter->call)
            send_result(NULL, endpoint, waiter, atom_ready);
    }
}

/* Every call fails: the endpoint is closed (PELTON_OK), or its peer has ended. The others find that when they try
 * again. */
static void fail_waiters(ErlNifEnv *caller, struct endpoint *endpoint, int code)
{
    while (endpoint->waiters) {
        struct waiter *waiter = endpoint->waiters;
        ERL_NIF_TERM result = atom_ready;
        if (waiter->call)
            result = code ? endpoint_lost(waiter->env, code) : error_of(waiter->env, atom_closed);
        send_result(caller, endpoint, waiter, result);
    }
}

static void remove_dead_waiters(struct endpoint *endpoint)
{
    for (struct waiter **at = &endpoint->waiters; *at;) {
        if (enif_is_process_alive(NULL, &(*at)->pid)) {
            at = &(*at)->next;
            continue;
        }
        if ((*at)->call)
            pelton_client_cancel(endpoint->handle.client, (*at)->call);
        endpoint_remove_waiter(NULL, endpoint, at);
    }
}

struct endpoint *endpoint_at(ErlNifEnv *env, ERL_NIF_TERM term, unsigned kinds, ERL_NIF_TERM *result)
{
    void *object;
    if (!enif_get_resource(env, term, shared->endpoint_type, &object) ||
        !(kinds & 1u << ((struct endpoint *)object)->kind)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    struct endpoint *endpoint = object;
    /* A thread that copies a large message has the lock for longer than a scheduler should wait. */
    if (enif_mutex_trylock(endpoint->lock)) {
        *result = atom_busy;
        return NULL;
    }
    bool is_open = endpoint->handle.any && !atomic_load(&endpoint->is_closing);
    if (is_open && !endpoint->has_completion)
        return endpoint;
    enif_mutex_unlock(endpoint->lock);
    *result = is_open ? atom_busy : error_of(env, atom_closed);
    return NULL;
}

ERL_NIF_TERM endpoint_leave(struct endpoint *endpoint, ERL_NIF_TERM result)
{
    enif_mutex_unlock(endpoint->lock);
    return result;
}

ERL_NIF_TERM endpoint_leave_to_waiters(struct endpoint *endpoint, ERL_NIF_TERM result)
{
    if (endpoint->waiters)
        endpoint_recheck(endpoint);
    return endpoint_leave(endpoint, result);
}

/* ---- Receiving ---- */

ERL_NIF_TERM endpoint_message(ErlNifEnv *env, struct endpoint *endpoint, const pelton_message *message, bool may_copy,
                              bool *needs_copy)
{
    *needs_copy = false;
    pelton_receiver *receiver = endpoint->handle.receiver;
    pelton_held *handle;
    bool holds = endpoint->holds && message->size > 64;
    if ((holds || (message->size > COPY_MAX && !may_copy)) && pelton_receiver_hold(receiver, &handle) == PELTON_OK) {
        *needs_copy = !holds;
        return held_term(env, endpoint, handle, message, holds);
    }
    ERL_NIF_TERM bytes = bytes_of(env, message->data, message->size);
    pelton_receiver_release(receiver);
    return bytes;
}

int endpoint_receive_delivery(struct endpoint *endpoint, pelton_delivery *delivery)
{
    if (!endpoint->has_delivery)
        return pelton_subscriber_receive(endpoint->handle.subscriber, PELTON_NO_WAIT, delivery);
    *delivery = endpoint->delivery;
    return PELTON_OK;
}

ERL_NIF_TERM endpoint_delivery(ErlNifEnv *env, ERL_NIF_TERM tag, ERL_NIF_TERM self, const pelton_delivery *delivery)
{
    ERL_NIF_TERM bytes = bytes_of(env, delivery->data, delivery->size);
    ERL_NIF_TERM number = enif_make_uint64(env, delivery->number), missed = enif_make_uint64(env, delivery->missed);
    if (self)
        return enif_make_tuple5(env, tag, self, bytes, number, missed);
    return enif_make_tuple4(env, tag, bytes, number, missed);
}

void endpoint_keep_delivery(struct endpoint *endpoint, const pelton_delivery *delivery)
{
    endpoint->has_delivery = true;
    endpoint->delivery = *delivery;
}

void endpoint_release_delivery(struct endpoint *endpoint)
{
    endpoint->has_delivery = false;
    pelton_subscriber_release(endpoint->handle.subscriber);
}

static ERL_NIF_TERM responder_term(ErlNifEnv *env, pelton_responder *handle)
{
    if (!handle)
        return atom_undefined;
    struct responder *responder = enif_alloc_resource(shared->responder_type, sizeof *responder);
    responder->handle = handle;
    atomic_init(&responder->state, RESPONDER_OPEN);
    ERL_NIF_TERM term = enif_make_resource(env, responder);
    enif_release_resource(responder);
    return term;
}

/* False: the owner has ended. */
static bool send_to_owner(ErlNifEnv *env, struct endpoint *endpoint, ERL_NIF_TERM message)
{
    bool is_sent = enif_send(NULL, &endpoint->owner, env, message);
    enif_clear_env(env);
    return is_sent;
}

/* Sends the owner the next message, delivery or request. Adds its size to *bytes. */
static int send_next(ErlNifEnv *env, struct endpoint *endpoint, size_t *bytes)
{
    ERL_NIF_TERM self = enif_make_resource(env, endpoint);
    if (endpoint->kind == RECEIVER) {
        pelton_message message;
        bool needs_copy;
        int code = pelton_receiver_receive(endpoint->handle.receiver, PELTON_NO_WAIT, &message);
        if (code)
            return code;
        *bytes += message.size;
        /* Before the message is released. */
        char text[PELTON_TRACEPARENT_SIZE];
        int found = endpoint->gives_traceparents && pelton_receiver_traceparent(endpoint->handle.receiver, text) == 1;
        ERL_NIF_TERM data = endpoint_message(env, endpoint, &message, true, &needs_copy);
        if (endpoint->gives_traceparents)
            data = enif_make_tuple4(env, atom_pelton, self, data, traceparent_of(env, found, text));
        else
            data = enif_make_tuple3(env, atom_pelton, self, data);
        send_to_owner(env, endpoint, data);
    } else if (endpoint->kind == SUBSCRIBER) {
        pelton_delivery delivery;
        int code = endpoint_receive_delivery(endpoint, &delivery);
        if (code)
            return code;
        *bytes += delivery.size;
        if (send_to_owner(env, endpoint, endpoint_delivery(env, atom_pelton_delivery, self, &delivery))) {
            endpoint_release_delivery(endpoint);
        } else {
            /* A durable subscription gives it to the next process. The owner's end closes the endpoint soon. */
            endpoint_keep_delivery(endpoint, &delivery);
            endpoint->active = 0;
        }
    } else {
        pelton_request request;
        int code = pelton_service_receive(endpoint->handle.service, PELTON_NO_WAIT, &request);
        if (code)
            return code;
        *bytes += request.size;
        ERL_NIF_TERM data = bytes_of(env, request.data, request.size);
        ERL_NIF_TERM responder = responder_term(env, request.responder);
        pelton_service_release(endpoint->handle.service);
        send_to_owner(env, endpoint, enif_make_tuple4(env, atom_pelton_request, self, responder, data));
    }
    return PELTON_OK;
}

/* Sends the owner what has arrived, as far as the endpoint is active: one quantum. */
static void send_arrived(struct endpoint *endpoint)
{
    ErlNifEnv *env = enif_alloc_env();
    int code = PELTON_OK;
    size_t bytes = 0;
    for (int i = 0; i < QUANTUM && bytes < QUANTUM_BYTES && endpoint->active && code == PELTON_OK; i++) {
        code = send_next(env, endpoint, &bytes);
        if (code == PELTON_OK && endpoint->active > 0 && --endpoint->active == 0 && !endpoint->is_once)
            send_to_owner(env, endpoint, enif_make_tuple2(env, atom_pelton_passive, enif_make_resource(env, endpoint)));
    }
    if (endpoint->active && (code == PELTON_OK || code == PELTON_AGAIN)) {
        switch (endpoint->kind) {
        case RECEIVER: code = pelton_receiver_arm(endpoint->handle.receiver); break;
        case SUBSCRIBER: code = pelton_subscriber_arm(endpoint->handle.subscriber); break;
        default: code = pelton_service_arm(endpoint->handle.service);
        }
        if (!endpoint_watch(endpoint, code) && code == PELTON_READY)
            endpoint_recheck(endpoint);
    }
    if (endpoint->active && code < 0) {
        endpoint->active = 0;
        ERL_NIF_TERM self = enif_make_resource(env, endpoint);
        send_to_owner(env, endpoint, enif_make_tuple3(env, atom_pelton_closed, self, atom_of_code(code)));
    }
    enif_free_env(env);
}

/* ---- Calls ---- */

ERL_NIF_TERM endpoint_lost(ErlNifEnv *env, int code)
{
    ERL_NIF_TERM reason = code == PELTON_AGAIN ? atom_not_begun : atom_of_code(code);
    return error_of(env, enif_make_tuple2(env, atom_lost, reason));
}

ERL_NIF_TERM endpoint_reply(ErlNifEnv *env, const pelton_completion *completion, const struct waiter *waiter)
{
    if (waiter && waiter->lacks_memory)
        return error_of(env, atom_enomem);
    size_t size = completion->size, before = waiter ? waiter->parts_size : 0;
    ERL_NIF_TERM bytes;
    switch (completion->outcome) {
    case PELTON_END:
        if (waiter && waiter->is_stream)
            return atom_ok;
        /* fall through */
    case PELTON_REPLY: {
        unsigned char *reply = enif_make_new_binary(env, before + size, &bytes);
        if (before)
            memcpy(reply, waiter->parts.data, before);
        if (size)
            memcpy(reply + before, completion->data, size);
        return enif_make_tuple2(env, atom_ok, bytes);
    }
    case PELTON_FAILED: {
        bytes = bytes_of(env, completion->data, size);
        ERL_NIF_TERM detail = enif_make_tuple2(env, enif_make_uint(env, completion->code), bytes);
        return error_of(env, enif_make_tuple2(env, atom_failed, detail));
    }
    case PELTON_ABANDONED: return error_of(env, atom_abandoned);
    default: return endpoint_lost(env, (int)completion->code);
    }
}

static void append_part(struct waiter *waiter, const pelton_completion *part)
{
    size_t wanted = waiter->parts_size + part->size;
    if (!waiter->parts.data) {
        waiter->lacks_memory = !enif_alloc_binary(wanted, &waiter->parts);
    } else if (waiter->parts.size < wanted && !enif_realloc_binary(&waiter->parts, wanted * 2)) {
        waiter->lacks_memory = true;
    }
    if (waiter->lacks_memory)
        return;
    memcpy(waiter->parts.data + waiter->parts_size, part->data, part->size);
    waiter->parts_size = wanted;
}

static void send_part(struct waiter *waiter, const pelton_completion *part)
{
    ErlNifEnv *env = enif_alloc_env();
    ERL_NIF_TERM result = enif_make_tuple2(env, atom_part, bytes_of(env, part->data, part->size));
    enif_send(NULL, &waiter->pid, env, enif_make_tuple3(env, atom_pelton, enif_make_copy(env, waiter->ref), result));
    enif_free_env(env);
}

/* Sends a completion to its waiter, and releases it. Returns its size. */
static size_t send_completion(struct endpoint *endpoint, const pelton_completion *completion)
{
    size_t size = completion->size;
    struct waiter *waiter = endpoint->waiters;
    while (waiter && waiter->call != completion->call)
        waiter = waiter->next;
    if (waiter && completion->outcome == PELTON_PART && waiter->is_stream)
        send_part(waiter, completion);
    else if (waiter && completion->outcome == PELTON_PART)
        append_part(waiter, completion);
    else if (waiter)
        send_result(NULL, endpoint, waiter, endpoint_reply(waiter->env, completion, waiter));
    pelton_client_release(endpoint->handle.client);
    return size;
}

/* Sends completions to their waiters: one quantum. */
static void send_completions(struct endpoint *endpoint)
{
    int code = PELTON_OK;
    size_t bytes = 0;
    pelton_completion completion;
    if (endpoint->has_completion) {
        endpoint->has_completion = false;
        bytes = send_completion(endpoint, &endpoint->completion);
    }
    for (int i = 0; i < QUANTUM && bytes < QUANTUM_BYTES && code == PELTON_OK; i++) {
        code = pelton_client_await(endpoint->handle.client, PELTON_NO_WAIT, &completion);
        if (code == PELTON_OK)
            bytes += send_completion(endpoint, &completion);
    }
    if (code == PELTON_OK || code == PELTON_AGAIN || code == PELTON_NO_LISTENER)
        send_ready(endpoint);
    else
        fail_waiters(NULL, endpoint, code);
}

void endpoint_arm_client(struct endpoint *endpoint)
{
    int code = pelton_client_arm(endpoint->handle.client);
    /* An error matters only to waiters. */
    if (!endpoint_watch(endpoint, code) && (code == PELTON_READY || endpoint->waiters))
        endpoint_recheck(endpoint);
}

/* ---- Life ---- */

struct endpoint *endpoint_create(ErlNifEnv *env, enum endpoint_kind kind)
{
    struct endpoint *endpoint = enif_alloc_resource(shared->endpoint_type, sizeof *endpoint);
    memset(endpoint, 0, sizeof *endpoint);
    endpoint->watched = WATCHED_ENDPOINT;
    endpoint->kind = kind;
    enif_self(env, &endpoint->owner);
    endpoint->lock = enif_mutex_create("pelton_endpoint");
    if (endpoint->lock)
        return endpoint;
    enif_release_resource(endpoint);
    return NULL;
}

static void list_endpoint(struct endpoint *endpoint)
{
    enif_mutex_lock(shared->lock);
    endpoint->next = shared->endpoints;
    if (endpoint->next)
        endpoint->next->previous = endpoint;
    shared->endpoints = endpoint;
    endpoint->is_listed = true;
    enif_mutex_unlock(shared->lock);
}

/* Under shared->lock. */
static void unlist_endpoint(struct endpoint *endpoint)
{
    if (endpoint->previous)
        endpoint->previous->next = endpoint->next;
    else
        shared->endpoints = endpoint->next;
    if (endpoint->next)
        endpoint->next->previous = endpoint->previous;
    endpoint->next = endpoint->previous = NULL;
    endpoint->is_listed = false;
}

/* The list has a reference. If the owner has ended already, the notifier thread finds that. */
static void list_for_owner(ErlNifEnv *env, struct endpoint *endpoint)
{
    enif_keep_resource(endpoint);
    list_endpoint(endpoint);
    if (enif_monitor_process(env, endpoint, &endpoint->owner, &endpoint->monitor)) {
        atomic_store(&endpoint->has_dead, true);
        endpoint_recheck(endpoint);
    }
}

int endpoint_opened(ErlNifEnv *env, struct endpoint *endpoint)
{
    int error = notifier_watch_once(endpoint_fd(endpoint), &endpoint->watched);
    if (!error)
        list_for_owner(env, endpoint);
    return error;
}

int endpoint_opens(ErlNifEnv *env, struct endpoint *endpoint, ERL_NIF_TERM ref)
{
    endpoint_add_waiter(env, endpoint, ref, 0);
    int error = notifier_watch(opening_fd(endpoint), &endpoint->watched);
    if (error)
        endpoint_remove_waiter(env, endpoint, &endpoint->waiters);
    else
        list_for_owner(env, endpoint);
    return error;
}

ERL_NIF_TERM endpoint_open_error(ErlNifEnv *env, int code)
{
    ERL_NIF_TERM atom = code == PELTON_SYSTEM ? atom_of_errno(errno) : atom_of_code(code);
    const char *detail = pelton_error_detail();
    return error_of(env, enif_make_tuple2(env, atom, bytes_of(env, detail, strlen(detail))));
}

static void close_opening(struct endpoint *endpoint)
{
    if (!endpoint->opening.any)
        return;
    notifier_unwatch(opening_fd(endpoint));
    pelton_close(endpoint->opening.any);
    endpoint->opening.any = NULL;
}

/* Binaries in a receiver's memory must not change, so the handle remains with them, and the sender overwrites
 * nothing. */
void endpoint_close(ErlNifEnv *caller, struct endpoint *endpoint)
{
    endpoint->active = 0;
    atomic_store(&endpoint->is_closing, true);
    if (atomic_load(&endpoint->is_in_operation))
        atomic_store(&shared->has_closed, true);
    if (endpoint->opening.any) {
        while (endpoint->waiters) {
            ErlNifEnv *env = endpoint->waiters->env;
            ERL_NIF_TERM detail = enif_make_tuple2(env, atom_closed, bytes_of(env, "", 0));
            send_result(caller, endpoint, endpoint->waiters, error_of(env, detail));
        }
        close_opening(endpoint);
    }
    fail_waiters(caller, endpoint, PELTON_OK);
    bool is_last = atomic_load(&endpoint->held) == 0;
    if (is_last && endpoint->handle.any) {
        /* The receivers that a listener accepted keep its descriptor open. A later event would name freed memory. */
        notifier_unwatch(endpoint_fd(endpoint));
        pelton_close(endpoint->handle.any);
        endpoint->handle.any = NULL;
    }
    enif_mutex_unlock(endpoint->lock);
    enif_mutex_lock(shared->lock);
    if (endpoint->is_listed)
        unlist_endpoint(endpoint);
    if (is_last) {
        endpoint->next_closed = shared->closed_endpoints;
        shared->closed_endpoints = endpoint;
    }
    enif_mutex_unlock(shared->lock);
    notifier_wake();
}

static bool is_orphan(const struct endpoint *endpoint)
{
    ErlNifPid owner = endpoint->owner;
    return !enif_is_process_alive(NULL, &owner);
}

void endpoints_close(ErlNifEnv *caller, bool only_orphans)
{
    for (;;) {
        enif_mutex_lock(shared->lock);
        struct endpoint *endpoint = shared->endpoints;
        while (endpoint && only_orphans && !is_orphan(endpoint))
            endpoint = endpoint->next;
        if (endpoint) {
            enif_keep_resource(endpoint);
            unlist_endpoint(endpoint);
        }
        enif_mutex_unlock(shared->lock);
        if (!endpoint)
            return;
        enif_mutex_lock(endpoint->lock);
        if (endpoint->handle.any || endpoint->opening.any)
            endpoint_close(caller, endpoint);
        else
            enif_mutex_unlock(endpoint->lock);
        enif_release_resource(endpoint);
    }
}

/* ---- Operations ---- */

struct endpoint *endpoint_give_to_operation(ErlNifEnv *env, ERL_NIF_TERM term, unsigned kinds, ERL_NIF_TERM *result)
{
    struct endpoint *endpoint = endpoint_at(env, term, kinds, result);
    if (!endpoint)
        return NULL;
    *result = error_of(env, endpoint->active ? atom_einval : atom_in_operation);
    bool is_given = !endpoint->active && !atomic_exchange(&endpoint->is_in_operation, true);
    if (is_given) {
        /* As a held message does, the operation keeps the handle. */
        atomic_fetch_add(&endpoint->held, 1);
        enif_keep_resource(endpoint);
    }
    enif_mutex_unlock(endpoint->lock);
    return is_given ? endpoint : NULL;
}

bool endpoint_return(struct endpoint *endpoint)
{
    bool is_closed = atomic_load(&endpoint->is_closing);
    atomic_fetch_sub(&endpoint->held, 1);
    atomic_store(&endpoint->is_in_operation, false);
    endpoint_recheck(endpoint);
    enif_release_resource(endpoint);
    return is_closed;
}

/* ---- The notifier thread ---- */

/* Sends {ok, Endpoint} or an error to the process that opens it. Takes over the lock, and unlocks. */
static void continue_opening(struct endpoint *endpoint)
{
    int code = endpoint_finish_opening(endpoint);
    if (code == PELTON_AGAIN) {
        enif_mutex_unlock(endpoint->lock);
        return;
    }
    struct waiter *waiter = endpoint->waiters;
    ERL_NIF_TERM result = 0;
    if (code && waiter)
        result = endpoint_open_error(waiter->env, code);
    close_opening(endpoint);
    if (!code && (errno = notifier_watch_once(endpoint_fd(endpoint), &endpoint->watched))) {
        code = PELTON_SYSTEM;
        if (waiter)
            result = endpoint_open_error(waiter->env, code);
    }
    if (!code && waiter)
        result = enif_make_tuple2(waiter->env, atom_ok, enif_make_resource(waiter->env, endpoint));
    if (waiter)
        send_result(NULL, endpoint, waiter, result);
    if (code)
        endpoint_close(NULL, endpoint);
    else
        enif_mutex_unlock(endpoint->lock);
}

/* Admits subscribers. To arm does that too, and continues the wait of those that wait for space, which any other
 * function would end. */
static void publisher_ready(struct endpoint *endpoint)
{
    pelton_publisher *publisher = endpoint->handle.publisher;
    int code = endpoint_waits_for_space(endpoint) ? pelton_publisher_arm(publisher, endpoint->wanted)
                                                  : pelton_publisher_wait_subscribers(publisher, 0, PELTON_NO_WAIT);
    for (struct waiter *waiter = endpoint->waiters, *next; waiter; waiter = next) {
        next = waiter->next;
        if (waiter->for_subscribers || code != PELTON_OK)
            send_result(NULL, endpoint, waiter, atom_ready);
    }
    /* Also after an error, as without free descriptors: a timer of the publisher repeats what failed. After a defect
     * in the library every call fails, and leaves the descriptor readable for ever. */
    if (code != PELTON_INTERNAL)
        endpoint_watch(endpoint, PELTON_OK);
}

void endpoint_ready(struct endpoint *endpoint)
{
    enif_mutex_lock(endpoint->lock);
    endpoint->is_watched = false;
    bool is_closing = atomic_load(&endpoint->is_closing), is_opening = endpoint->opening.any;
    bool is_open = endpoint->handle.any || is_opening;
    bool is_over = is_open && is_closing && atomic_load(&endpoint->held) == 0;
    if (is_open && atomic_exchange(&endpoint->has_dead, false)) {
        is_over |= !is_closing && is_orphan(endpoint);
        if (!is_over)
            remove_dead_waiters(endpoint);
    }
    if (is_over) {
        endpoint_close(NULL, endpoint);
        return;
    }
    if (is_opening) {
        continue_opening(endpoint);
        return;
    }
    if (is_open && !is_closing && !atomic_load(&endpoint->is_in_operation)) {
        switch (endpoint->kind) {
        case SENDER:
        case LISTENER: send_ready(endpoint); break;
        case PUBLISHER: publisher_ready(endpoint); break;
        case RECEIVER:
        case SUBSCRIBER:
        case SERVICE:
            send_ready(endpoint);
            if (endpoint->active)
                send_arrived(endpoint);
            break;
        case CLIENT:
            send_completions(endpoint);
            endpoint_arm_client(endpoint);
            break;
        }
    }
    enif_mutex_unlock(endpoint->lock);
}

void endpoints_recheck(void)
{
    /* Only those that are listed now: an endpoint that always has more comes after the others, and after the files. */
    enif_mutex_lock(shared->lock);
    struct endpoint *endpoint = shared->endpoints_to_recheck, *next;
    shared->endpoints_to_recheck = NULL;
    enif_mutex_unlock(shared->lock);
    for (; endpoint; endpoint = next) {
        enif_mutex_lock(shared->lock);
        next = endpoint->next_to_recheck;
        /* Before the check: a later request lists it again. Only this thread releases the list's reference. */
        endpoint->is_to_recheck = false;
        enif_mutex_unlock(shared->lock);
        endpoint_ready(endpoint);
    }
}

void endpoints_release_closed(void)
{
    enif_mutex_lock(shared->lock);
    struct endpoint *released = NULL, *next;
    for (struct endpoint **at = &shared->closed_endpoints; *at;) {
        struct endpoint *endpoint = *at;
        if (endpoint->is_to_recheck) {
            at = &endpoint->next_closed;
            continue;
        }
        *at = endpoint->next_closed;
        endpoint->is_released = true;
        endpoint->next_closed = released;
        released = endpoint;
    }
    enif_mutex_unlock(shared->lock);
    for (; released; released = next) {
        next = released->next_closed;
        enif_release_resource(released);
    }
}

/* The owner or a waiter has ended. It does not take the endpoint's lock, which a thread that copies may have for
 * long. */
static void process_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct endpoint *endpoint = object;
    atomic_store(&endpoint->has_dead, true);
    endpoint_recheck(endpoint);
}

static void destroy_endpoint(ErlNifEnv *env, void *object)
{
    (void)env;
    struct endpoint *endpoint = object;
    if (endpoint->lock)
        enif_mutex_destroy(endpoint->lock);
}

static void destroy_responder(ErlNifEnv *env, void *object)
{
    (void)env;
    struct responder *responder = object;
    if (atomic_load(&responder->state) != RESPONDER_CLOSED)
        pelton_close(responder->handle);
}

static void destroy_held(ErlNifEnv *env, void *object)
{
    (void)env;
    held_release(object);
}

int endpoint_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit endpoint = {.dtor = destroy_endpoint, .down = process_is_down};
    ErlNifResourceTypeInit responder = {.dtor = destroy_responder};
    ErlNifResourceTypeInit held = {.dtor = destroy_held};
    shared->endpoint_type = enif_open_resource_type_x(env, "pelton_endpoint", &endpoint, flags, NULL);
    shared->responder_type = enif_open_resource_type_x(env, "pelton_responder", &responder, flags, NULL);
    shared->held_type = enif_open_resource_type_x(env, "pelton_held", &held, flags, NULL);
    return shared->endpoint_type && shared->responder_type && shared->held_type ? 0 : ENOMEM;
}
