/* pelton's part: senders, receivers, clients and services.
 *
 * An end lives as a port does: until it is closed, or its owner ends. Any process may use it. What cannot be done at once leaves a waiter
 * in the end, arms it and has the ferry watch it once; the ferry answers a call, hands over what an active end receives, or tells the waiter
 * that it may try again. After its close an end's memory stays until the ferry has let go of it. */
#include "ends.h"
#include <sys/epoll.h>

/* A turn of the ferry's at one end: so many messages, or so many bytes. */
#define TURN 64
#define TURN_BYTES (1 << 20)

/* ---- Results ---- */

ERL_NIF_TERM atom_of_code(ErlNifEnv *env, int code)
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

ERL_NIF_TERM failed(ErlNifEnv *env, int code)
{
    return error_of(env, code == PELTON_SYSTEM && errno ? atom_of_errno(errno) : atom_of_code(env, code));
}

ERL_NIF_TERM bytes_of(ErlNifEnv *env, const void *data, size_t size)
{
    ERL_NIF_TERM term;
    unsigned char *bytes = enif_make_new_binary(env, size, &term);
    if (size)
        memcpy(bytes, data, size);
    return term;
}

static ERL_NIF_TERM held_term(ErlNifEnv *env, struct end *end, pelton_held *handle, const pelton_message *message, bool as_binary)
{
    struct held *held = enif_alloc_resource(all->held_type, sizeof *held);
    *held = (struct held){end, handle, message->data, message->size};
    enif_keep_resource(end);
    atomic_fetch_add(&end->held, 1);
    ERL_NIF_TERM term = as_binary ? enif_make_resource_binary(env, held, held->data, held->size) : enif_make_resource(env, held);
    enif_release_resource(held);
    return term;
}

void let_go_of(struct held *held)
{
    if (!held->handle)
        return;
    pelton_close(held->handle);
    held->handle = NULL;
    /* A closed end waits for its last. */
    if (atomic_fetch_sub(&held->end->held, 1) == 1 && atomic_load(&held->end->is_closing))
        look_again(held->end);
    enif_release_resource(held->end);
}

/* ---- Waiting ---- */

void look_again(struct end *end)
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

bool watch(struct end *end, int armed)
{
    if (armed != PELTON_AGAIN)
        return false;
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = end};
    if (epoll_ctl(all->epoll, EPOLL_CTL_MOD, pelton_fd(end->handle), &event))
        look_again(end);
    return true;
}

struct waiter *add_waiter(ErlNifEnv *env, struct end *end, ERL_NIF_TERM ref, uint64_t call)
{
    struct waiter *waiter = enif_alloc(sizeof *waiter);
    *waiter = (struct waiter){.next = end->waiters, .env = enif_alloc_env(), .call = call};
    enif_self(env, &waiter->pid);
    waiter->ref = enif_make_copy(waiter->env, ref);
    end->waiters = waiter;
    waiter->has_monitor = enif_monitor_process(env, end, &waiter->pid, &waiter->monitor) == 0;
    if (!waiter->has_monitor) {
        atomic_store(&end->has_dead, true);
        look_again(end);
    }
    return waiter;
}

void remove_waiter(ErlNifEnv *env, struct end *end, struct waiter **at)
{
    struct waiter *waiter = *at;
    *at = waiter->next;
    if (waiter->has_monitor)
        enif_demonitor_process(env, end, &waiter->monitor);
    if (waiter->parts.data)
        enif_release_binary(&waiter->parts);
    enif_free_env(waiter->env);
    enif_free(waiter);
}

/* Sends it what it waits for, and forgets it. */
static void tell(ErlNifEnv *told, struct end *end, struct waiter *waiter, ERL_NIF_TERM result)
{
    struct waiter **at = &end->waiters;
    while (*at != waiter)
        at = &(*at)->next;
    enif_send(told, &waiter->pid, waiter->env, enif_make_tuple3(waiter->env, atom_pelton, waiter->ref, result));
    remove_waiter(told, end, at);
}

/* A call that fails with its service. */
static ERL_NIF_TERM lost(ErlNifEnv *env, int code)
{
    return error_of(env, enif_make_tuple2(env, atom_lost, atom_of_code(env, code)));
}

/* Who waits for room may look for it. */
static void tell_of_room(struct end *end)
{
    for (struct waiter *waiter = end->waiters, *next; waiter; waiter = next) {
        next = waiter->next;
        if (!waiter->call)
            tell(NULL, end, waiter, atom_ready);
    }
}

static void tell_all(ErlNifEnv *told, struct end *end, bool is_closed, int code)
{
    while (end->waiters) {
        struct waiter *waiter = end->waiters;
        ERL_NIF_TERM result = is_closed ? error_of(waiter->env, atom_closed) : lost(waiter->env, code);
        tell(told, end, waiter, waiter->call ? result : atom_ready);
    }
}

/* Those that have ended wait for nothing: what they have asked is given up. */
static void forget_the_dead(struct end *end)
{
    for (struct waiter **at = &end->waiters; *at;) {
        if (enif_is_process_alive(NULL, &(*at)->pid)) {
            at = &(*at)->next;
            continue;
        }
        if ((*at)->call)
            pelton_cancel(end->handle, (*at)->call);
        remove_waiter(NULL, end, at);
    }
}

/* ---- Receiving ---- */

ERL_NIF_TERM received(ErlNifEnv *env, struct end *end, const pelton_message *message, bool may_copy, bool *is_held)
{
    *is_held = false;
    pelton_held *handle;
    bool holds = end->holds && message->size > 64;
    if ((holds || (message->size > COPY_MAX && !may_copy)) && pelton_hold(end->handle, &handle) == PELTON_OK) {
        *is_held = !holds;
        return held_term(env, end, handle, message, holds);
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
    size_t bytes = 0;
    for (int i = 0; i < TURN && bytes < TURN_BYTES && end->active && code == PELTON_OK; i++) {
        ERL_NIF_TERM self = enif_make_resource(env, end);
        if (end->kind == RECEIVER) {
            pelton_message message;
            bool is_held;
            code = pelton_receive(end->handle, PELTON_NO_WAIT, &message);
            bytes += code == PELTON_OK ? message.size : 0;
            if (code == PELTON_OK)
                to_owner(env, end, enif_make_tuple3(env, atom_pelton, self, received(env, end, &message, true, &is_held)));
        } else {
            pelton_request request;
            code = pelton_service_receive(end->handle, PELTON_NO_WAIT, &request);
            bytes += code == PELTON_OK ? request.size : 0;
            if (code == PELTON_OK) {
                ERL_NIF_TERM asked = bytes_of(env, request.data, request.size);
                ERL_NIF_TERM responder = responder_term(env, request.responder);
                pelton_release(end->handle);
                to_owner(env, end, enif_make_tuple4(env, enif_make_atom(env, "pelton_request"), self, responder, asked));
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

ERL_NIF_TERM answered(ErlNifEnv *env, const pelton_completion *answer, struct waiter *waiter)
{
    if (waiter && waiter->lacks_memory)
        return error_of(env, atom_enomem);
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

void keep_part(struct waiter *waiter, const pelton_completion *answer)
{
    size_t wanted = waiter->parts_size + answer->size;
    if (!waiter->parts.data) {
        waiter->lacks_memory = !enif_alloc_binary(wanted, &waiter->parts);
    } else if (waiter->parts.size < wanted && !enif_realloc_binary(&waiter->parts, wanted * 2)) {
        waiter->lacks_memory = true;
    }
    if (waiter->lacks_memory)
        return;
    memcpy(waiter->parts.data + waiter->parts_size, answer->data, answer->size);
    waiter->parts_size = wanted;
}

/* To whoever waits for it; it is released. Answers how much it was. */
static size_t hand_on(struct end *end, const pelton_completion *answer)
{
    size_t size = answer->size;
    struct waiter *waiter = end->waiters;
    while (waiter && waiter->call != answer->call)
        waiter = waiter->next;
    if (waiter && answer->outcome == PELTON_PART)
        keep_part(waiter, answer);
    else if (waiter)
        tell(NULL, end, waiter, answered(waiter->env, answer, waiter));
    pelton_release(end->handle);
    return size;
}

/* Answers to whoever waits for them, a turn's worth. Under the lock; the ferry's. */
static void take_replies(struct end *end)
{
    int code = PELTON_OK;
    size_t bytes = 0;
    pelton_completion answer;
    if (end->has_answer) {
        end->has_answer = false;
        bytes = hand_on(end, &end->answer);
    }
    for (int i = 0; i < TURN && bytes < TURN_BYTES && code == PELTON_OK; i++)
        if ((code = pelton_await(end->handle, PELTON_ANY_CALL, PELTON_NO_WAIT, &answer)) == PELTON_OK)
            bytes += hand_on(end, &answer);
    if (code == PELTON_OK || code == PELTON_AGAIN || code == PELTON_NO_LISTENER)
        tell_of_room(end);
    else
        tell_all(NULL, end, false, code);
}

void arm_client(struct end *end)
{
    int code = pelton_arm(end->handle);
    /* An end is for those who wait to be told of; nobody else may come. */
    if (!watch(end, code) && (code == PELTON_OK || end->waiters))
        look_again(end);
}

static void unlist_end(struct end *end)
{
    if (end->previous)
        end->previous->next = end->next;
    else
        all->ends = end->next;
    if (end->next)
        end->next->previous = end->previous;
    end->next = end->previous = NULL;
    end->is_listed = false;
}

void list_end(struct end *end)
{
    enif_mutex_lock(all->lock);
    end->next = all->ends;
    if (end->next)
        end->next->previous = end;
    all->ends = end;
    end->is_listed = true;
    enif_mutex_unlock(all->lock);
}

/* What a receiver holds is binaries of the emulator's, which do not change: the handle stays, and the sender writes over nothing. */
void close_end(ErlNifEnv *told, struct end *end)
{
    end->active = 0;
    atomic_store(&end->is_closing, true);
    if (atomic_load(&end->is_lent))
        give_up_requests_of(NULL, end);
    tell_all(told, end, true, 0);
    bool is_doomed = atomic_load(&end->held) == 0;
    if (is_doomed) {
        pelton_close(end->handle);
        end->handle = NULL;
    }
    enif_mutex_unlock(end->lock);
    enif_mutex_lock(all->lock);
    if (end->is_listed)
        unlist_end(end);
    if (is_doomed) {
        end->next_doomed = all->doomed_ends;
        all->doomed_ends = end;
    }
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

/* As a message that is held keeps the handle, so does who has it. */
bool take_back(struct end *end)
{
    bool is_closed = atomic_load(&end->is_closing);
    atomic_fetch_sub(&end->held, 1);
    atomic_store(&end->is_lent, false);
    look_again(end);
    enif_release_resource(end);
    return is_closed;
}

/* ---- The ferry's ---- */

void ends_ready(enum watched *watched)
{
    struct end *end = (struct end *)watched;
    enif_mutex_lock(end->lock);
    bool is_over = end->handle && atomic_load(&end->is_closing) && atomic_load(&end->held) == 0;
    if (end->handle && atomic_exchange(&end->has_dead, false)) {
        is_over |= !atomic_load(&end->is_closing) && !enif_is_process_alive(NULL, &end->owner);
        if (!is_over)
            forget_the_dead(end);
    }
    if (is_over) {
        close_end(NULL, end);
        return;
    }
    if (end->handle && !atomic_load(&end->is_closing) && !atomic_load(&end->is_lent)) {
        switch (end->kind) {
        case SENDER: tell_of_room(end); break;
        case RECEIVER:
        case SERVICE:
            tell_of_room(end);
            if (end->active)
                hand_over(end);
            break;
        case CLIENT:
            take_replies(end);
            arm_client(end);
            break;
        }
    }
    enif_mutex_unlock(end->lock);
}

void ends_look(void)
{
    /* Those there are now: who always has more comes after the others, and the files. */
    enif_mutex_lock(all->lock);
    struct end *end = all->ends_to_look_at, *next;
    all->ends_to_look_at = NULL;
    enif_mutex_unlock(all->lock);
    for (; end; end = next) {
        enif_mutex_lock(all->lock);
        next = end->next_to_look_at;
        /* Before it looks: what comes after that asks again. Nobody but this thread lets go of the end. */
        end->is_to_be_looked_at = false;
        enif_mutex_unlock(all->lock);
        ends_ready(&end->watched);
    }
}

void ends_bury(void)
{
    enif_mutex_lock(all->lock);
    struct opening *opening = all->openings, *next_opening;
    all->openings = NULL;
    struct end *doomed = NULL, *next;
    for (struct end **at = &all->doomed_ends; *at;) {
        struct end *end = *at;
        if (end->is_to_be_looked_at) {
            at = &end->next_doomed;
            continue;
        }
        *at = end->next_doomed;
        end->is_buried = true;
        end->next_doomed = doomed;
        doomed = end;
    }
    enif_mutex_unlock(all->lock);
    for (; doomed; doomed = next) {
        next = doomed->next_doomed;
        enif_release_resource(doomed);
    }
    for (; opening; opening = next_opening) {
        next_opening = opening->next;
        enif_thread_join(opening->thread, NULL);
        enif_free(opening);
    }
}

void opening_has_ended(struct opening *opening)
{
    enif_mutex_lock(all->lock);
    opening->next = all->openings;
    all->openings = opening;
    enif_mutex_unlock(all->lock);
    ferry_wake();
}

void ends_end(void)
{
    for (;;) {
        enif_mutex_lock(all->lock);
        struct end *end = all->ends;
        if (end) {
            enif_keep_resource(end);
            unlist_end(end);
        }
        enif_mutex_unlock(all->lock);
        if (!end)
            return;
        close_if_open(end);
        enif_release_resource(end);
    }
}

/* The owner, or one that waits: who copies much has the lock for longer than a scheduler should wait. */
static void process_is_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env, (void)pid, (void)monitor;
    struct end *end = object;
    atomic_store(&end->has_dead, true);
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
    let_go_of(object);
}

int ends_load(ErlNifEnv *env, ErlNifResourceFlags flags)
{
    ErlNifResourceTypeInit end = {.dtor = end_dies, .down = process_is_down};
    ErlNifResourceTypeInit responder = {.dtor = responder_dies};
    ErlNifResourceTypeInit held = {.dtor = held_dies};
    all->end_type = enif_open_resource_type_x(env, "pelton_end", &end, flags, NULL);
    all->responder_type = enif_open_resource_type_x(env, "pelton_responder", &responder, flags, NULL);
    all->held_type = enif_open_resource_type_x(env, "pelton_held", &held, flags, NULL);
    return all->end_type && all->responder_type && all->held_type ? 0 : ENOMEM;
}
