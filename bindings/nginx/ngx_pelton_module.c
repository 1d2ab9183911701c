/* pelton in nginx: a client per worker and service, on the worker's event loop, for resty/pelton.lua, which calls the functions below
 * by LuaJIT's FFI.
 *
 * A call that has to wait has a SLOT with a semaphore of ngx_lua's own; its coroutine sleeps on that. Slots are used again; a call that was
 * given up is cancelled at the library, which then has no answer for it any more, so a slot is free as soon as it is given back.
 *
 * THE TURN. Answers are taken in an event that is posted behind all others of a turn of the loop: it takes what there is, wakes those
 * coroutines, and is posted again behind them, so that it has what they ask next on its way together. When nothing is there it looks on
 * for some microseconds while that has paid lately, then arms and lets the loop sleep. A coroutine that it woke, that asks again, and
 * beside which nothing waits for its turn, is answered within the call. All of that for a millisecond at a time; then the loop has its way.
 *
 * OPENING waits for the service, so a thread of its own does it. It shares with the worker only ngx_pelton_opening_t, which the last of
 * the two frees. All else is the worker's one thread's.
 *
 * WHO ASKED. A request, or timer, that ends while calls of it are in flight has them cancelled, by a clean-up handler of its pool. */
#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_event.h>
#include <ngx_http.h>

#include <pelton.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>

/* Of resty/pelton.lua: both are of the same version, or Lua refuses. */
#define NGX_PELTON_VERSION 1

/* What ngx_pelton_ask and ngx_pelton_take answer besides pelton's codes. */
#define NGX_PELTON_WAITS 1     /* sleep on the slot's semaphore, then ngx_pelton_take */
#define NGX_PELTON_ASK_AGAIN 2 /* there is room now: ngx_pelton_ask with this slot */

/* ngx_pelton_ask's flags, beside PELTON_IDEMPOTENT and PELTON_NOTIFY. */
#define NGX_PELTON_STREAM 0x100   /* each part is told as it comes */
#define NGX_PELTON_MAY_WAIT 0x200 /* for room, or a client */

#define NGX_PELTON_NO_SLOT UINT32_MAX
#define NGX_PELTON_CALLS_MAX 1024 /* the library's */
/* The loop is had for so long at a time, as in pelton_uv.h. */
#define NGX_PELTON_TURN_NS 1000000
/* Calls answered within themselves between two looks at the clock, which costs 25 ns. */
#define NGX_PELTON_CLOCK_EACH 16
/* The library's own for pelton_arm. */
#define NGX_PELTON_HOLD_NS 20000
/* Answers taken before those who wait for them run. */
#define NGX_PELTON_TAKE_MAX 1024
/* How often the time of looking on is halved at most, as in pelton_uv.h; and after how many failures all of it is tried again: when both
 * sides sleep for each call, only a look as long as a wake takes finds that they need not. */
#define NGX_PELTON_HALVINGS_MAX 4
#define NGX_PELTON_TRY_AGAIN 64
/* After a client could not be opened, calls are refused for so long: a guess at what spares a machine whose service is down. */
#define NGX_PELTON_REST_MS 100
/* Of a slot's memory for answers, what is kept for the next. */
#define NGX_PELTON_KEPT_BYTES 65536
#define NGX_PELTON_UIDS_MAX 16

/* What a client is made with; Lua fills it in. All zero: the defaults. */
typedef struct {
    uint64_t capacity;
    uint64_t call_bytes_max;
    uint64_t parts_bytes_max; /* of parts that one call's coroutine has not taken yet */
    int64_t hold_ns;          /* -1: not at all */
    uint32_t uids_count;
    uint32_t uids[NGX_PELTON_UIDS_MAX];
} ngx_pelton_options_t;

/* What a call has come to, for Lua. After an error's code data is a text that says more. */
typedef struct {
    const void *data;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
    uint32_t slot;
} ngx_pelton_answer_t;

/* For Lua, and its tests. */
typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting; /* for room, or a client */
    uint32_t slots;   /* that are used now, */
    uint32_t slots_made;
    uint32_t connections; /* and how many times a client was opened */
    uint64_t turns;
    uint64_t within; /* calls answered within themselves */
    uint64_t bytes;  /* of answers in memory */
} ngx_pelton_figures_t;

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
typedef struct ngx_pelton_slot_s ngx_pelton_slot_t;

struct ngx_pelton_slot_s {
    ngx_queue_t queue; /* of the free ones, or of the service's that wait, or are granted */
    ngx_queue_t of_asker;
    ngx_pelton_slot_t *next; /* in the bucket of the calls in flight */
    ngx_pelton_service_t *service;
    void *semaphore;
    ngx_cycle_t *cycle; /* whose semaphore it is */
    uint64_t call;
    ngx_pelton_node_t *first;
    ngx_pelton_node_t **last;
    ngx_pelton_node_t *shown; /* what Lua is looking at */
    ngx_pelton_node_t *spare;
    size_t bytes; /* of its nodes */
    int failure;
    uint32_t index;
    ngx_pelton_state_t state;
    unsigned is_stream : 1;
    unsigned is_waiting : 1; /* on the semaphore */
    unsigned has_asker : 1;
};

/* In a request's pool. */
typedef struct {
    ngx_queue_t slots;
} ngx_pelton_asker_t;

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
    ngx_pelton_slot_t *buckets[NGX_PELTON_CALLS_MAX];
    uint32_t in_flight;
    uint32_t waiting;
    uint32_t slots;
    uint32_t freed; /* calls that ended since room was last granted */
    uint32_t within_turn;
    uint32_t connections;
    uint64_t turns;
    uint64_t within;
    uint64_t bytes;
    int64_t turn_ns; /* when this turn began */
    int64_t hold_ns;
    unsigned holds_failed; /* since one paid */
    ngx_msec_t rest_until;
    int failure; /* of the last opening */
    unsigned is_among_woken : 1; /* the turn is posted behind coroutines that it woke */
    unsigned is_in_place : 1;    /* an answer is with Lua that is not released */
    unsigned may_have_room : 1;
    unsigned has_held : 1; /* in vain, for the call that was asked last */
    unsigned rests : 1;
    char detail[512]; /* of that, or of the client's end */
    char name[];
};

typedef int (*ngx_pelton_sema_new_pt)(void **semaphore, int count, char **error);
typedef int (*ngx_pelton_sema_post_pt)(void *semaphore, int count);
typedef void (*ngx_pelton_sema_gc_pt)(void *semaphore);

static ngx_pelton_sema_new_pt ngx_pelton_sema_new;
static ngx_pelton_sema_post_pt ngx_pelton_sema_post;
static ngx_pelton_sema_gc_pt ngx_pelton_sema_gc;
static ngx_queue_t ngx_pelton_services = {&ngx_pelton_services, &ngx_pelton_services};
static ngx_queue_t ngx_pelton_free_slots = {&ngx_pelton_free_slots, &ngx_pelton_free_slots};
static ngx_pelton_slot_t **ngx_pelton_slots;
static uint32_t ngx_pelton_slots_made;
static uint32_t ngx_pelton_slots_room;
static char ngx_pelton_detail[512];

static void ngx_pelton_turn(ngx_event_t *event);
static void ngx_pelton_readable(ngx_event_t *event);
static void ngx_pelton_opened(ngx_event_t *event);
static void ngx_pelton_lost(ngx_pelton_service_t *service, int code);

static int64_t ngx_pelton_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void ngx_pelton_post(ngx_pelton_service_t *service) {
    if (!service->turn.posted) {
        ngx_post_event(&service->turn, &ngx_posted_events);
    }
}

/* ---- Slots ------------------------------------------------------------------------------------------------------------- */

static ngx_pelton_slot_t *ngx_pelton_new_slot(void) {
    ngx_pelton_slot_t *slot;
    if (ngx_pelton_slots_made == ngx_pelton_slots_room) {
        uint32_t room = ngx_pelton_slots_room == 0 ? 64 : ngx_pelton_slots_room * 2;
        ngx_pelton_slot_t **slots = realloc(ngx_pelton_slots, room * sizeof *slots);
        if (slots == NULL) {
            return NULL;
        }
        ngx_pelton_slots = slots;
        ngx_pelton_slots_room = room;
    }
    slot = calloc(1, sizeof *slot);
    if (slot != NULL) {
        slot->index = ngx_pelton_slots_made;
        ngx_pelton_slots[ngx_pelton_slots_made++] = slot;
    }
    return slot;
}

static ngx_pelton_slot_t *ngx_pelton_take_slot(ngx_pelton_service_t *service) {
    ngx_pelton_slot_t *slot;
    char *error;
    if (ngx_queue_empty(&ngx_pelton_free_slots)) {
        slot = ngx_pelton_new_slot();
        if (slot == NULL) {
            return NULL;
        }
    } else {
        /* The one used last: its memory is warm. */
        slot = ngx_queue_data(ngx_queue_head(&ngx_pelton_free_slots), ngx_pelton_slot_t, queue);
        ngx_queue_remove(&slot->queue);
    }
    /* Without master process a reload leaves this process, and what it had of ngx_lua's, behind. */
    if (slot->cycle != ngx_cycle) {
        if (ngx_pelton_sema_new(&slot->semaphore, 0, &error) != 0) {
            slot->cycle = NULL;
            ngx_queue_insert_head(&ngx_pelton_free_slots, &slot->queue);
            return NULL;
        }
        slot->cycle = (ngx_cycle_t *)ngx_cycle;
    }
    slot->service = service;
    slot->first = NULL;
    slot->last = &slot->first;
    slot->bytes = 0;
    slot->failure = PELTON_OK;
    slot->is_stream = 0;
    slot->is_waiting = 0;
    slot->has_asker = 0;
    service->slots++;
    return slot;
}

static void ngx_pelton_give_node(ngx_pelton_slot_t *slot, ngx_pelton_node_t *node) {
    slot->bytes -= node->size;
    slot->service->bytes -= node->size;
    if (slot->spare == NULL && node->room <= NGX_PELTON_KEPT_BYTES) {
        slot->spare = node;
    } else {
        free(node);
    }
}

/* Adds an answer, a copy. */
static ngx_int_t ngx_pelton_add_node(ngx_pelton_slot_t *slot, const pelton_completion *completion) {
    ngx_pelton_node_t *node = slot->spare;
    if (completion->size > INT32_MAX) {
        return NGX_ERROR;
    }
    if (node != NULL && node->room >= completion->size) {
        slot->spare = NULL;
    } else {
        size_t room = ngx_max(completion->size, 1024);
        node = malloc(sizeof *node + room);
        if (node == NULL) {
            return NGX_ERROR;
        }
        node->room = room;
        if (room <= NGX_PELTON_KEPT_BYTES) {
            free(slot->spare);
            slot->spare = NULL;
        }
    }
    node->next = NULL;
    node->size = (uint32_t)completion->size;
    node->outcome = completion->outcome;
    node->code = completion->code;
    ngx_memcpy(node->data, completion->data, completion->size);
    *slot->last = node;
    slot->last = &node->next;
    slot->bytes += node->size;
    slot->service->bytes += node->size;
    return NGX_OK;
}

static void ngx_pelton_drop_nodes(ngx_pelton_slot_t *slot) {
    ngx_pelton_node_t *node;
    while ((node = slot->first) != NULL) {
        slot->first = node->next;
        ngx_pelton_give_node(slot, node);
    }
    slot->last = &slot->first;
}

static void ngx_pelton_wake(ngx_pelton_slot_t *slot) {
    if (slot->is_waiting) {
        slot->is_waiting = 0;
        ngx_pelton_sema_post(slot->semaphore, 1);
    }
}

static ngx_pelton_slot_t *ngx_pelton_find(ngx_pelton_service_t *service, uint64_t call) {
    ngx_pelton_slot_t *slot = service->buckets[call % NGX_PELTON_CALLS_MAX];
    while (slot != NULL && slot->call != call) {
        slot = slot->next;
    }
    return slot;
}

static void ngx_pelton_begin(ngx_pelton_slot_t *slot, uint64_t call) {
    ngx_pelton_slot_t **bucket = &slot->service->buckets[call % NGX_PELTON_CALLS_MAX];
    slot->call = call;
    slot->next = *bucket;
    *bucket = slot;
    slot->state = ngx_pelton_in_flight;
    slot->service->in_flight++;
}

/* Its call is not in flight any more. */
static void ngx_pelton_end(ngx_pelton_slot_t *slot, int failure) {
    ngx_pelton_slot_t **at = &slot->service->buckets[slot->call % NGX_PELTON_CALLS_MAX];
    while (*at != slot) {
        at = &(*at)->next;
    }
    *at = slot->next;
    slot->service->in_flight--;
    slot->service->freed++;
    slot->state = ngx_pelton_ended;
    slot->failure = failure;
}

static void ngx_pelton_leave_queue(ngx_pelton_slot_t *slot) {
    ngx_queue_remove(&slot->queue);
    slot->service->waiting -= slot->state == ngx_pelton_queued;
    slot->state = ngx_pelton_ended;
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

static ngx_connection_t *ngx_pelton_watch(int fd, void *data, ngx_event_handler_pt handler) {
    ngx_connection_t *connection = ngx_get_connection(fd, ngx_cycle->log);
    if (connection == NULL) {
        return NULL;
    }
    connection->data = data;
    connection->read->handler = handler;
    connection->read->log = connection->log;
    connection->write->log = connection->log;
    if (ngx_add_event(connection->read, NGX_READ_EVENT, NGX_LEVEL_EVENT) != NGX_OK) {
        ngx_free_connection(connection);
        return NULL;
    }
    return connection;
}

/* The descriptor stays open. */
static void ngx_pelton_unwatch(ngx_connection_t *connection) {
    if (connection->read->active) {
        (void)ngx_del_event(connection->read, NGX_READ_EVENT, 0);
    }
    if (connection->read->posted) {
        ngx_delete_posted_event(connection->read);
    }
    ngx_free_connection(connection);
    connection->fd = (ngx_socket_t)-1;
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

/* A thread that begins to open a client, with no signal for itself: those are the worker's. */
static ngx_int_t ngx_pelton_start_thread(ngx_pelton_opening_t *opening) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int error;
    if (pthread_attr_init(&attributes) != 0) {
        return NGX_ERROR;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attributes, ngx_pelton_open_thread, opening);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    ngx_set_errno(error);
    return error == 0 ? NGX_OK : NGX_ERROR;
}

/* Looking on does not pay where the service runs only when this worker does not. */
static int64_t ngx_pelton_hold_ns(ngx_pelton_service_t *service) {
    pelton_info info;
    cpu_set_t own, peer, all;
    if (service->options.hold_ns < 0) {
        return 0;
    }
    CPU_ZERO(&peer);
    info.struct_bytes = sizeof info;
    if (pelton_get_info(service->client, &info) != PELTON_OK || info.peer_pid == 0 ||
        sched_getaffinity((pid_t)info.peer_pid, sizeof peer, &peer) != 0) {
        CPU_ZERO(&peer);
    }
    if (sched_getaffinity(0, sizeof own, &own) == 0) {
        CPU_OR(&all, &own, &peer);
        if (CPU_COUNT(&all) == 1) {
            return 0;
        }
    }
    return service->options.hold_ns == 0 ? NGX_PELTON_HOLD_NS : service->options.hold_ns;
}

/* Those that wait for room, or a client, need not any more. */
static void ngx_pelton_fail_waiting(ngx_pelton_service_t *service, int code) {
    ngx_pelton_slot_t *slot;
    while (!ngx_queue_empty(&service->queued)) {
        slot = ngx_queue_data(ngx_queue_head(&service->queued), ngx_pelton_slot_t, queue);
        ngx_pelton_leave_queue(slot);
        slot->failure = code;
        ngx_pelton_wake(slot);
    }
}

static int ngx_pelton_failed_to_open(ngx_pelton_service_t *service, int code, const char *detail) {
    ngx_cpystrn((u_char *)service->detail, (u_char *)detail, sizeof service->detail);
    if (service->failure != code) {
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: \"%s\" could not be opened: %s", service->name, detail);
    }
    service->failure = code;
    service->rests = 1;
    service->rest_until = ngx_current_msec + NGX_PELTON_REST_MS;
    ngx_pelton_fail_waiting(service, code);
    return code;
}

/* Begins to open a client, unless that is under way. Answers a code if there will be none. */
static int ngx_pelton_open(ngx_pelton_service_t *service) {
    ngx_pelton_opening_t *opening;
    pelton_options defaults = PELTON_OPTIONS_INIT;
    size_t size = ngx_strlen(service->name) + 1;
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
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "nginx has no connection left: raise worker_connections");
    }
    if (ngx_pelton_start_thread(opening) != NGX_OK) {
        ngx_pelton_unwatch(service->opening_connection);
        service->opening_connection = NULL;
        close(opening->fd);
        free(opening);
        return ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "no thread could be started");
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
        ngx_pelton_failed_to_open(service, PELTON_SYSTEM, "nginx has no connection left: raise worker_connections");
        return;
    }
    service->client = opening->client;
    opening->client = NULL;
    ngx_pelton_let_go(opening);
    service->connections++;
    service->failure = PELTON_OK;
    service->rests = 0;
    service->hold_ns = ngx_pelton_hold_ns(service);
    service->holds_failed = 0;
    service->may_have_room = 1;
    service->freed = NGX_PELTON_CALLS_MAX;
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

/* The client has come to its end: so have the calls in flight. Those that wait for room wait for the next client. */
static void ngx_pelton_lost(ngx_pelton_service_t *service, int code) {
    ngx_uint_t i;
    ngx_pelton_keep_detail(service->detail, sizeof service->detail);
    ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, 0, "pelton: \"%s\" is lost with %uD calls in flight: %s", service->name,
                  service->in_flight, service->detail);
    ngx_pelton_close_client(service);
    for (i = 0; i < NGX_PELTON_CALLS_MAX; i++) {
        while (service->buckets[i] != NULL) {
            ngx_pelton_slot_t *slot = service->buckets[i];
            ngx_pelton_end(slot, code);
            ngx_pelton_wake(slot);
        }
    }
    if (!ngx_queue_empty(&service->queued)) {
        (void)ngx_pelton_open(service);
    }
}

/* ---- The turn ---------------------------------------------------------------------------------------------------------- */

/* Gives an answer to who awaits it, and releases it. A call of which this side cannot take more is cancelled. */
static void ngx_pelton_deliver(ngx_pelton_service_t *service, const pelton_completion *completion) {
    ngx_pelton_slot_t *slot = ngx_pelton_find(service, completion->call);
    int is_part = completion->outcome == PELTON_PART, failure = PELTON_OK;
    const char *why = "";
    if (slot == NULL) {
        (void)pelton_release(service->client);
        return;
    }
    if (is_part && slot->bytes + completion->size > service->options.parts_bytes_max) {
        failure = PELTON_TOO_LARGE;
        why = "more parts have come than the coroutine has taken: see parts_bytes_max";
    } else if (ngx_pelton_add_node(slot, completion) != NGX_OK) {
        failure = PELTON_SYSTEM;
        why = "no memory for the answer";
    }
    (void)pelton_release(service->client);
    if (failure != PELTON_OK) {
        ngx_cpystrn((u_char *)service->detail, (u_char *)why, sizeof service->detail);
        if (is_part) {
            (void)pelton_cancel(service->client, slot->call);
        }
    }
    if (failure != PELTON_OK || !is_part) {
        ngx_pelton_end(slot, failure);
    }
    if (slot->state == ngx_pelton_ended || slot->is_stream) {
        ngx_pelton_wake(slot);
    }
}

/* Takes all answers that are there, up to so many. Answers PELTON_AGAIN when there are no more, PELTON_OK when there may be. */
static int ngx_pelton_drain(ngx_pelton_service_t *service, ngx_uint_t *taken) {
    pelton_completion completion;
    int code;
    while ((code = pelton_await(service->client, PELTON_ANY_CALL, PELTON_NO_WAIT, &completion)) == PELTON_OK) {
        ngx_pelton_deliver(service, &completion);
        if (++*taken == NGX_PELTON_TAKE_MAX) {
            return PELTON_OK;
        }
    }
    return code;
}

/* Looks on for an answer for as long as has lately paid. */
static int ngx_pelton_hold(ngx_pelton_service_t *service, pelton_completion *completion) {
    int64_t until = 0, now;
    unsigned halvings = service->holds_failed % NGX_PELTON_TRY_AGAIN;
    int code;
    ngx_uint_t i;
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
            until = now + (service->hold_ns >> ngx_min(halvings, NGX_PELTON_HALVINGS_MAX));
        } else if (now >= until) {
            service->holds_failed++;
            return code;
        }
    }
}

/* Lets those who wait for room ask again: one, or as many as have been answered. */
static void ngx_pelton_grant(ngx_pelton_service_t *service) {
    uint32_t count = ngx_max(service->freed, 1);
    ngx_pelton_slot_t *slot;
    service->freed = 0;
    service->may_have_room = 0;
    for (; count > 0 && !ngx_queue_empty(&service->queued); count--) {
        slot = ngx_queue_data(ngx_queue_head(&service->queued), ngx_pelton_slot_t, queue);
        ngx_pelton_leave_queue(slot);
        slot->state = ngx_pelton_granted;
        ngx_queue_insert_tail(&service->granted, &slot->queue);
        ngx_pelton_wake(slot);
    }
}

static void ngx_pelton_turn(ngx_event_t *event) {
    ngx_pelton_service_t *service = event->data;
    pelton_completion completion;
    ngx_uint_t taken = 0;
    int code;
    service->turns++;
    if (!service->is_among_woken) {
        service->turn_ns = ngx_pelton_now();
        service->within_turn = 0;
    }
    /* Who was let ask has run by now; of one that was killed nothing more comes. */
    while (service->is_among_woken && !ngx_queue_empty(&service->granted)) {
        ngx_pelton_leave_queue(ngx_queue_data(ngx_queue_head(&service->granted), ngx_pelton_slot_t, queue));
        service->may_have_room = 1;
    }
    if (service->client == NULL) {
        service->is_among_woken = 0;
        return;
    }
    ngx_pelton_settle(service);
    if (service->is_among_woken && ngx_pelton_now() - service->turn_ns > NGX_PELTON_TURN_NS) {
        service->is_among_woken = 0;
        ngx_post_event(&service->turn, &ngx_posted_next_events);
        return;
    }
    service->is_among_woken = 0;
    code = ngx_pelton_drain(service, &taken);
    if (code == PELTON_AGAIN && taken == 0 && service->in_flight > 0 && !service->has_held &&
        !(service->may_have_room && service->waiting > 0)) {
        code = ngx_pelton_hold(service, &completion);
        if (code == PELTON_OK) {
            ngx_pelton_deliver(service, &completion);
            taken = 1;
            code = ngx_pelton_drain(service, &taken);
        }
    }
    service->has_held = 0;
    if (service->waiting > 0 && (service->may_have_room || service->freed > 0)) {
        ngx_pelton_grant(service);
        taken++;
    }
    service->freed = 0;
    if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
        return;
    }
    if (taken > 0) {
        service->is_among_woken = 1;
        ngx_pelton_post(service);
        return;
    }
    code = pelton_arm(service->client);
    if (code == PELTON_OK) {
        service->may_have_room = 1;
        ngx_post_event(&service->turn, &ngx_posted_next_events);
    } else if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
    } else if (code != PELTON_AGAIN) {
        /* Nobody serves the name at the moment, for instance: who asks next has it looked at anew. */
        ngx_pelton_keep_detail(service->detail, sizeof service->detail);
        ngx_pelton_fail_waiting(service, code);
    }
}

static void ngx_pelton_readable(ngx_event_t *event) {
    ngx_connection_t *connection = event->data;
    ngx_pelton_service_t *service = connection->data;
    service->may_have_room = 1;
    ngx_pelton_post(service);
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------------- */

int ngx_pelton_version(void) { return NGX_PELTON_VERSION; }

/* The service of a name and these options, the same one whenever it is asked for. NULL: no memory. */
ngx_pelton_service_t *ngx_pelton_service(const char *name, const ngx_pelton_options_t *options, void *sema_new, void *sema_post,
                                         void *sema_gc) {
    ngx_queue_t *at;
    ngx_pelton_service_t *service;
    size_t size = ngx_strlen(name) + 1;
    ngx_pelton_sema_new = (ngx_pelton_sema_new_pt)sema_new;
    ngx_pelton_sema_post = (ngx_pelton_sema_post_pt)sema_post;
    ngx_pelton_sema_gc = (ngx_pelton_sema_gc_pt)sema_gc;
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
    if (++service->within_turn % NGX_PELTON_CLOCK_EACH == 0 && ngx_pelton_now() - service->turn_ns > NGX_PELTON_TURN_NS) {
        return 0;
    }
    return 1;
}

/* Has the coroutine sleep on the slot, unless there is something for it already. */
static int ngx_pelton_sleeps(ngx_pelton_slot_t *slot, ngx_pelton_answer_t *out) {
    ngx_pelton_post(slot->service);
    slot->is_waiting = 1;
    if (slot->state == ngx_pelton_ended || (slot->is_stream && slot->first != NULL)) {
        ngx_pelton_wake(slot);
    }
    out->slot = slot->index;
    return NGX_PELTON_WAITS;
}

/* What was asked is in flight: it is answered within the call, or sleeps on a slot. */
static int ngx_pelton_asked(ngx_pelton_service_t *service, ngx_pelton_slot_t *slot, uint64_t call, uint32_t flags,
                            ngx_pelton_answer_t *out) {
    pelton_completion completion;
    int code = PELTON_AGAIN;
    if (!(flags & NGX_PELTON_STREAM) && ngx_pelton_may_hold(service)) {
        code = ngx_pelton_hold(service, &completion);
        if (code == PELTON_OK && completion.call == call && completion.outcome != PELTON_PART && completion.size <= INT32_MAX) {
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
    if (slot == NULL && (slot = ngx_pelton_take_slot(service)) == NULL) {
        if (code == PELTON_OK) {
            (void)pelton_release(service->client);
        }
        (void)pelton_cancel(service->client, call);
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    slot->is_stream = (flags & NGX_PELTON_STREAM) != 0;
    ngx_pelton_begin(slot, call);
    if (code == PELTON_OK) {
        ngx_pelton_deliver(service, &completion);
    }
    return ngx_pelton_sleeps(slot, out);
}

/* There is no room, or no client. */
static int ngx_pelton_not_now(ngx_pelton_service_t *service, ngx_pelton_slot_t *slot, int was_granted, uint32_t flags,
                              ngx_pelton_answer_t *out) {
    int code;
    if (service->client == NULL) {
        if (ngx_process == NGX_PROCESS_MASTER || ngx_cycle->connections == NULL) {
            return ngx_pelton_fail(out, PELTON_REFUSED, "this is not a worker: call from a request, a timer or init_worker");
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
    if (slot == NULL && (slot = ngx_pelton_take_slot(service)) == NULL) {
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    slot->state = ngx_pelton_queued;
    service->waiting++;
    if (was_granted) {
        ngx_queue_insert_head(&service->queued, &slot->queue);
    } else {
        ngx_queue_insert_tail(&service->queued, &slot->queue);
    }
    return ngx_pelton_sleeps(slot, out);
}

/* Asks. Answers PELTON_OK when it is answered already, in place, or told: then ngx_pelton_release; NGX_PELTON_WAITS with a slot; or a code.
 * With a slot that has just waited for room, that slot is kept in the second case, and is the caller's to give back in the others. */
int ngx_pelton_ask(ngx_pelton_service_t *service, uint32_t index, const char *data, size_t size, uint32_t flags, ngx_pelton_answer_t *out) {
    ngx_pelton_slot_t *slot = index == NGX_PELTON_NO_SLOT ? NULL : ngx_pelton_slots[index];
    int code, was_granted = slot != NULL && slot->state == ngx_pelton_granted;
    uint64_t call = 0;
    if (was_granted) {
        ngx_pelton_leave_queue(slot);
    }
    if (service->client == NULL || (service->waiting > 0 && !was_granted)) {
        return ngx_pelton_not_now(service, slot, was_granted, flags, out);
    }
    ngx_pelton_settle(service);
    code = pelton_submit(service->client, data, size, flags & (PELTON_NOTIFY | PELTON_IDEMPOTENT), PELTON_NO_WAIT, &call);
    if (code == PELTON_AGAIN) {
        return ngx_pelton_not_now(service, slot, was_granted, flags, out);
    }
    if (ngx_pelton_is_end(code)) {
        /* Nothing was asked: another client may be had. */
        ngx_pelton_lost(service, code);
        return ngx_pelton_not_now(service, slot, was_granted, flags, out);
    }
    if (code != PELTON_OK) {
        return ngx_pelton_fail_now(out, code);
    }
    service->may_have_room |= was_granted;
    if (flags & PELTON_NOTIFY) {
        ngx_pelton_post(service);
        return PELTON_OK;
    }
    return ngx_pelton_asked(service, slot, call, flags, out);
}

/* The answer that came within the call was looked at. */
void ngx_pelton_release(ngx_pelton_service_t *service) { ngx_pelton_settle(service); }

void *ngx_pelton_semaphore(uint32_t index) { return ngx_pelton_slots[index]->semaphore; }

/* Gives a slot back, and its call up. */
void ngx_pelton_give_up(uint32_t index) {
    ngx_pelton_slot_t *slot = ngx_pelton_slots[index];
    ngx_pelton_service_t *service = slot->service;
    if (slot->state == ngx_pelton_free) {
        return;
    }
    if (slot->state == ngx_pelton_in_flight) {
        ngx_pelton_settle(service);
        ngx_pelton_end(slot, PELTON_OK);
        (void)pelton_cancel(service->client, slot->call);
        ngx_pelton_post(service);
    } else if (slot->state == ngx_pelton_queued || slot->state == ngx_pelton_granted) {
        service->may_have_room |= slot->state == ngx_pelton_granted;
        ngx_pelton_leave_queue(slot);
        ngx_pelton_post(service);
    }
    ngx_pelton_drop_nodes(slot);
    if (slot->shown != NULL) {
        ngx_pelton_give_node(slot, slot->shown);
        slot->shown = NULL;
    }
    if (slot->has_asker) {
        ngx_queue_remove(&slot->of_asker);
    }
    slot->state = ngx_pelton_free;
    slot->is_waiting = 0;
    service->slots--;
    ngx_queue_insert_head(&ngx_pelton_free_slots, &slot->queue);
}

static void ngx_pelton_asker_ended(void *data) {
    ngx_pelton_asker_t *asker = data;
    ngx_pelton_slot_t *slot;
    while (!ngx_queue_empty(&asker->slots)) {
        slot = ngx_queue_data(ngx_queue_head(&asker->slots), ngx_pelton_slot_t, of_asker);
        ngx_pelton_give_up(slot->index);
    }
}

/* Has the slot given up when the request, or the timer, ends. */
int ngx_pelton_park(uint32_t index, ngx_http_request_t *request) {
    ngx_pelton_slot_t *slot = ngx_pelton_slots[index];
    ngx_pool_cleanup_t *cleanup;
    ngx_pelton_asker_t *asker;
    for (cleanup = request->pool->cleanup; cleanup != NULL; cleanup = cleanup->next) {
        if (cleanup->handler == ngx_pelton_asker_ended) {
            break;
        }
    }
    if (cleanup == NULL) {
        cleanup = ngx_pool_cleanup_add(request->pool, sizeof *asker);
        if (cleanup == NULL) {
            return PELTON_SYSTEM;
        }
        asker = cleanup->data;
        ngx_queue_init(&asker->slots);
        cleanup->handler = ngx_pelton_asker_ended;
    }
    asker = cleanup->data;
    ngx_queue_insert_tail(&asker->slots, &slot->of_asker);
    slot->has_asker = 1;
    return PELTON_OK;
}

/* What has come to a slot: PELTON_OK with the next answer, good until the next function of this slot; NGX_PELTON_WAITS;
 * NGX_PELTON_ASK_AGAIN; or a code. */
int ngx_pelton_take(uint32_t index, ngx_pelton_answer_t *out) {
    ngx_pelton_slot_t *slot = ngx_pelton_slots[index];
    ngx_pelton_node_t *node;
    if (slot->shown != NULL) {
        ngx_pelton_give_node(slot, slot->shown);
        slot->shown = NULL;
    }
    out->slot = index;
    node = slot->first;
    /* In one piece, unless it is a stream. */
    if (node != NULL && (slot->is_stream || slot->state == ngx_pelton_ended)) {
        slot->first = node->next;
        if (slot->first == NULL) {
            slot->last = &slot->first;
        }
        slot->shown = node;
        out->data = node->data;
        out->size = node->size;
        out->outcome = node->outcome;
        out->code = node->code;
        return PELTON_OK;
    }
    if (slot->state == ngx_pelton_granted) {
        return NGX_PELTON_ASK_AGAIN;
    }
    if (slot->state == ngx_pelton_ended) {
        return ngx_pelton_fail(out, slot->failure == PELTON_OK ? PELTON_CLOSED : slot->failure, slot->service->detail);
    }
    slot->is_waiting = 1;
    return NGX_PELTON_WAITS;
}

void ngx_pelton_figures(ngx_pelton_service_t *service, ngx_pelton_figures_t *out) {
    out->is_connected = service->client != NULL;
    out->in_flight = service->in_flight;
    out->waiting = service->waiting;
    out->slots = service->slots;
    out->slots_made = ngx_pelton_slots_made;
    out->connections = service->connections;
    out->turns = service->turns;
    out->within = service->within;
    out->bytes = service->bytes;
}

/* ---- The module -------------------------------------------------------------------------------------------------------- */

/* A worker ends: the services are told, and nginx finds none of its connections open. */
static void ngx_pelton_exit_process(ngx_cycle_t *cycle) {
    ngx_queue_t *at;
    uint32_t i;
    (void)cycle;
    for (i = 0; i < ngx_pelton_slots_made; i++) {
        if (ngx_pelton_slots[i]->cycle == ngx_cycle) {
            ngx_pelton_sema_gc(ngx_pelton_slots[i]->semaphore);
            ngx_pelton_slots[i]->cycle = NULL;
        }
    }
    for (at = ngx_queue_head(&ngx_pelton_services); at != ngx_queue_sentinel(&ngx_pelton_services); at = ngx_queue_next(at)) {
        ngx_pelton_service_t *service = ngx_queue_data(at, ngx_pelton_service_t, queue);
        if (service->client != NULL) {
            ngx_pelton_close_client(service);
        }
        if (service->opening != NULL) {
            ngx_pelton_unwatch(service->opening_connection);
            ngx_pelton_let_go(service->opening);
            service->opening = NULL;
        }
    }
}

static ngx_core_module_t ngx_pelton_module_ctx = {ngx_string("pelton"), NULL, NULL};

ngx_module_t ngx_pelton_module = {NGX_MODULE_V1,
                                  &ngx_pelton_module_ctx,
                                  NULL, /* no directives */
                                  NGX_CORE_MODULE,
                                  NULL, /* init master: never called */
                                  NULL, /* init module */
                                  NULL, /* init process */
                                  NULL, /* init thread */
                                  NULL, /* exit thread */
                                  ngx_pelton_exit_process,
                                  NULL, /* exit master */
                                  NGX_MODULE_V1_PADDING};
