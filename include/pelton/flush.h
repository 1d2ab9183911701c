/* pelton/flush.h: whole buffers of messages to a sink: a record file, or a function.
 *
 * Messages go to the sink in chunks, without a copy, and are released when the sink has them. The sink gets each
 * committed message once, in the order of its sender, also after the sender has died. After a kill of this process, a
 * record file that is opened again knows what it has; a function gets unreleased messages again, and distinguishes them
 * by lane_id and seq. Descriptors that come with messages are closed.
 *
 *     pelton_flush_to_record_file(receiver, "log", NULL, NULL, &flush);
 *     while ((code = pelton_flush_run(flush, PELTON_FOREVER)) == PELTON_NO_SPACE) wait_for_space();
 *     pelton_close(flush);
 *
 * THE SINK'S ERRORS, in every function that flushes: PELTON_SINK: the function refused. Of a record file:
 * PELTON_NO_SPACE, PELTON_SYSTEM: the file is unchanged. Nothing is released, and it can be tried again. PELTON_SYSTEM
 * also reports, once, an earlier sync that failed: what was written before may not be on the disk.
 */
#ifndef PELTON_FLUSH_H
#define PELTON_FLUSH_H

#include <pelton/channel.h>
#include <pelton/result.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Flushes what a receiver receives. Closing it closes receiver and sink, without a flush or sync; what the sink does
 * not have stays unreleased. */
typedef struct pelton_flush pelton_flush;
/* Creates appenders for threads. Appenders stay open when it is closed, except threads' own ones. When it and all
 * appenders are closed, everything is flushed and synced, and the sink is closed: the last pelton_close waits for that,
 * and reports no error: call pelton_appenders_sync before. No other thread may be in a call with it. */
typedef struct pelton_appenders pelton_appenders;
/* Appends to a buffer of one thread. What it has appended is flushed later, also after it is closed. */
typedef struct pelton_appender pelton_appender;
/* Reads a record file. */
typedef struct pelton_records pelton_records;

/* ---- The sink ---------------------------------------------------------------------------------------------------- */

/* Consecutive records of one lane: for each message a header, a little-endian u64 of seq << 32 | size; its bytes; and
 * up to 7 bytes of any value, so that the next record begins at a multiple of 8. pelton_chunk_next iterates over
 * them. */
typedef struct pelton_chunk {
    uint64_t lane_id[2]; /* identifies the lane among all that ever existed */
    const void *bytes;   /* aligned to 8. A sender of another process that violates the rules can change them at any
                            time */
    size_t size;
    uint32_t first_seq;  /* number of the first message; the others follow, modulo 2^32, without 0 */
    uint32_t messages;   /* at least 1 */
    uint32_t pid;        /* the sender's process, 0 if unknown */
    uint32_t uid;        /* its user, UINT32_MAX if unknown */
} pelton_chunk;

/* A message of a chunk, or of a record file. */
typedef struct pelton_record {
    const void *data;    /* aligned to 8, never NULL */
    size_t size;
    uint64_t lane_id[2]; /* as in pelton_chunk, and so are pid and uid */
    uint32_t seq;        /* the message's number in its lane */
    uint32_t pid;
    uint32_t uid;
    uint32_t reserved;   /* 0 */
} pelton_record;

/* Called with the context of the function that created the flush or the appenders. Returns 0 or more when it has all
 * chunks, which are then released; they must not be read afterwards. A negative number, for instance a negated errno,
 * means that it has taken nothing: the same chunks come again with the next flush, and the flushing function returns
 * PELTON_SINK with the number, negated, in errno. One thread at a time calls it: one that flushes, appends to a full
 * buffer or closes the last appenders, or the library's own. It must return, and must not use the handles that lead to
 * it, or wait for a thread that does. */
typedef int (*pelton_write)(void *context, const pelton_chunk *chunks, size_t count);

/* How to write a record file. Format: spec/record-file.md. */
typedef struct pelton_record_file_options {
    uint32_t struct_bytes;    /* sizeof(pelton_record_file_options): PELTON_RECORD_FILE_OPTIONS_INIT sets it */
    uint32_t reserved;        /* 0 */
    uint64_t rotate_bytes;    /* a write beyond this size begins a new file; the old one is renamed to PATH.000001 and
                                 so on. 0: never */
    uint64_t sync_bytes;      /* fdatasync after each such number of bytes, without waiting. PELTON_EACH_WRITE: before a
                                 write counts as done. 0: not by size */
    int64_t sync_interval_ns; /* fdatasync this long after a write, by the flush that comes then: pelton_flush_run and
                                 the thread of appenders flush in time for it. 0: not by time */
} pelton_record_file_options;

#define PELTON_RECORD_FILE_OPTIONS_INIT {(uint32_t)sizeof(pelton_record_file_options), 0, 0, 0, 0}
#define PELTON_EACH_WRITE UINT64_MAX

/* ---- Flushing a receiver ----------------------------------------------------------------------------------------- */

/* When to flush. */
typedef struct pelton_flush_options {
    uint32_t struct_bytes;     /* sizeof(pelton_flush_options): PELTON_FLUSH_OPTIONS_INIT sets it */
    uint32_t reserved;         /* 0 */
    uint64_t flush_bytes;      /* once so many bytes of records wait: 1 MiB, at most 1 GiB */
    int64_t flush_interval_ns; /* at the latest so long after a message came: 100 ms. PELTON_FOREVER: once nothing more
                                  is there */
} pelton_flush_options;

#define PELTON_FLUSH_OPTIONS_INIT {(uint32_t)sizeof(pelton_flush_options), 0, 0, 0}

/* Flushes a receiver to a record file, which is created, or continued after cutting off the torn end of a killed
 * writer. If another program renames, deletes or truncates the file, as logrotate does, the next write continues in the
 * file at the path. The receiver's handle is closed: it becomes part of the flush. If this fails, the receiver is
 * unchanged. Does not wait, except up to a second for a file whose writer was just killed. file and options may be
 * NULL. Errors: PELTON_NOT_RELEASED. PELTON_OPTION. PELTON_ROLE_TAKEN: the file has another writer. PELTON_DAMAGED: it
 * is damaged in the middle: move it away. PELTON_NOT_A_RECORD_FILE: other content, or a later version.
 * PELTON_NO_SPACE. */
PELTON_MUST_USE int pelton_flush_to_record_file(pelton_receiver *receiver, const char *path,
                                                const pelton_record_file_options *file,
                                                const pelton_flush_options *options,
                                                pelton_flush **out);

/* Flushes a receiver to a function. Otherwise as pelton_flush_to_record_file. Does not wait. */
PELTON_MUST_USE int pelton_flush_to_function(pelton_receiver *receiver, pelton_write write, void *context,
                                             const pelton_flush_options *options, pelton_flush **out);

/* Flushes until no sender is left; then it syncs and returns PELTON_OK. A receiver that gathers under a name always has
 * senders to come. Waits as the receiver's options state. It can be called again after any error. Errors: PELTON_AGAIN:
 * the deadline has passed. The sink's. As pelton_receiver_receive, except PELTON_CLOSED; everything that came before is
 * in the sink. */
PELTON_MUST_USE int pelton_flush_run(pelton_flush *flush, int64_t deadline_ns);

/* Flushes what has come. Waits for no message, only for the sink. Errors: as pelton_flush_run. PELTON_CLOSED: no sender
 * is left, and everything is in the sink. */
PELTON_MUST_USE int pelton_flush_flush(pelton_flush *flush);

/* As pelton_flush_flush; then a record file writes everything to the disk. */
PELTON_MUST_USE int pelton_flush_sync(pelton_flush *flush);

/* Iterates over a chunk: *at is 0 at first. Returns 1, or 0 at the end, or where a record is invalid, which only a
 * sender that violates the rules can cause: compare the number of records with chunk->messages. *out is the previous
 * record.
 *
 *     size_t at = 0;
 *     pelton_record record;
 *     while (pelton_chunk_next(&chunks[i], &at, &record)) use(record.data, record.size); */
static inline int pelton_chunk_next(const pelton_chunk *chunk, size_t *at, pelton_record *out) {
    const unsigned char *record = (const unsigned char *)chunk->bytes + *at;
    uint32_t seq = *at == 0 ? chunk->first_seq : out->seq == UINT32_MAX ? 1 : out->seq + 1;
    if (*at > chunk->size || chunk->size - *at < 8) return 0;
    /* Loaded once: the sender could change it. */
    uint64_t header = *(const volatile uint64_t *)(const void *)record;
    size_t size = (uint32_t)header, space = chunk->size - *at - 8;
    if (header >> 32 != seq || size > space) return 0;
    out->data = record + 8;
    out->size = size;
    out->lane_id[0] = chunk->lane_id[0];
    out->lane_id[1] = chunk->lane_id[1];
    out->seq = seq;
    out->pid = chunk->pid;
    out->uid = chunk->uid;
    out->reserved = 0;
    *at += 8 + ((size + 7) & ~(size_t)7);
    return 1;
}

/* ---- Appending ---------------------------------------------------------------------------------------------------- *
 * Each thread of this process appends to a buffer of its own. A thread waits only to flush: when its buffer is full, it
 * passes the buffer to the sink itself, one thread at a time. In the sink, messages of one appender are in order. */

/* Options of appenders. */
typedef struct pelton_appenders_options {
    uint32_t struct_bytes;      /* sizeof(pelton_appenders_options): PELTON_APPENDERS_OPTIONS_INIT sets it */
    uint32_t appenders_max;     /* at a time: 1024, which is also the largest value */
    uint64_t flush_bytes;       /* size of each buffer: 1 MiB, from 64 KiB to 1 GiB */
    uint64_t message_bytes_max; /* largest message; a buffer's size less 16 if that is less */
    int64_t flush_interval_ns;  /* at the latest so long after an append: 100 ms, by a thread of the library that sleeps
                                   while nothing is there. PELTON_FOREVER: no thread, and no flush by time */
} pelton_appenders_options;

#define PELTON_APPENDERS_OPTIONS_INIT {(uint32_t)sizeof(pelton_appenders_options), 0, 0, 0, 0}

/* Creates appenders to a record file. Does not wait. Errors: PELTON_OPTION. As pelton_flush_to_record_file. */
PELTON_MUST_USE int pelton_appenders_to_record_file(const char *path, const pelton_record_file_options *file,
                                                    const pelton_appenders_options *options, pelton_appenders **out);

/* Creates appenders to a function. Does not wait. Errors: PELTON_OPTION. */
PELTON_MUST_USE int pelton_appenders_to_function(pelton_write write, void *context,
                                                 const pelton_appenders_options *options,
                                                 pelton_appenders **out);

/* Appends through the calling thread's own appender, which is created at the first use and closed when the thread ends.
 * Any thread. Errors: as pelton_appender_append and pelton_appenders_appender. PELTON_REFUSED: also in a destructor of
 * thread-local data, after the thread's appender was closed. */
PELTON_MUST_USE int pelton_appenders_append(pelton_appenders *appenders, const void *data, size_t size);

/* Creates an appender with a buffer of its own, for one thread at a time: the fastest way to append. Any thread. Does
 * not wait while there are fewer than appenders_max, including closed ones that are not flushed; else it flushes those.
 * Errors: PELTON_REFUSED: there are appenders_max. The sink's. */
PELTON_MUST_USE int pelton_appenders_appender(pelton_appenders *appenders, pelton_appender **out);

/* Flushes: everything whose append has returned is in the sink when this returns. Waits for the sink, and for another
 * thread that flushes. Any thread. Errors: the sink's. */
PELTON_MUST_USE int pelton_appenders_flush(pelton_appenders *appenders);

/* As pelton_appenders_flush; then a record file writes everything to the disk. */
PELTON_MUST_USE int pelton_appenders_sync(pelton_appenders *appenders);

/* Copies a message into the buffer. Waits only if the buffer is full, for the sink and for another thread that flushes.
 * data may be NULL if size is 0. Errors: PELTON_TOO_LARGE. PELTON_RESERVED. The sink's: the message was not appended,
 * and earlier ones are kept. */
PELTON_MUST_USE int pelton_appender_append(pelton_appender *appender, const void *data, size_t size);

/* Reserves size bytes in the buffer, aligned to 8, for the caller to write the message in place. Waits, and fails, as
 * pelton_appender_append. An earlier reservation is aborted, also if this fails. */
PELTON_MUST_USE int pelton_appender_reserve(pelton_appender *appender, size_t size, void **out);

/* Appends the first size bytes of the reservation as one message. Errors: PELTON_NOT_RESERVED. PELTON_TOO_LARGE: more
 * than reserved; the reservation remains. */
PELTON_MUST_USE int pelton_appender_commit(pelton_appender *appender, size_t size);

/* Drops the reservation. Errors: PELTON_NOT_RESERVED. */
int pelton_appender_abort(pelton_appender *appender);

/* ---- Reading a record file --------------------------------------------------------------------------------------- */

/* Opens a record file, compressed or not, for reading; a writer may continue meanwhile. Closing it ends only the
 * reading. Does not wait. Errors: PELTON_NOT_A_RECORD_FILE: other content, or a later version. PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_records_open(const char *path, pelton_records **out);

/* Reads the next message, in the order of writing; its checksum was verified. data is valid until the next call with
 * the handle. Waits only for the disk. Errors: PELTON_AGAIN: the end of the file; a writer may add more. PELTON_TORN:
 * the rest is not whole: its writer was killed, or is writing now; the next call checks it again. PELTON_DAMAGED: a
 * damaged part was skipped; the next call continues after it. PELTON_NOT_A_RECORD_FILE: it continues in a later
 * version. */
PELTON_MUST_USE int pelton_records_next(pelton_records *records, pelton_record *out);

#ifdef __cplusplus
}
#endif

#endif
