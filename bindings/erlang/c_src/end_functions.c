/* What pelton asks of ends.c and of libpelton. */
#include "ends.h"
#include <sys/epoll.h>

/* So long, in nanoseconds, a process that receives or calls looks for an answer before it sleeps: twice a wake-up. */
#define PATIENCE 20000
/* That, as bytes that were copied. */
#define TURN_OF_PATIENCE (2 << 16)

/* ---- Opening: it waits, for as long as was said, in a thread of its own ---- */

struct request {
    struct opening opening;
    enum kind kind;
    pelton_options options;
    ErlNifPid pid;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    char name[];
};

static int open_handle(struct request *request, void **out)
{
    const pelton_options *options = &request->options;
    switch (request->kind) {
    case SENDER: return pelton_sender_open(request->name, options, (pelton_sender **)out);
    case RECEIVER:
        return strncmp(request->name, "path:", 5) == 0 && options->lanes <= 1
            ? pelton_receiver_open(request->name, options, (pelton_receiver **)out)
            : pelton_gather(request->name, options, (pelton_receiver **)out);
    case CLIENT: return pelton_client_open(request->name, options, (pelton_client **)out);
    default: return pelton_service_listen(request->name, options, (pelton_service **)out);
    }
}

/* {ok, End} or {error, {Code, Detail}}. */
static ERL_NIF_TERM opened(struct request *request)
{
    ErlNifEnv *env = request->env;
    struct end *end = enif_alloc_resource(all->end_type, sizeof *end);
    memset(end, 0, sizeof *end);
    end->watched = WATCHED_END;
    end->kind = request->kind;
    end->patience = 8;
    end->owner = request->pid;
    end->lock = enif_mutex_create("pelton_end");
    int code = end->lock ? open_handle(request, &end->handle) : PELTON_SYSTEM;
    struct epoll_event event = {.events = EPOLLONESHOT, .data.ptr = end};
    if (code || epoll_ctl(all->epoll, EPOLL_CTL_ADD, pelton_fd(end->handle), &event)) {
        const char *detail = code ? pelton_error_detail() : "the descriptor cannot be watched";
        ERL_NIF_TERM atom = !code || code == PELTON_SYSTEM ? atom_of_errno(errno) : atom_of_code(env, code);
        ERL_NIF_TERM reason = enif_make_tuple2(env, atom, bytes_of(env, detail, strlen(detail)));
        pelton_close(end->handle);
        end->handle = NULL;
        enif_release_resource(end);
        return error_of(env, reason);
    }
    list_end(end);
    /* Of the list; the term has one as well. */
    ERL_NIF_TERM term = enif_make_resource(env, end);
    if (enif_monitor_process(NULL, end, &end->owner, &end->monitor)) {
        atomic_store(&end->has_dead, true);
        look_again(end);
    }
    return enif_make_tuple2(env, atom_ok, term);
}

static void *open_in_thread(void *argument)
{
    struct request *request = argument;
    request->opening.thread = enif_thread_self();
    ERL_NIF_TERM result = opened(request);
    enif_send(NULL, &request->pid, request->env, enif_make_tuple3(request->env, atom_pelton, request->ref, result));
    enif_free_env(request->env);
    opening_has_ended(&request->opening);
    return NULL;
}

/* end_open(Kind, Name, {Capacity, MessageBytesMax, Milliseconds, Lanes, Create, CallBytesMax}, Ref): `pending`; {ok, End} or {error, {Code,
 * Detail}} is sent. */
NIF(end_open)
{
    (void)argc;
    unsigned kind;
    ErlNifBinary name;
    const ERL_NIF_TERM *numbers;
    int arity;
    uint64_t found[7];
    if (!enif_get_uint(env, argv[0], &kind) || kind > SERVICE || !enif_inspect_binary(env, argv[1], &name) || !name.size ||
        name.data[name.size - 1] || !enif_get_tuple(env, argv[2], &arity, &numbers) || arity != 7)
        return enif_make_badarg(env);
    for (int i = 0; i < 7; i++)
        if (!enif_get_uint64(env, numbers[i], &found[i]))
            return enif_make_badarg(env);
    struct request *request = enif_alloc(sizeof *request + name.size);
    if (!request)
        return error_of(env, enif_make_tuple2(env, atom_enomem, bytes_of(env, "", 0)));
    *request = (struct request){.kind = (enum kind)kind, .options = PELTON_OPTIONS_INIT, .env = enif_alloc_env()};
    memcpy(request->name, name.data, name.size);
    pelton_options *options = &request->options;
    /* The time that it may look for an answer is the deadline that it is given: it never sleeps in a call. */
    options->wait = PELTON_SPIN;
    options->capacity = found[0];
    options->message_bytes_max = found[1];
    int64_t milliseconds = found[2] > INT64_MAX / 1000000 ? INT64_MAX / 1000000 : (int64_t)found[2];
    options->deadline_ns = milliseconds ? pelton_deadline(milliseconds * 1000000) : PELTON_NO_WAIT;
    options->lanes = (uint32_t)found[3];
    options->create = (uint32_t)found[4];
    options->call_bytes_max = found[5];
    options->memory = found[6];
    options->hold_ns = PELTON_NO_HOLD;
    request->ref = enif_make_copy(request->env, argv[3]);
    enif_self(env, &request->pid);
    ErlNifTid thread;
    int code = enif_thread_create("pelton_open", &thread, open_in_thread, request, NULL);
    if (!code)
        return atom_pending;
    enif_free_env(request->env);
    enif_free(request);
    return error_of(env, enif_make_tuple2(env, atom_of_errno(code), bytes_of(env, "no thread can be made", 21)));
}

/* ---- The functions ---- */

static ERL_NIF_TERM leave_end(struct end *end, ERL_NIF_TERM result)
{
    enif_mutex_unlock(end->lock);
    return result;
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
    bool is_open = end->handle && !atomic_load(&end->is_closing);
    if (is_open && !end->has_answer)
        return end;
    enif_mutex_unlock(end->lock);
    *result = is_open ? atom_full : failed(env, PELTON_CLOSED);
    return NULL;
}

void *lend(ErlNifEnv *env, ERL_NIF_TERM term, bool receives, struct end **out, ERL_NIF_TERM *result)
{
    struct end *end = *out = end_at(env, term, 1u << (receives ? RECEIVER : SENDER), result);
    if (!end)
        return NULL;
    void *handle = NULL;
    *result = atom_einval;
    if (!end->active && !atomic_exchange(&end->is_lent, true)) {
        handle = end->handle;
        atomic_fetch_add(&end->held, 1);
        enif_keep_resource(end);
    } else if (!end->active) {
        *result = enif_make_atom(env, "lent");
    }
    *result = leave_end(end, error_of(env, *result));
    return handle;
}

/* There may be something for those that wait, which whoever has just used the end was not asked to tell of. */
static ERL_NIF_TERM leave_to_others(struct end *end, ERL_NIF_TERM result)
{
    if (end->waiters)
        look_again(end);
    return leave_end(end, result);
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
    if (atomic_load(&end->is_lent))
        return leave_end(end, error_of(env, enif_make_atom(env, "lent")));
    for (;;) {
        int code = pelton_send(end->handle, data.data, data.size, PELTON_NO_WAIT);
        if (code != PELTON_AGAIN) {
            took(env, data.size);
            return leave_to_others(end, code ? failed(env, code) : atom_ok);
        }
        code = pelton_arm_send(end->handle, data.size);
        if (code == PELTON_OK)
            continue;
        if (!watch(end, code))
            return leave_to_others(end, failed(env, code));
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
    if (!enif_get_resource(env, argv[0], all->held_type, &object))
        return enif_make_badarg(env);
    struct held *held = object;
    ERL_NIF_TERM bytes = bytes_of(env, held->data, held->size);
    /* Not when it is collected: the sender waits for the room. */
    let_go_of(held);
    return enif_make_tuple2(env, atom_ok, bytes);
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
    if (end->active || atomic_load(&end->is_lent))
        return leave_end(end, error_of(env, end->active ? atom_einval : enif_make_atom(env, "lent")));
    pelton_message message;
    int code = pelton_receive(end->handle, PELTON_NO_WAIT, &message);
    if (code == PELTON_AGAIN) {
        code = pelton_receive(end->handle, patience_of(end), &message);
        learn(end, code == PELTON_OK);
        took(env, TURN_OF_PATIENCE);
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
        return leave_to_others(end, failed(env, code));
    bool is_held;
    took(env, message.size);
    ERL_NIF_TERM bytes = leave_to_others(end, received(env, end, &message, false, &is_held));
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
        return leave_end(end, error_of(env, enif_make_atom(env, "noproc")));
    enif_demonitor_process(env, end, &end->monitor);
    end->monitor = monitor;
    end->owner = pid;
    return leave_end(end, atom_ok);
}

/* Has the ferry tell of answers, and of room to those that wait for it: who has just found some was not the only one to want it. */
static ERL_NIF_TERM leave_client(struct end *end, ERL_NIF_TERM result)
{
    if (end->waiters)
        look_again(end);
    else
        arm_client(end);
    return leave_end(end, result);
}

/* end_call(End, Data, Ref, TellsOnly): the answer, or `ok`; or `waits`, and it is sent; or `pending`, and then `ready`: for room */
NIF(end_call)
{
    (void)argc;
    ERL_NIF_TERM result;
    ErlNifBinary data;
    if (!enif_inspect_iolist_as_binary(env, argv[1], &data))
        return enif_make_badarg(env);
    bool tells_only = enif_is_identical(argv[3], atom_true);
    struct end *end = end_at(env, argv[0], 1u << CLIENT, &result);
    if (!end)
        return result;
    took(env, data.size);
    uint64_t call;
    int code = pelton_submit(end->handle, data.data, data.size, tells_only ? PELTON_NOTIFY : 0, PELTON_NO_WAIT, &call);
    if (code == PELTON_AGAIN) {
        add_waiter(env, end, argv[2], 0);
        arm_client(end);
        return leave_end(end, atom_pending);
    }
    if (code || tells_only)
        return leave_client(end, code ? failed(env, code) : atom_ok);
    pelton_completion answer;
    int64_t patience = patience_of(end);
    code = PELTON_AGAIN;
    if (patience) {
        code = pelton_await(end->handle, call, patience, &answer);
        learn(end, code == PELTON_OK);
        if (code != PELTON_OK)
            took(env, TURN_OF_PATIENCE);
    }
    if (code == PELTON_OK && answer.outcome != PELTON_PART && answer.size <= COPY_MAX) {
        took(env, answer.size);
        result = answered(env, &answer, NULL);
        pelton_release(end->handle);
        return leave_client(end, result);
    }
    if (code != PELTON_OK && code != PELTON_AGAIN) {
        /* What an answer that nobody has asked for by its number says is an error here: they are told alike. */
        ERL_NIF_TERM why = atom_of_code(env, code == PELTON_NO_LISTENER || code == PELTON_REFUSED ? PELTON_AGAIN : code);
        return leave_client(end, error_of(env, code == PELTON_SYSTEM ? why : enif_make_tuple2(env, atom_lost, why)));
    }
    add_waiter(env, end, argv[2], call);
    if (code == PELTON_OK) {
        end->answer = answer;
        end->has_answer = true;
        look_again(end);
    } else {
        arm_client(end);
    }
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
            uint64_t call = (*at)->call;
            remove_waiter(env, end, at);
            if (call) {
                pelton_cancel(end->handle, call);
                return leave_client(end, atom_ok);
            }
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
