/* What pelton_file's parts share: files.c has engines, files and requests, file_functions.c what is asked of them. */
#ifndef PELTON_FILES_H
#define PELTON_FILES_H

#include "nif.h"

#define IN_FLIGHT_MAX 4096
#define CLOSED (1u << 31)

struct engine {
    enum watched watched;
    ErlNifMutex *lock;
    pelton_engine *handle; /* NULL until it is needed */
    struct request *pending;
    unsigned in_flight;
    bool armed;
    bool gives_up; /* some that are pending: the ferry cancels them */
};

struct file {
    pelton_file *handle;
    atomic_uint users; /* and CLOSED */
    atomic_flag claimed;
    atomic_int pending; /* requests */
    bool is_regular;
    bool has_owner;
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct file *next, *previous; /* all->files */
};

struct waiting_engine {
    pelton_engine *handle;
    struct waiting_engine *next;
};

struct doomed_file {
    pelton_file *handle;
    struct doomed_file *next;
};

struct part {
    struct request *request;
    ErlNifBinary memory; /* what is read */
    bool has_memory;
    bool has_ended;
    bool is_cancelled;
    int error;
    uint64_t wanted, count, offset;
    struct iovec piece;
    struct iovec *pieces;
    size_t pieces_count;
};

struct request {
    struct engine *engine;
    struct request *next, *previous; /* engine->pending */
    struct file *file, *to;
    uint32_t kind;
    bool is_list;
    bool is_pending;
    bool is_given_up; /* by who asked, or as a file was closed */
    bool has_monitor;
    bool may_be_directory;
    ErlNifPid pid; /* undefined: nobody is told */
    ErlNifMonitor monitor;
    ErlNifEnv *env;
    ERL_NIF_TERM ref;
    unsigned left; /* parts that have not ended */
    pelton_file *opened;
    pelton_stat stat;
    ErlNifBinary text;
    bool has_text;
    unsigned parts_count;
    struct part parts[];
};

/* Enters the file that is the term; NULL: it is closed, and the result says so. */
struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result);
void leave_file(struct file *file);
/* The handle, if it is to be closed now; NULL if that is done already, or by the last of those that are at it. */
pelton_file *end_file(struct file *file, bool *was_open);
void unlist(struct file *file);
/* Has the ferry close it. */
void doom(pelton_file *handle);
/* Has the ferry cancel what is in flight of a file, or of all. */
void give_up_requests_of(struct file *file);

struct request *request_of(uint32_t kind, unsigned parts, struct file *file, struct file *to);
pelton_operation operation_of(struct part *part, uint32_t kind);
/* Asks. Answers the result, if it is there at once and `sends` is not wanted; else `pending`, and it is sent to who calls; or `full`: nothing
 * was asked. Takes over the request. */
ERL_NIF_TERM ask(ErlNifEnv *env, struct request *request, const pelton_operation *operations, ERL_NIF_TERM ref, bool sends);

/* An engine for who waits in what it does, on a dirty scheduler: nobody else's until it is given back. NULL: there is none to be had. */
struct waiting_engine *take_waiting_engine(void);
void give_back(struct waiting_engine *engine);

#endif
