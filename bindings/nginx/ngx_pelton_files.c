/* Files from nginx: one engine per worker, in its event loop, for resty/pelton/file.lua.
 *
 * An operation's token is its slot's ticket. A completion after the slot's release finds no slot, and a file that it
 * opened is closed. What the page cache has is done within the call, until the tick is over. */
#include "ngx_pelton.h"

#include <stdatomic.h>

/* Completions taken with one call. */
#define NGX_PELTON_DONE_MAX 64

/* An operation's path, or the bytes that it reads or writes. The slot and the engine, with the kernel, each have a
 * reference. The last one frees it, on any thread: so it is from no pool. */
typedef struct {
    atomic_int references;
    struct iovec memory;
    char bytes[];
} ngx_pelton_memory_t;

typedef enum {
    ngx_pelton_file_waits, /* for space in the engine */
    ngx_pelton_file_submitted,
    ngx_pelton_file_done
} ngx_pelton_file_state_t;

typedef struct {
    ngx_pelton_slot_t slot; /* its queue: waiting for space, or done and not woken */
    ngx_pelton_file_state_t state;
    ngx_pelton_memory_t *memory;
    pelton_operation operation;
    pelton_file *file; /* opened */
    uint64_t bytes;
    int code;
    int error;
    unsigned is_queued : 1;
} ngx_pelton_work_t;

static void ngx_pelton_cancel_work(ngx_pelton_slot_t *slot);

static ngx_pelton_kind_t ngx_pelton_works = {sizeof(ngx_pelton_work_t), ngx_pelton_cancel_work,
                                             {&ngx_pelton_works.free, &ngx_pelton_works.free}};
static pelton_engine *ngx_pelton_engine;
static ngx_connection_t *ngx_pelton_engine_connection;
static ngx_uint_t ngx_pelton_works_in_flight; /* without a taken completion */
static ngx_event_t ngx_pelton_files_event;
static ngx_queue_t ngx_pelton_works_waiting = {&ngx_pelton_works_waiting, &ngx_pelton_works_waiting};
static ngx_queue_t ngx_pelton_works_done = {&ngx_pelton_works_done, &ngx_pelton_works_done};
static char ngx_pelton_file_text[512];

static ngx_pelton_work_t *ngx_pelton_work_of(ngx_pelton_slot_t *slot) { return (ngx_pelton_work_t *)(void *)slot; }

static ngx_pelton_work_t *ngx_pelton_queued_work(ngx_queue_t *at) {
    return ngx_pelton_work_of(ngx_queue_data(at, ngx_pelton_slot_t, queue));
}

static void ngx_pelton_enqueue_work(ngx_pelton_work_t *work, ngx_queue_t *queue) {
    work->is_queued = 1;
    ngx_queue_insert_tail(queue, &work->slot.queue);
}

static void ngx_pelton_dequeue_work(ngx_pelton_work_t *work) {
    if (work->is_queued) {
        work->is_queued = 0;
        ngx_queue_remove(&work->slot.queue);
    }
}

/* The tick takes completions and arms. It is needed after each submission and each take, while operations are in
 * flight. */
static void ngx_pelton_post_files(void) {
    if (ngx_pelton_works_in_flight > 0 && !ngx_pelton_files_event.posted) {
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_events);
    }
}

/* Any thread. */
static void ngx_pelton_release_memory(void *context) {
    ngx_pelton_memory_t *memory = context;
    if (atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) == 1) {
        ngx_free(memory);
    }
}

/* Without waiting. */
void ngx_pelton_file_close(pelton_file *file) {
    pelton_operation operation;
    size_t taken = 0;
    ngx_memzero(&operation, sizeof operation);
    operation.kind = PELTON_FILE_CLOSE;
    operation.file = file;
    /* An accepted operation can fail to start. */
    if (ngx_pelton_engine == NULL ||
        (pelton_engine_submit(ngx_pelton_engine, &operation, 1, &taken) != PELTON_OK && taken == 0)) {
        (void)pelton_close(file);
        return;
    }
    ngx_pelton_works_in_flight++;
    ngx_pelton_post_files();
}

/* ---- The tick ---------------------------------------------------------------------------------------------------- */

static void ngx_pelton_complete(const pelton_file_completion *completion) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(ngx_pelton_find_slot((double)completion->token, &ngx_pelton_works));
    ngx_pelton_works_in_flight--;
    if (work == NULL) {
        if (completion->file != NULL) {
            ngx_pelton_file_close(completion->file);
        }
        return;
    }
    work->state = ngx_pelton_file_done;
    work->code = completion->code;
    work->error = completion->error;
    work->file = completion->file;
    work->bytes = completion->stat != NULL ? completion->stat->bytes : completion->count;
    ngx_pelton_wake(&work->slot);
}

static void ngx_pelton_take_completions(void) {
    pelton_file_completion done[NGX_PELTON_DONE_MAX];
    size_t taken = 0, i;
    while (pelton_engine_completions(ngx_pelton_engine, PELTON_NO_WAIT, done, NGX_PELTON_DONE_MAX, &taken) ==
           PELTON_OK) {
        for (i = 0; i < taken; i++) {
            ngx_pelton_complete(&done[i]);
        }
        if (taken < NGX_PELTON_DONE_MAX) {
            break;
        }
    }
}

/* PELTON_AGAIN: the engine has no space. */
static int ngx_pelton_submit_work(ngx_pelton_work_t *work) {
    size_t taken = 0;
    int code;
    if (work->memory != NULL && work->operation.release != NULL) {
        atomic_fetch_add_explicit(&work->memory->references, 1, memory_order_relaxed);
    }
    code = pelton_engine_submit(ngx_pelton_engine, &work->operation, 1, &taken);
    if (taken == 1) {
        ngx_pelton_works_in_flight++;
        work->state = ngx_pelton_file_submitted;
        return PELTON_OK;
    }
    if (work->memory != NULL && work->operation.release != NULL) {
        ngx_pelton_release_memory(work->memory);
    }
    return code == PELTON_OK ? PELTON_AGAIN : code;
}

static void ngx_pelton_failed(ngx_pelton_work_t *work, int code) {
    work->state = ngx_pelton_file_done;
    work->code = code;
    work->error = 0;
    (void)snprintf(ngx_pelton_file_text, sizeof ngx_pelton_file_text, "%s", pelton_error_detail());
    ngx_pelton_wake(&work->slot);
}

static void ngx_pelton_files_tick(ngx_event_t *event) {
    int code;
    if (ngx_pelton_engine == NULL) {
        return;
    }
    /* Set if it was posted for after nginx's poll. */
    if (event->data != NULL) {
        event->data = NULL;
        ngx_pelton_begin_tick();
    }
    while (!ngx_queue_empty(&ngx_pelton_works_done)) {
        ngx_pelton_work_t *work = ngx_pelton_queued_work(ngx_queue_head(&ngx_pelton_works_done));
        ngx_pelton_dequeue_work(work);
        ngx_pelton_wake(&work->slot);
    }
    ngx_pelton_take_completions();
    while (!ngx_queue_empty(&ngx_pelton_works_waiting)) {
        ngx_pelton_work_t *work = ngx_pelton_queued_work(ngx_queue_head(&ngx_pelton_works_waiting));
        code = ngx_pelton_submit_work(work);
        if (code == PELTON_AGAIN) {
            break;
        }
        ngx_pelton_dequeue_work(work);
        if (code != PELTON_OK) {
            ngx_pelton_failed(work, code);
        }
    }
    code = pelton_engine_arm(ngx_pelton_engine);
    if (code == PELTON_READY) {
        ngx_pelton_files_event.data = &ngx_pelton_files_event;
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_next_events);
    } else if (code != PELTON_OK) {
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0,
                      "pelton: the engine of files could not be armed, and is retried: %s",
                      pelton_error_detail());
        ngx_add_timer(&ngx_pelton_files_event, 100);
    }
}

static void ngx_pelton_engine_readable(ngx_event_t *event) {
    (void)event;
    ngx_pelton_begin_tick();
    /* The descriptor stays readable until the next arm. */
    if (!ngx_pelton_files_event.posted) {
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_events);
    }
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------- */

static int ngx_pelton_file_fail(ngx_pelton_file_result_t *out, int code, const char *text) {
    out->data = text;
    out->error = 0;
    return code;
}

static int ngx_pelton_open_engine(ngx_pelton_file_result_t *out) {
    const char *why = ngx_pelton_refusal();
    int code;
    if (why != NULL) {
        return ngx_pelton_file_fail(out, PELTON_REFUSED, why);
    }
    code = pelton_engine_open(NULL, &ngx_pelton_engine);
    if (code != PELTON_OK) {
        (void)snprintf(ngx_pelton_file_text, sizeof ngx_pelton_file_text, "%s", pelton_error_detail());
        return ngx_pelton_file_fail(out, code, ngx_pelton_file_text);
    }
    ngx_pelton_engine_connection =
        ngx_pelton_watch(pelton_engine_fd(ngx_pelton_engine), NULL, ngx_pelton_engine_readable);
    if (ngx_pelton_engine_connection == NULL) {
        (void)pelton_close(ngx_pelton_engine);
        ngx_pelton_engine = NULL;
        return ngx_pelton_file_fail(out, PELTON_SYSTEM, NGX_PELTON_NOT_WATCHED);
    }
    ngx_pelton_files_event.handler = ngx_pelton_files_tick;
    ngx_pelton_files_event.log = ngx_cycle->log;
    ngx_pelton_files_event.cancelable = 1;
    return PELTON_OK;
}

/* An opened file belongs to Lua from now on. */
static int ngx_pelton_give_result(ngx_pelton_work_t *work, ngx_pelton_file_result_t *out) {
    out->bytes = work->bytes;
    out->error = work->error;
    out->file = work->file;
    work->file = NULL;
    if (work->code == PELTON_OK) {
        out->data = work->memory == NULL ? "" : work->memory->memory.iov_base;
        return PELTON_OK;
    }
    out->data = work->error != 0 ? strerror(work->error) : ngx_pelton_file_text;
    return work->code;
}

int ngx_pelton_file_start(const ngx_pelton_operation_t *wanted, ngx_pelton_file_result_t *out) {
    ngx_pelton_work_t *work;
    size_t path = wanted->path == NULL ? 0 : strlen(wanted->path) + 1;
    int code, has_memory = wanted->kind == PELTON_FILE_READ || wanted->kind == PELTON_FILE_WRITE;
    out->ticket = 0;
    out->file = NULL;
    if (ngx_pelton_engine == NULL && (code = ngx_pelton_open_engine(out)) != PELTON_OK) {
        return code;
    }
    work = ngx_pelton_work_of(ngx_pelton_use_slot(&ngx_pelton_works));
    if (work == NULL) {
        return ngx_pelton_file_fail(out, PELTON_SYSTEM, "no memory");
    }
    work->file = NULL;
    work->is_queued = 0;
    work->state = ngx_pelton_file_waits;
    work->memory = NULL;
    ngx_memzero(&work->operation, sizeof work->operation);
    work->operation.kind = wanted->kind;
    work->operation.file = wanted->file;
    work->operation.offset = wanted->offset;
    work->operation.bytes = wanted->bytes;
    work->operation.open_flags = wanted->open_flags;
    work->operation.mode = wanted->mode;
    work->operation.token = ngx_pelton_ticket(&work->slot);
    if (has_memory || path > 0) {
        size_t bytes = has_memory ? wanted->bytes : path;
        work->memory = bytes <= INT32_MAX ? ngx_alloc(sizeof *work->memory + bytes, ngx_cycle->log) : NULL;
        if (work->memory == NULL) {
            ngx_pelton_free_slot(&work->slot);
            return ngx_pelton_file_fail(out, PELTON_SYSTEM, "no memory for the bytes");
        }
        atomic_init(&work->memory->references, 1);
        work->memory->memory.iov_base = work->memory->bytes;
        work->memory->memory.iov_len = bytes;
        if (has_memory) {
            if (wanted->kind == PELTON_FILE_WRITE) {
                ngx_memcpy(work->memory->bytes, wanted->data, bytes);
            }
            work->operation.memory = &work->memory->memory;
            work->operation.memory_count = 1;
            work->operation.release = ngx_pelton_release_memory;
            work->operation.context = work->memory;
        } else {
            ngx_memcpy(work->memory->bytes, wanted->path, bytes);
            work->operation.path = work->memory->bytes;
        }
    }
    out->ticket = (double)work->operation.token;
    code = ngx_queue_empty(&ngx_pelton_works_waiting) ? ngx_pelton_submit_work(work) : PELTON_AGAIN;
    if (code == PELTON_AGAIN) {
        ngx_pelton_enqueue_work(work, &ngx_pelton_works_waiting);
    } else if (code != PELTON_OK) {
        ngx_pelton_failed(work, code);
        return ngx_pelton_give_result(work, out);
    } else {
        ngx_pelton_take_completions();
        ngx_pelton_post_files();
        if (work->state == ngx_pelton_file_done && !ngx_pelton_is_tick_over()) {
            return ngx_pelton_give_result(work, out);
        }
    }
    work->slot.is_waiting = 1;
    if (work->state == ngx_pelton_file_done) {
        /* The tick is over: nginx polls first. */
        ngx_pelton_enqueue_work(work, &ngx_pelton_works_done);
        ngx_pelton_files_event.data = &ngx_pelton_files_event;
        if (!ngx_pelton_files_event.posted) {
            ngx_post_event(&ngx_pelton_files_event, &ngx_posted_next_events);
        }
    }
    return NGX_PELTON_WAITS;
}

int ngx_pelton_file_take(double ticket, int is_last, ngx_pelton_file_result_t *out) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(ngx_pelton_find_slot(ticket, &ngx_pelton_works));
    out->ticket = ticket;
    out->file = NULL;
    if (work == NULL) {
        return ngx_pelton_file_fail(out, PELTON_CLOSED, "the request that started this has ended");
    }
    work->slot.is_waiting = 0;
    if (is_last && work->state == ngx_pelton_file_submitted) {
        ngx_pelton_take_completions();
        ngx_pelton_post_files();
    }
    if (work->state == ngx_pelton_file_done) {
        return ngx_pelton_give_result(work, out);
    }
    work->slot.is_waiting = !is_last;
    return NGX_PELTON_WAITS;
}

static void ngx_pelton_cancel_work(ngx_pelton_slot_t *slot) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(slot);
    ngx_pelton_dequeue_work(work);
    if (work->state == ngx_pelton_file_waits && work->operation.kind == PELTON_FILE_CLOSE) {
        ngx_pelton_file_close(work->operation.file);
    }
    if (work->state == ngx_pelton_file_submitted && work->operation.kind != PELTON_FILE_CLOSE) {
        (void)pelton_engine_cancel(ngx_pelton_engine, work->operation.token);
        ngx_pelton_post_files();
    }
    if (work->file != NULL) {
        ngx_pelton_file_close(work->file);
        work->file = NULL;
    }
    if (work->memory != NULL) {
        ngx_pelton_release_memory(work->memory);
        work->memory = NULL;
    }
}

uint32_t ngx_pelton_files_in_flight(void) {
    return (uint32_t)ngx_pelton_works_in_flight + !ngx_queue_empty(&ngx_pelton_works_waiting);
}

void ngx_pelton_close_files(void) {
    if (ngx_pelton_engine == NULL) {
        return;
    }
    ngx_pelton_unwatch(ngx_pelton_engine_connection);
    if (ngx_pelton_files_event.timer_set) {
        ngx_del_timer(&ngx_pelton_files_event);
    }
    /* Memory that the kernel still uses is freed when it has finished. */
    (void)pelton_close(ngx_pelton_engine);
    ngx_pelton_engine = NULL;
    ngx_pelton_works_in_flight = 0;
}
