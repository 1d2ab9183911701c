/* Slots, on which coroutines sleep; descriptors in nginx's event loop; the tick's time. See ngx_pelton.h. */
#include "ngx_pelton.h"

/* A ticket has these bits for the slot's number, and above them those for its generation: 51 bits. */
#define NGX_PELTON_INDEX_BITS 20
#define NGX_PELTON_GENERATION_BITS 31

typedef int (*ngx_pelton_sema_new_pt)(void **semaphore, int count, char **error);
typedef int (*ngx_pelton_sema_post_pt)(void *semaphore, int count);
typedef void (*ngx_pelton_sema_gc_pt)(void *semaphore);

static ngx_pelton_sema_new_pt ngx_pelton_sema_new;
static ngx_pelton_sema_post_pt ngx_pelton_sema_post;
static ngx_pelton_sema_gc_pt ngx_pelton_sema_gc;
static ngx_pool_t *ngx_pelton_pool;
static ngx_array_t *ngx_pelton_slots; /* of ngx_pelton_slot_t * */
static int64_t ngx_pelton_tick_began_ns;
static ngx_uint_t ngx_pelton_has_ended;

/* A pool of its own: Lua may call before the worker has its cycle (init_by_lua), after its exit_process, and, without a
 * master process, after a reload, which replaces the cycle. */
void *ngx_pelton_worker_calloc(size_t size) {
    if (ngx_pelton_pool == NULL) {
        ngx_pelton_pool = ngx_create_pool(NGX_DEFAULT_POOL_SIZE, ngx_cycle->log);
        if (ngx_pelton_pool == NULL) {
            return NULL;
        }
    }
    ngx_pelton_pool->log = ngx_cycle->log;
    return ngx_pcalloc(ngx_pelton_pool, size);
}

/* ---- Slots ------------------------------------------------------------------------------------------------------- */

static ngx_pelton_slot_t *ngx_pelton_new_slot(ngx_pelton_kind_t *kind) {
    ngx_pelton_slot_t *slot = ngx_pelton_worker_calloc(kind->size), **place;
    if (slot == NULL) {
        return NULL;
    }
    if (ngx_pelton_slots == NULL) {
        ngx_pelton_slots = ngx_array_create(ngx_pelton_pool, 64, sizeof(ngx_pelton_slot_t *));
    }
    if (ngx_pelton_slots == NULL || ngx_pelton_slots->nelts == 1 << NGX_PELTON_INDEX_BITS ||
        (place = ngx_array_push(ngx_pelton_slots)) == NULL) {
        return NULL;
    }
    *place = slot;
    slot->kind = kind;
    slot->generation = 1;
    slot->index = (uint32_t)ngx_pelton_slots->nelts - 1;
    return slot;
}

ngx_pelton_slot_t *ngx_pelton_use_slot(ngx_pelton_kind_t *kind) {
    ngx_pelton_slot_t *slot;
    char *error;
    if (ngx_queue_empty(&kind->free)) {
        slot = ngx_pelton_new_slot(kind);
        if (slot == NULL) {
            return NULL;
        }
    } else {
        /* The last one released: its memory is in the cache. */
        slot = ngx_queue_data(ngx_queue_head(&kind->free), ngx_pelton_slot_t, queue);
        ngx_queue_remove(&slot->queue);
    }
    /* Without a master process, a reload frees ngx_lua's objects, and this process continues. */
    if (slot->cycle != ngx_cycle) {
        if (ngx_pelton_sema_new(&slot->semaphore, 0, &error) != 0) {
            slot->cycle = NULL;
            ngx_queue_insert_head(&kind->free, &slot->queue);
            return NULL;
        }
        slot->cycle = (ngx_cycle_t *)ngx_cycle;
    }
    slot->is_used = 1;
    slot->is_waiting = 0;
    slot->is_bound = 0;
    return slot;
}

void ngx_pelton_free_slot(ngx_pelton_slot_t *slot) {
    slot->kind->cancel(slot);
    if (slot->is_bound) {
        ngx_queue_remove(&slot->of_request);
    }
    /* A coroutine of another request can sleep here. It must not be woken for the slot's next user. */
    ngx_pelton_wake(slot);
    slot->is_used = 0;
    slot->generation = slot->generation == (1U << NGX_PELTON_GENERATION_BITS) - 1 ? 1 : slot->generation + 1;
    ngx_queue_insert_head(&slot->kind->free, &slot->queue);
}

uint64_t ngx_pelton_ticket(const ngx_pelton_slot_t *slot) {
    return (uint64_t)slot->generation << NGX_PELTON_INDEX_BITS | slot->index;
}

ngx_pelton_slot_t *ngx_pelton_find_slot(double ticket, const ngx_pelton_kind_t *kind) {
    uint64_t bits = (uint64_t)ticket, index = bits & ((1 << NGX_PELTON_INDEX_BITS) - 1);
    ngx_pelton_slot_t *slot;
    if (ngx_pelton_slots == NULL || index >= ngx_pelton_slots->nelts) {
        return NULL;
    }
    slot = ((ngx_pelton_slot_t **)ngx_pelton_slots->elts)[index];
    if (!slot->is_used || slot->generation != bits >> NGX_PELTON_INDEX_BITS || (kind != NULL && slot->kind != kind)) {
        return NULL;
    }
    return slot;
}

void ngx_pelton_wake(ngx_pelton_slot_t *slot) {
    if (slot->is_waiting) {
        slot->is_waiting = 0;
        ngx_pelton_sema_post(slot->semaphore, 1);
    }
}

void ngx_pelton_close_slots(void) {
    ngx_uint_t i;
    ngx_pelton_has_ended = 1;
    for (i = 0; ngx_pelton_slots != NULL && i < ngx_pelton_slots->nelts; i++) {
        ngx_pelton_slot_t *slot = ((ngx_pelton_slot_t **)ngx_pelton_slots->elts)[i];
        if (slot->cycle == ngx_cycle) {
            ngx_pelton_sema_gc(slot->semaphore);
            slot->cycle = NULL;
            slot->is_waiting = 0;
        }
    }
}

/* ---- For Lua ----------------------------------------------------------------------------------------------------- */

uint32_t ngx_pelton_version(void) { return PELTON_VERSION; }

void ngx_pelton_use_semaphores(void *sema_new, void *sema_post, void *sema_gc) {
    ngx_pelton_sema_new = (ngx_pelton_sema_new_pt)sema_new;
    ngx_pelton_sema_post = (ngx_pelton_sema_post_pt)sema_post;
    ngx_pelton_sema_gc = (ngx_pelton_sema_gc_pt)sema_gc;
}

double ngx_pelton_msec(void) { return (double)ngx_current_msec; }

void *ngx_pelton_semaphore(double ticket) {
    ngx_pelton_slot_t *slot = ngx_pelton_find_slot(ticket, NULL);
    return slot == NULL ? NULL : slot->semaphore;
}

void ngx_pelton_release_slot(double ticket) {
    ngx_pelton_slot_t *slot = ngx_pelton_find_slot(ticket, NULL);
    if (slot != NULL) {
        ngx_pelton_free_slot(slot);
    }
}

/* ---- The event loop ---------------------------------------------------------------------------------------------- */

static int64_t ngx_pelton_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void ngx_pelton_begin_tick(void) { ngx_pelton_tick_began_ns = ngx_pelton_now(); }

ngx_int_t ngx_pelton_is_tick_over(void) { return ngx_pelton_now() - ngx_pelton_tick_began_ns > NGX_PELTON_TICK_NS; }

const char *ngx_pelton_refusal(void) {
    if (ngx_process == NGX_PROCESS_MASTER || ngx_cycle->connections == NULL) {
        return "this is not a worker: call from a request, a timer or init_worker";
    }
    return ngx_pelton_has_ended ? "the worker ends" : NULL;
}

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
