/* The functions of pelton.
 *
 * `busy`: another thread uses the endpoint, and nothing was done. `pending`: the endpoint has a waiter now, and the
 * notifier thread sends {pelton, Ref, ready}. */
#include "endpoint.h"
#include "functions.h"
#include <poll.h>

/* ---- Opening ---- */

struct numbers {
    uint64_t capacity, message_bytes_max, memory_bytes_max, call_bytes_max, peers_max, create, traced;
    uint64_t history, policy, lag_after_ms, slack, start_from, mode;
    int64_t hold_max_ms, deadline_ns; /* hold_max_ms: -1: none is given */
    const char *durable;
};

static int open_sender(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.deadline_ns = numbers->deadline_ns;
    options.create = (uint32_t)numbers->create;
    options.lanes = (uint32_t)numbers->peers_max;
    options.traced = (uint32_t)numbers->traced;
    return pelton_sender_open_start(name, &options, &endpoint->opening.sender);
}

static int open_path_receiver(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.memory_bytes_max = numbers->memory_bytes_max;
    options.deadline_ns = numbers->deadline_ns;
    options.create = (uint32_t)numbers->create;
    options.lanes = (uint32_t)numbers->peers_max;
    options.traced = (uint32_t)numbers->traced;
    return pelton_receiver_open_start(name, &options, &endpoint->opening.receiver);
}

static int open_receiver(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_gather_options options = PELTON_GATHER_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.memory_bytes_max = numbers->memory_bytes_max;
    options.senders_max = (uint32_t)numbers->peers_max;
    return pelton_receiver_gather(name, &options, &endpoint->handle.receiver);
}

static int open_client(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.memory_bytes_max = numbers->memory_bytes_max;
    options.call_bytes_max = numbers->call_bytes_max;
    options.deadline_ns = numbers->deadline_ns;
    return pelton_client_open_start(name, &options, &endpoint->opening.client);
}

static int open_service(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.memory_bytes_max = numbers->memory_bytes_max;
    options.call_bytes_max = numbers->call_bytes_max;
    options.clients_max = (uint32_t)numbers->peers_max;
    return pelton_service_open(name, &options, &endpoint->handle.service);
}

static int open_listener(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.memory_bytes_max = numbers->memory_bytes_max;
    return pelton_listener_open(name, &options, &endpoint->handle.listener);
}

/* On a path, pelton:open tries it again while another publisher is alive: here it is 200 ms, or not at all. */
static int open_publisher(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.history = numbers->history;
    options.mode = (uint32_t)numbers->mode;
    options.deadline_ns = numbers->deadline_ns ? pelton_deadline(0) : 0;
    if (numbers->hold_max_ms >= 0)
        options.hold_max_ns = numbers->hold_max_ms ? numbers->hold_max_ms * 1000000 : PELTON_NO_HOLD;
    return pelton_publisher_open(name, &options, &endpoint->handle.publisher);
}

static int open_subscriber(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    options.capacity = numbers->capacity;
    options.message_bytes_max = numbers->message_bytes_max;
    options.policy = (uint32_t)numbers->policy;
    options.lag_after_ns = (int64_t)numbers->lag_after_ms * 1000000;
    options.slack = numbers->slack;
    options.start_from = numbers->start_from;
    options.durable = numbers->durable;
    options.mode = (uint32_t)numbers->mode;
    options.deadline_ns = numbers->deadline_ns;
    endpoint->copies = options.policy != PELTON_GATE || options.lag_after_ns;
    return pelton_subscriber_open_start(name, &options, &endpoint->opening.subscriber);
}

static int open_endpoint(struct endpoint *endpoint, const char *name, const struct numbers *numbers)
{
    int code;
    switch (endpoint->kind) {
    case SENDER: code = open_sender(endpoint, name, numbers); break;
    case RECEIVER:
        code = strncmp(name, "path:", 5) == 0 ? open_path_receiver(endpoint, name, numbers)
                                              : open_receiver(endpoint, name, numbers);
        break;
    case CLIENT: code = open_client(endpoint, name, numbers); break;
    case SERVICE: code = open_service(endpoint, name, numbers); break;
    case PUBLISHER: code = open_publisher(endpoint, name, numbers); break;
    case SUBSCRIBER: code = open_subscriber(endpoint, name, numbers); break;
    default: code = open_listener(endpoint, name, numbers);
    }
    /* An out-parameter of a function that failed is not a handle. */
    if (code)
        endpoint->opening.any = endpoint->handle.any = NULL;
    return code;
}

/* {Capacity, MessageBytesMax, MemoryBytesMax, CallBytesMax, PeersMax, Create, Traced, History, Policy, LagAfterMs,
 * Slack, StartFrom, Mode, HoldMaxMs, TimeoutMs, Durable}; TimeoutMs -1: no limit; HoldMaxMs -1: none */
static bool numbers_at(ErlNifEnv *env, ERL_NIF_TERM term, struct numbers *numbers)
{
    const ERL_NIF_TERM *terms;
    int arity;
    ErlNifSInt64 timeout_ms;
    uint64_t *found[] = {&numbers->capacity,       &numbers->message_bytes_max, &numbers->memory_bytes_max,
                         &numbers->call_bytes_max, &numbers->peers_max,         &numbers->create,
                         &numbers->traced,         &numbers->history,           &numbers->policy,
                         &numbers->lag_after_ms,   &numbers->slack,             &numbers->start_from,
                         &numbers->mode};
    enum { COUNT = sizeof found / sizeof *found };
    if (!enif_get_tuple(env, term, &arity, &terms) || arity != COUNT + 3)
        return false;
    for (int i = 0; i < COUNT; i++)
        if (!enif_get_uint64(env, terms[i], found[i]))
            return false;
    ErlNifSInt64 hold_max_ms;
    if (!enif_get_int64(env, terms[COUNT], &hold_max_ms) || !enif_get_int64(env, terms[COUNT + 1], &timeout_ms) ||
        !text_at(env, terms[COUNT + 2], &numbers->durable))
        return false;
    numbers->hold_max_ms = hold_max_ms > INT64_MAX / 1000000 ? INT64_MAX / 1000000 : hold_max_ms;
    if (numbers->lag_after_ms > INT64_MAX / 1000000)
        numbers->lag_after_ms = INT64_MAX / 1000000;
    if (timeout_ms < 0 || timeout_ms > INT64_MAX / 1000000)
        numbers->deadline_ns = PELTON_FOREVER;
    else
        numbers->deadline_ns = timeout_ms ? pelton_deadline(timeout_ms * 1000000) : PELTON_NO_WAIT;
    return true;
}

/* Begins to use the endpoint, whose handle has just been set unless the code is an error: {ok, Endpoint} or an error.
 * Under the lock. */
static ERL_NIF_TERM begin_use(ErlNifEnv *env, struct endpoint *endpoint, int code)
{
    if (code) {
        /* An out-parameter of a function that failed is not a handle. */
        endpoint->handle.any = NULL;
        return endpoint_open_error(env, code);
    }
    if ((errno = endpoint_opened(env, endpoint))) {
        ERL_NIF_TERM result = endpoint_open_error(env, PELTON_SYSTEM);
        pelton_close(endpoint->handle.any);
        endpoint->handle.any = NULL;
        return result;
    }
    if (endpoint->kind == PUBLISHER)
        endpoint_recheck(endpoint);
    return enif_make_tuple2(env, atom_ok, enif_make_resource(env, endpoint));
}

/* Opens it, or begins to. Under the lock. */
static ERL_NIF_TERM begin_open(ErlNifEnv *env, struct endpoint *endpoint, const char *name,
                               const struct numbers *numbers, ERL_NIF_TERM ref)
{
    int code = open_endpoint(endpoint, name, numbers);
    if (!code && endpoint->opening.any) {
        code = endpoint_finish_opening(endpoint);
        if (code == PELTON_AGAIN) {
            errno = endpoint_opens(env, endpoint, ref);
            if (!errno)
                return atom_pending;
            code = PELTON_SYSTEM;
        }
    }
    ERL_NIF_TERM result = begin_use(env, endpoint, code);
    pelton_close(endpoint->opening.any);
    endpoint->opening.any = NULL;
    return result;
}

/* endpoint_open(Kind, Name, Numbers, Ref): {ok, Endpoint} or {error, {Atom, Detail}}, or `pending`: one of them is
 * sent. On a dirty scheduler, for the file system. */
NIF(endpoint_open)
{
    (void)argc;
    unsigned kind;
    ErlNifBinary name;
    struct numbers numbers;
    if (!enif_get_uint(env, argv[0], &kind) || kind > SUBSCRIBER || !enif_inspect_binary(env, argv[1], &name) ||
        !name.size || name.data[name.size - 1] || !numbers_at(env, argv[2], &numbers))
        return enif_make_badarg(env);
    /* The notifier thread closes them as well, but perhaps after a supervisor has restarted the owner. */
    endpoints_close(env, true);
    struct endpoint *endpoint = endpoint_create(env, (enum endpoint_kind)kind);
    if (!endpoint)
        return error_of(env, enif_make_tuple2(env, atom_enomem, bytes_of(env, "", 0)));
    enif_mutex_lock(endpoint->lock);
    ERL_NIF_TERM result = begin_open(env, endpoint, (char *)name.data, &numbers, argv[3]);
    enif_mutex_unlock(endpoint->lock);
    enif_release_resource(endpoint);
    return result;
}

/* endpoint_accept(Listener, Ref): {ok, Receiver} or {error, {Atom, Detail}}; `pending`: no sender has connected. On a
 * dirty scheduler, because a slow sender can delay it by half a second. */
NIF(endpoint_accept)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *listener = endpoint_at(env, argv[0], 1u << LISTENER, &result);
    if (!listener)
        return result;
    struct pollfd connection = {.fd = pelton_listener_fd(listener->handle.listener), .events = POLLIN};
    if (!atomic_load(&listener->is_in_operation) && poll(&connection, 1, 0) == 0) {
        endpoint_watch(listener, PELTON_OK);
        endpoint_add_waiter(env, listener, argv[1], 0);
        return endpoint_leave(listener, atom_pending);
    }
    enif_mutex_unlock(listener->lock);
    struct endpoint *receiver = endpoint_create(env, RECEIVER);
    if (!receiver)
        return error_of(env, enif_make_tuple2(env, atom_enomem, bytes_of(env, "", 0)));
    listener = endpoint_give_to_operation(env, argv[0], 1u << LISTENER, &result);
    if (listener) {
        enif_mutex_lock(receiver->lock);
        pelton_listener *handle = listener->handle.listener;
        int code = pelton_listener_accept_receiver(handle, PELTON_NO_WAIT, &receiver->handle.receiver);
        result = code == PELTON_AGAIN ? atom_busy : begin_use(env, receiver, code);
        enif_mutex_unlock(receiver->lock);
        endpoint_return(listener);
    }
    enif_release_resource(receiver);
    return result;
}

/* endpoint_close(Endpoint) */
NIF(endpoint_close)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], ANY_KIND, &result);
    if (!endpoint)
        return result;
    enif_demonitor_process(env, endpoint, &endpoint->monitor);
    endpoint_close(env, endpoint);
    return atom_ok;
}

/* endpoint_set(Endpoint, Active, Holds, Traceparents). Active: `true`, `false`, `once`, a number, which is added, or
 * `undefined`: unchanged. Holds, Traceparents: `true`, `false` or `undefined`, which they are of all but receivers. */
NIF(endpoint_set)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifSInt64 number = 0;
    bool is_number = enif_get_int64(env, argv[1], &number);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << RECEIVER | 1u << SERVICE | 1u << SUBSCRIBER, &result);
    if (!endpoint)
        return result;
    bool is_of_receiver = !enif_is_identical(argv[2], atom_undefined) || !enif_is_identical(argv[3], atom_undefined);
    if (is_of_receiver && endpoint->kind != RECEIVER)
        return endpoint_leave(endpoint, enif_make_badarg(env));
    if (!enif_is_identical(argv[2], atom_undefined))
        endpoint->holds = enif_is_identical(argv[2], atom_true);
    if (!enif_is_identical(argv[3], atom_undefined))
        endpoint->gives_traceparents = enif_is_identical(argv[3], atom_true);
    if (enif_is_identical(argv[1], atom_undefined))
        return endpoint_leave(endpoint, atom_ok);
    bool is_counting = endpoint->active > 0 && !endpoint->is_once;
    endpoint->is_once = enif_is_identical(argv[1], atom_once);
    if (is_number) {
        endpoint->active = (is_counting ? endpoint->active : 0) + number;
        if (endpoint->active <= 0) {
            endpoint->active = 0;
            result = enif_make_tuple2(env, atom_pelton_passive, enif_make_resource(env, endpoint));
            enif_send(env, &endpoint->owner, NULL, result);
        }
    } else {
        endpoint->active = enif_is_identical(argv[1], atom_true) ? -1 : endpoint->is_once;
    }
    if (endpoint->active)
        endpoint_recheck(endpoint);
    return endpoint_leave(endpoint, atom_ok);
}

/* endpoint_give(Endpoint, Pid): makes it the owner */
NIF(endpoint_give)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifPid pid, self;
    if (!enif_get_local_pid(env, argv[1], &pid))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], ANY_KIND, &result);
    if (!endpoint)
        return result;
    if (enif_compare_pids(enif_self(env, &self), &endpoint->owner) != 0)
        return endpoint_leave(endpoint, error_of(env, atom_not_owner));
    ErlNifMonitor monitor;
    if (enif_monitor_process(env, endpoint, &pid, &monitor))
        return endpoint_leave(endpoint, error_of(env, atom_noproc));
    enif_demonitor_process(env, endpoint, &endpoint->monitor);
    endpoint->monitor = monitor;
    endpoint->owner = pid;
    return endpoint_leave(endpoint, atom_ok);
}

/* endpoint_cancel(Endpoint, Ref): the caller does not wait any more */
NIF(endpoint_cancel)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], ANY_KIND, &result);
    if (!endpoint)
        return result;
    for (struct waiter **at = &endpoint->waiters; *at; at = &(*at)->next)
        if (enif_is_identical((*at)->ref, argv[1])) {
            uint64_t call = (*at)->call;
            endpoint_remove_waiter(env, endpoint, at);
            if (call) {
                pelton_client_cancel(endpoint->handle.client, call);
                endpoint_arm_client(endpoint);
            }
            break;
        }
    return endpoint_leave_to_waiters(endpoint, atom_ok);
}

/* ---- Messages ---- */

static int send_now(struct endpoint *endpoint, const ErlNifBinary *data, const char *traceparent)
{
    if (endpoint->kind == PUBLISHER)
        return pelton_publisher_send(endpoint->handle.publisher, data->data, data->size, PELTON_NO_WAIT);
    pelton_sender *sender = endpoint->handle.sender;
    return traceparent ? pelton_sender_send_traced(sender, data->data, data->size, traceparent, PELTON_NO_WAIT)
                       : pelton_sender_send(sender, data->data, data->size, PELTON_NO_WAIT);
}

/* endpoint_send(Sender or Publisher, Data, Traceparent, Ref): ok, `pending` or an error. Traceparent: a text that ends
 * with 0, or `undefined`; of a publisher it has no use. */
NIF(endpoint_send)
{
    (void)argc;
    ErlNifBinary data;
    ERL_NIF_TERM result;
    const char *traceparent;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data) || !text_at(env, argv[2], &traceparent))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << SENDER | 1u << PUBLISHER, &result);
    if (!endpoint)
        return result;
    if (atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, atom_in_operation));
    for (;;) {
        int code = send_now(endpoint, &data, traceparent);
        if (code != PELTON_AGAIN) {
            charge_bytes(env, data.size);
            if (endpoint->kind == PUBLISHER)
                endpoint_watch(endpoint, PELTON_OK);
            return endpoint_leave_to_waiters(endpoint, code ? error_of_code(env, code) : atom_ok);
        }
        code = endpoint->kind == PUBLISHER ? pelton_publisher_arm(endpoint->handle.publisher, data.size)
                                           : pelton_sender_arm(endpoint->handle.sender, data.size);
        if (code == PELTON_READY)
            continue;
        if (!endpoint_watch(endpoint, code))
            return endpoint_leave_to_waiters(endpoint, error_of_code(env, code));
        if (!endpoint_waits_for_space(endpoint) || data.size < endpoint->wanted)
            endpoint->wanted = data.size;
        /* This send and this arm have admitted subscribers, perhaps those that another process waits for. */
        if (endpoint->kind == PUBLISHER && endpoint->waiters)
            endpoint_recheck(endpoint);
        endpoint_add_waiter(env, endpoint, argv[3], 0);
        return endpoint_leave(endpoint, atom_pending);
    }
}

/* Waits for at most that many milliseconds: ok, `later` or an error. Other functions that use the endpoint meanwhile
 * return `in_operation`, and its close completes afterwards. */
static ERL_NIF_TERM wait_with(ErlNifEnv *env, const ERL_NIF_TERM argv[], unsigned kinds,
                              int (*wait)(struct endpoint *endpoint, int64_t deadline_ns))
{
    unsigned milliseconds;
    ERL_NIF_TERM result;
    if (!enif_get_uint(env, argv[1], &milliseconds))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_give_to_operation(env, argv[0], kinds, &result);
    if (!endpoint)
        return result;
    int code = wait(endpoint, pelton_deadline((int64_t)milliseconds * 1000000));
    if (code)
        result = code == PELTON_AGAIN ? atom_later : error_of_code(env, code);
    return endpoint_return(endpoint) ? error_of(env, atom_closed) : code ? result : atom_ok;
}

static int wait_released(struct endpoint *endpoint, int64_t deadline_ns)
{
    if (endpoint->kind == PUBLISHER)
        return pelton_publisher_wait_released(endpoint->handle.publisher, deadline_ns);
    return pelton_sender_wait_released(endpoint->handle.sender, deadline_ns);
}

static int resume(struct endpoint *endpoint, int64_t deadline_ns)
{
    if (endpoint->kind == SENDER)
        return pelton_sender_resume(endpoint->handle.sender, deadline_ns);
    if (endpoint->kind == SUBSCRIBER)
        return pelton_subscriber_resume(endpoint->handle.subscriber, deadline_ns);
    return pelton_receiver_resume(endpoint->handle.receiver, deadline_ns);
}

/* endpoint_wait_released(Sender or Publisher, Milliseconds) */
NIF(endpoint_wait_released)
{
    (void)argc;
    return wait_with(env, argv, 1u << SENDER | 1u << PUBLISHER, wait_released);
}

/* endpoint_resume(Endpoint, Milliseconds) */
NIF(endpoint_resume)
{
    (void)argc;
    return wait_with(env, argv, 1u << SENDER | 1u << RECEIVER | 1u << SUBSCRIBER, resume);
}

NIF(endpoint_send_large)
{
    return nif_endpoint_send(env, argc, argv);
}

/* {ok, Bytes}, or {ok, Bytes, Traceparent} */
static ERL_NIF_TERM received(ErlNifEnv *env, ERL_NIF_TERM bytes, const ERL_NIF_TERM *traceparent)
{
    return traceparent ? enif_make_tuple3(env, atom_ok, bytes, *traceparent) : enif_make_tuple2(env, atom_ok, bytes);
}

/* copy_held(Held), or copy_held(Held, Traceparent) */
static NIF(copy_held)
{
    void *object;
    if (!enif_get_resource(env, argv[0], shared->held_type, &object))
        return enif_make_badarg(env);
    struct held *held = object;
    ERL_NIF_TERM bytes = bytes_of(env, held->data, held->size);
    /* Now, and not when the resource is collected: the sender waits for the space. */
    held_release(held);
    return received(env, bytes, argc == 2 ? &argv[1] : NULL);
}

/* endpoint_receive(Receiver, Ref): {ok, Bytes}, or {ok, Bytes, Traceparent} if the endpoint gives them; `pending` or an
 * error */
NIF(endpoint_receive)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << RECEIVER, &result);
    if (!endpoint)
        return result;
    if (endpoint->active || atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, endpoint->active ? atom_einval : atom_in_operation));
    pelton_receiver *receiver = endpoint->handle.receiver;
    pelton_message message;
    int code = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message);
    if (code == PELTON_AGAIN) {
        int64_t began_us = now_us();
        /* An end that it returns is not returned again. */
        code = pelton_receiver_poll(receiver);
        if (code == PELTON_AGAIN)
            charge_us(env, now_us() - began_us);
        else if (code == PELTON_OK)
            code = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message);
    }
    while (code == PELTON_AGAIN) {
        code = pelton_receiver_arm(receiver);
        if (code == PELTON_READY) {
            code = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message);
        } else if (endpoint_watch(endpoint, code)) {
            endpoint_add_waiter(env, endpoint, argv[1], 0);
            return endpoint_leave(endpoint, atom_pending);
        }
    }
    if (code)
        return endpoint_leave_to_waiters(endpoint, error_of_code(env, code));
    bool needs_copy, gives_traceparent = endpoint->gives_traceparents;
    /* The message, and its traceparent, which is read before the message is released. */
    ERL_NIF_TERM found[2];
    char text[PELTON_TRACEPARENT_SIZE];
    charge_bytes(env, message.size);
    if (gives_traceparent)
        found[1] = traceparent_of(env, pelton_receiver_traceparent(receiver, text), text);
    found[0] = endpoint_leave_to_waiters(endpoint, endpoint_message(env, endpoint, &message, false, &needs_copy));
    if (needs_copy)
        return enif_schedule_nif(env, "copy_held", ERL_NIF_DIRTY_JOB_CPU_BOUND, nif_copy_held, 1 + gives_traceparent,
                                 found);
    return received(env, found[0], gives_traceparent ? &found[1] : NULL);
}

/* ---- Maps ---- */

struct figure {
    const char *name;
    uint64_t value;
};

/* A map. The peer is in it only if there is one. */
static ERL_NIF_TERM map_of(ErlNifEnv *env, const struct figure *figures, size_t count, bool has_peer, uint32_t pid,
                           uint32_t uid)
{
    ERL_NIF_TERM map = enif_make_new_map(env);
    for (size_t i = 0; i < count; i++)
        enif_make_map_put(env, map, enif_make_atom(env, figures[i].name), enif_make_uint64(env, figures[i].value), &map);
    if (has_peer) {
        enif_make_map_put(env, map, enif_make_atom(env, "peer_pid"), enif_make_uint(env, pid), &map);
        enif_make_map_put(env, map, enif_make_atom(env, "peer_uid"), enif_make_uint(env, uid), &map);
    }
    return map;
}

/* ---- Publish and subscribe ---- */

static ERL_NIF_TERM receive_delivery_on_dirty(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[])
{
    return enif_schedule_nif(env, "endpoint_receive_delivery", ERL_NIF_DIRTY_JOB_CPU_BOUND,
                             nif_endpoint_receive_delivery, argc, argv);
}

/* endpoint_receive_delivery(Subscriber, Ref): {ok, Bytes, Number, Missed}; `pending` or an error. A dirty scheduler
 * copies what is larger than COPY_MAX. If to receive is to copy, the size is known only after a copy: so after a large
 * message it receives the next one too. */
NIF(endpoint_receive_delivery)
{
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << SUBSCRIBER, &result);
    if (!endpoint)
        return result;
    if (endpoint->active || atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, endpoint->active ? atom_einval : atom_in_operation));
    bool may_copy = enif_thread_type() != ERL_NIF_THR_NORMAL_SCHEDULER;
    if (endpoint->copies && endpoint->is_large && !may_copy)
        return endpoint_leave(endpoint, receive_delivery_on_dirty(env, argc, argv));
    pelton_subscriber *subscriber = endpoint->handle.subscriber;
    pelton_delivery delivery;
    int code = endpoint_receive_delivery(endpoint, &delivery);
    if (code == PELTON_AGAIN) {
        int64_t began_us = now_us();
        code = pelton_subscriber_poll(subscriber);
        charge_us(env, now_us() - began_us);
        if (code == PELTON_OK)
            code = endpoint_receive_delivery(endpoint, &delivery);
    }
    while (code == PELTON_AGAIN) {
        code = pelton_subscriber_arm(subscriber);
        if (code == PELTON_READY) {
            code = endpoint_receive_delivery(endpoint, &delivery);
        } else if (endpoint_watch(endpoint, code)) {
            endpoint_add_waiter(env, endpoint, argv[1], 0);
            return endpoint_leave(endpoint, atom_pending);
        }
    }
    if (code)
        return endpoint_leave_to_waiters(endpoint, error_of_code(env, code));
    endpoint->is_large = delivery.size > COPY_MAX;
    if (endpoint->is_large && !may_copy) {
        endpoint_keep_delivery(endpoint, &delivery);
        return endpoint_leave(endpoint, receive_delivery_on_dirty(env, argc, argv));
    }
    charge_bytes(env, delivery.size);
    result = endpoint_delivery(env, atom_ok, 0, &delivery);
    endpoint_release_delivery(endpoint);
    return endpoint_leave_to_waiters(endpoint, result);
}

/* endpoint_wait_subscribers(Publisher, Count, Ref): ok; `pending`: there are fewer */
NIF(endpoint_wait_subscribers)
{
    (void)argc;
    ERL_NIF_TERM result;
    unsigned count;
    if (!enif_get_uint(env, argv[1], &count))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << PUBLISHER, &result);
    if (!endpoint)
        return result;
    if (atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, atom_in_operation));
    /* The notifier thread admits them: here it would end a wait for space. */
    pelton_publisher_info info = {.struct_bytes = sizeof info};
    int code = pelton_publisher_get_info(endpoint->handle.publisher, &info);
    if (code || info.subscribers >= count)
        return endpoint_leave(endpoint, code ? error_of_code(env, code) : atom_ok);
    endpoint_watch(endpoint, PELTON_OK);
    endpoint_add_waiter(env, endpoint, argv[2], 0)->for_subscribers = true;
    return endpoint_leave(endpoint, atom_pending);
}

static const char *const policies[] = {"gate", "lag", "latest"};

/* As map_of, with the name of its durable subscription, its policy, and whether it lags. */
static ERL_NIF_TERM subscriber_map(ErlNifEnv *env, const pelton_subscriber_state *state)
{
    struct figure figures[] = {{"pid", state->pid},
                               {"uid", state->uid},
                               {"lag_after_ns", (uint64_t)state->lag_after_ns},
                               {"holds_ns", (uint64_t)state->holds_ns},
                               {"behind", state->behind},
                               {"messages", state->messages},
                               {"missed", state->missed}};
    ERL_NIF_TERM map = map_of(env, figures, sizeof figures / sizeof *figures, false, 0, 0);
    ERL_NIF_TERM durable =
        state->durable[0] ? bytes_of(env, state->durable, strlen(state->durable)) : atom_undefined;
    enif_make_map_put(env, map, enif_make_atom(env, "durable"), durable, &map);
    enif_make_map_put(env, map, enif_make_atom(env, "policy"), enif_make_atom(env, policies[state->policy]), &map);
    enif_make_map_put(env, map, enif_make_atom(env, "lags"), state->lags ? atom_true : atom_false, &map);
    return map;
}

/* endpoint_subscribers(Publisher): a list of maps, or an error */
NIF(endpoint_subscribers)
{
    (void)argc;
    enum { SUBSCRIBERS_MAX = 64 };
    ERL_NIF_TERM result;
    pelton_subscriber_state states[SUBSCRIBERS_MAX];
    size_t count;
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << PUBLISHER, &result);
    if (!endpoint)
        return result;
    if (atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, atom_in_operation));
    int code = pelton_publisher_subscribers(endpoint->handle.publisher, states, SUBSCRIBERS_MAX, &count);
    if (code)
        return endpoint_leave(endpoint, error_of_code(env, code));
    result = enif_make_list(env, 0);
    while (count)
        result = enif_make_list_cell(env, subscriber_map(env, &states[--count]), result);
    return endpoint_leave(endpoint, result);
}

/* subscription_remove(Name, Durable): ok or {error, {Atom, Detail}} */
NIF(subscription_remove)
{
    (void)argc;
    const char *name, *durable;
    if (!text_at(env, argv[0], &name) || !text_at(env, argv[1], &durable) || !name || !durable)
        return enif_make_badarg(env);
    int code = pelton_subscription_remove(name, durable);
    return code ? endpoint_open_error(env, code) : atom_ok;
}

/* ---- Calls ---- */

static int submit(pelton_client *client, const ErlNifBinary *data, const char *traceparent, uint64_t *call)
{
    if (traceparent)
        return pelton_client_submit_traced(client, data->data, data->size, traceparent, 0, PELTON_NO_WAIT, call);
    return pelton_client_submit(client, data->data, data->size, 0, PELTON_NO_WAIT, call);
}

/* The notifier thread sends completions, and `ready` to those that wait for space: the caller may have taken their
 * event. */
static ERL_NIF_TERM leave_client(struct endpoint *endpoint, ERL_NIF_TERM result)
{
    if (endpoint->waiters)
        endpoint_recheck(endpoint);
    else
        endpoint_arm_client(endpoint);
    return endpoint_leave(endpoint, result);
}

/* endpoint_call(Client, Data, Traceparent, Ref): {ok, Reply} or an error; `waits`: one of them is sent; `pending`: for
 * free space. Traceparent as of endpoint_send. */
NIF(endpoint_call)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    const char *traceparent;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data) || !text_at(env, argv[2], &traceparent))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << CLIENT, &result);
    if (!endpoint)
        return result;
    pelton_client *client = endpoint->handle.client;
    uint64_t call;
    charge_bytes(env, data.size);
    int code = submit(client, &data, traceparent, &call);
    if (code == PELTON_AGAIN) {
        endpoint_add_waiter(env, endpoint, argv[3], 0);
        endpoint_arm_client(endpoint);
        return endpoint_leave(endpoint, atom_pending);
    }
    if (code)
        return leave_client(endpoint, error_of_code(env, code));
    pelton_completion completion;
    int64_t began_us = now_us();
    code = pelton_client_poll(client);
    if (code == PELTON_AGAIN)
        charge_us(env, now_us() - began_us);
    else
        code = pelton_client_await_call(client, call, PELTON_NO_WAIT, &completion);
    if (code == PELTON_OK && completion.outcome != PELTON_PART && completion.size <= COPY_MAX) {
        charge_bytes(env, completion.size);
        result = endpoint_reply(env, &completion, NULL);
        pelton_client_release(client);
        return leave_client(endpoint, result);
    }
    if (code == PELTON_SYSTEM)
        return leave_client(endpoint, error_of_code(env, code));
    if (code != PELTON_OK && code != PELTON_AGAIN) {
        /* Two codes mean that the call was not begun. The notifier thread's pelton_client_await reports that as
         * PELTON_LOST. */
        bool was_begun = code != PELTON_NO_LISTENER && code != PELTON_REFUSED;
        return leave_client(endpoint, endpoint_lost(env, was_begun ? code : PELTON_AGAIN));
    }
    endpoint_add_waiter(env, endpoint, argv[3], call);
    if (code == PELTON_OK) {
        endpoint->completion = completion;
        endpoint->has_completion = true;
        endpoint_recheck(endpoint);
    } else {
        endpoint_arm_client(endpoint);
    }
    return endpoint_leave(endpoint, atom_waits);
}

/* endpoint_stream(Client, Data, Traceparent, Ref): as endpoint_call, without an immediate reply. Each part is sent as
 * {part, Bytes}, then {ok, Bytes}, the last one, or ok: there is no other. */
NIF(endpoint_stream)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    const char *traceparent;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data) || !text_at(env, argv[2], &traceparent))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << CLIENT, &result);
    if (!endpoint)
        return result;
    uint64_t call = 0;
    charge_bytes(env, data.size);
    int code = submit(endpoint->handle.client, &data, traceparent, &call);
    if (code != PELTON_OK && code != PELTON_AGAIN)
        return leave_client(endpoint, error_of_code(env, code));
    endpoint_add_waiter(env, endpoint, argv[3], code ? 0 : call)->is_stream = true;
    endpoint_arm_client(endpoint);
    return endpoint_leave(endpoint, code ? atom_pending : atom_waits);
}

NIF(endpoint_stream_large)
{
    return nif_endpoint_stream(env, argc, argv);
}

NIF(endpoint_call_large)
{
    return nif_endpoint_call(env, argc, argv);
}

/* endpoint_cast(Client, Data): ok or an error; {error, full}: no space */
NIF(endpoint_cast)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data))
        return enif_make_badarg(env);
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << CLIENT, &result);
    if (!endpoint)
        return result;
    charge_bytes(env, data.size);
    int code = pelton_client_notify(endpoint->handle.client, data.data, data.size, PELTON_NO_WAIT);
    if (code == PELTON_AGAIN)
        return leave_client(endpoint, error_of(env, atom_full));
    return leave_client(endpoint, code ? error_of_code(env, code) : atom_ok);
}

NIF(endpoint_cast_large)
{
    return nif_endpoint_cast(env, argc, argv);
}

/* The responder that the term is, for this thread alone. NULL: *result says why. */
static struct responder *responder_take(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    void *object;
    if (!enif_get_resource(env, term, shared->responder_type, &object)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    struct responder *responder = object;
    int state = RESPONDER_OPEN;
    if (atomic_compare_exchange_strong(&responder->state, &state, RESPONDER_IN_USE))
        return responder;
    *result = state == RESPONDER_CLOSED ? error_of(env, atom_closed) : atom_busy;
    return NULL;
}

/* responder_reply(Responder, Code, Data): Code is `undefined` for a reply, else the failure's */
NIF(responder_reply)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    unsigned number = 0;
    bool fails = !enif_is_identical(argv[1], atom_undefined);
    if (!enif_inspect_iolist_as_binary(env, argv[2], &data) || (fails && !enif_get_uint(env, argv[1], &number)))
        return enif_make_badarg(env);
    struct responder *responder = responder_take(env, argv[0], &result);
    if (!responder)
        return result;
    int code = fails ? pelton_responder_fail(responder->handle, number, data.data, data.size)
                     : pelton_responder_reply(responder->handle, data.data, data.size);
    atomic_store(&responder->state, code == PELTON_TOO_LARGE ? RESPONDER_OPEN : RESPONDER_CLOSED);
    charge_bytes(env, data.size);
    return code ? error_of_code(env, code) : atom_ok;
}

/* responder_part(Responder, Data): {error, full}: there is no free space. The responder remains open. */
NIF(responder_part)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data))
        return enif_make_badarg(env);
    struct responder *responder = responder_take(env, argv[0], &result);
    if (!responder)
        return result;
    int code = pelton_responder_part(responder->handle, data.data, data.size, PELTON_NO_WAIT);
    atomic_store(&responder->state, RESPONDER_OPEN);
    charge_bytes(env, data.size);
    if (code == PELTON_AGAIN)
        return error_of(env, atom_full);
    return code ? error_of_code(env, code) : atom_ok;
}

NIF(responder_part_large)
{
    return nif_responder_part(env, argc, argv);
}

/* responder_end(Responder): after parts */
NIF(responder_end)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct responder *responder = responder_take(env, argv[0], &result);
    if (!responder)
        return result;
    int code = pelton_responder_end(responder->handle);
    atomic_store(&responder->state, RESPONDER_CLOSED);
    return code ? error_of_code(env, code) : atom_ok;
}

/* responder_is_cancelled(Responder): `true`: nobody waits for the reply any more, or it is complete */
NIF(responder_is_cancelled)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct responder *responder = responder_take(env, argv[0], &result);
    if (!responder)
        return enif_is_tuple(env, result) ? atom_true : result;
    int code = pelton_responder_is_cancelled(responder->handle);
    atomic_store(&responder->state, RESPONDER_OPEN);
    return code == 0 ? atom_false : atom_true;
}

/* responder_traceparent(Responder): a binary, or `undefined` */
NIF(responder_traceparent)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct responder *responder = responder_take(env, argv[0], &result);
    if (!responder)
        return enif_is_tuple(env, result) ? atom_undefined : result;
    char text[PELTON_TRACEPARENT_SIZE];
    result = traceparent_of(env, pelton_responder_traceparent(responder->handle, text), text);
    atomic_store(&responder->state, RESPONDER_OPEN);
    return result;
}

/* endpoint_drain(Service) */
NIF(endpoint_drain)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], 1u << SERVICE, &result);
    if (!endpoint)
        return result;
    int code = pelton_service_drain(endpoint->handle.service);
    endpoint_recheck(endpoint);
    return endpoint_leave(endpoint, code ? error_of_code(env, code) : atom_ok);
}

/* ---- Figures ---- */

#define FIGURE(name) {#name, info.name}
#define COUNTERS FIGURE(messages), FIGURE(bytes), FIGURE(waits), FIGURE(sleeps), FIGURE(wakes_sent)
#define MAP_OF(has_peer, pid, uid) map_of(env, figures, sizeof figures / sizeof *figures, has_peer, pid, uid)

static ERL_NIF_TERM sender_info(ErlNifEnv *env, pelton_sender *sender)
{
    pelton_sender_info info = {.struct_bytes = sizeof info};
    int code = pelton_sender_get_info(sender, &info);
    struct figure figures[] = {COUNTERS, FIGURE(unreleased), FIGURE(unreleased_max), FIGURE(capacity),
                               FIGURE(message_bytes_max)};
    return code ? error_of_code(env, code) : MAP_OF(info.has_peer, info.peer_pid, info.peer_uid);
}

static ERL_NIF_TERM receiver_info(ErlNifEnv *env, pelton_receiver *receiver)
{
    pelton_receiver_info info = {.struct_bytes = sizeof info};
    int code = pelton_receiver_get_info(receiver, &info);
    struct figure figures[] = {COUNTERS, FIGURE(capacity), FIGURE(message_bytes_max)};
    return code ? error_of_code(env, code) : MAP_OF(info.has_peer, info.peer_pid, info.peer_uid);
}

static ERL_NIF_TERM client_info(ErlNifEnv *env, pelton_client *client)
{
    pelton_client_info info = {.struct_bytes = sizeof info};
    int code = pelton_client_get_info(client, &info);
    struct figure figures[] = {FIGURE(request_bytes_max), FIGURE(services), FIGURE(in_flight), FIGURE(dropped),
                               FIGURE(wakes_sent)};
    return code ? error_of_code(env, code) : MAP_OF(info.has_peer, info.peer_pid, info.peer_uid);
}

static ERL_NIF_TERM service_info(ErlNifEnv *env, pelton_service *service)
{
    pelton_service_info info = {.struct_bytes = sizeof info};
    int code = pelton_service_get_info(service, &info);
    struct figure figures[] = {FIGURE(dropped), FIGURE(corrupt)};
    return code ? error_of_code(env, code) : MAP_OF(false, 0, 0);
}

static ERL_NIF_TERM publisher_info(ErlNifEnv *env, pelton_publisher *publisher)
{
    pelton_publisher_info info = {.struct_bytes = sizeof info};
    int code = pelton_publisher_get_info(publisher, &info);
    struct figure figures[] = {COUNTERS, FIGURE(subscribers), FIGURE(next_number), FIGURE(corrupt), FIGURE(capacity),
                               FIGURE(message_bytes_max)};
    return code ? error_of_code(env, code) : MAP_OF(false, 0, 0);
}

static ERL_NIF_TERM subscriber_info(ErlNifEnv *env, pelton_subscriber *subscriber)
{
    pelton_subscriber_info info = {.struct_bytes = sizeof info};
    int code = pelton_subscriber_get_info(subscriber, &info);
    struct figure figures[] = {COUNTERS, FIGURE(missed), FIGURE(continues), FIGURE(next_number), FIGURE(capacity),
                               FIGURE(message_bytes_max)};
    return code ? error_of_code(env, code) : MAP_OF(info.peer_pid != 0, info.peer_pid, info.peer_uid);
}

/* endpoint_info(Endpoint): a map of figures, or an error */
NIF(endpoint_info)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct endpoint *endpoint = endpoint_at(env, argv[0], ANY_KIND & ~(1u << LISTENER), &result);
    if (!endpoint)
        return result;
    /* The operation's thread uses the handle. */
    if (atomic_load(&endpoint->is_in_operation))
        return endpoint_leave(endpoint, error_of(env, atom_in_operation));
    switch (endpoint->kind) {
    case SENDER: result = sender_info(env, endpoint->handle.sender); break;
    case RECEIVER: result = receiver_info(env, endpoint->handle.receiver); break;
    case CLIENT: result = client_info(env, endpoint->handle.client); break;
    case PUBLISHER: result = publisher_info(env, endpoint->handle.publisher); break;
    case SUBSCRIBER: result = subscriber_info(env, endpoint->handle.subscriber); break;
    default: result = service_info(env, endpoint->handle.service);
    }
    return endpoint_leave(endpoint, result);
}

NIF(responder_reply_large)
{
    return nif_responder_reply(env, argc, argv);
}

/* code_text(Atom): the text of pelton.h for an error's atom; `undefined`: it has none */
NIF(code_text)
{
    (void)argc;
    int code = code_of_atom(argv[0]);
    if (code == PELTON_OK)
        return atom_undefined;
    const char *text = pelton_code_text(code);
    return bytes_of(env, text, strlen(text));
}
