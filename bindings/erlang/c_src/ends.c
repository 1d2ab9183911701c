/* pelton's part: senders, receivers, clients and services.
 *
 * An end lives as a port does: until it is closed, or its owner ends. Any process may use it. What cannot be done at once leaves a waiter
 * in the end, arms it and has the ferry watch it once; the ferry answers a call, hands over what an active end receives, or tells the waiter
 * that it may try again. After its close an end's memory stays until the ferry has let go of it. */
#include "nif.h"
#include <sys/epoll.h>

/* What is larger is copied by a dirty scheduler, or the ferry: some 50 us. */
#define COPY_MAX (256 << 10)
/* So long, in nanoseconds, a process that receives or calls looks for an answer before it sleeps: twice a wake-up. */
#define PATIENCE 20000
#define TURN 64

enum kind { SENDER, RECEIVER, CLIENT, SERVICE };

struct waiter {
    struct waiter *next;
    ErlNifPid pid;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    uint64_t call;      /* of a client's: which is awaited; 0: it waits for room */
    ErlNifBinary parts; /* of its answer, that have come */
    size_t parts_size;
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
    bool holds; /* messages are not copied */
    unsigned patience, attempts;
    struct end *next, *previous; /* all->ends */
    atomic_bool is_orphan; /* its owner has ended: the ferry closes it */
    bool is_doomed;        /* under all->lock, as what follows: it is closed, and the ferry is to let go of it */
    bool is_buried;        /* it has */
    bool is_to_be_looked_at;
    struct end *next_to_look_at;
};

struct responder {
    pelton_responder *handle;
    atomic_flag is_used;
};

struct held {
    pelton_held *handle;
    const void *data;
    size_t size;
};

static ErlNifResourceType *held_type;

/* ---- Results ---- */

static ERL_NIF_TERM atom_of_code(ErlNifEnv *env, int code)
{
#define CODE_(name, number, text) \
    if (code == number) { \
        static const char *const full = #name; \
        char lower[40]; \
        size_t i = 0; \
        for (const char *c = full + 7; *c && i < sizeof lower - 1; c++) \
            lower[i++] = (char)(*c >= 'A' && *c <= 'Z' ? *c + 32 : *c); \
        return enif_make_atom_len(env, lower, i); \
    }
    PELTON_CODES(CODE_)
#undef CODE_
    return enif_make_atom(env, "unknown");
}

/* {error, Code} */
static ERL_NIF_TERM failed(ErlNifEnv *env, int code)
{
    return error_of(env, atom_of_code(env, code));
}

static ERL_NIF_TERM bytes_of(ErlNifEnv *env, const void *data, size_t size)
{
    ERL_NIF_TERM term;
    unsigned char *bytes = enif_make_new_binary(env, size, &term);
    if (size)
        memcpy(bytes, data, size);
    return term;
}

static ERL_NIF_TERM held_term(ErlNifEnv *env, pelton_held *handle, const void *data, size_t size, bool as_binary)
{
    struct held *held = enif_alloc_resource(held_type, sizeof *held);
    *held = (struct held){handle, data, size};
    ERL_NIF_TERM term = as_binary ? enif_make_resource_binary(env, held, data, size) : enif_make_resource(env, held);
    enif_release_resource(held);
    return term;
}

/* ---- Waiting ---- */

/* Has the ferry look at the end now. */
static void look_again(struct end *end)
{
    enif_mutex_lock(all->lock);
    if (!end->is_to_be_looked_at && !end->is_buried) {
        end->is_to_be_looked_at = true;
        end->next_to_look_at = all->ends_to_look_at;
        all->ends_to_look_at = end;
    }
    enif_mutex_unlock(all->lock);
    ferry_wake();
}

/* Has the ferry look at the end when there is something; false: there is already, or never will be. Under the lock. */
static bool watch(struct end *end, int armed)
{
    if (armed != PELTON_AGAIN)
        return false;
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = end};
    if (epoll_ctl(all->epoll, EPOLL_CTL_MOD, pelton_fd(end->handle), &event))
        look_again(end);
    return true;
}

static struct waiter *add_waiter(ErlNifEnv *env, struct end *end, ERL_NIF_TERM ref, uint64_t call)
{
    struct waiter *waiter = enif_alloc(sizeof *waiter);
    *waiter = (struct waiter){.next = end->waiters, .env = enif_alloc_env(), .call = call};
    enif_self(env, &waiter->pid);
    waiter->ref = enif_make_copy(waiter->env, ref);
    end->waiters = waiter;
    return waiter;
}

static void free_waiter(struct waiter *waiter)
{
    if (waiter->parts.data)
        enif_release_binary(&waiter->parts);
    enif_free_env(waiter->env);
    enif_free(waiter);
}

/* Sends it what it waits for, and forgets it. */
static void tell(ErlNifEnv *told, struct end *end, struct waiter *waiter, ERL_NIF_TERM result)
{
    for (struct waiter **at = &end->waiters; *at; at = &(*at)->next)
        if (*at == waiter) {
            *at = waiter->next;
            break;
        }
    enif_send(told, &waiter->pid, waiter->env, enif_make_tuple3(waiter->env, atom_pelton, waiter->ref, result));
    free_waiter(waiter);
}

/* Those that wait for an answer wait on, unless they all are to be told. */
static void tell_all(ErlNifEnv *told, struct end *end, bool calls_too, int code)
{
    for (struct waiter *waiter = end->waiters, *next; waiter; waiter = next) {
        next = waiter->next;
        if (!waiter->call)
            tell(told, end, waiter, atom_ready);
        else if (calls_too)
            tell(told, end, waiter, failed(waiter->env, code));
    }
}

/* ---- Receiving ---- */

/* What was received last, as a term; it is released, or held. */
static ERL_NIF_TERM received(ErlNifEnv *env, struct end *end, const pelton_message *message, bool may_copy, bool *is_held)
{
    *is_held = false;
    pelton_held *handle;
    bool holds = end->holds && message->size > 64;
    if ((holds || (message->size > COPY_MAX && !may_copy)) && pelton_hold(end->handle, &handle) == PELTON_OK) {
        *is_held = !holds;
        return held_term(env, handle, message->data, message->size, holds);
    }
    ERL_NIF_TERM bytes = bytes_of(env, message->data, message->size);
    pelton_release(end->handle);
    return bytes;
}

static ERL_NIF_TERM responder_term(ErlNifEnv *env, pelton_responder *handle)
{
    if (!handle)
        return atom_undefined;
    struct responder *responder = enif_alloc_resource(all->responder_type, sizeof *responder);
    responder->handle = handle;
    atomic_flag_clear(&responder->is_used);
    ERL_NIF_TERM term = enif_make_resource(env, responder);
    enif_release_resource(responder);
    return term;
}

static void to_owner(ErlNifEnv *env, struct end *end, ERL_NIF_TERM message)
{
    enif_send(NULL, &end->owner, env, message);
    enif_clear_env(env);
}

/* Hands what comes to the owner, as far as it wants it, a turn's worth. Under the lock; the ferry's. */
static void hand_over(struct end *end)
{
    ErlNifEnv *env = enif_alloc_env();
    int code = PELTON_OK;
    for (int i = 0; i < TURN && end->active && code == PELTON_OK; i++) {
        ERL_NIF_TERM self = enif_make_resource(env, end);
        if (end->kind == RECEIVER) {
            pelton_message message;
            bool is_held;
            code = pelton_receive(end->handle, PELTON_NO_WAIT, &message);
            if (code == PELTON_OK)
                to_owner(env, end, enif_make_tuple3(env, atom_pelton, self, received(env, end, &message, true, &is_held)));
        } else {
            pelton_request request;
            code = pelton_service_receive(end->handle, PELTON_NO_WAIT, &request);
            if (code == PELTON_OK) {
                ERL_NIF_TERM bytes = bytes_of(env, request.data, request.size);
                ERL_NIF_TERM responder = responder_term(env, request.responder);
                pelton_release(end->handle);
                to_owner(env, end, enif_make_tuple4(env, enif_make_atom(env, "pelton_request"), self, responder, bytes));
            }
        }
        if (code == PELTON_OK && end->active > 0 && --end->active == 0 && !end->once)
            to_owner(env, end, enif_make_tuple2(env, enif_make_atom(env, "pelton_passive"), enif_make_resource(env, end)));
    }
    if (end->active && (code == PELTON_OK || code == PELTON_AGAIN)) {
        code = pelton_arm(end->handle);
        if (!watch(end, code) && code == PELTON_OK)
            look_again(end);
    }
    if (end->active && code != PELTON_OK && code != PELTON_AGAIN) {
        end->active = 0;
        to_owner(env, end,
            enif_make_tuple3(env, enif_make_atom(env, "pelton_closed"), enif_make_resource(env, end), atom_of_code(env, code)));
    }
    enif_free_env(env);
}

/* ---- Calls ---- */

/* What came of a call, as the function's result. */
static ERL_NIF_TERM answered(ErlNifEnv *env, const pelton_completion *answer, struct waiter *waiter)
{
    const unsigned char *data = answer->data;
    size_t size = answer->size;
    ERL_NIF_TERM bytes;
    switch (answer->outcome) {
    case PELTON_REPLY:
    case PELTON_END:
        if (waiter && waiter->parts_size) {
            size_t before = waiter->parts_size;
            unsigned char *all_bytes = enif_make_new_binary(env, before + size, &bytes);
            memcpy(all_bytes, waiter->parts.data, before);
            if (size)
                memcpy(all_bytes + before, data, size);
        } else {
            bytes = bytes_of(env, data, size);
        }
        return enif_make_tuple2(env, atom_ok, bytes);
    case PELTON_FAILED:
        return error_of(env, enif_make_tuple3(env, atom_failed, enif_make_uint(env, answer->code), bytes_of(env, data, size)));
    case PELTON_ABANDONED: return error_of(env, atom_abandoned);
    default: return error_of(env, enif_make_tuple2(env, atom_lost, atom_of_code(env, (int)answer->code)));
    }
}

static void keep_part(struct waiter *waiter, const pelton_completion *answer)
{
    size_t wanted = waiter->parts_size + answer->size;
    if (!waiter->parts.data) {
        if (!enif_alloc_binary(wanted, &waiter->parts))
            return;
    } else if (waiter->parts.size < wanted && !enif_realloc_binary(&waiter->parts, wanted * 2)) {
        return;
    }
    memcpy(waiter->parts.data + waiter->parts_size, answer->data, answer->size);
    waiter->parts_size = wanted;
}

/* Answers to whoever waits for them, a turn's worth. Under the lock. */
static void take_replies(ErlNifEnv *told, struct end *end)
{
    int code = PELTON_OK;
    for (int i = 0; i < TURN && code == PELTON_OK; i++) {
        pelton_completion answer;
        code = pelton_await(end->handle, PELTON_ANY_CALL, PELTON_NO_WAIT, &answer);
        if (code)
            break;
        struct waiter *waiter = end->waiters;
        while (waiter && waiter->call != answer.call)
            waiter = waiter->next;
        if (waiter && answer.outcome == PELTON_PART)
            keep_part(waiter, &answer);
        else if (waiter)
            tell(told, end, waiter, answered(waiter->env, &answer, waiter));
        pelton_release(end->handle);
    }
    bool has_ended = code != PELTON_OK && code != PELTON_AGAIN && code != PELTON_NO_LISTENER;
    tell_all(told, end, has_ended, code);
}

static void arm_client(struct end *end)
{
    if (!end->waiters)
        return;
    int code = pelton_arm(end->handle);
    if (!watch(end, code))
        look_again(end);
}

/* Closes what is open; what waits is told. Under the lock, which it gives up. */
static void close_end(ErlNifEnv *told, struct end *end)
{
    end->active = 0;
    tell_all(told, end, true, PELTON_CLOSED);
    pelton_close(end->handle);
    end->handle = NULL;
    enif_mutex_unlock(end->lock);
    enif_mutex_lock(all->lock);
    end->is_doomed = true;
    enif_mutex_unlock(all->lock);
    ferry_wake();
}

static void close_if_open(struct end *end)
{
    enif_mutex_lock(end->lock);
    if (end->handle)
        close_end(NULL, end);
    else
        enif_mutex_unlock(end->lock);
}

/* ---- The ferry's ---- */

void ends_ready(enum watched *watched)
{
    struct end *end = (struct end *)watched;
    if (atomic_load(&end->is_orphan)) {
        close_if_open(end);
        return;
    }
    enif_mutex_lock(end->lock);
    if (end->handle) {
        switch (end->kind) {
        case SENDER: tell_all(NULL, end, false, 0); break;
        case RECEIVER:
        case SERVICE:
            tell_all(NULL, end, false, 0);
            if (end->active)
                hand_over(end);
            break;
        case CLIENT:
            take_replies(NULL, end);
            arm_client(end);
            break;
        }
    }
    enif_mutex_unlock(end->lock);
}

void ends_look(void)
{
    for (;;) {
        enif_mutex_lock(all->lock);
        struct end *end = all->ends_to_look_at;
        if (end) {
            all->ends_to_look_at = end->next_to_look_at;
            /* Before it looks: what comes after that asks again. Nobody but this thread lets go of the end. */
            end->is_to_be_looked_at = false;
        }
        enif_mutex_unlock(all->lock);
        if (!end)
            return;
        ends_ready(&end->watched);
    }
}

/* Under all->lock. */
static void remove_end(struct end *end)
{
    if (end->previous)
        end->previous->next = end->next;
    else
        all->ends = end->next;
    if (end->next)
        end->next->previous = end->previous;
}

void ends_bury(void)
{
    for (;;) {
        enif_mutex_lock(all->lock);
        struct end *end = all->ends;
        while (end && (!end->is_doomed || end->is_to_be_looked_at))
            end = end->next;
        if (end) {
            remove_end(end);
            end->is_buried = true;
        }
        enif_mutex_unlock(all->lock);
        if (!end)
            return;
        enif_release_resource(end);
    }
}

void ends_end(void)
{
    for (;;) {
        enif_mutex_lock(all->lock);
        struct end *end = all->ends;
        while (end && end->is_doomed)
            end = end->next;
        if (end)
            enif_keep_resource(end);
        enif_mutex_unlock(all->lock);
        if (!end)
            return;
        close_if_open(end);
        enif_release_resource(end);
    }
}

static void owner_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct end *end = object;
    /* Who copies much has the lock for longer than a scheduler should wait. */
    atomic_store(&end->is_orphan, true);
    look_again(end);
}

static void end_dies(ErlNifEnv *env, void *object)
{
    (void)env;
    struct end *end = object;
    if (end->lock)
        enif_mutex_destroy(end->lock);
}

static void responder_dies(ErlNifEnv *env, void *object)
{
    (void)env;
    struct responder *responder = object;
    if (!atomic_flag_test_and_set(&responder->is_used))
        pelton_close(responder->handle);
}

static void held_dies(ErlNifEnv *env, void *object)
{
    (void)env;
    pelton_close(((struct held *)object)->handle);
}

int ends_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit end = {.dtor = end_dies, .down = owner_is_down};
    ErlNifResourceTypeInit responder = {.dtor = responder_dies};
    ErlNifResourceTypeInit held = {.dtor = held_dies};
    all->end_type = enif_open_resource_type_x(env, "pelton_end", &end, flags, NULL);
    all->responder_type = enif_open_resource_type_x(env, "pelton_responder", &responder, flags, NULL);
    held_type = enif_open_resource_type_x(env, "pelton_held", &held, flags, NULL);
    return all->end_type && all->responder_type && held_type ? 0 : ENOMEM;
}

/* ---- The functions ---- */

/* end_open(Kind, Name, {Capacity, MessageBytesMax, Milliseconds, Lanes, Create, CallBytesMax}): {ok, End} or {error, {Code, Detail}}. Waits. */
NIF(end_open)
{
    (void)argc;
    unsigned kind;
    ErlNifBinary name;
    const ERL_NIF_TERM *numbers;
    int arity;
    uint64_t found[6];
    if (!enif_get_uint(env, argv[0], &kind) || kind > SERVICE || !enif_inspect_binary(env, argv[1], &name) || !name.size ||
        name.data[name.size - 1] || !enif_get_tuple(env, argv[2], &arity, &numbers) || arity != 6)
        return enif_make_badarg(env);
    for (int i = 0; i < 6; i++)
        if (!enif_get_uint64(env, numbers[i], &found[i]))
            return enif_make_badarg(env);
    pelton_options options = PELTON_OPTIONS_INIT;
    /* The time that it may look for an answer is the deadline that it is given: it never sleeps in a call. */
    options.wait = PELTON_SPIN;
    options.capacity = found[0];
    options.message_bytes_max = found[1];
    options.deadline_ns = found[2] ? pelton_deadline((int64_t)found[2] * 1000000) : PELTON_NO_WAIT;
    options.lanes = (uint32_t)found[3];
    options.create = (uint32_t)found[4];
    options.call_bytes_max = found[5];
    options.hold_ns = PELTON_NO_HOLD;
    struct end *end = enif_alloc_resource(all->end_type, sizeof *end);
    memset(end, 0, sizeof *end);
    end->watched = WATCHED_END;
    end->kind = (enum kind)kind;
    end->patience = 8;
    end->lock = enif_mutex_create("pelton_end");
    int code = PELTON_SYSTEM;
    const char *at = (const char *)name.data;
    bool is_path = strncmp(at, "path:", 5) == 0;
    switch (end->kind) {
    case SENDER: code = pelton_sender_open(at, &options, (pelton_sender **)&end->handle); break;
    case RECEIVER:
        code = is_path && options.lanes <= 1 ? pelton_receiver_open(at, &options, (pelton_receiver **)&end->handle)
                                             : pelton_gather(at, &options, (pelton_receiver **)&end->handle);
        break;
    case CLIENT: code = pelton_client_open(at, &options, (pelton_client **)&end->handle); break;
    case SERVICE: code = pelton_service_listen(at, &options, (pelton_service **)&end->handle); break;
    }
    struct epoll_event event = {.events = EPOLLONESHOT, .data.ptr = end};
    if (code || epoll_ctl(all->epoll, EPOLL_CTL_ADD, pelton_fd(end->handle), &event)) {
        const char *detail = code ? pelton_error_detail() : "the descriptor cannot be watched";
        ERL_NIF_TERM reason = enif_make_tuple2(env, atom_of_code(env, code ? code : PELTON_SYSTEM), bytes_of(env, detail, strlen(detail)));
        pelton_close(end->handle);
        end->handle = NULL;
        enif_release_resource(end);
        return error_of(env, reason);
    }
    enif_self(env, &end->owner);
    enif_mutex_lock(all->lock);
    end->next = all->ends;
    if (end->next)
        end->next->previous = end;
    all->ends = end; /* which has it */
    enif_mutex_unlock(all->lock);
    ERL_NIF_TERM term = enif_make_resource(env, end);
    if (enif_monitor_process(env, end, &end->owner, &end->monitor)) {
        atomic_store(&end->is_orphan, true);
        look_again(end);
    }
    return enif_make_tuple2(env, atom_ok, term);
}

/* The end that is the first argument, whose lock is held; NULL: the result says why not. */
static struct end *end_at(ErlNifEnv *env, ERL_NIF_TERM term, unsigned kinds, ERL_NIF_TERM *result)
{
    void *object;
    if (!enif_get_resource(env, term, all->end_type, &object) || !(kinds & 1u << ((struct end *)object)->kind)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    struct end *end = object;
    /* Who copies much has it for longer than a scheduler should wait. */
    if (enif_mutex_trylock(end->lock)) {
        *result = atom_full;
        return NULL;
    }
    if (end->handle)
        return end;
    enif_mutex_unlock(end->lock);
    *result = failed(env, PELTON_CLOSED);
    return NULL;
}

static ERL_NIF_TERM leave_end(struct end *end, ERL_NIF_TERM result)
{
    enif_mutex_unlock(end->lock);
    return result;
}

/* end_close(End) */
NIF(end_close)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct end *end = end_at(env, argv[0], 15, &result);
    if (!end)
        return result;
    close_end(env, end);
    enif_demonitor_process(env, end, &end->monitor);
    return atom_ok;
}

/* end_send(End, Data, Ref): ok, or `pending` and then `ready` */
NIF(end_send)
{
    (void)argc;
    ErlNifBinary data;
    ERL_NIF_TERM result;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data))
        return enif_make_badarg(env);
    struct end *end = end_at(env, argv[0], 1u << SENDER, &result);
    if (!end)
        return result;
    for (;;) {
        int code = pelton_send(end->handle, data.data, data.size, PELTON_NO_WAIT);
        if (code != PELTON_AGAIN)
            return leave_end(end, code ? failed(env, code) : atom_ok);
        code = pelton_arm_send(end->handle, data.size);
        if (code == PELTON_OK)
            continue;
        if (!watch(end, code))
            return leave_end(end, failed(env, code));
        add_waiter(env, end, argv[2], 0);
        return leave_end(end, atom_pending);
    }
}

NIF(end_send_large)
{
    return end_send(env, argc, argv);
}

static NIF(copy_held)
{
    (void)argc;
    void *object;
    if (!enif_get_resource(env, argv[0], held_type, &object))
        return enif_make_badarg(env);
    struct held *held = object;
    return enif_make_tuple2(env, atom_ok, bytes_of(env, held->data, held->size));
}

/* So long it pays to look again before sleeping: as long as that has led to something lately, and now and then, to find out. */
static int64_t patience_of(struct end *end)
{
    return end->patience || ++end->attempts % 32 == 0 ? pelton_deadline(PATIENCE) : PELTON_NO_WAIT;
}

static void learn(struct end *end, bool has_paid)
{
    if (has_paid)
        end->patience = 8;
    else if (end->patience)
        end->patience--;
}

/* end_receive(End, Ref): {ok, Bytes}, or `pending` and then `ready` */
NIF(end_receive)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct end *end = end_at(env, argv[0], 1u << RECEIVER, &result);
    if (!end)
        return result;
    if (end->active)
        return leave_end(end, error_of(env, atom_einval));
    pelton_message message;
    int code = pelton_receive(end->handle, PELTON_NO_WAIT, &message);
    if (code == PELTON_AGAIN) {
        code = pelton_receive(end->handle, patience_of(end), &message);
        learn(end, code == PELTON_OK);
    }
    while (code == PELTON_AGAIN) {
        code = pelton_arm(end->handle);
        if (code == PELTON_OK) {
            code = pelton_receive(end->handle, PELTON_NO_WAIT, &message);
        } else if (watch(end, code)) {
            add_waiter(env, end, argv[1], 0);
            return leave_end(end, atom_pending);
        }
    }
    if (code)
        return leave_end(end, failed(env, code));
    bool is_held;
    ERL_NIF_TERM bytes = received(env, end, &message, false, &is_held);
    enif_mutex_unlock(end->lock);
    if (is_held)
        return enif_schedule_nif(env, "copy_held", ERL_NIF_DIRTY_JOB_CPU_BOUND, copy_held, 1, &bytes);
    return enif_make_tuple2(env, atom_ok, bytes);
}

/* end_set(End, Active, Once, Holds): Active is how many messages are to come, below 0 all */
NIF(end_set)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifSInt64 active;
    if (!enif_get_int64(env, argv[1], &active))
        return enif_make_badarg(env);
    struct end *end = end_at(env, argv[0], 1u << RECEIVER | 1u << SERVICE, &result);
    if (!end)
        return result;
    end->active = active;
    end->once = enif_is_identical(argv[2], atom_true);
    end->holds = enif_is_identical(argv[3], atom_true);
    if (end->active)
        look_again(end);
    return leave_end(end, atom_ok);
}

/* end_give(End, Pid) */
NIF(end_give)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifPid pid, self;
    if (!enif_get_local_pid(env, argv[1], &pid))
        return enif_make_badarg(env);
    struct end *end = end_at(env, argv[0], 15, &result);
    if (!end)
        return result;
    if (enif_compare_pids(enif_self(env, &self), &end->owner) != 0)
        return leave_end(end, error_of(env, enif_make_atom(env, "not_owner")));
    ErlNifMonitor monitor;
    if (enif_monitor_process(env, end, &pid, &monitor))
        return leave_end(end, enif_make_badarg(env));
    enif_demonitor_process(env, end, &end->monitor);
    end->monitor = monitor;
    end->owner = pid;
    return leave_end(end, atom_ok);
}

/* end_call(End, Data, Ref, Milliseconds): the answer; or `waits`, and it is sent; or `pending`, and then `ready`: for room */
NIF(end_call)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    ErlNifSInt64 milliseconds;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data) || !enif_get_int64(env, argv[3], &milliseconds))
        return enif_make_badarg(env);
    struct end *end = end_at(env, argv[0], 1u << CLIENT, &result);
    if (!end)
        return result;
    uint64_t call;
    bool tells_only = milliseconds < -1;
    int code = pelton_submit(end->handle, data.data, data.size, tells_only ? PELTON_NOTIFY : 0, PELTON_NO_WAIT, &call);
    if (code == PELTON_AGAIN) {
        add_waiter(env, end, argv[2], 0);
        arm_client(end);
        return leave_end(end, atom_pending);
    }
    if (code || tells_only)
        return leave_end(end, code ? failed(env, code) : atom_ok);
    pelton_completion answer;
    int64_t patience = patience_of(end);
    code = patience ? pelton_await(end->handle, call, patience, &answer) : PELTON_AGAIN;
    if (patience)
        learn(end, code == PELTON_OK);
    if (code == PELTON_OK && answer.outcome != PELTON_PART && answer.size <= COPY_MAX) {
        result = answered(env, &answer, NULL);
        pelton_release(end->handle);
        /* Answers to others may have come meanwhile, and are with the client now. */
        if (end->waiters) {
            take_replies(env, end);
            arm_client(end);
        }
        return leave_end(end, result);
    }
    if (code != PELTON_OK && code != PELTON_AGAIN)
        return leave_end(end, failed(env, code));
    struct waiter *waiter = add_waiter(env, end, argv[2], call);
    if (code == PELTON_OK) {
        if (answer.outcome == PELTON_PART)
            keep_part(waiter, &answer);
        else
            tell(env, end, waiter, answered(waiter->env, &answer, NULL));
        pelton_release(end->handle);
    }
    arm_client(end);
    return leave_end(end, atom_waits);
}

NIF(end_call_large)
{
    return end_call(env, argc, argv);
}

/* end_cancel(End, Ref): who asked does not wait any more, for room or for an answer */
NIF(end_cancel)
{
    (void)argc;
    ERL_NIF_TERM result;
    struct end *end = end_at(env, argv[0], 15, &result);
    if (!end)
        return result;
    for (struct waiter **at = &end->waiters; *at; at = &(*at)->next)
        if (enif_is_identical((*at)->ref, argv[1])) {
            struct waiter *waiter = *at;
            *at = waiter->next;
            if (waiter->call)
                pelton_cancel(end->handle, waiter->call);
            free_waiter(waiter);
            break;
        }
    return leave_end(end, atom_ok);
}

/* end_reply(Responder, Code, Data): Code is `undefined` for an answer, or a failure's */
NIF(end_reply)
{
    (void)argc;
    void *object;
    ErlNifBinary data;
    unsigned code = 0;
    bool fails = !enif_is_identical(argv[1], atom_undefined);
    if (!enif_get_resource(env, argv[0], all->responder_type, &object) || !enif_inspect_iolist_as_binary(env, argv[2], &data) ||
        (fails && !enif_get_uint(env, argv[1], &code)))
        return enif_make_badarg(env);
    struct responder *responder = object;
    if (atomic_flag_test_and_set(&responder->is_used))
        return error_of(env, atom_closed);
    int answer = fails ? pelton_reply_fail(responder->handle, code, data.data, data.size)
                       : pelton_reply(responder->handle, data.data, data.size);
    /* It stays then. */
    if (answer == PELTON_TOO_LARGE)
        atomic_flag_clear(&responder->is_used);
    return answer ? failed(env, answer) : atom_ok;
}

NIF(end_reply_large)
{
    return end_reply(env, argc, argv);
}
