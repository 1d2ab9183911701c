/* Files from nginx: an engine per worker, on its event loop, for resty/pelton/file.lua.
 *
 * An operation is submitted with its slot's ticket as token, so what completes after its coroutine has let go of it finds nobody, and a file
 * that it has opened is closed. Of its memory the slot is one holder and the engine, with the kernel, the other: the last of the two frees
 * it, on whatever thread. What the page cache has is answered within the call, for a millisecond at a time; then the loop has its way. */
#include "ngx_pelton.h"

#include <stdatomic.h>

/* Completions taken with one call. */
#define NGX_PELTON_DONE_MAX 64

/* The copies of an operation's path, and of what it writes, or room for what it reads. */
typedef struct {
    atomic_int holders;
    struct iovec memory;
    char bytes[]; /* the path, if there is one, else the memory */
} ngx_pelton_memory_t;

typedef enum {
    ngx_pelton_file_waits, /* for room */
    ngx_pelton_file_begun,
    ngx_pelton_file_done
} ngx_pelton_file_state_t;

typedef struct {
    ngx_pelton_slot_t slot; /* its queue: of those that wait for room, or are done and to be woken */
    ngx_pelton_file_state_t state;
    ngx_pelton_memory_t *memory;
    pelton_operation operation;
    pelton_file *file; /* that was opened */
    uint64_t bytes;
    int code;
    int error;
    unsigned is_queued : 1;
} ngx_pelton_work_t;

static void ngx_pelton_let_go_of_work(ngx_pelton_slot_t *slot);

static ngx_pelton_kind_t ngx_pelton_works = {sizeof(ngx_pelton_work_t), ngx_pelton_let_go_of_work,
                                             {&ngx_pelton_works.free, &ngx_pelton_works.free}};
static pelton_engine *ngx_pelton_engine;
static ngx_connection_t *ngx_pelton_engine_connection;
static ngx_uint_t ngx_pelton_works_begun; /* whose completions were not taken */
static ngx_event_t ngx_pelton_files_event;
static ngx_queue_t ngx_pelton_works_waiting = {&ngx_pelton_works_waiting, &ngx_pelton_works_waiting};
static ngx_queue_t ngx_pelton_works_done = {&ngx_pelton_works_done, &ngx_pelton_works_done};
static char ngx_pelton_file_text[512];

static ngx_pelton_work_t *ngx_pelton_work_of(ngx_pelton_slot_t *slot) { return (ngx_pelton_work_t *)(void *)slot; }

static ngx_pelton_work_t *ngx_pelton_queue_work(ngx_queue_t *at) {
    return ngx_pelton_work_of(ngx_queue_data(at, ngx_pelton_slot_t, queue));
}

static void ngx_pelton_enqueue(ngx_pelton_work_t *work, ngx_queue_t *queue) {
    work->is_queued = 1;
    ngx_queue_insert_tail(queue, &work->slot.queue);
}

static void ngx_pelton_dequeue(ngx_pelton_work_t *work) {
    if (work->is_queued) {
        work->is_queued = 0;
        ngx_queue_remove(&work->slot.queue);
    }
}

/* Has what completes taken, and the engine armed: needed whenever something is in flight and completions were taken, or something submitted. */
static void ngx_pelton_post_files(void) {
    if (ngx_pelton_works_begun > 0 && !ngx_pelton_files_event.posted) {
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_events);
    }
}

/* Any thread. */
static void ngx_pelton_release_memory(void *context) {
    ngx_pelton_memory_t *memory = context;
    if (atomic_fetch_sub_explicit(&memory->holders, 1, memory_order_acq_rel) == 1) {
        free(memory);
    }
}

/* Closes a file that nobody has any more, without waiting for it. */
static void ngx_pelton_close_file(pelton_file *file) {
    pelton_operation operation;
    size_t taken = 0;
    ngx_memzero(&operation, sizeof operation);
    operation.kind = PELTON_FILE_CLOSE;
    operation.file = file;
    /* It may be taken, and fail to begin. */
    if (ngx_pelton_engine == NULL || (pelton_file_submit(ngx_pelton_engine, &operation, 1, &taken) != PELTON_OK && taken == 0)) {
        (void)pelton_close(file);
        return;
    }
    ngx_pelton_works_begun++;
    ngx_pelton_post_files();
}

/* ---- What completes ---------------------------------------------------------------------------------------------------- */

static void ngx_pelton_complete(const pelton_file_completion *completion) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(ngx_pelton_of_ticket(completion->token, &ngx_pelton_works));
    ngx_pelton_works_begun--;
    if (work == NULL) {
        if (completion->file != NULL) {
            ngx_pelton_close_file(completion->file);
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

/* Takes what has completed. */
static void ngx_pelton_take_completions(void) {
    pelton_file_completion done[NGX_PELTON_DONE_MAX];
    size_t taken = 0, i;
    while (pelton_file_completions(ngx_pelton_engine, PELTON_NO_WAIT, done, NGX_PELTON_DONE_MAX, &taken) == PELTON_OK) {
        for (i = 0; i < taken; i++) {
            ngx_pelton_complete(&done[i]);
        }
        if (taken < NGX_PELTON_DONE_MAX) {
            break;
        }
    }
}

/* Submits an operation. PELTON_AGAIN: there is no room. */
static int ngx_pelton_submit_work(ngx_pelton_work_t *work) {
    size_t taken = 0;
    int code;
    if (work->memory != NULL && work->operation.release != NULL) {
        atomic_fetch_add_explicit(&work->memory->holders, 1, memory_order_relaxed);
    }
    code = pelton_file_submit(ngx_pelton_engine, &work->operation, 1, &taken);
    if (taken == 1) {
        ngx_pelton_works_begun++;
        work->state = ngx_pelton_file_begun;
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

static void ngx_pelton_files_turn(ngx_event_t *event) {
    int code;
    if (ngx_pelton_engine == NULL) {
        return;
    }
    /* Set where it is posted for when nginx has looked around. */
    if (event->data != NULL) {
        event->data = NULL;
        ngx_pelton_begin_chain();
    }
    while (!ngx_queue_empty(&ngx_pelton_works_done)) {
        ngx_pelton_work_t *work = ngx_pelton_queue_work(ngx_queue_head(&ngx_pelton_works_done));
        ngx_pelton_dequeue(work);
        ngx_pelton_wake(&work->slot);
    }
    ngx_pelton_take_completions();
    while (!ngx_queue_empty(&ngx_pelton_works_waiting)) {
        ngx_pelton_work_t *work = ngx_pelton_queue_work(ngx_queue_head(&ngx_pelton_works_waiting));
        code = ngx_pelton_submit_work(work);
        if (code == PELTON_AGAIN) {
            break;
        }
        ngx_pelton_dequeue(work);
        if (code != PELTON_OK) {
            ngx_pelton_failed(work, code);
        }
    }
    code = pelton_arm(ngx_pelton_engine);
    if (code == PELTON_OK) {
        ngx_pelton_files_event.data = &ngx_pelton_files_event;
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_next_events);
    } else if (code != PELTON_AGAIN) {
        ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0, "pelton: files are looked at again later: %s", pelton_error_detail());
        ngx_add_timer(&ngx_pelton_files_event, 100);
    }
}

static void ngx_pelton_engine_readable(ngx_event_t *event) {
    (void)event;
    ngx_pelton_begin_chain();
    /* Whatever is in flight: it is readable until it is armed again. */
    if (!ngx_pelton_files_event.posted) {
        ngx_post_event(&ngx_pelton_files_event, &ngx_posted_events);
    }
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------------- */

static int ngx_pelton_file_fail(ngx_pelton_done_t *out, int code, const char *text) {
    out->data = text;
    out->error = 0;
    return code;
}

static int ngx_pelton_open_engine(ngx_pelton_done_t *out) {
    const char *why = ngx_pelton_why_not_here();
    int code;
    if (why != NULL) {
        return ngx_pelton_file_fail(out, PELTON_REFUSED, why);
    }
    code = pelton_engine_open(NULL, &ngx_pelton_engine);
    if (code != PELTON_OK) {
        (void)snprintf(ngx_pelton_file_text, sizeof ngx_pelton_file_text, "%s", pelton_error_detail());
        return ngx_pelton_file_fail(out, code, ngx_pelton_file_text);
    }
    ngx_pelton_engine_connection = ngx_pelton_watch(pelton_fd(ngx_pelton_engine), NULL, ngx_pelton_engine_readable);
    if (ngx_pelton_engine_connection == NULL) {
        (void)pelton_close(ngx_pelton_engine);
        ngx_pelton_engine = NULL;
        return ngx_pelton_file_fail(out, PELTON_SYSTEM, "nginx has no connection left for files, or cannot watch them: raise "
                                                        "worker_connections, or see its log");
    }
    ngx_pelton_files_event.handler = ngx_pelton_files_turn;
    ngx_pelton_files_event.log = ngx_cycle->log;
    ngx_pelton_files_event.cancelable = 1;
    return PELTON_OK;
}

/* Tells what has come of an operation that is done. What was opened is Lua's from now on. */
static int ngx_pelton_tell(ngx_pelton_work_t *work, ngx_pelton_done_t *out) {
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

/* Begins an operation. PELTON_OK, or a code: it is done, and what has come of it is good until the slot of out->ticket is given back, if that
 * is not 0. NGX_PELTON_WAITS: sleep on that slot. */
int ngx_pelton_file(const ngx_pelton_operation_t *wanted, ngx_pelton_done_t *out) {
    ngx_pelton_work_t *work;
    size_t path = wanted->path == NULL ? 0 : strlen(wanted->path) + 1;
    int code, has_memory = wanted->kind == PELTON_FILE_READ || wanted->kind == PELTON_FILE_WRITE;
    out->ticket = 0;
    out->file = NULL;
    if (ngx_pelton_engine == NULL && (code = ngx_pelton_open_engine(out)) != PELTON_OK) {
        return code;
    }
    work = ngx_pelton_work_of(ngx_pelton_take_slot(&ngx_pelton_works));
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
        work->memory = bytes <= INT32_MAX ? malloc(sizeof *work->memory + bytes) : NULL;
        if (work->memory == NULL) {
            ngx_pelton_give_slot(&work->slot);
            return ngx_pelton_file_fail(out, PELTON_SYSTEM, "no memory for the bytes");
        }
        atomic_init(&work->memory->holders, 1);
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
        ngx_pelton_enqueue(work, &ngx_pelton_works_waiting);
    } else if (code != PELTON_OK) {
        ngx_pelton_failed(work, code);
        return ngx_pelton_tell(work, out);
    } else {
        ngx_pelton_take_completions();
        ngx_pelton_post_files();
        if (work->state == ngx_pelton_file_done && !ngx_pelton_is_chain_over()) {
            return ngx_pelton_tell(work, out);
        }
    }
    work->slot.is_waiting = 1;
    if (work->state == ngx_pelton_file_done) {
        /* The loop first. */
        ngx_pelton_enqueue(work, &ngx_pelton_works_done);
        ngx_pelton_files_event.data = &ngx_pelton_files_event;
        if (!ngx_pelton_files_event.posted) {
            ngx_post_event(&ngx_pelton_files_event, &ngx_posted_next_events);
        }
    }
    return NGX_PELTON_WAITS;
}

/* As ngx_pelton_file has it, of a slot. NGX_PELTON_WAITS: not yet; unless it is the last time, when it is given up after that. */
int ngx_pelton_file_take(double ticket, int is_last, ngx_pelton_done_t *out) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(ngx_pelton_of_ticket((uint64_t)ticket, &ngx_pelton_works));
    out->ticket = ticket;
    out->file = NULL;
    if (work == NULL) {
        return ngx_pelton_file_fail(out, PELTON_CLOSED, "the request that asked this has ended");
    }
    work->slot.is_waiting = 0;
    if (is_last && work->state == ngx_pelton_file_begun) {
        ngx_pelton_take_completions();
        ngx_pelton_post_files();
    }
    if (work->state == ngx_pelton_file_done) {
        return ngx_pelton_tell(work, out);
    }
    work->slot.is_waiting = !is_last;
    return NGX_PELTON_WAITS;
}

/* Lua has no use for it any more. */
void ngx_pelton_file_drop(pelton_file *file) { ngx_pelton_close_file(file); }

static void ngx_pelton_let_go_of_work(ngx_pelton_slot_t *slot) {
    ngx_pelton_work_t *work = ngx_pelton_work_of(slot);
    ngx_pelton_dequeue(work);
    if (work->state == ngx_pelton_file_waits && work->operation.kind == PELTON_FILE_CLOSE) {
        ngx_pelton_close_file(work->operation.file);
    }
    if (work->state == ngx_pelton_file_begun && work->operation.kind != PELTON_FILE_CLOSE) {
        (void)pelton_file_cancel(ngx_pelton_engine, work->operation.token);
        ngx_pelton_post_files();
    }
    if (work->file != NULL) {
        ngx_pelton_close_file(work->file);
        work->file = NULL;
    }
    if (work->memory != NULL) {
        ngx_pelton_release_memory(work->memory);
        work->memory = NULL;
    }
}

/* Operations that are begun, or wait for room: for the tests. */
uint32_t ngx_pelton_files_in_flight(void) { return (uint32_t)ngx_pelton_works_begun + !ngx_queue_empty(&ngx_pelton_works_waiting); }

void ngx_pelton_end_files(void) {
    if (ngx_pelton_engine == NULL) {
        return;
    }
    ngx_pelton_unwatch(ngx_pelton_engine_connection);
    if (ngx_pelton_files_event.timer_set) {
        ngx_del_timer(&ngx_pelton_files_event);
    }
    /* Memory that the kernel still has is released when it has done with it. */
    (void)pelton_close(ngx_pelton_engine);
    ngx_pelton_engine = NULL;
    ngx_pelton_works_begun = 0;
}
