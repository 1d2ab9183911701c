/* pelton in nginx: the module, and what its parts have in common, see ngx_pelton.h. resty/pelton.lua and resty/pelton/file.lua call the
 * functions below, and those of ngx_pelton_calls.c and ngx_pelton_files.c, by LuaJIT's FFI. All is the worker's one thread's, but where
 * it says otherwise.
 *
 * WHO ASKED. A request, or timer, that ends while slots are its own has them given back, by a clean-up handler of its pool. */
#include "ngx_pelton.h"

/* Of resty/pelton/base.lua: both are of the same version, and their structures of the same size, or Lua refuses. */
#define NGX_PELTON_VERSION 2

/* A ticket is so many bits of the slot's number, and of its generation above them: 51 in all. */
#define NGX_PELTON_INDEX_BITS 20
#define NGX_PELTON_GENERATION_BITS 31

/* In a request's pool. */
typedef struct {
    ngx_queue_t slots;
} ngx_pelton_asker_t;

typedef int (*ngx_pelton_sema_new_pt)(void **semaphore, int count, char **error);
typedef int (*ngx_pelton_sema_post_pt)(void *semaphore, int count);
typedef void (*ngx_pelton_sema_gc_pt)(void *semaphore);

static ngx_pelton_sema_new_pt ngx_pelton_sema_new;
static ngx_pelton_sema_post_pt ngx_pelton_sema_post;
static ngx_pelton_sema_gc_pt ngx_pelton_sema_gc;
static ngx_pelton_slot_t **ngx_pelton_slots;
static uint32_t ngx_pelton_slots_made;
static uint32_t ngx_pelton_slots_room;
static int64_t ngx_pelton_chain_ns;
static ngx_uint_t ngx_pelton_has_ended;

int64_t ngx_pelton_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void ngx_pelton_begin_chain(void) { ngx_pelton_chain_ns = ngx_pelton_now(); }

ngx_int_t ngx_pelton_is_chain_over(void) { return ngx_pelton_now() - ngx_pelton_chain_ns > NGX_PELTON_CHAIN_NS; }

const char *ngx_pelton_why_not_here(void) {
    if (ngx_process == NGX_PROCESS_MASTER || ngx_cycle->connections == NULL) {
        return "this is not a worker: call from a request, a timer or init_worker";
    }
    return ngx_pelton_has_ended ? "the worker ends" : NULL;
}

/* ---- Slots ------------------------------------------------------------------------------------------------------------- */

static ngx_pelton_slot_t *ngx_pelton_new_slot(ngx_pelton_kind_t *kind) {
    ngx_pelton_slot_t *slot;
    if (ngx_pelton_slots_made == 1 << NGX_PELTON_INDEX_BITS) {
        return NULL;
    }
    if (ngx_pelton_slots_made == ngx_pelton_slots_room) {
        uint32_t room = ngx_pelton_slots_room == 0 ? 64 : ngx_pelton_slots_room * 2;
        ngx_pelton_slot_t **slots = realloc(ngx_pelton_slots, room * sizeof *slots);
        if (slots == NULL) {
            return NULL;
        }
        ngx_pelton_slots = slots;
        ngx_pelton_slots_room = room;
    }
    slot = calloc(1, kind->size);
    if (slot != NULL) {
        slot->kind = kind;
        slot->generation = 1;
        slot->index = ngx_pelton_slots_made;
        ngx_pelton_slots[ngx_pelton_slots_made++] = slot;
    }
    return slot;
}

ngx_pelton_slot_t *ngx_pelton_take_slot(ngx_pelton_kind_t *kind) {
    ngx_pelton_slot_t *slot;
    char *error;
    if (ngx_queue_empty(&kind->free)) {
        slot = ngx_pelton_new_slot(kind);
        if (slot == NULL) {
            return NULL;
        }
    } else {
        /* The one used last: its memory is warm. */
        slot = ngx_queue_data(ngx_queue_head(&kind->free), ngx_pelton_slot_t, queue);
        ngx_queue_remove(&slot->queue);
    }
    /* Without master process a reload leaves this process, and what it had of ngx_lua's, behind. */
    if (slot->cycle != ngx_cycle) {
        if (ngx_pelton_sema_new(&slot->semaphore, 0, &error) != 0) {
            slot->cycle = NULL;
            ngx_queue_insert_head(&kind->free, &slot->queue);
            return NULL;
        }
        slot->cycle = (ngx_cycle_t *)ngx_cycle;
    }
    slot->is_taken = 1;
    slot->is_waiting = 0;
    slot->has_asker = 0;
    return slot;
}

void ngx_pelton_give_slot(ngx_pelton_slot_t *slot) {
    slot->kind->let_go(slot);
    if (slot->has_asker) {
        ngx_queue_remove(&slot->of_asker);
    }
    /* A coroutine of another request's may sleep here, which must not be woken for who has the slot next. */
    ngx_pelton_wake(slot);
    slot->is_taken = 0;
    slot->generation = slot->generation == (1U << NGX_PELTON_GENERATION_BITS) - 1 ? 1 : slot->generation + 1;
    ngx_queue_insert_head(&slot->kind->free, &slot->queue);
}

uint64_t ngx_pelton_ticket(const ngx_pelton_slot_t *slot) { return (uint64_t)slot->generation << NGX_PELTON_INDEX_BITS | slot->index; }

static ngx_pelton_slot_t *ngx_pelton_any_of_ticket(uint64_t ticket) {
    uint64_t index = ticket & ((1 << NGX_PELTON_INDEX_BITS) - 1);
    ngx_pelton_slot_t *slot = index < ngx_pelton_slots_made ? ngx_pelton_slots[index] : NULL;
    return slot != NULL && slot->is_taken && slot->generation == ticket >> NGX_PELTON_INDEX_BITS ? slot : NULL;
}

ngx_pelton_slot_t *ngx_pelton_of_ticket(uint64_t ticket, const ngx_pelton_kind_t *kind) {
    ngx_pelton_slot_t *slot = ngx_pelton_any_of_ticket(ticket);
    return slot != NULL && slot->kind == kind ? slot : NULL;
}

void ngx_pelton_wake(ngx_pelton_slot_t *slot) {
    if (slot->is_waiting) {
        slot->is_waiting = 0;
        ngx_pelton_sema_post(slot->semaphore, 1);
    }
}

/* ---- On nginx's loop --------------------------------------------------------------------------------------------------- */

ngx_connection_t *ngx_pelton_watch(int fd, void *data, ngx_event_handler_pt handler) {
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

void ngx_pelton_unwatch(ngx_connection_t *connection) {
    if (connection->read->active) {
        (void)ngx_del_event(connection->read, NGX_READ_EVENT, 0);
    }
    if (connection->read->posted) {
        ngx_delete_posted_event(connection->read);
    }
    ngx_free_connection(connection);
    connection->fd = (ngx_socket_t)-1;
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------------- */

/* Takes ngx_lua's functions, which no header has. */
int ngx_pelton_version(void *sema_new, void *sema_post, void *sema_gc) {
    ngx_pelton_sema_new = (ngx_pelton_sema_new_pt)sema_new;
    ngx_pelton_sema_post = (ngx_pelton_sema_post_pt)sema_post;
    ngx_pelton_sema_gc = (ngx_pelton_sema_gc_pt)sema_gc;
    return NGX_PELTON_VERSION * 100000 + (int)(sizeof(ngx_pelton_options_t) + sizeof(ngx_pelton_answer_t) + sizeof(ngx_pelton_figures_t) +
                                               sizeof(ngx_pelton_operation_t) + sizeof(ngx_pelton_done_t));
}

/* Of a clock that nobody sets, as of the last time that nginx looked. */
double ngx_pelton_msec(void) { return (double)ngx_current_msec; }

/* NULL: the slot was given back. */
void *ngx_pelton_semaphore(double ticket) {
    ngx_pelton_slot_t *slot = ngx_pelton_any_of_ticket((uint64_t)ticket);
    return slot == NULL ? NULL : slot->semaphore;
}

void ngx_pelton_give_up(double ticket) {
    ngx_pelton_slot_t *slot = ngx_pelton_any_of_ticket((uint64_t)ticket);
    if (slot != NULL) {
        ngx_pelton_give_slot(slot);
    }
}

static void ngx_pelton_asker_ended(void *data) {
    ngx_pelton_asker_t *asker = data;
    while (!ngx_queue_empty(&asker->slots)) {
        ngx_pelton_give_slot(ngx_queue_data(ngx_queue_head(&asker->slots), ngx_pelton_slot_t, of_asker));
    }
}

/* Has the slot given up when the request, or the timer, ends. */
int ngx_pelton_park(double ticket, ngx_http_request_t *request) {
    ngx_pelton_slot_t *slot = ngx_pelton_any_of_ticket((uint64_t)ticket);
    ngx_pool_cleanup_t *cleanup;
    ngx_pelton_asker_t *asker;
    if (slot == NULL) {
        return PELTON_CLOSED;
    }
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

uint32_t ngx_pelton_slots_in_all(void) { return ngx_pelton_slots_made; }

/* ---- The module -------------------------------------------------------------------------------------------------------- */

/* A worker ends: the services are told, and nginx finds none of its connections open. */
static void ngx_pelton_exit_process(ngx_cycle_t *cycle) {
    uint32_t i;
    (void)cycle;
    ngx_pelton_has_ended = 1;
    for (i = 0; i < ngx_pelton_slots_made; i++) {
        if (ngx_pelton_slots[i]->cycle == ngx_cycle) {
            ngx_pelton_sema_gc(ngx_pelton_slots[i]->semaphore);
            ngx_pelton_slots[i]->cycle = NULL;
            ngx_pelton_slots[i]->is_waiting = 0;
        }
    }
    ngx_pelton_end_calls();
    ngx_pelton_end_files();
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
