/* Engines and requests (request.c), and the parts that request.c does not know: buffered_io.c, file_background.c. */
#ifndef PELTON_ERLANG_REQUEST_H
#define PELTON_ERLANG_REQUEST_H

#include "endpoint.h"
#include "file.h"

#define IN_FLIGHT_MAX 4096
#define PIECES_MAX 1024 /* IOV_MAX */

struct engine {
    enum watched watched;
    ErlNifMutex *lock;
    pelton_engine *handle; /* NULL until it is needed */
    struct request *pending;
    unsigned in_flight;
    bool is_armed;
    bool has_cancelled; /* some pending requests are to be cancelled, by the notifier thread */
};

/* An engine for a thread that waits for it, on a dirty scheduler. */
struct waiting_engine {
    pelton_engine *handle;
    struct waiting_engine *next;
};

/* An operation of a request. */
struct part {
    struct request *request;
    ErlNifBinary memory; /* to read into */
    bool has_memory;
    bool has_completed;
    bool is_cancelled;
    int code, error;
    uint64_t wanted, count, offset;
    struct iovec piece;
    struct iovec *pieces;
    size_t pieces_count;
};

/* A resource, with a reference for each operation until that has completed and released its memory. */
struct request {
    struct engine *engine;
    struct request *next, *previous; /* engine->pending */
    struct file *file, *to;
    struct endpoint *endpoint; /* given to the operation */
    bool endpoint_was_closed;
    uint32_t kind;             /* of pelton_operation */
    bool is_list;              /* of reads */
    bool is_pending;
    bool is_cancelled;         /* its process has ended, or a file or endpoint was closed */
    bool must_complete;        /* it is never cancelled */
    bool has_monitor;
    bool may_be_directory;
    ErlNifPid pid;             /* undefined: nobody receives the result */
    ErlNifMonitor monitor;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    unsigned left;             /* parts that have not completed */
    /* After the last part has completed, before the result is sent; and if nothing was submitted. May be NULL. */
    void (*completed)(struct request *request);
    void (*not_submitted)(struct request *request);
    pelton_file *opened;
    pelton_stat stat;
    ErlNifBinary text;
    bool has_text;
    struct buffer *buffer;     /* of a file that is opened */
    bool fills;                /* the buffer: */
    bool wants_line, again;
    size_t before, wanted;     /* bytes in front of what is read; bytes that the process wants */
    unsigned parts_count;
    struct part parts[];
};

/* ---- request.c ---- */

struct request *request_create(uint32_t kind, unsigned parts, struct file *file, struct file *to);
/* Memory for a part that reads. False: no memory. */
bool part_allocate(struct part *part, uint64_t size);
pelton_operation part_operation(struct part *part);
/* Submits one operation for each part. Returns the result if it is complete, unless it must be `sent`; `pending`: it
 * is sent to the calling process; `busy`: nothing was submitted. Takes over the request. */
ERL_NIF_TERM request_submit(ErlNifEnv *env, struct request *request, const pelton_operation *operations,
                            ERL_NIF_TERM ref, bool sent);
/* Submits its one operation for nobody. Unless it is SUBMITTED, the request still belongs to the caller. */
enum submitted { SUBMITTED, NO_SPACE, NOT_ACCEPTED };
enum submitted request_submit_quietly(struct request *request, const pelton_operation *operation);
/* Runs its one operation, and waits for it: on a dirty scheduler. Takes over the request. */
ERL_NIF_TERM request_run(ErlNifEnv *env, struct request *request, const pelton_operation *operation);

/* Cancels every request. */
void requests_cancel_all(void);
/* Closes engines with nothing in flight, and those for waiting threads. */
void engines_close_idle(void);

/* For the notifier thread. */
void engine_ready(struct engine *engine);
void requests_cancel(void);

int request_load(ErlNifEnv *env, ErlNifResourceFlags flags);

/* ---- buffered_io.c ---- */

/* The request writes the delayed bytes in front of its own pieces. Under the buffer's lock, by a user of the file. */
void flush_begin(struct file *file, struct request *request);

/* ---- file_background.c ---- */

/* For the notifier thread: closes forgotten files; flushes what is due, and returns for how many milliseconds nothing
 * more is due, or -1. */
void files_close_deferred(void);
int files_flush_due(void);
/* Closes every file once its buffer is written, and idle engines. Waits for the writes. */
void files_close(void);

#endif
