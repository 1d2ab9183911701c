/* pelton/file.h: files without blocking an event loop.
 *
 * An engine carries out operations. What the page cache has is done within the call, up to an amount that a loop does
 * not notice; everything else goes to io_uring, or to threads where io_uring is refused. Each thread or loop can have
 * an engine.
 *   - pelton_engine_run waits for one operation;
 *   - pelton_engine_submit starts many. pelton_engine_completions returns the token of each with its result, in any
 *     order.
 *
 *     pelton_operation open = {.kind = PELTON_FILE_OPEN, .path = "notes", .open_flags = O_RDONLY};
 *     pelton_file_completion opened;
 *     pelton_engine_run(engine, &open, PELTON_FOREVER, &opened);
 *     struct iovec memory = {buffer, sizeof buffer};
 *     pelton_operation read = {.kind = PELTON_FILE_READ, .token = 1, .file = opened.file,
 *                              .memory = &memory, .memory_count = 1};
 *     pelton_engine_submit(engine, &read, 1, &taken);
 *     ...
 *     while (pelton_engine_completions(engine, PELTON_NO_WAIT, done, 16, &count) == 0)
 *         for (size_t i = 0; i < count; i++) finish(done[i].token, done[i].code, done[i].count);
 *
 * Operations are independent, unless they are linked. A read continues to the end of the file or of its memory, and a
 * write until all is written. If an error or a cancellation comes after some bytes, count has their number and error
 * the reason. EINTR and EAGAIN never appear. A failed operation has the code PELTON_SYSTEM and the kernel's number.
 */
#ifndef PELTON_FILE_H
#define PELTON_FILE_H

#include <pelton/channel.h>
#include <pelton/result.h>
#include <string.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Closing the engine: operations in flight are cancelled, and their completions are lost. Memory with a release
 * function is released when the kernel no longer uses it. For memory without one, and for endpoints, pelton_close waits
 * until then. To finish everything first: pelton_engine_wait_idle. */
typedef struct pelton_engine pelton_engine;
/* An open file. It is closed with the last handle or operation that uses it, which can wait for a file server, and
 * reports no error; PELTON_FILE_CLOSE does. Any thread may use it, but none while another closes it. */
typedef struct pelton_file pelton_file;

/* ---- Operations -------------------------------------------------------------------------------------------------- */

/* The kind of an operation, the fields of pelton_operation that it uses, and its result in pelton_file_completion.
 *
 *   kind                      fields                                      result
 *   OPEN                      path, open_flags, mode, resolve             file. A FIFO waits for its other end
 *   CLOSE                     file, which is no handle afterwards         EBUSY: still in use; its last user closes it
 *   READ                      file, memory, offset                        count
 *   WRITE                     file, memory, offset                        count
 *   SYNC                      file                                        fsync
 *   SYNC_DATA                 file                                        fdatasync
 *   TRUNCATE                  file, bytes                                 the file has that length
 *   ALLOCATE                  file, offset, bytes                         disk space is allocated, and the file so long
 *   STAT                      path or file                                stat
 *   STAT_LINK                 path                                        stat, of a symbolic link itself
 *   SET_TIMES                 path, accessed_ns, modified_ns
 *   UNLINK, REMOVE_DIRECTORY  path
 *   RENAME, LINK              path, path_to                               RENAME replaces path_to
 *   SYMLINK                   path: the link's content, path_to: the link
 *   READ_LINK                 path                                        text
 *   MAKE_DIRECTORY            path, mode
 *   LIST                      file: a directory, by one LIST at a time    text: the next some hundred entries, for
 *                                                                         pelton_entry_next; empty: the end
 *   COPY                      file, offset, to, offset_to, bytes          count. In the kernel; may share blocks
 *   SEND                      file, offset, bytes, sender,                count. Sends up to bytes of the file as
 *                             message_bytes                               messages of message_bytes; waits for space
 *   RECEIVE                   file, offset, bytes, receiver               count. Writes and releases messages until the
 *                                                                         next one exceeds bytes, or the sender closed
 *
 * Fields that a kind does not use are ignored, except memory_count and release: PELTON_OPTION.
 */
enum pelton_file_operation {
    PELTON_FILE_OPEN = 1,
    PELTON_FILE_CLOSE = 2,
    PELTON_FILE_READ = 3,
    PELTON_FILE_WRITE = 4,
    PELTON_FILE_SYNC = 5,
    PELTON_FILE_SYNC_DATA = 6,
    PELTON_FILE_TRUNCATE = 7,
    PELTON_FILE_ALLOCATE = 8,
    PELTON_FILE_STAT = 9,
    PELTON_FILE_STAT_LINK = 10,
    PELTON_FILE_SET_TIMES = 11,
    PELTON_FILE_UNLINK = 12,
    PELTON_FILE_REMOVE_DIRECTORY = 13,
    PELTON_FILE_RENAME = 14,
    PELTON_FILE_LINK = 15,
    PELTON_FILE_SYMLINK = 16,
    PELTON_FILE_READ_LINK = 17,
    PELTON_FILE_MAKE_DIRECTORY = 18,
    PELTON_FILE_LIST = 19,
    PELTON_FILE_COPY = 20,
    PELTON_FILE_SEND = 21,
    PELTON_FILE_RECEIVE = 22
};

/* pelton_operation.offset of a read or write: the file's own position, which moves; of a write: the end of the file. */
#define PELTON_CURRENT UINT64_MAX
#define PELTON_AT_END (UINT64_MAX - 1)

/* pelton_operation.accessed_ns and modified_ns: unchanged. 0 is the beginning of 1970. */
#define PELTON_UNCHANGED INT64_MIN

/* pelton_operation.flags: the next operation of the same submission begins when this one has succeeded. After a
 * failure, a cancellation or a short result, the linked ones behind it complete with ECANCELED, and are not carried
 * out. */
#define PELTON_LINKED 1

/* Called once with an operation's context when neither the kernel nor the engine needs its memory any more: before its
 * completion is returned; after its deadline, in a later call; after the engine was closed, at any time on any thread.
 * It must return, and must not use the engine or wait for a thread that does. Not called if the operation was not
 * accepted, nor in a forked child. */
typedef void (*pelton_release)(void *context);

/* One operation: zero-initialise it, then set what its kind uses. The engine copies it; only `memory` is used after the
 * call. */
typedef struct pelton_operation {
    uint64_t token;             /* chosen by the caller, returned with the completion; need not be unique */
    uint32_t kind;              /* enum pelton_file_operation */
    uint32_t flags;             /* PELTON_LINKED, or 0 */
    pelton_file *file;
    pelton_file *to;
    const char *path;
    const char *path_to;
    const struct iovec *memory; /* pieces to read into, or write from, in order */
    size_t memory_count;
    uint64_t offset;
    uint64_t offset_to;
    uint64_t bytes;
    uint32_t open_flags;        /* as for open(2); the file closes on exec in any case */
    uint32_t mode;              /* permission bits of what is created, less the umask */
    uint64_t resolve;           /* as for openat2(2): RESOLVE_NO_SYMLINKS and others */
    int64_t accessed_ns;        /* since 1970 */
    int64_t modified_ns;
    pelton_release release;     /* of a read or write. NULL: the memory must stay valid until its completion was
                                   returned, or the engine was closed */
    void *context;              /* for release */
    pelton_sender *sender;      /* of SEND, and */
    pelton_receiver *receiver;  /* of RECEIVE: belongs to the operation until its completion was returned; other uses,
                                   and pelton_close, return PELTON_WRONG_THREAD. Several linked operations of one engine
                                   may use it in turn, others fail with EBUSY. PELTON_RESERVED, PELTON_NOT_RELEASED: it
                                   is in use */
    uint64_t message_bytes;
} pelton_operation;

/* What a file system entry is. */
enum pelton_file_kind {
    PELTON_UNKNOWN = 0,
    PELTON_REGULAR = 1,
    PELTON_DIRECTORY = 2,
    PELTON_SYMBOLIC_LINK = 3,
    PELTON_FIFO = 4,
    PELTON_SOCKET = 5,
    PELTON_CHARACTER_DEVICE = 6,
    PELTON_BLOCK_DEVICE = 7
};

/* Status of a file. Times since 1970. */
typedef struct pelton_stat {
    uint32_t kind;       /* enum pelton_file_kind */
    uint32_t mode;       /* the twelve permission bits */
    uint64_t bytes;
    uint64_t allocated_bytes;
    uint64_t links;
    uint32_t uid;
    uint32_t gid;
    uint32_t device_major;
    uint32_t device_minor;
    uint64_t inode;
    int64_t accessed_ns;
    int64_t modified_ns;
    int64_t changed_ns;
    int64_t created_ns;  /* INT64_MIN if unknown */
} pelton_stat;

/* The result of an operation. stat and text belong to the engine, and are valid until completions are taken again, an
 * operation is run, or the engine is closed. file, stat and text are NULL if there is none. */
typedef struct pelton_file_completion {
    uint64_t token;
    int32_t code;           /* PELTON_OK, PELTON_SYSTEM, or the channel's code, such as PELTON_CLOSED */
    int32_t error;          /* the kernel's number, else 0. With PELTON_OK: what ended it after count bytes; EPIPE: the
                               channel */
    uint64_t count;         /* bytes read, written, copied, sent or received. Fewer than requested without an error: the
                               file, or the channel, has ended */
    pelton_file *file;      /* of PELTON_FILE_OPEN: belongs to the caller */
    const pelton_stat *stat;
    const char *text;       /* of LIST: for pelton_entry_next. Of READ_LINK: the content, followed by a 0 */
    size_t text_size;
} pelton_file_completion;

/* ---- Engine ------------------------------------------------------------------------------------------------------ */

typedef struct pelton_engine_options {
    uint32_t struct_bytes;  /* sizeof(pelton_engine_options): PELTON_ENGINE_OPTIONS_INIT sets it */
    uint32_t in_flight_max; /* operations without a taken completion: 1024, at most 16384 */
    uint32_t threads_max;   /* for what io_uring does not do: 8, at most 1024. An operation that waits for another
                               process, for instance at a FIFO, has a thread of its own in addition */
    uint32_t reserved;      /* 0 */
    const char *root;       /* a directory that no path leads out of, whatever "..", absolute paths and symbolic links
                               say: EXDEV, ELOOP. NULL: no such limit */
} pelton_engine_options;

#define PELTON_ENGINE_OPTIONS_INIT {(uint32_t)sizeof(pelton_engine_options), 0, 0, 0, NULL}

/* Creates an engine. Waits only to open the root. It loads the limit of file sizes: exceeding that is EFBIG, not a
 * signal. Errors: PELTON_OPTION. PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_engine_open(const pelton_engine_options *options, pelton_engine **out);

/* Carries out one operation and waits for it. With PELTON_FOREVER the calling thread carries it out. Returns the
 * operation's code; *out has its result, also if the operation failed, but not after the errors below; out may be NULL,
 * except for PELTON_FILE_OPEN. Not with PELTON_LINKED. Writing to a pipe or socket without a reader raises SIGPIPE, as
 * write(2) does; submitted operations raise none. After PELTON_SYSTEM errno has the kernel's number. Errors:
 * PELTON_AGAIN: the deadline has passed, and it is cancelled; its current step may still be carried out. Without a
 * release function, and with an endpoint, it waits until those are free. PELTON_OPTION: an invalid operation.
 * PELTON_CLOSED_HANDLE. */
PELTON_MUST_USE int pelton_engine_run(pelton_engine *engine, const pelton_operation *operation, int64_t deadline_ns,
                                      pelton_file_completion *out);

/* Submits count operations, or as many as fit in in_flight_max; linked ones all or none. *taken is the number of
 * accepted ones, the first ones, also with the errors below. It is not written if the engine cannot be used or a
 * parameter is NULL: set it to 0 before the call. One system call starts them; while the engine is armed, later
 * submissions of the same tick start together at the next arm. Does not wait; what needs no waiting is done within the
 * call. Errors: PELTON_AGAIN: none fits: take completions. Of the first operation that was not accepted: PELTON_OPTION,
 * PELTON_CLOSED_HANDLE; PELTON_REFUSED: more linked ones than in_flight_max. PELTON_SYSTEM: they are accepted but
 * cannot be started now; taking completions tries again. */
PELTON_MUST_USE int pelton_engine_submit(pelton_engine *engine, const pelton_operation *operations, size_t count,
                                         size_t *taken);

/* Takes up to count completions. Waits for the first. *taken is their number, at least 1. Errors: PELTON_AGAIN: there
 * is none. PELTON_TOO_SMALL: count is 0. PELTON_REFUSED: nothing is in flight, so this would wait forever.
 * PELTON_SYSTEM: no memory, or threads, to start what was submitted: every operation remains in flight, and a later
 * call returns its completion. To give up after that, cancel, and take the completions: until then the memory is in
 * use. */
PELTON_MUST_USE int pelton_engine_completions(pelton_engine *engine, int64_t deadline_ns, pelton_file_completion *out,
                                              size_t count, size_t *taken);

/* Cancels the operations with this token, and those linked behind them. Each still completes: with ECANCELED, or, if it
 * could not be stopped, with its result. Does not wait. Opening a FIFO leaves a thread behind until its other end is
 * opened; with 256 of these in the process, opening another is EMFILE. Errors: PELTON_AGAIN: no operation with that
 * token is in flight. */
int pelton_engine_cancel(pelton_engine *engine, uint64_t token);

/* Waits until every operation has completed; their completions remain to be taken.
 * Errors: PELTON_AGAIN: not yet. As pelton_engine_completions. */
PELTON_MUST_USE int pelton_engine_wait_idle(pelton_engine *engine, int64_t deadline_ns);

/* The descriptor to poll for reading. Constant; not to be closed, read or written. */
int pelton_engine_fd(const pelton_engine *engine);

/* Busy-polls for a completion ("Event loops" in pelton.h). Errors: PELTON_AGAIN: none yet. As
 * pelton_engine_completions. */
PELTON_MUST_USE int pelton_engine_poll(pelton_engine *engine);

/* Makes the descriptor readable once an operation completes, and starts what was submitted. Returns PELTON_OK, or
 * PELTON_READY: take completions. Errors: as pelton_engine_completions. */
PELTON_MUST_USE int pelton_engine_arm(pelton_engine *engine);

/* Ends what pelton_engine_arm began. */
int pelton_engine_disarm(pelton_engine *engine);

/* An engine's figures. Set struct_bytes before the call; fields that the library does not have are 0. */
typedef struct pelton_engine_info {
    uint32_t struct_bytes; /* sizeof(pelton_engine_info) */
    uint32_t reserved;     /* 0 */
    uint64_t in_flight;    /* operations without a taken completion */
} pelton_engine_info;

/* Errors: PELTON_OPTION: struct_bytes is 0, no multiple of 8, or above 4096. */
int pelton_engine_get_info(pelton_engine *engine, pelton_engine_info *out);

/* Takes over an open descriptor of any kind: it is closed with the file. name is for error details. Asks the kernel for
 * its kind, which can wait for a file server. Errors: PELTON_NULL: the descriptor remains the caller's. PELTON_SYSTEM:
 * EBADF: it is not open; with another number it was closed. */
PELTON_MUST_USE int pelton_file_from_fd(int fd, const char *name, pelton_file **out);

/* The file's descriptor, which the file owns: not to be closed. Any thread. */
int pelton_file_fd(const pelton_file *file);

/* ---- Directories ------------------------------------------------------------------------------------------------- */

/* An entry of a directory, without "." and "..". */
typedef struct pelton_entry {
    const char *name;  /* ends with a 0; any bytes but '/'; valid as long as the list's text */
    uint64_t inode;
    uint32_t kind;     /* enum pelton_file_kind, as far as the directory says */
    uint32_t reserved; /* 0 */
} pelton_entry;

/* Iterates over the entries of PELTON_FILE_LIST: *at is 0 at first. Returns 1, or 0 at the end. The text has for each
 * entry its inode, a little-endian u64, its kind, a byte, and its name, which ends with a 0. */
static inline int pelton_entry_next(const pelton_file_completion *list, size_t *at, pelton_entry *out) {
    if (list->text_size < *at + 10) return 0;
    const char *entry = list->text + *at;
    memcpy(&out->inode, entry, 8);
    out->kind = (unsigned char)entry[8];
    out->name = entry + 9;
    out->reserved = 0;
    *at += 10 + strlen(out->name);
    return 1;
}

#ifdef __cplusplus
}
#endif

#endif
