/* Calls from nginx: a client per worker and service, on the worker's event loop, for resty/pelton.lua.
 *
 * A call that has to wait has a slot. A call that was given up is cancelled at the library, which then has no answer for it any more, so
 * a slot is free as soon as it is given back.
 *
 * THE TURN. Answers are taken in an event that is posted behind all others of a turn of the loop: it takes what there is, wakes those
 * coroutines, and is posted again behind them, so that it has what they ask next on its way together. When nothing is there it looks on
 * for some microseconds while that has paid lately, then arms and lets the loop sleep. A coroutine that it woke, that asks again, and
 * beside which nothing waits for its turn, is answered within the call. All of that, of all services together, for a millisecond at a
 * time; then the loop has its way.
 *
 * ROOM. Who finds no room waits in a queue. `room` says how many of these may be let ask, and every event that may have made room, as well
 * as everyone who was let ask and goes without having taken it, is counted there by ngx_pelton_room_came.
 *
 * OPENING waits for the service, so a thread of its own does it. It shares with the worker only ngx_pelton_opening_t, which the last of
 * the two frees. */
#include "ngx_pelton.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>

/* Of a slot that was given back. */
#define NGX_PELTON_STALE "the request that asked this has ended, or has let go of it"

#define NGX_PELTON_ASK_AGAIN 2 /* of ngx_pelton_take: there is room now: ngx_pelton_ask with this slot */

/* ngx_pelton_ask's flags, beside PELTON_IDEMPOTENT and PELTON_NOTIFY. */
#define NGX_PELTON_STREAM 0x100   /* each part is told as it comes */
#define NGX_PELTON_MAY_WAIT 0x200 /* for room, or a client */

#define NGX_PELTON_CALLS_MAX 1024 /* the library's */
/* Calls answered within themselves between two looks at the clock, which costs 25 ns. */
#define NGX_PELTON_CLOCK_EACH 16
/* The library's own for pelton_arm. */
#define NGX_PELTON_HOLD_NS 20000
/* Answers, and bytes of them, taken before those who wait for them run: a guess at what nobody minds, a tenth of a millisecond. */
#define NGX_PELTON_TAKE_MAX 1024
#define NGX_PELTON_TAKE_BYTES 1048576
/* So often that is taken for a call whose time is over: more than a lane holds, unless its capacity was raised. */
#define NGX_PELTON_LAST_LOOKS 16
/* Of a call's parts_bytes_max, what all calls of a service may have together. */
#define NGX_PELTON_PARTS_SUMS 16
/* What is large takes longer to be answered: for so many bytes that were asked, a nanosecond more; but no more than so many times as long. At 100
 * KiB both sides copy for some 20 us. */
#define NGX_PELTON_HOLD_BYTES_PER_NS 4
#define NGX_PELTON_HOLD_TIMES_MAX 5
/* On one processor: a look that lets others run is of use where it takes no longer than this. More is another's time, of a machine that has much
 * to do. A guess. */
#define NGX_PELTON_YIELD_NS 200000
/* How often the time of looking on is halved at most, as in pelton_uv.h; and after how many failures all of it is tried again: when both
 * sides sleep for each call, only a look as long as a wake takes finds that they need not. */
#define NGX_PELTON_HALVINGS_MAX 4
#define NGX_PELTON_TRY_AGAIN 64
/* After a client could not be opened, calls are refused for so long: a guess at what spares a machine whose service is down. */
#define NGX_PELTON_REST_MS 100
/* Of a slot's memory for answers, what is kept for the next; and of all slots'. */
#define NGX_PELTON_KEPT_BYTES 1048576
#define NGX_PELTON_KEPT_BYTES_IN_ALL 8388608
typedef struct ngx_pelton_node_s ngx_pelton_node_t;

/* An answer in this worker's own memory. */
struct ngx_pelton_node_s {
    ngx_pelton_node_t *next;
    size_t room;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
    u_char data[];
};

typedef enum {
    ngx_pelton_free = 0,
    ngx_pelton_queued,  /* waits for room, or a client */
    ngx_pelton_granted, /* may ask again */
    ngx_pelton_in_flight,
    ngx_pelton_ended /* its last answer is among the nodes, or there is a failure */
} ngx_pelton_state_t;

typedef struct ngx_pelton_service_s ngx_pelton_service_t;
typedef struct ngx_pelton_call_s ngx_pelton_call_t;

struct ngx_pelton_call_s {
    ngx_pelton_slot_t slot;  /* its queue: of the service's that wait, or are granted */
    ngx_pelton_call_t *next; /* in the bucket of the calls in flight */
    ngx_pelton_service_t *service;
    uint64_t id;
    ngx_pelton_node_t *first;
    ngx_pelton_node_t **last;
    ngx_pelton_node_t *shown; /* what Lua is looking at */
    ngx_pelton_node_t *spare;
    size_t bytes; /* of its nodes */
    const char *why;
    int failure;
    ngx_pelton_state_t state;
    unsigned is_stream : 1;
};

/* What a thread that opens a client shares with the worker. */
typedef struct {
    atomic_int holders;
    int fd; /* an eventfd, that the thread rings */
    int code;
    pelton_client *client;
    uint32_t uids[NGX_PELTON_UIDS_MAX];
    pelton_options options;
    char detail[512];
    char name[];
} ngx_pelton_opening_t;

struct ngx_pelton_service_s {
    ngx_queue_t queue;
    ngx_pelton_options_t options;
    pelton_client *client;
    ngx_connection_t *connection; /* of the client's descriptor */
    ngx_pelton_opening_t *opening;
    ngx_connection_t *opening_connection;
    ngx_event_t turn;
    ngx_queue_t queued;
    ngx_queue_t granted;
    ngx_pelton_call_t *buckets[NGX_PELTON_CALLS_MAX];
    uint32_t in_flight;
    uint32_t waiting;
    uint32_t slots;
    uint32_t room; /* so many of those that wait may find room */
    uint32_t within_turn;
    uint32_t connections;
    uint64_t turns;
    uint64_t within;
    uint64_t bytes;
    int64_t hold_ns;
    unsigned holds_failed; /* since one paid */
    size_t asked_bytes;    /* of what was asked last */
    uint64_t wakes_sent;   /* as they were when that mattered last */
    ngx_msec_t opened_at;
    ngx_msec_t rest_until;
    int failure; /* of the last opening, or of a client that ended at once */
    unsigned is_among_woken : 1; /* the turn is posted behind coroutines that it woke */
    unsigned is_in_place : 1;    /* an answer is with Lua that is not released */
    unsigned lacks_place : 1;    /* as many calls as may be were in flight when room was last wanted */
    unsigned is_next : 1;        /* the turn is posted for when nginx has looked around */
    unsigned yields : 1;         /* both sides have one processor: instead of looking on, the other is let run */
    unsigned has_held : 1; /* in vain, for the call that was asked last */
    unsigned rests : 1;
    char detail[512]; /* of that, or of the client's end */
    char name[];
};

static ngx_queue_t ngx_pelton_services = {&ngx_pelton_services, &ngx_pelton_services};
static void ngx_pelton_let_go_of_call(ngx_pelton_slot_t *slot);
static ngx_pelton_kind_t ngx_pelton_calls = {sizeof(ngx_pelton_call_t), ngx_pelton_let_go_of_call,
                                             {&ngx_pelton_calls.free, &ngx_pelton_calls.free}};
static size_t ngx_pelton_kept_bytes;
static char ngx_pelton_detail[512];

static void ngx_pelton_turn(ngx_event_t *event);
static void ngx_pelton_readable(ngx_event_t *event);
static void ngx_pelton_opened(ngx_event_t *event);

/* Of the slot, which is its first member. */
static ngx_pelton_call_t *ngx_pelton_call_of(ngx_pelton_slot_t *slot) { return (ngx_pelton_call_t *)(void *)slot; }

static ngx_pelton_call_t *ngx_pelton_queue_call(ngx_queue_t *at) {
    return ngx_pelton_call_of(ngx_queue_data(at, ngx_pelton_slot_t, queue));
}

static void ngx_pelton_post(ngx_pelton_service_t *service) {
    if (!service->turn.posted) {
        ngx_post_event(&service->turn, &ngx_posted_events);
    }
}

/* The turn comes when nginx has looked at everything else. */
static void ngx_pelton_post_next(ngx_pelton_service_t *service) {
    service->is_next = 1;
    if (!service->turn.posted) {
        ngx_post_event(&service->turn, &ngx_posted_next_events);
    }
}

/* Room may have come for one of those who wait for it. For the turn, and what it does: others post it. */
static void ngx_pelton_count_room(ngx_pelton_service_t *service) {
    service->room = ngx_min(service->room + 1, NGX_PELTON_CALLS_MAX);
}

static void ngx_pelton_room_came(ngx_pelton_service_t *service) {
    ngx_pelton_count_room(service);
    ngx_pelton_post(service);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------------- */

static ngx_pelton_call_t *ngx_pelton_take_call(ngx_pelton_service_t *service) {
    ngx_pelton_slot_t *slot = ngx_pelton_take_slot(&ngx_pelton_calls);
    ngx_pelton_call_t *call = ngx_pelton_call_of(slot);
    if (slot == NULL) {
        return NULL;
    }
    call->service = service;
    call->first = NULL;
    call->last = &call->first;
    call->bytes = 0;
    call->failure = PELTON_OK;
    call->why = NULL;
    call->is_stream = 0;
    call->state = ngx_pelton_ended;
    service->slots++;
    return call;
}

static void ngx_pelton_give_node(ngx_pelton_call_t *call, ngx_pelton_node_t *node) {
    call->bytes -= node->size;
    call->service->bytes -= node->size;
    if (call->spare == NULL && node->room <= NGX_PELTON_KEPT_BYTES &&
        ngx_pelton_kept_bytes + node->room <= NGX_PELTON_KEPT_BYTES_IN_ALL) {
        ngx_pelton_kept_bytes += node->room;
        call->spare = node;
    } else {
        free(node);
    }
}

/* Adds an answer, a copy. */
static ngx_int_t ngx_pelton_add_node(ngx_pelton_call_t *call, const pelton_completion *completion) {
    ngx_pelton_node_t *node = call->spare;
    if (node != NULL) {
        call->spare = NULL;
        ngx_pelton_kept_bytes -= node->room;
    }
    if (node == NULL || node->room < completion->size) {
        size_t room = ngx_max(completion->size, 1024);
        free(node);
        node = malloc(sizeof *node + room);
        if (node == NULL) {
            return NGX_ERROR;
        }
        node->room = room;
    }
    node->next = NULL;
    node->size = (uint32_t)completion->size;
    node->outcome = completion->outcome;
    node->code = completion->code;
    ngx_memcpy(node->data, completion->data, completion->size);
    *call->last = node;
    call->last = &node->next;
    call->bytes += node->size;
    call->service->bytes += node->size;
    return NGX_OK;
}

static void ngx_pelton_drop_nodes(ngx_pelton_call_t *call) {
    ngx_pelton_node_t *node;
    while ((node = call->first) != NULL) {
        call->first = node->next;
        ngx_pelton_give_node(call, node);
    }
    call->last = &call->first;
}

static void ngx_pelton_drop_shown(ngx_pelton_call_t *call) {
    if (call->shown != NULL) {
        ngx_pelton_give_node(call, call->shown);
        call->shown = NULL;
    }
}

static ngx_pelton_call_t *ngx_pelton_find(ngx_pelton_service_t *service, uint64_t id) {
    ngx_pelton_call_t *call = service->buckets[id % NGX_PELTON_CALLS_MAX];
    while (call != NULL && call->id != id) {
        call = call->next;
    }
    return call;
}

static void ngx_pelton_begin(ngx_pelton_call_t *call, uint64_t id) {
    ngx_pelton_call_t **bucket = &call->service->buckets[id % NGX_PELTON_CALLS_MAX];
    call->id = id;
    call->next = *bucket;
    *bucket = call;
    call->state = ngx_pelton_in_flight;
    call->service->in_flight++;
}

/* It is not in flight any more. */
static void ngx_pelton_end(ngx_pelton_call_t *call, int failure, const char *why) {
    ngx_pelton_call_t **at = &call->service->buckets[call->id % NGX_PELTON_CALLS_MAX];
    while (*at != call) {
        at = &(*at)->next;
    }
    *at = call->next;
    call->service->in_flight--;
    ngx_pelton_count_room(call->service);
    call->state = ngx_pelton_ended;
    call->failure = failure;
    call->why = why;
}

static void ngx_pelton_leave_queue(ngx_pelton_call_t *call) {
    ngx_queue_remove(&call->slot.queue);
    call->service->waiting -= call->state == ngx_pelton_queued;
    call->state = ngx_pelton_ended;
}

/* ---- The client -------------------------------------------------------------------------------------------------------- */

static void ngx_pelton_keep_detail(char *to, size_t room) {
    ngx_cpystrn((u_char *)to, (u_char *)pelton_error_detail(), room);
}

/* So that no answer is in the way of what comes next. Lua releases it itself, unless it raised an error. */
static void ngx_pelton_settle(ngx_pelton_service_t *service) {
    if (service->is_in_place) {
        service->is_in_place = 0;
        (void)pelton_release(service->client);
    }
}

static void ngx_pelton_let_go(ngx_pelton_opening_t *opening) {
    if (atomic_fetch_sub_explicit(&opening->holders, 1, memory_order_acq_rel) == 1) {
        (void)pelton_close(opening->client);
        close(opening->fd);
        free(opening);
    }
}

static void *ngx_pelton_open_thread(void *data) {
    ngx_pelton_opening_t *opening = data;
    uint64_t one = 1;
    opening->code = pelton_client_open(opening->name, &opening->options, &opening->client);
    if (opening->code == PELTON_AGAIN) {
        ngx_cpystrn((u_char *)opening->detail, (u_char *)"it listens, but did not let this client in for some seconds",
                    sizeof opening->detail);
    } else if (opening->code != PELTON_OK) {
        ngx_pelton_keep_detail(opening->detail, sizeof opening->detail);
    }
    /* The write is what lets the worker look. */
    while (write(opening->fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
    ngx_pelton_let_go(opening);
    return NULL;
}

/* A thread that begins to open a client, with no signal for itself: those are the worker's. Answers an errno, or 0. */
static int ngx_pelton_start_thread(ngx_pelton_opening_t *opening) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error != 0) {
        return error;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attributes, ngx_pelton_open_thread, opening);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* Whether to look on for answers, and how. It does not pay where the service runs only when this worker does not: there the service is let
 * run. */
static void ngx_pelton_choose_hold(ngx_pelton_service_t *service) {
    pelton_info info;
    cpu_set_t own, peer, all;
    service->holds_failed = 0;
    service->wakes_sent = 0;
    service->yields = 0;
    service->hold_ns = service->options.hold_ns == 0 ? NGX_PELTON_HOLD_NS : ngx_max(service->options.hold_ns, 0);
    if (service->hold_ns == 0) {
        return;
    }
    CPU_ZERO(&peer);
    info.struct_bytes = sizeof info;
    if (pelton_get_info(service->client, &info) != PELTON_OK || info.peer_pid == 0 ||
        sched_getaffinity((pid_t)info.peer_pid, sizeof peer, &peer) != 0) {
        CPU_ZERO(&peer);
    }
    if (sched_getaffinity(0, sizeof own, &own) == 0) {
        CPU_OR(&all, &own, &peer);
        service->yields = CPU_COUNT(&all) == 1;
    }
}

/* Those that wait for room, or a client, need not any more. */
static void ngx_pelton_fail_waiting(ngx_pelton_service_t *service, int code) {
    while (!ngx_queue_empty(&service->queued)) {
        ngx_pelton_call_t *call = ngx_pelton_queue_call(ngx_queue_head(&service->queued));
        ngx_pelton_leave_queue(call);
        call->failure = code;
        ngx_pelton_wake(&call->slot);
    }
}

/* Nobody is to open a client for a while: what service->detail says has kept the last one from being of use. */
static void ngx_pelton_rest(ngx_pelton_service_t *service, int code) {
    service->failure = code;
    service->rests = 1;
    service->rest_until = ngx_current_msec + NGX_PELTON_REST_MS;
    ngx_pelton_fail_waiting(service, code);
}

static int ngx_pelton_failed_to_open(ngx_pelton_service_t *service, int code, const char *detail) {
    ngx_cpystrn((u_char *)service->detail, (u_char *)detail, sizeof service->detail);
    if (service->failure != code) {
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: \"%s\" could not be opened: %s", service->name, detail);
    }
    ngx_pelton_rest(service, code);
    return code;
}

/* Begins to open a client, unless that is under way. Answers a code if there will be none. */
static int ngx_pelton_open(ngx_pelton_service_t *service) {
    ngx_pelton_opening_t *opening;
    pelton_options defaults = PELTON_OPTIONS_INIT;
    size_t size = ngx_strlen(service->name) + 1;
    char text[128];
    int error;
    if (service->opening != NULL) {
        return PELTON_OK;
    }
    service->turn.log = ngx_cycle->log;
    if (service->rests && (ngx_msec_int_t)(service->rest_until - ngx_current_msec) > 0) {
        return service->failure;
    }
    opening = calloc(1, sizeof *opening + size);
    if (opening == NULL) {
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "no memory");
    }
    ngx_memcpy(opening->name, service->name, size);
    ngx_memcpy(opening->uids, service->options.uids, sizeof opening->uids);
    opening->options = defaults;
    opening->options.capacity = service->options.capacity;
    opening->options.call_bytes_max = service->options.call_bytes_max;
    opening->options.uids = opening->uids;
    opening->options.uids_count = service->options.uids_count;
    /* The turn looks on by itself: arming that finds something costs two system calls. */
    opening->options.hold_ns = PELTON_NO_HOLD;
    atomic_init(&opening->holders, 2);
    opening->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (opening->fd < 0) {
        free(opening);
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "no descriptor for an eventfd: raise worker_rlimit_nofile");
    }
    service->opening_connection = ngx_pelton_watch(opening->fd, service, ngx_pelton_opened);
    if (service->opening_connection == NULL) {
        close(opening->fd);
        free(opening);
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "nginx has no connection left for it, or cannot watch it: raise worker_connections, or see its log");
    }
    error = ngx_pelton_start_thread(opening);
    if (error != 0) {
        ngx_pelton_unwatch(service->opening_connection);
        service->opening_connection = NULL;
        close(opening->fd);
        free(opening);
        (void)snprintf(text, sizeof text, "no thread could be started: errno %d", error);
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, text);
    }
    service->opening = opening;
    return PELTON_OK;
}

/* The thread has done what it could. */
static void ngx_pelton_opened(ngx_event_t *event) {
    ngx_connection_t *connection = event->data;
    ngx_pelton_service_t *service = connection->data;
    ngx_pelton_opening_t *opening = service->opening;
    uint64_t count;
    int fd;
    if (opening == NULL || read(opening->fd, &count, sizeof count) != sizeof count) {
        return;
    }
    ngx_pelton_unwatch(service->opening_connection);
    service->opening_connection = NULL;
    service->opening = NULL;
    if (opening->code != PELTON_OK) {
        ngx_pelton_failed_to_open(service, opening->code, opening->detail);
        ngx_pelton_let_go(opening);
        return;
    }
    fd = pelton_fd(opening->client);
    service->connection = fd < 0 ? NULL : ngx_pelton_watch(fd, service, ngx_pelton_readable);
    if (service->connection == NULL) {
        ngx_pelton_let_go(opening);
        ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "nginx has no connection left for it, or cannot watch it: raise worker_connections, or see its log");
        return;
    }
    service->client = opening->client;
    opening->client = NULL;
    ngx_pelton_let_go(opening);
    service->connections++;
    service->failure = PELTON_OK;
    service->rests = 0;
    ngx_pelton_choose_hold(service);
    service->opened_at = ngx_current_msec;
    service->room = NGX_PELTON_CALLS_MAX;
    ngx_pelton_begin_chain();
    ngx_log_error(NGX_LOG_NOTICE, ngx_cycle->log, 0, "pelton: \"%s\" is connected", service->name);
    ngx_pelton_post(service);
}

/* Whether a client that answered this is of no use any more. */
static ngx_int_t ngx_pelton_is_end(int code) {
    return code == PELTON_CLOSED || code == PELTON_PEER_DIED || code == PELTON_CORRUPT || code == PELTON_FORKED || code == PELTON_INTERNAL;
}

static void ngx_pelton_close_client(ngx_pelton_service_t *service) {
    if (service->connection != NULL) {
        ngx_pelton_unwatch(service->connection);
        service->connection = NULL;
    }
    (void)pelton_close(service->client);
    service->client = NULL;
    service->is_in_place = 0;
}

/* The client has come to its end: so have the calls in flight. Those that wait for room wait for the next client, unless this one has hardly
 * been of use. */
static void ngx_pelton_lost(ngx_pelton_service_t *service, int code) {
    ngx_uint_t i;
    ngx_pelton_keep_detail(service->detail, sizeof service->detail);
    ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, 0, "pelton: \"%s\" is lost with %uD calls in flight: %s", service->name,
                  service->in_flight, service->detail);
    ngx_pelton_close_client(service);
    for (i = 0; i < NGX_PELTON_CALLS_MAX; i++) {
        while (service->buckets[i] != NULL) {
            ngx_pelton_call_t *call = service->buckets[i];
            ngx_pelton_end(call, code, NULL);
            ngx_pelton_wake(&call->slot);
        }
    }
    if (ngx_current_msec - service->opened_at < NGX_PELTON_REST_MS) {
        ngx_pelton_rest(service, PELTON_NO_LISTENER);
    } else if (!ngx_queue_empty(&service->queued)) {
        (void)ngx_pelton_open(service);
    }
}

/* ---- The turn ---------------------------------------------------------------------------------------------------------- */

/* Gives an answer to who awaits it, and releases it. A call of which this side cannot take more is cancelled. */
static void ngx_pelton_deliver(ngx_pelton_service_t *service, const pelton_completion *completion) {
    ngx_pelton_call_t *call = ngx_pelton_find(service, completion->call);
    int is_part = completion->outcome == PELTON_PART, failure = PELTON_OK;
    uint64_t parts_max = service->options.parts_bytes_max;
    const char *why = NULL;
    if (call == NULL) {
        (void)pelton_release(service->client);
        return;
    }
    if (completion->size > INT32_MAX) {
        failure = PELTON_TOO_LARGE;
        why = "an answer of 2 GiB or more";
    } else if (is_part && call->bytes + completion->size > parts_max) {
        failure = PELTON_TOO_LARGE;
        why = "more parts have come than the coroutine has taken: see parts_bytes_max";
    } else if (is_part && service->bytes + completion->size > parts_max * NGX_PELTON_PARTS_SUMS) {
        failure = PELTON_TOO_LARGE;
        why = "the calls of this service have together sixteen times parts_bytes_max that nobody has taken";
    } else if (ngx_pelton_add_node(call, completion) != NGX_OK) {
        failure = PELTON_SYSTEM;
        why = "no memory for the answer";
    }
    (void)pelton_release(service->client);
    if (failure != PELTON_OK && is_part) {
        (void)pelton_cancel(service->client, call->id);
    }
    if (failure != PELTON_OK || !is_part) {
        ngx_pelton_end(call, failure, why);
    }
    if (call->state == ngx_pelton_ended || call->is_stream) {
        ngx_pelton_wake(&call->slot);
    }
}

/* Takes all answers that are there, up to so many. Answers PELTON_AGAIN when there are no more, PELTON_OK when there may be. */
static int ngx_pelton_drain(ngx_pelton_service_t *service, ngx_uint_t *taken) {
    pelton_completion completion;
    size_t bytes = 0;
    int code;
    while ((code = pelton_await(service->client, PELTON_ANY_CALL, PELTON_NO_WAIT, &completion)) == PELTON_OK) {
        bytes += completion.size;
        ngx_pelton_deliver(service, &completion);
        if (++*taken >= NGX_PELTON_TAKE_MAX || bytes >= NGX_PELTON_TAKE_BYTES) {
            return PELTON_OK;
        }
    }
    return code;
}

/* Whether the service slept when something was asked since the last time that this was. It is woken then, and runs when this worker sleeps. */
static ngx_int_t ngx_pelton_has_slept(ngx_pelton_service_t *service) {
    pelton_info info;
    uint64_t before = service->wakes_sent;
    info.struct_bytes = sizeof info;
    if (pelton_get_info(service->client, &info) != PELTON_OK) {
        return 1;
    }
    service->wakes_sent = info.wakes_sent;
    return info.wakes_sent != before;
}

/* Lets the service run, which then has the one processor to itself, and looks once more; if it lets this worker run likewise. A wake and a sleep of
 * both sides are two changes from one to the other, as this is; but it saves what each has to do to be woken. A service that sleeps
 * instead would be woken by the first of many requests, and run before the second is asked. */
static int ngx_pelton_yield(ngx_pelton_service_t *service, pelton_completion *completion) {
    int64_t began;
    int code = pelton_await(service->client, PELTON_ANY_CALL, PELTON_NO_WAIT, completion);
    if (code != PELTON_AGAIN || ngx_pelton_has_slept(service)) {
        return code;
    }
    if (service->holds_failed % NGX_PELTON_TRY_AGAIN > NGX_PELTON_HALVINGS_MAX) {
        service->holds_failed++;
        return code;
    }
    began = ngx_pelton_now();
    (void)sched_yield();
    code = pelton_await(service->client, PELTON_ANY_CALL, PELTON_NO_WAIT, completion);
    if (code != PELTON_AGAIN && ngx_pelton_now() - began < NGX_PELTON_YIELD_NS) {
        service->holds_failed = 0;
    } else {
        service->holds_failed++;
    }
    return code;
}

/* Looks on for an answer for as long as has lately paid. */
static int ngx_pelton_hold(ngx_pelton_service_t *service, pelton_completion *completion) {
    int64_t until = 0, now;
    unsigned halvings = service->holds_failed % NGX_PELTON_TRY_AGAIN;
    int code;
    ngx_uint_t i;
    if (service->yields) {
        return ngx_pelton_yield(service, completion);
    }
    for (;;) {
        for (i = 0; i < 8; i++) {
            code = pelton_await(service->client, PELTON_ANY_CALL, PELTON_NO_WAIT, completion);
            if (code != PELTON_AGAIN) {
                service->holds_failed = 0;
                return code;
            }
            if (service->hold_ns == 0) {
                return code;
            }
            ngx_cpu_pause();
        }
        now = ngx_pelton_now();
        if (until == 0) {
            int64_t of_bytes = (int64_t)service->asked_bytes / NGX_PELTON_HOLD_BYTES_PER_NS;
            int64_t most = ngx_min(service->hold_ns + of_bytes, service->hold_ns * NGX_PELTON_HOLD_TIMES_MAX);
            until = now + (most >> ngx_min(halvings, NGX_PELTON_HALVINGS_MAX));
        } else if (now >= until) {
            service->holds_failed++;
            return code;
        }
    }
}

/* Whether fewer calls are in flight than may be, with those given up that the service has not let go of. */
static ngx_int_t ngx_pelton_has_place(ngx_pelton_service_t *service) {
    pelton_info info;
    info.struct_bytes = sizeof info;
    return pelton_get_info(service->client, &info) == PELTON_OK && info.calls < NGX_PELTON_CALLS_MAX;
}

/* Whether a place has come for who waits for one. The last word of a call that was given up is told to nobody. */
static ngx_int_t ngx_pelton_found_place(ngx_pelton_service_t *service) {
    if (service->waiting == 0 || !service->lacks_place || !ngx_pelton_has_place(service)) {
        return 0;
    }
    service->lacks_place = 0;
    ngx_pelton_count_room(service);
    return 1;
}

/* Lets so many of those who wait for room ask again. */
static void ngx_pelton_grant(ngx_pelton_service_t *service) {
    uint32_t count = service->room;
    service->room = 0;
    for (; count > 0 && !ngx_queue_empty(&service->queued); count--) {
        ngx_pelton_call_t *call = ngx_pelton_queue_call(ngx_queue_head(&service->queued));
        ngx_pelton_leave_queue(call);
        call->state = ngx_pelton_granted;
        ngx_queue_insert_tail(&service->granted, &call->slot.queue);
        ngx_pelton_wake(&call->slot);
    }
}

/* Puts one that was let ask back at the head of those who wait. */
static void ngx_pelton_wait_again(ngx_pelton_call_t *call) {
    call->state = ngx_pelton_queued;
    call->service->waiting++;
    ngx_queue_insert_head(&call->service->queued, &call->slot.queue);
}

static void ngx_pelton_turn(ngx_event_t *event) {
    ngx_pelton_service_t *service = event->data;
    pelton_completion completion;
    ngx_uint_t taken = 0, is_among_woken = service->is_among_woken;
    int code;
    service->turns++;
    if (service->is_next) {
        service->is_next = 0;
        ngx_pelton_begin_chain();
    }
    service->is_among_woken = 0;
    service->within_turn = 0;
    /* Who was let ask has run by now; of one that was killed nothing more comes. */
    while (is_among_woken && !ngx_queue_empty(&service->granted)) {
        ngx_pelton_leave_queue(ngx_pelton_queue_call(ngx_queue_head(&service->granted)));
        ngx_pelton_count_room(service);
    }
    if (service->client == NULL) {
        return;
    }
    ngx_pelton_settle(service);
    if (ngx_pelton_is_chain_over()) {
        ngx_pelton_post_next(service);
        return;
    }
    code = ngx_pelton_drain(service, &taken);
    if (code == PELTON_AGAIN && taken == 0 && service->in_flight > 0 && !service->has_held &&
        !(service->room > 0 && service->waiting > 0)) {
        code = ngx_pelton_hold(service, &completion);
        if (code == PELTON_OK) {
            ngx_pelton_deliver(service, &completion);
            taken = 1;
            code = ngx_pelton_drain(service, &taken);
        }
    }
    service->has_held = 0;
    if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
        return;
    }
    (void)ngx_pelton_found_place(service);
    if (service->waiting > 0 && service->room > 0) {
        ngx_pelton_grant(service);
        taken++;
    }
    if (taken > 0) {
        service->is_among_woken = 1;
        ngx_pelton_post(service);
        return;
    }
    code = pelton_arm(service->client);
    if (code == PELTON_OK) {
        ngx_pelton_count_room(service);
        ngx_pelton_post_next(service);
    } else if (code == PELTON_AGAIN) {
        /* Arming takes in what comes at the last moment. */
        if (ngx_pelton_found_place(service)) {
            ngx_pelton_post(service);
        }
    } else if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
    } else {
        ngx_pelton_keep_detail(service->detail, sizeof service->detail);
        ngx_pelton_fail_waiting(service, code);
        if (code != PELTON_NO_LISTENER) {
            ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: \"%s\" is looked at again later: %s", service->name, service->detail);
            ngx_add_timer(&service->turn, NGX_PELTON_REST_MS);
        }
        /* Of a name that nobody serves at the moment who asks next has that looked at anew. */
    }
}

static void ngx_pelton_readable(ngx_event_t *event) {
    ngx_connection_t *connection = event->data;
    ngx_pelton_begin_chain();
    ngx_pelton_room_came(connection->data);
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------------- */

/* The service of a name and these options, the same one whenever it is asked for. NULL: no memory. */
ngx_pelton_service_t *ngx_pelton_service(const char *name, const ngx_pelton_options_t *options) {
    ngx_queue_t *at;
    ngx_pelton_service_t *service;
    size_t size = ngx_strlen(name) + 1;
    for (at = ngx_queue_head(&ngx_pelton_services); at != ngx_queue_sentinel(&ngx_pelton_services); at = ngx_queue_next(at)) {
        service = ngx_queue_data(at, ngx_pelton_service_t, queue);
        if (ngx_strcmp(service->name, name) == 0 && ngx_memcmp(&service->options, options, sizeof *options) == 0) {
            return service;
        }
    }
    service = calloc(1, sizeof *service + size);
    if (service == NULL) {
        return NULL;
    }
    service->options = *options;
    ngx_memcpy(service->name, name, size);
    ngx_queue_init(&service->queued);
    ngx_queue_init(&service->granted);
    service->turn.data = service;
    service->turn.handler = ngx_pelton_turn;
    service->turn.cancelable = 1;
    ngx_queue_insert_tail(&ngx_pelton_services, &service->queue);
    return service;
}

static int ngx_pelton_fail(ngx_pelton_answer_t *out, int code, const char *detail) {
    out->data = detail;
    out->size = (uint32_t)ngx_strlen(detail);
    return code;
}

/* What pelton itself said just now. */
static int ngx_pelton_fail_now(ngx_pelton_answer_t *out, int code) {
    ngx_pelton_keep_detail(ngx_pelton_detail, sizeof ngx_pelton_detail);
    return ngx_pelton_fail(out, code, ngx_pelton_detail);
}

/* Whether who asks now can be answered within the call: the turn had woken it, nothing else waits to run, and it has not gone on so for
 * too long. */
static ngx_int_t ngx_pelton_may_hold(ngx_pelton_service_t *service) {
    if (!service->is_among_woken || service->in_flight > 0 || service->hold_ns == 0 ||
        ngx_queue_head(&ngx_posted_events) != &service->turn.queue) {
        return 0;
    }
    return ++service->within_turn % NGX_PELTON_CLOCK_EACH != 0 || !ngx_pelton_is_chain_over();
}

/* Has the coroutine sleep on the slot, unless there is something for it already. */
static int ngx_pelton_sleeps(ngx_pelton_call_t *call, ngx_pelton_answer_t *out) {
    ngx_pelton_post(call->service);
    call->slot.is_waiting = 1;
    if (call->state == ngx_pelton_ended || (call->is_stream && call->first != NULL)) {
        ngx_pelton_wake(&call->slot);
    }
    out->ticket = (double)ngx_pelton_ticket(&call->slot);
    return NGX_PELTON_WAITS;
}

/* What was asked is in flight: it is answered within the call, or sleeps on a slot. */
static int ngx_pelton_asked(ngx_pelton_service_t *service, ngx_pelton_call_t *call, uint64_t id, uint32_t flags,
                            ngx_pelton_answer_t *out) {
    pelton_completion completion;
    int code = PELTON_AGAIN;
    if (!(flags & NGX_PELTON_STREAM) && ngx_pelton_may_hold(service)) {
        code = ngx_pelton_hold(service, &completion);
        if (code == PELTON_OK && completion.call == id && completion.outcome != PELTON_PART && completion.size <= INT32_MAX) {
            service->is_in_place = 1;
            service->within++;
            out->data = completion.data;
            out->size = (uint32_t)completion.size;
            out->outcome = completion.outcome;
            out->code = completion.code;
            return PELTON_OK;
        }
        if (ngx_pelton_is_end(code)) {
            ngx_pelton_lost(service, code);
            return ngx_pelton_fail(out, code, service->detail);
        }
        service->has_held = code == PELTON_AGAIN;
    }
    if (call == NULL) {
        call = ngx_pelton_take_call(service);
    }
    if (call != NULL) {
        call->is_stream = (flags & NGX_PELTON_STREAM) != 0;
        ngx_pelton_begin(call, id);
    }
    if (code == PELTON_OK) {
        ngx_pelton_deliver(service, &completion);
    }
    if (call == NULL) {
        (void)pelton_cancel(service->client, id);
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    return ngx_pelton_sleeps(call, out);
}

/* There is no room, or no client, or others wait. */
static int ngx_pelton_not_now(ngx_pelton_service_t *service, ngx_pelton_call_t *call, int was_granted, uint32_t flags,
                              ngx_pelton_answer_t *out) {
    int code;
    if (service->client == NULL) {
        const char *why = ngx_pelton_why_not_here();
        if (why != NULL) {
            return ngx_pelton_fail(out, PELTON_REFUSED, why);
        }
        code = ngx_pelton_open(service);
        if (code != PELTON_OK) {
            return ngx_pelton_fail(out, code, service->detail);
        }
    }
    if (!(flags & NGX_PELTON_MAY_WAIT)) {
        ngx_pelton_post(service);
        return ngx_pelton_fail(out, PELTON_AGAIN, service->client == NULL ? "the client is being opened" : "there is no room");
    }
    if (was_granted) {
        /* Nor is there for those who were let ask behind it: all keep their places. */
        while (!ngx_queue_empty(&service->granted)) {
            ngx_pelton_call_t *other = ngx_pelton_queue_call(ngx_queue_last(&service->granted));
            ngx_pelton_leave_queue(other);
            ngx_pelton_wait_again(other);
        }
        ngx_pelton_wait_again(call);
        return ngx_pelton_sleeps(call, out);
    }
    if (call == NULL && (call = ngx_pelton_take_call(service)) == NULL) {
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    call->state = ngx_pelton_queued;
    service->waiting++;
    ngx_queue_insert_tail(&service->queued, &call->slot.queue);
    return ngx_pelton_sleeps(call, out);
}

/* Who asked has found the client's end: nothing was asked. What had been answered is taken before all others are told; where more of it may
 * come yet, a turn finds the end behind it. */
static void ngx_pelton_found_end(ngx_pelton_service_t *service, int code) {
    ngx_uint_t taken, looks = 0;
    int found;
    if (code == PELTON_CLOSED || code == PELTON_PEER_DIED) {
        do {
            taken = 0;
            found = ngx_pelton_drain(service, &taken);
        } while (found == PELTON_OK && ++looks < NGX_PELTON_LAST_LOOKS);
        if (!ngx_pelton_is_end(found)) {
            ngx_pelton_post(service);
            return;
        }
        code = found;
    }
    ngx_pelton_lost(service, code);
}

/* A request that finds no room for now is not to wait for it if it never will. */
static ngx_int_t ngx_pelton_is_too_large(ngx_pelton_service_t *service, size_t size) {
    pelton_info info;
    info.struct_bytes = sizeof info;
    return pelton_get_info(service->client, &info) == PELTON_OK && info.message_bytes_max > 0 && size > info.message_bytes_max;
}

/* Asks. Answers PELTON_OK when it is answered already, in place, or told: then ngx_pelton_release; NGX_PELTON_WAITS with a slot; or a code.
 * With the ticket of a slot that has just waited for room, that slot is kept in the second case, and is the caller's to give back in the
 * others; 0: none. */
int ngx_pelton_ask(ngx_pelton_service_t *service, double ticket, const char *data, size_t size, uint32_t flags, ngx_pelton_answer_t *out) {
    ngx_pelton_call_t *call = NULL;
    int code = PELTON_AGAIN, was_granted = 0;
    uint64_t id = 0;
    if (ticket != 0) {
        call = ngx_pelton_call_of(ngx_pelton_of_ticket((uint64_t)ticket, &ngx_pelton_calls));
        if (call == NULL || call->service != service || call->state != ngx_pelton_granted) {
            return ngx_pelton_fail(out, PELTON_CLOSED, NGX_PELTON_STALE);
        }
        ngx_pelton_leave_queue(call);
        was_granted = 1;
    }
    if (service->client != NULL) {
        ngx_pelton_settle(service);
        if (service->waiting == 0 || was_granted) {
            code = pelton_submit(service->client, data, size, flags & (PELTON_NOTIFY | PELTON_IDEMPOTENT), PELTON_NO_WAIT, &id);
            service->asked_bytes = size;
            if (code == PELTON_AGAIN) {
                service->room = 0;
                service->lacks_place = !ngx_pelton_has_place(service);
            } else if (ngx_pelton_is_end(code)) {
                ngx_pelton_found_end(service, code);
                code = PELTON_AGAIN;
            }
        } else if (ngx_pelton_is_too_large(service, size)) {
            return ngx_pelton_fail(out, PELTON_TOO_LARGE, "the request is larger than the service takes");
        }
    }
    if (code == PELTON_AGAIN) {
        return ngx_pelton_not_now(service, call, was_granted, flags, out);
    }
    if (was_granted) {
        ngx_pelton_room_came(service);
    }
    if (code != PELTON_OK) {
        return ngx_pelton_fail_now(out, code);
    }
    if (flags & PELTON_NOTIFY) {
        ngx_pelton_post(service);
        return PELTON_OK;
    }
    return ngx_pelton_asked(service, call, id, flags, out);
}

/* The answer that came within the call was looked at. */
void ngx_pelton_release(ngx_pelton_service_t *service) { ngx_pelton_settle(service); }

/* The call is given up. */
static void ngx_pelton_let_go_of_call(ngx_pelton_slot_t *slot) {
    ngx_pelton_call_t *call = ngx_pelton_call_of(slot);
    ngx_pelton_service_t *service = call->service;
    if (call->state == ngx_pelton_in_flight) {
        ngx_pelton_settle(service);
        ngx_pelton_end(call, PELTON_OK, NULL);
        (void)pelton_cancel(service->client, call->id);
        ngx_pelton_post(service);
    } else if (call->state == ngx_pelton_queued || call->state == ngx_pelton_granted) {
        ngx_pelton_leave_queue(call);
        ngx_pelton_room_came(service);
    }
    ngx_pelton_drop_nodes(call);
    ngx_pelton_drop_shown(call);
    call->state = ngx_pelton_free;
    service->slots--;
}

/* A call's time is over: its answer may be there all the same, as nginx runs timers before the turn. */
static void ngx_pelton_look_a_last_time(ngx_pelton_call_t *call) {
    ngx_pelton_service_t *service = call->service;
    ngx_uint_t taken, looks = 0;
    int code = PELTON_OK;
    ngx_pelton_settle(service);
    while (code == PELTON_OK && call->state == ngx_pelton_in_flight && !(call->is_stream && call->first != NULL) &&
           looks++ < NGX_PELTON_LAST_LOOKS) {
        taken = 0;
        code = ngx_pelton_drain(service, &taken);
    }
    ngx_pelton_post(service);
    if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
    }
}

/* What has come to a slot: PELTON_OK with the next answer, good until the next function of this slot; NGX_PELTON_WAITS, unless it is the
 * last time: then it is given up after that; NGX_PELTON_ASK_AGAIN; or a code. */
int ngx_pelton_take(double ticket, int is_last, ngx_pelton_answer_t *out) {
    ngx_pelton_call_t *call = ngx_pelton_call_of(ngx_pelton_of_ticket((uint64_t)ticket, &ngx_pelton_calls));
    ngx_pelton_node_t *node;
    if (call == NULL) {
        return ngx_pelton_fail(out, PELTON_CLOSED, NGX_PELTON_STALE);
    }
    call->slot.is_waiting = 0;
    ngx_pelton_drop_shown(call);
    if (is_last && call->state == ngx_pelton_in_flight) {
        ngx_pelton_look_a_last_time(call);
    }
    out->ticket = ticket;
    node = call->first;
    /* In one piece, unless it is a stream. */
    if (node != NULL && (call->is_stream || call->state == ngx_pelton_ended)) {
        call->first = node->next;
        if (call->first == NULL) {
            call->last = &call->first;
        }
        call->shown = node;
        out->data = node->data;
        out->size = node->size;
        out->outcome = node->outcome;
        out->code = node->code;
        return PELTON_OK;
    }
    if (call->state == ngx_pelton_granted) {
        return NGX_PELTON_ASK_AGAIN;
    }
    if (call->state == ngx_pelton_ended) {
        return ngx_pelton_fail(out, call->failure == PELTON_OK ? PELTON_CLOSED : call->failure,
                               call->why != NULL ? call->why : call->service->detail);
    }
    call->slot.is_waiting = !is_last;
    return NGX_PELTON_WAITS;
}

void ngx_pelton_figures(ngx_pelton_service_t *service, ngx_pelton_figures_t *out) {
    out->is_connected = service->client != NULL;
    out->in_flight = service->in_flight;
    out->waiting = service->waiting;
    out->slots = service->slots;
    out->connections = service->connections;
    out->turns = service->turns;
    out->within = service->within;
    out->bytes = service->bytes;
}

void ngx_pelton_end_calls(void) {
    ngx_queue_t *at;
    for (at = ngx_queue_head(&ngx_pelton_services); at != ngx_queue_sentinel(&ngx_pelton_services); at = ngx_queue_next(at)) {
        ngx_pelton_service_t *service = ngx_queue_data(at, ngx_pelton_service_t, queue);
        if (service->client != NULL) {
            ngx_pelton_close_client(service);
        }
        if (service->turn.timer_set) {
            ngx_del_timer(&service->turn);
        }
        if (service->opening != NULL) {
            ngx_pelton_unwatch(service->opening_connection);
            ngx_pelton_let_go(service->opening);
            service->opening = NULL;
        }
    }
}
