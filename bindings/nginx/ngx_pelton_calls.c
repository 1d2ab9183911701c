/* Calls from nginx: one client per worker and service, in the worker's event loop, for resty/pelton.lua.
 *
 * A call that waits has a slot. A cancelled call has no further completion, so its slot is free immediately.
 *
 * THE TICK. One posted event takes completions, wakes their coroutines, and is posted again behind them, so that their
 * next requests leave together. If there is no completion, it busy-polls (pelton_client_poll), arms, and lets the loop
 * sleep. A coroutine that the tick woke, and behind which nothing waits, is answered within its submit. All services
 * together use the loop for NGX_PELTON_TICK_NS, then nginx polls.
 *
 * IN PLACE. A large reply to the only call in flight stays in the lane while its coroutine is woken. It is copied if
 * the client is used before the coroutine takes it, or, for a view, before the coroutine releases it.
 *
 * SPACE. A call that finds no space waits in a queue. `space` is the number of waiting calls that may retry. Each event
 * that can free space increases it, and so does a call that was to retry and ends without doing so. */
#include "ngx_pelton.h"

#define NGX_PELTON_RELEASED "the request that made this call has ended, or has released it"

#define NGX_PELTON_VIEW_RELEASED "the view was released, or the request that made its call has ended"
#define NGX_PELTON_NO_MEMORY "no memory for the reply"

#define NGX_PELTON_CALLS_MAX 1024 /* the library's */
#define NGX_PELTON_PARTS_BYTES_MAX (16 * 1024 * 1024)
/* Parts of all calls of a service: at most this number of times the limit of one call. */
#define NGX_PELTON_PARTS_SUM 16
/* Immediate replies between two reads of the clock, which cost 25 ns. */
#define NGX_PELTON_POLLS_PER_CLOCK 16
/* Completions, and their bytes, taken before their coroutines run: a guess at a tenth of a millisecond. */
#define NGX_PELTON_TAKE_MAX 1024
#define NGX_PELTON_TAKE_BYTES 1048576
/* Such takes for a call whose timeout has expired, or whose service has ended: more than a lane of default capacity. */
#define NGX_PELTON_LATE_TAKES 16
/* Below this size a copy costs less than what a reply in place delays. A guess. */
#define NGX_PELTON_IN_PLACE_BYTES 4096
/* After a failed open, calls fail for this time, so that a stopped service costs little. A guess. */
#define NGX_PELTON_RETRY_MS 100
/* Services that may hang up while a client is opened, before that is an error. A guess. */
#define NGX_PELTON_HANG_UPS_MAX 8
/* The memory for a copy that a slot keeps for its next call, and the sum of all slots. */
#define NGX_PELTON_SPARE_BYTES 1048576
#define NGX_PELTON_SPARE_BYTES_SUM 8388608

typedef struct ngx_pelton_copy_s ngx_pelton_copy_t;

/* A completion in the worker's memory: from ngx_alloc, since it is freed when Lua has taken it, before its request. */
struct ngx_pelton_copy_s {
    ngx_pelton_copy_t *next;
    size_t allocated;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
    u_char data[];
};

typedef enum {
    ngx_pelton_waiting = 0, /* for space, or a client */
    ngx_pelton_retrying,    /* its coroutine was woken to submit again */
    ngx_pelton_in_flight,
    ngx_pelton_ended /* its last completion is copied, or there is a failure */
} ngx_pelton_state_t;

typedef struct ngx_pelton_call_s ngx_pelton_call_t;

struct ngx_pelton_call_s {
    ngx_pelton_slot_t slot;  /* its queue: waiting, or retrying */
    ngx_pelton_call_t *next; /* in the bucket of calls in flight */
    ngx_pelton_service_t *service;
    uint64_t id;
    ngx_pelton_copy_t *first;
    ngx_pelton_copy_t **last;
    ngx_pelton_copy_t *taken; /* Lua reads it */
    ngx_pelton_copy_t *spare;
    size_t bytes; /* of its copies */
    const char *detail;
    int failure;
    ngx_pelton_state_t state;
    unsigned is_stream : 1;
    unsigned is_view : 1;
    unsigned has_returned : 1; /* its reply, as a view */
};

struct ngx_pelton_service_s {
    ngx_queue_t queue;
    ngx_pelton_options_t options;
    pelton_client *client;
    pelton_completion in_place;
    ngx_pelton_call_t *in_place_call; /* whose reply it is, as long as that must remain valid */
    pelton_client_opening *opening;
    ngx_connection_t *connection; /* of the opening's descriptor, then of the client's */
    ngx_event_t tick;
    ngx_queue_t waiting;
    ngx_queue_t retrying;
    ngx_pelton_call_t *buckets[NGX_PELTON_CALLS_MAX];
    uint32_t in_flight;
    uint32_t waiting_count;
    uint32_t slots;
    uint32_t space;
    uint32_t immediate_in_tick;
    uint32_t connections;
    uint32_t hang_ups; /* since a client was last opened */
    uint64_t immediate;
    uint64_t bytes;
    ngx_msec_t opened_at;
    ngx_msec_t retry_at;
    int failure;                   /* of the last open, or of a client that ended at once */
    unsigned has_woken : 1;        /* the tick is posted behind coroutines that it woke */
    unsigned is_in_place : 1;      /* a completion is not released */
    unsigned lacks_number : 1;     /* NGX_PELTON_CALLS_MAX were in flight when a call last found no space */
    unsigned is_next : 1;          /* the tick is posted for after nginx's poll */
    unsigned has_polled : 1;       /* without success, for the call that was submitted last */
    unsigned is_resting : 1;       /* until retry_at */
    unsigned is_draining : 1;      /* the client's service has returned a call: it takes no more */
    unsigned has_drained_young : 1; /* the client before did so, soon after its opening */
    char detail[512];              /* of the failure, or of the client's end */
    char address[];
};

static void ngx_pelton_cancel_call(ngx_pelton_slot_t *slot);

static ngx_queue_t ngx_pelton_services = {&ngx_pelton_services, &ngx_pelton_services};
static ngx_pelton_kind_t ngx_pelton_calls = {
    sizeof(ngx_pelton_call_t), ngx_pelton_cancel_call, {&ngx_pelton_calls.free, &ngx_pelton_calls.free}};
static size_t ngx_pelton_spare_bytes;
static char ngx_pelton_detail[512];

/* The slot is its first member. */
static ngx_pelton_call_t *ngx_pelton_call_of(ngx_pelton_slot_t *slot) { return (ngx_pelton_call_t *)(void *)slot; }

static ngx_pelton_call_t *ngx_pelton_queued_call(ngx_queue_t *at) {
    return ngx_pelton_call_of(ngx_queue_data(at, ngx_pelton_slot_t, queue));
}

static void ngx_pelton_post(ngx_pelton_service_t *service) {
    if (!service->tick.posted) {
        ngx_post_event(&service->tick, &ngx_posted_events);
    }
}

/* The tick follows nginx's next poll. */
static void ngx_pelton_post_next(ngx_pelton_service_t *service) {
    service->is_next = 1;
    if (!service->tick.posted) {
        ngx_post_event(&service->tick, &ngx_posted_next_events);
    }
}

/* One waiting call may retry in the next tick. */
static void ngx_pelton_count_space(ngx_pelton_service_t *service) {
    service->space = ngx_min(service->space + 1, NGX_PELTON_CALLS_MAX);
}

static void ngx_pelton_post_space(ngx_pelton_service_t *service) {
    ngx_pelton_count_space(service);
    ngx_pelton_post(service);
}

static void ngx_pelton_copy_detail(char *to, size_t size) {
    ngx_cpystrn((u_char *)to, (u_char *)pelton_error_detail(), size);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static ngx_pelton_call_t *ngx_pelton_new_call(ngx_pelton_service_t *service) {
    ngx_pelton_slot_t *slot = ngx_pelton_use_slot(&ngx_pelton_calls);
    ngx_pelton_call_t *call = ngx_pelton_call_of(slot);
    if (slot == NULL) {
        return NULL;
    }
    call->service = service;
    call->first = NULL;
    call->last = &call->first;
    call->bytes = 0;
    call->failure = PELTON_OK;
    call->detail = NULL;
    call->is_stream = 0;
    call->is_view = 0;
    call->has_returned = 0;
    call->state = ngx_pelton_ended;
    service->slots++;
    return call;
}

static void ngx_pelton_free_copy(ngx_pelton_call_t *call, ngx_pelton_copy_t *copy) {
    call->bytes -= copy->size;
    call->service->bytes -= copy->size;
    if (call->spare == NULL && copy->allocated <= NGX_PELTON_SPARE_BYTES &&
        ngx_pelton_spare_bytes + copy->allocated <= NGX_PELTON_SPARE_BYTES_SUM) {
        ngx_pelton_spare_bytes += copy->allocated;
        call->spare = copy;
    } else {
        ngx_free(copy);
    }
}

static ngx_int_t ngx_pelton_add_copy(ngx_pelton_call_t *call, const pelton_completion *completion) {
    ngx_pelton_copy_t *copy = call->spare;
    if (copy != NULL) {
        call->spare = NULL;
        ngx_pelton_spare_bytes -= copy->allocated;
    }
    if (copy == NULL || copy->allocated < completion->size) {
        size_t size = ngx_max(completion->size, 1024);
        if (copy != NULL) {
            ngx_free(copy);
        }
        copy = ngx_alloc(sizeof *copy + size, ngx_cycle->log);
        if (copy == NULL) {
            return NGX_ERROR;
        }
        copy->allocated = size;
    }
    copy->next = NULL;
    copy->size = (uint32_t)completion->size;
    copy->outcome = completion->outcome;
    copy->code = completion->code;
    ngx_memcpy(copy->data, completion->data, completion->size);
    *call->last = copy;
    call->last = &copy->next;
    call->bytes += copy->size;
    call->service->bytes += copy->size;
    return NGX_OK;
}

/* Its oldest copy, which Lua reads from now on. */
static ngx_pelton_copy_t *ngx_pelton_take_copy(ngx_pelton_call_t *call) {
    call->taken = call->first;
    call->first = call->taken->next;
    if (call->first == NULL) {
        call->last = &call->first;
    }
    return call->taken;
}

static void ngx_pelton_free_taken(ngx_pelton_call_t *call) {
    if (call->taken != NULL) {
        ngx_pelton_free_copy(call, call->taken);
        call->taken = NULL;
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
static void ngx_pelton_end(ngx_pelton_call_t *call, int failure, const char *detail) {
    ngx_pelton_call_t **at = &call->service->buckets[call->id % NGX_PELTON_CALLS_MAX];
    while (*at != call) {
        at = &(*at)->next;
    }
    *at = call->next;
    call->service->in_flight--;
    ngx_pelton_count_space(call->service);
    call->state = ngx_pelton_ended;
    call->failure = failure;
    call->detail = detail;
}

static void ngx_pelton_enqueue(ngx_pelton_call_t *call, ngx_uint_t is_first) {
    call->state = ngx_pelton_waiting;
    call->service->waiting_count++;
    if (is_first) {
        ngx_queue_insert_head(&call->service->waiting, &call->slot.queue);
    } else {
        ngx_queue_insert_tail(&call->service->waiting, &call->slot.queue);
    }
}

static void ngx_pelton_dequeue(ngx_pelton_call_t *call) {
    ngx_queue_remove(&call->slot.queue);
    call->service->waiting_count -= call->state == ngx_pelton_waiting;
    call->state = ngx_pelton_ended;
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

/* Whether a service at a path returned the call because it drains: it has not begun it, and takes no other. The
 * successor gets the call. The client of a short name submits such calls to other services itself. */
static ngx_int_t ngx_pelton_is_returned(ngx_pelton_service_t *service, const pelton_completion *completion) {
    return completion->outcome == PELTON_LOST && (int)completion->code == PELTON_AGAIN &&
           ngx_strncmp(service->address, "unix:", 5) == 0;
}

static void ngx_pelton_hold_in_place(ngx_pelton_call_t *call, const pelton_completion *completion) {
    call->service->in_place = *completion;
    call->service->in_place_call = call;
    call->service->is_in_place = 1;
}

/* Releases the completion in place, and copies it before if it must remain valid. */
static void ngx_pelton_release_in_place(ngx_pelton_service_t *service) {
    ngx_pelton_call_t *call = service->in_place_call;
    if (!service->is_in_place) {
        return;
    }
    service->is_in_place = 0;
    service->in_place_call = NULL;
    if (call != NULL && ngx_pelton_add_copy(call, &service->in_place) != NGX_OK) {
        call->failure = PELTON_SYSTEM;
        call->detail = NGX_PELTON_NO_MEMORY;
    } else if (call != NULL && call->has_returned) {
        (void)ngx_pelton_take_copy(call);
    }
    (void)pelton_client_release(service->client);
}

static void ngx_pelton_fail_waiting(ngx_pelton_service_t *service, int code) {
    while (!ngx_queue_empty(&service->waiting)) {
        ngx_pelton_call_t *call = ngx_pelton_queued_call(ngx_queue_head(&service->waiting));
        ngx_pelton_dequeue(call);
        call->failure = code;
        ngx_pelton_wake(&call->slot);
    }
}

/* Calls fail with service->detail until retry_at. */
static void ngx_pelton_rest(ngx_pelton_service_t *service, int code) {
    service->failure = code;
    service->is_resting = 1;
    service->retry_at = ngx_current_msec + NGX_PELTON_RETRY_MS;
    ngx_pelton_fail_waiting(service, code);
}

static int ngx_pelton_open_failed(ngx_pelton_service_t *service, int code, const char *detail) {
    ngx_cpystrn((u_char *)service->detail, (u_char *)detail, sizeof service->detail);
    if (service->failure != code) {
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: \"%s\" could not be opened: %s", service->address,
                      detail);
    }
    ngx_pelton_rest(service, code);
    return code;
}

/* Closes the opening, or the client. */
static void ngx_pelton_close(ngx_pelton_service_t *service) {
    ngx_pelton_release_in_place(service);
    if (service->connection != NULL) {
        ngx_pelton_unwatch(service->connection);
        service->connection = NULL;
    }
    (void)pelton_close(service->opening);
    (void)pelton_close(service->client);
    service->opening = NULL;
    service->client = NULL;
    service->is_draining = 0;
}

static void ngx_pelton_client_readable(ngx_event_t *event) {
    ngx_connection_t *connection = event->data;
    ngx_pelton_begin_tick();
    ngx_pelton_post_space(connection->data);
}

static int ngx_pelton_open(ngx_pelton_service_t *service);

static void ngx_pelton_opening_readable(ngx_event_t *event) {
    ngx_connection_t *connection = event->data;
    ngx_pelton_service_t *service = connection->data;
    pelton_client *client = NULL;
    int code = pelton_client_opening_finish(service->opening, &client);
    if (code == PELTON_AGAIN) {
        return;
    }
    if (code == PELTON_HUNG_UP && service->hang_ups++ < NGX_PELTON_HANG_UPS_MAX) {
        /* It began to drain: its successor may listen. */
        ngx_pelton_close(service);
        (void)ngx_pelton_open(service);
        return;
    }
    if (code != PELTON_OK) {
        ngx_pelton_copy_detail(ngx_pelton_detail, sizeof ngx_pelton_detail);
        ngx_pelton_close(service);
        ngx_pelton_open_failed(service, code, ngx_pelton_detail);
        return;
    }
    ngx_pelton_close(service);
    service->client = client;
    service->connection = ngx_pelton_watch(pelton_client_fd(client), service, ngx_pelton_client_readable);
    if (service->connection == NULL) {
        ngx_pelton_close(service);
        ngx_pelton_open_failed(service, PELTON_SYSTEM, NGX_PELTON_NOT_WATCHED);
        return;
    }
    service->connections++;
    service->hang_ups = 0;
    service->failure = PELTON_OK;
    service->is_resting = 0;
    service->opened_at = ngx_current_msec;
    service->space = NGX_PELTON_CALLS_MAX;
    ngx_pelton_begin_tick();
    ngx_log_error(NGX_LOG_NOTICE, ngx_cycle->log, 0, "pelton: \"%s\" is connected", service->address);
    ngx_pelton_post(service);
}

/* Starts to open a client, unless one is being opened. Returns a code if there will be none. */
static int ngx_pelton_open(ngx_pelton_service_t *service) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    int code;
    if (service->opening != NULL) {
        return PELTON_OK;
    }
    service->tick.log = ngx_cycle->log;
    if (service->is_resting && (ngx_msec_int_t)(service->retry_at - ngx_current_msec) > 0) {
        return service->failure;
    }
    options.capacity = service->options.capacity;
    options.call_bytes_max = service->options.call_bytes_max;
    options.poll_ns = service->options.poll_ns;
    options.uids = service->options.uids;
    options.uid_count = service->options.uid_count;
    code = pelton_client_open_start(service->address, &options, &service->opening);
    if (code != PELTON_OK) {
        return ngx_pelton_open_failed(service, code, pelton_error_detail());
    }
    service->connection =
        ngx_pelton_watch(pelton_client_opening_fd(service->opening), service, ngx_pelton_opening_readable);
    if (service->connection == NULL) {
        ngx_pelton_close(service);
        return ngx_pelton_open_failed(service, PELTON_SYSTEM, NGX_PELTON_NOT_WATCHED);
    }
    return PELTON_OK;
}

/* Whether the client is of no use after this code. */
static ngx_int_t ngx_pelton_is_end(int code) {
    return code == PELTON_CLOSED || code == PELTON_PEER_DIED || code == PELTON_CORRUPT || code == PELTON_FORKED ||
           code == PELTON_INTERNAL;
}

/* The client has ended, and its calls in flight fail. Calls that wait for space wait for the next client, unless this
 * one ended at once; the first one that drained is excepted, as its successor may listen. */
static void ngx_pelton_lost(ngx_pelton_service_t *service, int code) {
    ngx_uint_t i, is_young, was_draining = service->is_draining;
    ngx_pelton_copy_detail(service->detail, sizeof service->detail);
    ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, 0, "pelton: \"%s\" is lost with %uD calls in flight: %s",
                  service->address, service->in_flight, service->detail);
    ngx_pelton_close(service);
    for (i = 0; i < NGX_PELTON_CALLS_MAX; i++) {
        while (service->buckets[i] != NULL) {
            ngx_pelton_call_t *call = service->buckets[i];
            ngx_pelton_end(call, code, NULL);
            ngx_pelton_wake(&call->slot);
        }
    }
    is_young = ngx_current_msec - service->opened_at < NGX_PELTON_RETRY_MS;
    /* A service that returns each call would be asked without end. */
    if (is_young && (!was_draining || service->has_drained_young)) {
        ngx_pelton_rest(service, PELTON_NO_LISTENER);
    } else if (!ngx_queue_empty(&service->waiting)) {
        (void)ngx_pelton_open(service);
    }
    service->has_drained_young = is_young && was_draining;
}

/* ---- The tick ---------------------------------------------------------------------------------------------------- */

/* Copies a completion to its call, and releases it; or leaves a large one in place. A call that exceeds a limit of this
 * side is cancelled. */
static void ngx_pelton_deliver(ngx_pelton_service_t *service, const pelton_completion *completion) {
    ngx_pelton_call_t *call = ngx_pelton_find(service, completion->call);
    int is_part = completion->outcome == PELTON_PART, failure = PELTON_OK;
    uint64_t parts_max = service->options.parts_bytes_max;
    const char *detail = NULL;
    if (call == NULL) {
        (void)pelton_client_release(service->client);
        return;
    }
    if (parts_max == 0) {
        parts_max = NGX_PELTON_PARTS_BYTES_MAX;
    }
    if (ngx_pelton_is_returned(service, completion)) {
        service->is_draining = 1;
        (void)pelton_client_release(service->client);
        ngx_pelton_end(call, PELTON_OK, NULL);
        ngx_pelton_enqueue(call, 0);
        return;
    }
    if (completion->size > INT32_MAX) {
        failure = PELTON_TOO_LARGE;
        detail = "a reply of 2 GiB or more";
    } else if (is_part && call->bytes + completion->size > parts_max) {
        failure = PELTON_TOO_LARGE;
        detail = "the parts that the coroutine has not taken exceed parts_bytes_max";
    } else if (is_part && (service->bytes + completion->size) / NGX_PELTON_PARTS_SUM > parts_max) {
        failure = PELTON_TOO_LARGE;
        detail = "the parts of all calls of this service exceed sixteen times parts_bytes_max";
    } else if (!is_part && call->first == NULL && service->in_flight == 1 &&
               completion->size >= NGX_PELTON_IN_PLACE_BYTES) {
        ngx_pelton_hold_in_place(call, completion);
    } else if (ngx_pelton_add_copy(call, completion) != NGX_OK) {
        failure = PELTON_SYSTEM;
        detail = NGX_PELTON_NO_MEMORY;
    }
    if (!service->is_in_place) {
        (void)pelton_client_release(service->client);
    }
    if (failure != PELTON_OK && is_part) {
        (void)pelton_client_cancel(service->client, call->id);
    }
    if (failure != PELTON_OK || !is_part) {
        ngx_pelton_end(call, failure, detail);
    }
    if (call->state == ngx_pelton_ended || call->is_stream) {
        ngx_pelton_wake(&call->slot);
    }
}

/* Delivers completions up to a limit. Returns PELTON_AGAIN if there are no more, PELTON_OK if there may be. */
static int ngx_pelton_deliver_all(ngx_pelton_service_t *service, ngx_uint_t *taken) {
    pelton_completion completion;
    size_t bytes = 0;
    int code;
    while ((code = pelton_client_await(service->client, PELTON_NO_WAIT, &completion)) == PELTON_OK) {
        bytes += completion.size;
        ngx_pelton_deliver(service, &completion);
        if (service->is_in_place) {
            /* Nothing else is in flight. */
            ++*taken;
            return PELTON_AGAIN;
        }
        if (++*taken >= NGX_PELTON_TAKE_MAX || bytes >= NGX_PELTON_TAKE_BYTES) {
            return PELTON_OK;
        }
    }
    /* PELTON_REFUSED: nothing is in flight. */
    return code == PELTON_REFUSED ? PELTON_AGAIN : code;
}

static int ngx_pelton_poll(ngx_pelton_service_t *service, pelton_completion *completion) {
    int code = pelton_client_poll(service->client);
    return code == PELTON_OK ? pelton_client_await(service->client, PELTON_NO_WAIT, completion) : code;
}

/* Whether another call can be in flight. Cancelled calls count until the service has finished them. */
static ngx_int_t ngx_pelton_has_number(ngx_pelton_service_t *service) {
    pelton_client_info info;
    info.struct_bytes = sizeof info;
    return pelton_client_get_info(service->client, &info) == PELTON_OK && info.in_flight < NGX_PELTON_CALLS_MAX;
}

/* The same, for waiting calls. No completion says that the service has finished a cancelled call. */
static ngx_int_t ngx_pelton_found_number(ngx_pelton_service_t *service) {
    if (service->waiting_count == 0 || !service->lacks_number || !ngx_pelton_has_number(service)) {
        return 0;
    }
    service->lacks_number = 0;
    ngx_pelton_count_space(service);
    return 1;
}

/* Wakes `space` of the waiting calls, to submit again. */
static void ngx_pelton_retry(ngx_pelton_service_t *service) {
    uint32_t count = service->space;
    if (service->is_draining) {
        return;
    }
    service->space = 0;
    for (; count > 0 && !ngx_queue_empty(&service->waiting); count--) {
        ngx_pelton_call_t *call = ngx_pelton_queued_call(ngx_queue_head(&service->waiting));
        ngx_pelton_dequeue(call);
        call->state = ngx_pelton_retrying;
        ngx_queue_insert_tail(&service->retrying, &call->slot.queue);
        ngx_pelton_wake(&call->slot);
    }
}

static void ngx_pelton_tick(ngx_event_t *event) {
    ngx_pelton_service_t *service = event->data;
    pelton_completion completion;
    ngx_uint_t taken = 0, has_woken = service->has_woken;
    int code;
    if (service->is_next) {
        service->is_next = 0;
        ngx_pelton_begin_tick();
    }
    service->has_woken = 0;
    service->immediate_in_tick = 0;
    /* The woken coroutines have run. A killed one does not retry, and leaves its space to the next. */
    while (has_woken && !ngx_queue_empty(&service->retrying)) {
        ngx_pelton_dequeue(ngx_pelton_queued_call(ngx_queue_head(&service->retrying)));
        ngx_pelton_count_space(service);
    }
    if (service->client == NULL) {
        return;
    }
    ngx_pelton_release_in_place(service);
    if (ngx_pelton_is_tick_over()) {
        ngx_pelton_post_next(service);
        return;
    }
    code = ngx_pelton_deliver_all(service, &taken);
    if (code == PELTON_AGAIN && taken == 0 && service->in_flight > 0 && !service->has_polled &&
        (service->is_draining || !(service->space > 0 && service->waiting_count > 0))) {
        code = ngx_pelton_poll(service, &completion);
        if (code == PELTON_OK) {
            ngx_pelton_deliver(service, &completion);
            taken = 1;
            code = service->is_in_place ? PELTON_AGAIN : ngx_pelton_deliver_all(service, &taken);
        }
    }
    service->has_polled = 0;
    if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
        return;
    }
    (void)ngx_pelton_found_number(service);
    if (service->waiting_count > 0 && service->space > 0 && !service->is_draining) {
        ngx_pelton_retry(service);
        taken++;
    }
    if (taken > 0) {
        service->has_woken = 1;
        ngx_pelton_post(service);
        return;
    }
    code = pelton_client_arm(service->client);
    if (code == PELTON_READY) {
        ngx_pelton_count_space(service);
        ngx_pelton_post_next(service);
    } else if (code == PELTON_OK) {
        /* Arming receives what came last. */
        if (ngx_pelton_found_number(service)) {
            ngx_pelton_post(service);
        }
    } else if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
    } else {
        ngx_pelton_copy_detail(service->detail, sizeof service->detail);
        ngx_pelton_fail_waiting(service, code);
        /* PELTON_NO_LISTENER: of a short name. The next submit searches for listeners. */
        if (code != PELTON_NO_LISTENER) {
            ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: \"%s\" could not be armed, and is retried: %s",
                          service->address, service->detail);
            ngx_add_timer(&service->tick, NGX_PELTON_RETRY_MS);
        }
    }
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------- */

ngx_pelton_service_t *ngx_pelton_service(const char *address, const ngx_pelton_options_t *options) {
    ngx_queue_t *at;
    ngx_pelton_service_t *service;
    size_t size = ngx_strlen(address) + 1;
    for (at = ngx_queue_head(&ngx_pelton_services); at != &ngx_pelton_services; at = ngx_queue_next(at)) {
        service = ngx_queue_data(at, ngx_pelton_service_t, queue);
        if (ngx_strcmp(service->address, address) == 0 &&
            ngx_memcmp(&service->options, options, sizeof *options) == 0) {
            return service;
        }
    }
    service = ngx_pelton_worker_calloc(sizeof *service + size);
    if (service == NULL) {
        return NULL;
    }
    service->options = *options;
    ngx_memcpy(service->address, address, size);
    ngx_queue_init(&service->waiting);
    ngx_queue_init(&service->retrying);
    service->tick.data = service;
    service->tick.handler = ngx_pelton_tick;
    service->tick.cancelable = 1;
    ngx_queue_insert_tail(&ngx_pelton_services, &service->queue);
    return service;
}

static int ngx_pelton_fail(ngx_pelton_reply_t *out, int code, const char *detail) {
    out->data = detail;
    out->size = (uint32_t)ngx_strlen(detail);
    return code;
}

static void ngx_pelton_give(ngx_pelton_reply_t *out, const void *data, size_t size, uint32_t outcome, uint32_t code) {
    out->data = data;
    out->size = (uint32_t)size;
    out->outcome = outcome;
    out->code = code;
}

/* Whether submit may poll for the reply: the tick woke the coroutine, nothing else waits to run, and the tick is not
 * over. */
static ngx_int_t ngx_pelton_may_poll(ngx_pelton_service_t *service) {
    if (!service->has_woken || service->in_flight > 0 || service->options.poll_ns < 0 ||
        ngx_queue_head(&ngx_posted_events) != &service->tick.queue) {
        return 0;
    }
    return ++service->immediate_in_tick % NGX_PELTON_POLLS_PER_CLOCK != 0 || !ngx_pelton_is_tick_over();
}

/* The coroutine sleeps on the slot, unless something is there already. */
static int ngx_pelton_sleep(ngx_pelton_call_t *call, ngx_pelton_reply_t *out) {
    ngx_pelton_post(call->service);
    call->slot.is_waiting = 1;
    if (call->state == ngx_pelton_ended || (call->is_stream && call->first != NULL)) {
        ngx_pelton_wake(&call->slot);
    }
    out->ticket = (double)ngx_pelton_ticket(&call->slot);
    return NGX_PELTON_WAITS;
}

/* Passes a call's reply in place to Lua. */
static int ngx_pelton_give_in_place(ngx_pelton_call_t *call, ngx_pelton_reply_t *out) {
    ngx_pelton_service_t *service = call->service;
    const pelton_completion *completion = &service->in_place;
    ngx_pelton_give(out, completion->data, completion->size, completion->outcome, completion->code);
    call->has_returned = call->is_view;
    if (!call->is_view) {
        service->in_place_call = NULL;
    }
    return PELTON_OK;
}

/* The call is in flight: its reply comes now, or its coroutine sleeps. */
static int ngx_pelton_submitted(ngx_pelton_service_t *service, ngx_pelton_call_t *call, uint64_t id, uint32_t flags,
                                ngx_pelton_reply_t *out) {
    pelton_completion completion;
    int code = PELTON_AGAIN;
    if (!(flags & NGX_PELTON_STREAM) && ngx_pelton_may_poll(service)) {
        code = ngx_pelton_poll(service, &completion);
        if (code == PELTON_OK && completion.call == id && completion.outcome != PELTON_PART &&
            completion.size <= INT32_MAX && !ngx_pelton_is_returned(service, &completion) &&
            (!(flags & NGX_PELTON_VIEW) || call != NULL || (call = ngx_pelton_new_call(service)) != NULL)) {
            service->immediate++;
            if (flags & NGX_PELTON_VIEW) {
                call->is_view = 1;
                out->ticket = (double)ngx_pelton_ticket(&call->slot);
                ngx_pelton_hold_in_place(call, &completion);
                return ngx_pelton_give_in_place(call, out);
            }
            service->is_in_place = 1;
            ngx_pelton_give(out, completion.data, completion.size, completion.outcome, completion.code);
            return PELTON_OK;
        }
        if (ngx_pelton_is_end(code)) {
            ngx_pelton_lost(service, code);
            return ngx_pelton_fail(out, code, service->detail);
        }
        service->has_polled = code == PELTON_AGAIN;
    }
    if (call == NULL) {
        call = ngx_pelton_new_call(service);
    }
    if (call != NULL) {
        call->is_stream = (flags & NGX_PELTON_STREAM) != 0;
        call->is_view = (flags & NGX_PELTON_VIEW) != 0;
        ngx_pelton_begin(call, id);
    }
    if (code == PELTON_OK) {
        ngx_pelton_deliver(service, &completion);
    }
    if (call == NULL) {
        (void)pelton_client_cancel(service->client, id);
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    return ngx_pelton_sleep(call, out);
}

/* There is no space or no client, or other calls wait. */
static int ngx_pelton_wait_for_space(ngx_pelton_service_t *service, ngx_pelton_call_t *call, uint32_t flags,
                                     ngx_pelton_reply_t *out) {
    ngx_uint_t is_retry = call != NULL;
    int code;
    if (service->client == NULL) {
        const char *refusal = ngx_pelton_refusal();
        if (refusal != NULL) {
            return ngx_pelton_fail(out, PELTON_REFUSED, refusal);
        }
        code = ngx_pelton_open(service);
        if (code != PELTON_OK) {
            return ngx_pelton_fail(out, code, service->detail);
        }
    }
    if (!(flags & NGX_PELTON_MAY_WAIT)) {
        ngx_pelton_post(service);
        return ngx_pelton_fail(out, PELTON_AGAIN,
                               service->client == NULL ? "the client is being opened" : "there is no space");
    }
    /* Calls that were to retry behind it find none either: all keep their order. */
    while (is_retry && !ngx_queue_empty(&service->retrying)) {
        ngx_pelton_call_t *other = ngx_pelton_queued_call(ngx_queue_last(&service->retrying));
        ngx_pelton_dequeue(other);
        ngx_pelton_enqueue(other, 1);
    }
    if (call == NULL && (call = ngx_pelton_new_call(service)) == NULL) {
        return ngx_pelton_fail(out, PELTON_SYSTEM, "no memory");
    }
    ngx_pelton_enqueue(call, is_retry);
    return ngx_pelton_sleep(call, out);
}

/* A submit has found the client's end. Replies that arrived before are delivered first; if more may come, a tick finds
 * the end behind them. */
static void ngx_pelton_found_end(ngx_pelton_service_t *service, int code) {
    ngx_uint_t taken = 0, takes = 0;
    if (code == PELTON_CLOSED || code == PELTON_PEER_DIED) {
        do {
            taken = 0;
            code = ngx_pelton_deliver_all(service, &taken);
        } while (code == PELTON_OK && ++takes < NGX_PELTON_LATE_TAKES);
        if (!ngx_pelton_is_end(code)) {
            ngx_pelton_post(service);
            return;
        }
    }
    ngx_pelton_lost(service, code);
}

/* A request that finds no space must not wait if it never fits. */
static ngx_int_t ngx_pelton_is_too_large(ngx_pelton_service_t *service, size_t size) {
    pelton_client_info info;
    info.struct_bytes = sizeof info;
    return pelton_client_get_info(service->client, &info) == PELTON_OK && info.request_bytes_max > 0 &&
           size > info.request_bytes_max;
}

int ngx_pelton_submit(ngx_pelton_service_t *service, double ticket, const char *data, size_t size,
                      const char *traceparent, uint32_t flags, ngx_pelton_reply_t *out) {
    ngx_pelton_call_t *call = NULL;
    int code = PELTON_AGAIN;
    uint64_t id = 0;
    if (ticket != 0) {
        call = ngx_pelton_call_of(ngx_pelton_find_slot(ticket, &ngx_pelton_calls));
        if (call == NULL || call->service != service || call->state != ngx_pelton_retrying) {
            return ngx_pelton_fail(out, PELTON_CLOSED, NGX_PELTON_RELEASED);
        }
        ngx_pelton_dequeue(call);
    }
    if (service->client != NULL) {
        ngx_pelton_release_in_place(service);
        if (service->is_draining) {
            /* All calls wait for its end, and for the successor. */
        } else if (service->waiting_count == 0 || call != NULL) {
            if (flags & NGX_PELTON_NOTIFY) {
                code = pelton_client_notify(service->client, data, size, PELTON_NO_WAIT);
            } else if (traceparent != NULL) {
                code = pelton_client_submit_traced(service->client, data, size, traceparent, flags & PELTON_IDEMPOTENT,
                                                   PELTON_NO_WAIT, &id);
            } else {
                code = pelton_client_submit(service->client, data, size, flags & PELTON_IDEMPOTENT, PELTON_NO_WAIT,
                                            &id);
            }
            if (code == PELTON_AGAIN) {
                service->space = 0;
                service->lacks_number = !ngx_pelton_has_number(service);
            } else if (ngx_pelton_is_end(code)) {
                ngx_pelton_found_end(service, code);
                code = PELTON_AGAIN;
            }
        } else if (ngx_pelton_is_too_large(service, size)) {
            return ngx_pelton_fail(out, PELTON_TOO_LARGE, "the request exceeds the service's limit");
        }
    }
    if (code == PELTON_AGAIN) {
        return ngx_pelton_wait_for_space(service, call, flags, out);
    }
    if (call != NULL) {
        ngx_pelton_post_space(service);
    }
    if (code != PELTON_OK) {
        ngx_pelton_copy_detail(ngx_pelton_detail, sizeof ngx_pelton_detail);
        return ngx_pelton_fail(out, code, ngx_pelton_detail);
    }
    if (flags & NGX_PELTON_NOTIFY) {
        ngx_pelton_post(service);
        return PELTON_OK;
    }
    return ngx_pelton_submitted(service, call, id, flags, out);
}

void ngx_pelton_release(ngx_pelton_service_t *service) { ngx_pelton_release_in_place(service); }

static void ngx_pelton_cancel_call(ngx_pelton_slot_t *slot) {
    ngx_pelton_call_t *call = ngx_pelton_call_of(slot);
    ngx_pelton_service_t *service = call->service;
    if (service->in_place_call == call) {
        service->in_place_call = NULL;
        ngx_pelton_release_in_place(service);
    }
    if (call->state == ngx_pelton_in_flight) {
        ngx_pelton_release_in_place(service);
        ngx_pelton_end(call, PELTON_OK, NULL);
        (void)pelton_client_cancel(service->client, call->id);
        ngx_pelton_post(service);
    } else if (call->state != ngx_pelton_ended) {
        ngx_pelton_dequeue(call);
        ngx_pelton_post_space(service);
    }
    while (call->first != NULL) {
        ngx_pelton_copy_t *copy = call->first;
        call->first = copy->next;
        ngx_pelton_free_copy(call, copy);
    }
    ngx_pelton_free_taken(call);
    service->slots--;
}

/* The call's timeout has expired. Its reply can have arrived, since nginx runs timers before the tick. */
static void ngx_pelton_take_late(ngx_pelton_call_t *call) {
    ngx_pelton_service_t *service = call->service;
    ngx_uint_t taken, takes = 0;
    int code = PELTON_OK;
    ngx_pelton_release_in_place(service);
    while (code == PELTON_OK && call->state == ngx_pelton_in_flight && !(call->is_stream && call->first != NULL) &&
           takes++ < NGX_PELTON_LATE_TAKES) {
        taken = 0;
        code = ngx_pelton_deliver_all(service, &taken);
    }
    ngx_pelton_post(service);
    if (ngx_pelton_is_end(code)) {
        ngx_pelton_lost(service, code);
    }
}

int ngx_pelton_take(double ticket, int is_last, ngx_pelton_reply_t *out) {
    ngx_pelton_call_t *call = ngx_pelton_call_of(ngx_pelton_find_slot(ticket, &ngx_pelton_calls));
    ngx_pelton_copy_t *copy;
    if (call == NULL) {
        return ngx_pelton_fail(out, PELTON_CLOSED, NGX_PELTON_RELEASED);
    }
    call->slot.is_waiting = 0;
    ngx_pelton_free_taken(call);
    if (is_last && call->state == ngx_pelton_in_flight) {
        ngx_pelton_take_late(call);
    }
    out->ticket = ticket;
    if (call->service->in_place_call == call) {
        return ngx_pelton_give_in_place(call, out);
    }
    copy = call->first;
    /* Unless it is a stream, parts are taken when all have arrived. */
    if (copy != NULL && (call->is_stream || call->state == ngx_pelton_ended)) {
        copy = ngx_pelton_take_copy(call);
        ngx_pelton_give(out, copy->data, copy->size, copy->outcome, copy->code);
        return PELTON_OK;
    }
    if (call->state == ngx_pelton_retrying) {
        return NGX_PELTON_SUBMIT_AGAIN;
    }
    if (call->state == ngx_pelton_ended) {
        return ngx_pelton_fail(out, call->failure == PELTON_OK ? PELTON_CLOSED : call->failure,
                               call->detail != NULL ? call->detail : call->service->detail);
    }
    call->slot.is_waiting = !is_last;
    return NGX_PELTON_WAITS;
}

int ngx_pelton_view(double ticket, ngx_pelton_reply_t *out) {
    ngx_pelton_call_t *call = ngx_pelton_call_of(ngx_pelton_find_slot(ticket, &ngx_pelton_calls));
    if (call == NULL) {
        return ngx_pelton_fail(out, PELTON_CLOSED, NGX_PELTON_VIEW_RELEASED);
    }
    if (call->service->in_place_call == call) {
        return ngx_pelton_give_in_place(call, out);
    }
    if (call->taken == NULL) {
        return ngx_pelton_fail(out, call->failure == PELTON_OK ? PELTON_CLOSED : call->failure,
                               call->detail != NULL ? call->detail : "the call has not returned its reply");
    }
    ngx_pelton_give(out, call->taken->data, call->taken->size, call->taken->outcome, call->taken->code);
    return PELTON_OK;
}

void ngx_pelton_get_info(ngx_pelton_service_t *service, ngx_pelton_info_t *out) {
    out->is_connected = service->client != NULL;
    out->in_flight = service->in_flight;
    out->waiting = service->waiting_count;
    out->slots = service->slots;
    out->connections = service->connections;
    out->immediate = service->immediate;
    out->bytes = service->bytes;
}

void ngx_pelton_close_calls(void) {
    ngx_queue_t *at;
    for (at = ngx_queue_head(&ngx_pelton_services); at != &ngx_pelton_services; at = ngx_queue_next(at)) {
        ngx_pelton_service_t *service = ngx_queue_data(at, ngx_pelton_service_t, queue);
        ngx_pelton_close(service);
        if (service->tick.timer_set) {
            ngx_del_timer(&service->tick);
        }
    }
}
