/* pelton/result.h: what the other headers share: codes, deadlines, the library's version, closing a handle. */
#ifndef PELTON_RESULT_H
#define PELTON_RESULT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of these headers. A program needs a library of the same major version that is not older; while the major
 * version is 0, of the same minor version. */
#define PELTON_VERSION_MAJOR 0
#define PELTON_VERSION_MINOR 2
#define PELTON_VERSION_PATCH 0
#define PELTON_VERSION (PELTON_VERSION_MAJOR * 1000000 + PELTON_VERSION_MINOR * 1000 + PELTON_VERSION_PATCH)

/* The compiler warns when the result is ignored: a message that was not sent still belongs to the caller. */
#if defined(__GNUC__)
#define PELTON_MUST_USE __attribute__((warn_unused_result))
#else
#define PELTON_MUST_USE
#endif

/* All codes: name, number, text. Programs in other languages can read this table: one X(...) a line, nothing in
 * between. Numbers never change; new codes come at the end. */
#define PELTON_CODES(X) \
    X(PELTON_AGAIN, -1, "not now: nothing is there, there is no space, or the deadline has passed") \
    X(PELTON_CLOSED, -2, "the peer has closed") \
    X(PELTON_PEER_DIED, -3, "the peer died without closing: resume waits for a successor") \
    X(PELTON_TOO_LARGE, -4, "larger than the reservation, or than the channel's limit") \
    X(PELTON_TOO_SMALL, -5, "the buffer is too small: the required size was written") \
    X(PELTON_TOO_MANY_DESCRIPTORS, -6, "more descriptors than one message can carry") \
    X(PELTON_DESCRIPTORS_LOST, -7, "this process had too few free descriptors: raise RLIMIT_NOFILE") \
    X(PELTON_CORRUPT, -8, "the peer violated the layout or the protocol: close the handle") \
    X(PELTON_REFUSED, -9, "refused by the peer, or impossible for this kind of channel") \
    X(PELTON_HUNG_UP, -10, "the peer hung up during the handshake: see its own error") \
    X(PELTON_NO_LISTENER, -11, "no process listens under the name: start the peer, or set a deadline") \
    X(PELTON_IN_USE, -12, "another process listens under the name") \
    X(PELTON_NAME, -13, "an invalid name") \
    X(PELTON_OPTION, -14, "an option has an invalid value, or does not apply here") \
    X(PELTON_NO_CHANNEL, -15, "there is no channel at the path: create it, or set a deadline") \
    X(PELTON_NOT_A_CHANNEL, -16, "the file at the path cannot be used as a channel") \
    X(PELTON_ROLE_TAKEN, -17, "the role at the path is taken: receiver, publisher, durable name, or all senders") \
    X(PELTON_NO_SPACE, -18, "the file system is full: nothing is damaged, try again when there is space") \
    X(PELTON_REBOOTED, -19, "the path's channel is from before a reboot: `pelton recover` keeps the intact messages") \
    X(PELTON_SYSTEM, -20, "the operating system refused an operation: errno has the reason") \
    X(PELTON_FORKED, -21, "the handle belongs to the process that forked this one: create another one here") \
    X(PELTON_INTERNAL, -22, "a bug in pelton: close the handle, and report it") \
    X(PELTON_NULL, -23, "caller's mistake: a pointer is NULL that must not be") \
    X(PELTON_CLOSED_HANDLE, -24, "caller's mistake: the handle is closed, or of another kind") \
    X(PELTON_WRONG_THREAD, -25, "caller's mistake: another thread is in a call with this handle") \
    X(PELTON_NOT_RESERVED, -26, "caller's mistake: nothing is reserved") \
    X(PELTON_RESERVED, -27, "caller's mistake: commit or abort the reservation first") \
    X(PELTON_NOT_RECEIVED, -28, "caller's mistake: no message is received, or it was released already") \
    X(PELTON_NOT_RELEASED, -29, "caller's mistake: release or hold the received message first") \
    X(PELTON_SINK, -30, "the sink accepted nothing: nothing is released, and the same messages come again") \
    X(PELTON_NOT_A_RECORD_FILE, -31, "the file at the path cannot be used as a record file") \
    X(PELTON_DAMAGED, -32, "the record file is damaged here, and continues after that") \
    X(PELTON_TORN, -33, "the record file's end is torn, as a killed writer leaves it: everything before is intact") \
    X(PELTON_TIMED_OUT, -34, "opening has reached its deadline: the detail says what it waited for")

enum pelton_code {
#define PELTON_CODE_(name, number, text) name = number,
    PELTON_CODES(PELTON_CODE_)
#undef PELTON_CODE_
    PELTON_OK = 0,
    /* Positive, not an error: something is there already, so the caller need not wait (pelton_OBJECT_arm). */
    PELTON_READY = 1
};

/* Limits of deadline_ns: return immediately, as with any number below 0; wait without limit. */
#define PELTON_NO_WAIT INT64_C(0)
#define PELTON_FOREVER INT64_MAX

/* Returns the library's version, in the form of PELTON_VERSION. Any thread. */
uint32_t pelton_version(void);

/* Returns the text of a code, "ok" for 0, "an unknown code" for others. Never NULL; never freed. Any thread. */
const char *pelton_code_text(int code);

/* Returns one line about the last failed call of this thread: what was found, what was wanted, what to do. "" if no
 * call failed. Calls that succeed, or return PELTON_AGAIN, leave it as it is. Valid until this thread's next pelton
 * call; never freed. After PELTON_SYSTEM and PELTON_NO_SPACE, errno has the kernel's number. Any thread. */
const char *pelton_error_detail(void);

/* Returns the deadline timeout_ns from now. A negative timeout has passed; a sum beyond the clock is PELTON_FOREVER.
 * Any thread. */
int64_t pelton_deadline(int64_t timeout_ns);

/* A function that receives the log. priority is that of syslog(3): 3 error, 4 warning, 6 information. text is one line
 * without a line break, valid during the call. Any thread that is in a pelton call can call it, several at a time. That
 * thread may hold locks of the library, so the function must call no pelton function, and must return. */
typedef void (*pelton_log)(void *context, int priority, const char *text);

/* Sets the function that receives the library's log, for the whole process; NULL, the default: none. The log has what
 * changes how the program runs and is no result of a call: peers that were refused, with process, user and reason; and
 * fallbacks, where the system refuses membarrier or io_uring. Refused peers have at most one line per second, which
 * counts those before it without a line; at the end of a listener, a last line counts the rest. Nothing is logged for
 * each message. Returns once no thread is in the previous function, which may then be unloaded. Any thread.
 *
 *     static void to_syslog(void *context, int priority, const char *text) { syslog(priority, "pelton: %s", text); }
 *     pelton_set_log(to_syslog, NULL); */
void pelton_set_log(pelton_log log, void *context);

/* Closes and frees a handle of any kind, also after an error, and while something is reserved or received. Does nothing
 * with NULL. Does not wait, except for the last handle of appenders, for a file (pelton_file), and for an engine whose
 * operations use memory without a release function or an endpoint. Each kind's comment has what closing means for the
 * peer. Errors: PELTON_CLOSED_HANDLE. PELTON_WRONG_THREAD: it remains open, since an operation on a file, a
 * pelton_subscriber_set or another thread uses it, or another thread has the responder's reservation. PELTON_FORKED: it
 * is freed, and the parent's handle is unchanged. PELTON_INTERNAL: it is freed. */
int pelton_close(void *handle);

/* The size of the text of a traceparent, with its NUL: the header of W3C Trace Context, as
 * "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01". */
#define PELTON_TRACEPARENT_SIZE 56

#ifdef __cplusplus
}
#endif

#endif
