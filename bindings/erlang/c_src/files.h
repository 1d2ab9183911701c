/* What pelton_file's parts share: files.c has engines, files and requests, file_functions.c what is asked of them. */
#ifndef PELTON_FILES_H
#define PELTON_FILES_H

#include "nif.h"

#define IN_FLIGHT_MAX 4096
#define PIECES_MAX 1024 /* IOV_MAX */
#define CLOSED (1u << 31)
#define NOW_MAX (256 << 10) /* So much is read at once. */

struct engine {
    enum watched watched;
    ErlNifMutex *lock;
    pelton_engine *handle; /* NULL until it is needed */
    struct request *pending;
    unsigned in_flight;
    bool armed;
    bool gives_up; /* some that are pending: the ferry cancels them */
};

/* What delayed_write and read_ahead keep: see buffers.c. */
struct buffer {
    ErlNifMutex *lock;
    bool has_position;
    bool flushes, fills, moves; /* what is at the file's position just now */
    ErlNifBinary written;
    size_t kept;      /* of what was written */
    size_t write_max; /* fewer are kept, */
    int64_t delay;    /* for so many milliseconds, */
    int64_t due;      /* until then */
    int error;        /* of a flush for which nobody has waited: for who comes next */
    ErlNifBinary ahead;
    size_t from, to; /* what is there of it */
    size_t ahead_max;
    bool is_stale; /* what is just being read is: something was written meanwhile */
    /* Under all->lock: */
    bool is_listed;
    int64_t listed_due;
    struct file *next, *previous; /* all->delayed */
    struct file *next_due;        /* the ferry's */
};

struct file {
    pelton_file *handle;
    atomic_uint users; /* and CLOSED */
    atomic_flag claimed;
    atomic_int pending; /* requests */
    atomic_int wary;    /* so many reads more are done on a dirty scheduler: one lately had to wait */
    bool is_regular;
    atomic_bool reads_wait; /* the file system does not know of reading without */
    atomic_int manner;      /* of writing: see at_once.c, and of what follows */
    atomic_bool is_at_end;  /* its position */
    bool appends;
    unsigned block_bytes;
    bool has_owner;
    ErlNifPid owner;
    ErlNifMonitor monitor;
    struct buffer *buffer; /* NULL: what is written and read goes straight */
    struct file *next, *previous; /* all->files */
};

struct waiting_engine {
    pelton_engine *handle;
    struct waiting_engine *next;
};

struct doomed_file {
    pelton_file *handle;
    ErlNifBinary memory;
    size_t kept; /* so much of that is to be written first, */
    bool goes_on; /* whatever happens */
    struct doomed_file *next;
};

struct part {
    struct request *request;
    ErlNifBinary memory; /* what is read */
    bool has_memory;
    bool has_ended;
    bool is_cancelled;
    int code, error;
    uint64_t wanted, count, offset;
    struct iovec piece;
    struct iovec *pieces;
    size_t pieces_count;
};

struct request {
    struct engine *engine;
    struct request *next, *previous; /* engine->pending */
    struct file *file, *to;
    struct end *end; /* that is lent to it */
    bool end_is_closed;
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
    bool flushes, fills; /* a buffer */
    bool goes_on;        /* and is not given up */
    bool wants_line, again;
    size_t before, wanted; /* bytes that are there before what is read; and bytes for who asked */
    struct buffer *buffer; /* of a file that is opened */
    unsigned parts_count;
    struct part parts[];
};

/* An offset, or the atom `undefined`: the file's own position. */
bool offset_at(ErlNifEnv *env, ERL_NIF_TERM term, uint64_t *offset);
/* Enters the file that is the term; NULL: it is closed, and the result says so. */
struct file *file_at(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result);
/* The same, for what leaves the position where it is, or at the end. */
struct file *entered(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result);
bool enter_file(struct file *file);
void leave_file(struct file *file);
/* The handle, if it is to be closed now; NULL if that is done already, or by the last of those that are at it. */
pelton_file *end_file(struct file *file, bool *was_open);
void unlist(struct file *file);
/* Has the ferry close it; of a file, write what it keeps before. */
void doom(pelton_file *handle);
void doom_file(struct file *file, pelton_file *handle);

struct request *request_of(uint32_t kind, unsigned parts, struct file *file, struct file *to);
pelton_operation operation_of(struct part *part, uint32_t kind);
/* Asks. Answers the result, if it is there at once and `sends` is not wanted; else `pending`, and it is sent to who calls; or `full`: nothing
 * was asked. Takes over the request. */
ERL_NIF_TERM ask(ErlNifEnv *env, struct request *request, const pelton_operation *operations, ERL_NIF_TERM ref, bool sends);
/* Asks, and nobody is told. If it is not asked, the request is still the caller's. */
enum asked { ASKED, NO_ROOM, NOT_TAKEN };
enum asked ask_quietly(struct request *request, const pelton_operation *operation);
/* What came of a request whose first part was run by who calls; it is released. */
ERL_NIF_TERM result_of_run(ErlNifEnv *env, struct request *request, const pelton_file_completion *completion);
int64_t now_us(void);
/* How often this thread has given up its processor by itself: as it waited for something. */
long waits_of_this_thread(void);
/* A read, or what began it, took from then until now, and perhaps waited: answers how long, and whether that can have been the page cache is learnt. */
int64_t learn_of_read(struct file *file, int64_t began_us, bool has_waited);
uint64_t bytes_of_pieces(const ErlNifIOVec *pieces);

/* An engine for who waits in what it does, on a dirty scheduler: nobody else's until it is given back. NULL: there is none to be had. */
struct waiting_engine *take_waiting_engine(void);
void give_back(struct waiting_engine *engine);

/* buffers.c */
struct buffer *buffer_of(uint64_t write_max, uint64_t delay, uint64_t ahead_max);
void free_buffer(struct buffer *buffer);
/* What was kept, for who has claimed the handle: so many bytes. */
size_t take_kept(struct file *file, ErlNifBinary *memory);
/* The ferry need not come any more. */
void is_never_due(struct file *file);
void forget_what_is_due(void);
/* Something was written to it: what was read ahead is read again. */
void is_written(struct file *file);
/* Before its position is looked at, and after. False: something else is at it. */
bool begin_move(struct file *file);
void end_move(struct file *file);
/* Of each request that has ended, before it is told; and of one that came to nothing, for now. */
void buffered_has_ended(struct request *request);
void buffered_was_not_asked(struct request *request);
/* One that all->flushes counts has ended. */
void flush_has_ended(void);

#endif
