/* What the module's C files share. Each uses only those above it in this list:
 *   ngx_pelton_slot.c     slots, on which coroutines sleep; descriptors in nginx's event loop; the tick's time
 *   ngx_pelton_calls.c    calls          ngx_pelton_files.c     files
 *   ngx_pelton_module.c   the directive, the end of a request, the end of a worker
 * No thread is started here, and every function runs on the worker's one thread, unless its comment says otherwise.
 *
 * A SLOT has a semaphore of ngx_lua, on which one coroutine sleeps. Slots are reused. Lua therefore gets a TICKET: the
 * slot's number and its generation. The ticket of a slot that was released is refused. */
#ifndef NGX_PELTON_H
#define NGX_PELTON_H

#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_event.h>
#include <ngx_http.h>

#include <pelton.h>

/* The module may use the event loop for this time, then nginx polls its descriptors and timers: as in pelton_uv.h. */
#define NGX_PELTON_TICK_NS 1000000

/* ---- Shared with Lua: bindings/generate copies this part into resty/pelton/abi.lua ------------------------------- */

#define NGX_PELTON_UIDS_MAX 16

enum {
    /* Results beside pelton's codes. */
    NGX_PELTON_WAITS = 2,        /* sleep on the slot's semaphore, then take */
    NGX_PELTON_SUBMIT_AGAIN = 3, /* there may be space now: submit again with this ticket */
    /* Flags of ngx_pelton_submit beside PELTON_IDEMPOTENT. */
    NGX_PELTON_NOTIFY = 0x10,
    NGX_PELTON_STREAM = 0x20,  /* each part is taken when it arrives */
    NGX_PELTON_MAY_WAIT = 0x40, /* for space, or a client */
    NGX_PELTON_VIEW = 0x80      /* the reply stays valid until its slot is released: ngx_pelton_view */
};

typedef struct ngx_pelton_service_s ngx_pelton_service_t;

/* Options of a client. 0 is the default. */
typedef struct {
    uint64_t capacity;
    uint64_t call_bytes_max;
    uint64_t parts_bytes_max; /* parts of one call that its coroutine has not taken */
    int64_t poll_ns;
    uint32_t uid_count;
    uint32_t uids[NGX_PELTON_UIDS_MAX];
} ngx_pelton_options_t;

/* A completion. After an error code, data is a text about it. */
typedef struct {
    const char *data;
    double ticket;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
} ngx_pelton_reply_t;

typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting; /* for space, or a client */
    uint32_t slots;   /* in use */
    uint32_t connections; /* clients opened so far */
    uint64_t immediate; /* replies that arrived within ngx_pelton_submit */
    uint64_t bytes;     /* replies in the worker's memory */
} ngx_pelton_info_t;

/* As pelton_operation. */
typedef struct {
    const char *path; /* ends with a 0 */
    const char *data; /* to write; copied */
    pelton_file *file;
    uint64_t offset;
    uint64_t bytes; /* to read, or to write */
    uint32_t kind;
    uint32_t open_flags;
    uint32_t mode;
} ngx_pelton_operation_t;

typedef struct {
    const char *data; /* the bytes read, valid until the slot is released; after an error a text */
    double ticket;
    pelton_file *file;
    uint64_t bytes; /* read or written; of a stat the file's size */
    int32_t error;  /* errno */
} ngx_pelton_file_result_t;

/* PELTON_VERSION of the library in the module. */
uint32_t ngx_pelton_version(void);
/* Passes ngx_lua's functions, which no header declares. */
void ngx_pelton_use_semaphores(void *sema_new, void *sema_post, void *sema_gc);
/* nginx's cached time of a monotonic clock, in milliseconds. */
double ngx_pelton_msec(void);
/* The slot's semaphore. NULL: the slot was released. */
void *ngx_pelton_semaphore(double ticket);
/* Releases a slot, and cancels its call or operation. */
void ngx_pelton_release_slot(double ticket);
/* Releases the slot when the request, or the timer, ends. */
int ngx_pelton_bind(double ticket, ngx_http_request_t *request);

/* The service of an address and options: one per worker. NULL: no memory. */
ngx_pelton_service_t *ngx_pelton_service(const char *address, const ngx_pelton_options_t *options);
/* The service of the directive `pelton_service`, and its timeout in milliseconds, 0 without one. NULL: no such one. */
ngx_pelton_service_t *ngx_pelton_configured(const char *name, double *timeout);
/* Submits. PELTON_OK: notified, or the reply is in *out, in place, until ngx_pelton_release, or with NGX_PELTON_VIEW
 * until the slot of out->ticket is released. NGX_PELTON_WAITS: sleep on the slot of out->ticket. With the ticket of a
 * slot that waited for space, that slot is used again, and belongs to the caller after other results; 0: none.
 * traceparent: a text with its NUL, or NULL. */
int ngx_pelton_submit(ngx_pelton_service_t *service, double ticket, const char *data, size_t size,
                      const char *traceparent, uint32_t flags, ngx_pelton_reply_t *out);
/* Releases the reply of ngx_pelton_submit. */
void ngx_pelton_release(ngx_pelton_service_t *service);
/* Takes a slot's next completion. PELTON_OK: valid until the slot's next function. NGX_PELTON_WAITS: none yet; if
 * is_last, the caller releases the slot then. NGX_PELTON_SUBMIT_AGAIN. */
int ngx_pelton_take(double ticket, int is_last, ngx_pelton_reply_t *out);
/* The reply of a call with NGX_PELTON_VIEW, which has returned it. Its address may change at each
 * use of the client and in the loop's next iteration.
 * PELTON_CLOSED: its slot was released. */
int ngx_pelton_view(double ticket, ngx_pelton_reply_t *out);
void ngx_pelton_get_info(ngx_pelton_service_t *service, ngx_pelton_info_t *out);

/* Starts an operation. NGX_PELTON_WAITS: sleep on the slot of out->ticket. Other results: it is done, and *out valid
 * until that slot is released, if the ticket is not 0. */
int ngx_pelton_file_start(const ngx_pelton_operation_t *wanted, ngx_pelton_file_result_t *out);
/* Takes the result, as ngx_pelton_take. */
int ngx_pelton_file_take(double ticket, int is_last, ngx_pelton_file_result_t *out);
/* Closes a file without waiting. */
void ngx_pelton_file_close(pelton_file *file);
/* Operations that have not completed. */
uint32_t ngx_pelton_files_in_flight(void);

/* ---- Slots ------------------------------------------------------------------------------------------------------- */

typedef struct ngx_pelton_slot_s ngx_pelton_slot_t;

/* A kind of slots, whose structures begin with ngx_pelton_slot_t. */
typedef struct {
    size_t size;
    void (*cancel)(ngx_pelton_slot_t *slot); /* before the release */
    ngx_queue_t free;
} ngx_pelton_kind_t;

struct ngx_pelton_slot_s {
    ngx_queue_t queue;      /* of free slots; of a used one its user's */
    ngx_queue_t of_request;
    ngx_pelton_kind_t *kind;
    void *semaphore;
    ngx_cycle_t *cycle; /* whose ngx_lua has the semaphore */
    uint32_t index;
    uint32_t generation;
    unsigned is_used : 1;
    unsigned is_waiting : 1; /* a coroutine sleeps on the semaphore */
    unsigned is_bound : 1;
};

/* Memory of the worker, zeroed and never freed. It is for services and slots, which are reused. NULL: none. */
void *ngx_pelton_worker_calloc(size_t size);
/* NULL: no memory. */
ngx_pelton_slot_t *ngx_pelton_use_slot(ngx_pelton_kind_t *kind);
void ngx_pelton_free_slot(ngx_pelton_slot_t *slot);
/* Never 0, and a whole number that a double represents. */
uint64_t ngx_pelton_ticket(const ngx_pelton_slot_t *slot);
/* NULL: it was released, or is of another kind. kind NULL: any. */
ngx_pelton_slot_t *ngx_pelton_find_slot(double ticket, const ngx_pelton_kind_t *kind);
/* Wakes the slot's coroutine, if it sleeps. */
void ngx_pelton_wake(ngx_pelton_slot_t *slot);
/* The worker ends: frees the semaphores, which ngx_lua's memory pool does not, and refuses what comes later. */
void ngx_pelton_close_slots(void);

/* ---- The event loop ---------------------------------------------------------------------------------------------- */

/* nginx has polled its descriptors. */
void ngx_pelton_begin_tick(void);
ngx_int_t ngx_pelton_is_tick_over(void);

/* Polls fd for reading. NULL: nginx has no free connection, or its log says why epoll refused. */
ngx_connection_t *ngx_pelton_watch(int fd, void *data, ngx_event_handler_pt handler);
#define NGX_PELTON_NOT_WATCHED \
    "nginx has no free connection, or cannot poll it: raise worker_connections, or see its log"
/* The descriptor stays open. */
void ngx_pelton_unwatch(ngx_connection_t *connection);

/* NULL, or the reason why this process can have no client or engine. */
const char *ngx_pelton_refusal(void);

/* The worker ends. */
void ngx_pelton_close_calls(void);
void ngx_pelton_close_files(void);

#endif
