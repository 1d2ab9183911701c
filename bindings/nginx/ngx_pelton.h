/* What the module's parts have in common: the slots that coroutines sleep on, descriptors on nginx's loop, and how long that is had.
 *
 * A SLOT has a semaphore of ngx_lua's own; a coroutine of Lua sleeps on that. Slots are used again, so Lua has a TICKET, of the slot and its
 * generation: that of a slot which has been given back is of no use to anybody. */
#ifndef NGX_PELTON_H
#define NGX_PELTON_H

#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_event.h>
#include <ngx_http.h>

#include <pelton.h>

/* What functions for Lua answer besides pelton's codes: sleep on the slot's semaphore, then take. */
#define NGX_PELTON_WAITS 1

/* The loop is had for so long at a time, as in pelton_uv.h: by all that runs between two looks of nginx at its descriptors, timers and
 * requests, whatever it is asked of. */
#define NGX_PELTON_CHAIN_NS 1000000

/* ---- What Lua fills in, and reads: in pelton.lua and file.lua as well ---------------------------------------------------- */

#define NGX_PELTON_UIDS_MAX 16

/* What a client is made with. All zero: the defaults. */
typedef struct {
    uint64_t capacity;
    uint64_t call_bytes_max;
    uint64_t parts_bytes_max; /* of parts that one call's coroutine has not taken yet */
    int64_t hold_ns;          /* -1: not at all */
    uint32_t uids_count;
    uint32_t uids[NGX_PELTON_UIDS_MAX];
} ngx_pelton_options_t;

/* What a call has come to. After an error's code data is a text that says more. */
typedef struct {
    const void *data;
    double ticket;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
} ngx_pelton_answer_t;

/* Also for the tests. */
typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting; /* for room, or a client */
    uint32_t slots;   /* that are used now */
    uint32_t connections; /* how many times a client was opened */
    uint64_t turns;
    uint64_t within; /* calls answered within themselves */
    uint64_t bytes;  /* of answers in memory */
} ngx_pelton_figures_t;

/* What is to be done with a file: as pelton_operation. */
typedef struct {
    const char *path; /* with a 0 behind it */
    const char *data; /* to be written: copied */
    pelton_file *file;
    uint64_t offset;
    uint64_t bytes; /* to be read, or written */
    uint32_t kind;
    uint32_t open_flags;
    uint32_t mode;
} ngx_pelton_operation_t;

/* What has come of it. */
typedef struct {
    const char *data; /* what was read, good until the slot is given back; of an error a text */
    double ticket;
    pelton_file *file;
    uint64_t bytes; /* that were read, or written; or are in the file */
    int32_t error;  /* the errno */
} ngx_pelton_done_t;

/* ---- Slots --------------------------------------------------------------------------------------------------------------- */

typedef struct ngx_pelton_slot_s ngx_pelton_slot_t;

/* A kind of slots, which begin with ngx_pelton_slot_t. */
typedef struct {
    size_t size;
    void (*let_go)(ngx_pelton_slot_t *slot); /* what it was taken for is given up; called before it is given back */
    ngx_queue_t free;
} ngx_pelton_kind_t;

struct ngx_pelton_slot_s {
    ngx_queue_t queue; /* of the free ones; of one that is taken its user's */
    ngx_queue_t of_asker;
    ngx_pelton_kind_t *kind;
    void *semaphore;
    ngx_cycle_t *cycle; /* whose semaphore it is */
    uint32_t index;
    uint32_t generation;
    unsigned is_taken : 1;
    unsigned is_waiting : 1; /* on the semaphore */
    unsigned has_asker : 1;
};

/* The one used last, or another; NULL: no memory. */
ngx_pelton_slot_t *ngx_pelton_take_slot(ngx_pelton_kind_t *kind);
/* Gives back a slot, and has its kind let go of what it was taken for. */
void ngx_pelton_give_slot(ngx_pelton_slot_t *slot);
/* Never 0, and a whole number that a double can hold. */
uint64_t ngx_pelton_ticket(const ngx_pelton_slot_t *slot);
/* NULL: it has been given back, or is of another kind. */
ngx_pelton_slot_t *ngx_pelton_of_ticket(uint64_t ticket, const ngx_pelton_kind_t *kind);
/* There is something for the slot's coroutine, if it sleeps. */
void ngx_pelton_wake(ngx_pelton_slot_t *slot);

/* ---- On nginx's loop ----------------------------------------------------------------------------------------------------- */

int64_t ngx_pelton_now(void);
/* nginx has looked at its descriptors: the chain of what runs without that begins anew. */
void ngx_pelton_begin_chain(void);
ngx_int_t ngx_pelton_is_chain_over(void);

/* NULL: nginx has no connection left, or its log says why it cannot watch this one. */
ngx_connection_t *ngx_pelton_watch(int fd, void *data, ngx_event_handler_pt handler);
/* The descriptor stays open. */
void ngx_pelton_unwatch(ngx_connection_t *connection);

/* Whether clients and engines may be made here; else why not. */
const char *ngx_pelton_why_not_here(void);

/* A worker ends. */
void ngx_pelton_end_calls(void);
void ngx_pelton_end_files(void);

#endif
