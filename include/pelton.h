/* pelton.h: messages at memory speed between the threads and processes of one machine.
 *
 * Linux 5.10 or later, 64-bit, little-endian; C11 or C++17. This header includes one header for each verb:
 *
 *   pelton/channel.h     send     messages of any size to another thread or process; many senders, one receiver
 *   pelton/broadcast.h   publish  each message to many subscribers, which read it in place
 *   pelton/call.h        call     a service in another process, in any language, and await its reply
 *   pelton/flush.h       flush    whole buffers of messages to a file or a function; record files
 *   pelton/file.h        file     read and write files without blocking an event loop
 *
 * and pelton/result.h with what all of them share: codes, deadlines, the library's version.
 *
 *     pelton_sender *sender;
 *     pelton_sender_open("events", NULL, &sender);
 *     pelton_sender_send(sender, "hello", 5, PELTON_FOREVER);
 *     pelton_close(sender);
 *
 * and in the other process
 *
 *     pelton_listener *listener;
 *     pelton_receiver *receiver;
 *     pelton_message message;
 *     pelton_listener_open("events", NULL, &listener);
 *     pelton_listener_accept_receiver(listener, PELTON_FOREVER, &receiver);
 *     while (pelton_receiver_receive(receiver, PELTON_FOREVER, &message) == 0) {
 *         use(message.data, message.size);
 *         pelton_receiver_release(receiver);
 *     }
 *     pelton_close(receiver);
 *     pelton_close(listener);
 *
 * NAMES. A function on a handle is pelton_OBJECT_VERB, and its first parameter is the handle. Another kind of handle is
 * an error in C++, and at least a warning in C. Only pelton_close takes a handle of any kind: pass it the handle, not
 * the handle's address.
 *
 * RESULTS. A function that returns int returns PELTON_OK (0) or a negative code; a few return a positive number, as
 * their comment says, and pelton_OBJECT_fd returns a descriptor. PELTON_AGAIN is not an error: nothing is there, there
 * is no space, or the deadline has passed. After any other negative code, pelton_error_detail() describes what was
 * found, what was wanted, and what to do. An out-parameter is written only with PELTON_OK, unless the comment says
 * otherwise. errno has a meaning only where a comment says so. "Errors" in a comment lists the function's own codes.
 * Besides these, each function can return:
 *   PELTON_NULL           a pointer is NULL that must not be.
 *   PELTON_CLOSED_HANDLE  the handle is closed, or is of another kind, which a cast or another language made possible.
 *                         A closed handle is recognised for at least the next 64 closings of the process, not for ever.
 *   PELTON_WRONG_THREAD   another thread is in a call with this handle, found only if PELTON_CHECK_THREADS is set in
 *                         the environment or the library is a debug build; or an operation on a file uses the endpoint,
 *                         or a pelton_subscriber_set the subscriber. Nothing was done.
 *   PELTON_FORKED         the caller is a forked child, and its parent created the handle. Close the handle, and create
 *                         another one. Only pelton_records works in a child too.
 *   PELTON_INTERNAL       a bug in pelton. The handle can only be closed. Please report pelton_error_detail().
 *   PELTON_SYSTEM         the kernel refused something: errno has its number.
 *
 * WAITING. A function with the parameter deadline_ns can wait until that time of CLOCK_MONOTONIC, in nanoseconds: a
 * time, not a duration. PELTON_NO_WAIT and PELTON_FOREVER are the two limits; pelton_deadline(n) is n nanoseconds from
 * now. Functions without that parameter do not wait, unless their comment says so. A signal does not end a wait: a
 * program that needs that uses its own event loop.
 *
 * EVENT LOOPS. A sender, receiver, publisher, subscriber, subscriber set, client, service and engine has one descriptor
 * (pelton_OBJECT_fd) for poll, epoll, io_uring or libuv; poll it for reading, level-triggered. Then:
 *   1. Take everything with PELTON_NO_WAIT, until PELTON_AGAIN.
 *   2. Optionally, pelton_OBJECT_poll busy-polls for some microseconds; PELTON_OK: go to 1. It is worth its time where
 *      replies or messages usually arrive within the cost of a sleep, and it adapts: it polls less after failures.
 *      A subscriber set has none.
 *   3. pelton_OBJECT_arm. PELTON_OK: return to the loop; the descriptor becomes readable once there is something.
 *      PELTON_READY: go to 1. A negative code is the end of the channel, or an error.
 *   4. When the descriptor is readable, go to 1. It can be readable although nothing is there: then step 3 follows.
 * A loop that has had enough for one tick may skip the rest: the descriptor stays readable until the next arm.
 * pelton_OBJECT_disarm ends the interest, and must precede functions that wait. For libuv, use pelton_uv.h.
 * To open without waiting, see pelton_sender_open_start. The descriptors of listeners and of openings are not armed.
 *
 * THREADS. One thread at a time uses a handle, also where a parameter is const. Another one may use it later, if the
 * program orders the two uses. Different handles are independent. A comment says "any thread" where several threads may
 * call at the same time. Threads that the library creates block all signals; those of pelton_service_run have the
 * caller's signal mask.
 *
 * MEMORY. The library uses what a parameter points to only during the call, unless a comment says otherwise: names,
 * paths, options and arrays may be freed afterwards. A short name and "unix:PATH" are UTF-8; other paths are any bytes.
 * A pointer that the library returns belongs to the library, and its comment says how long it is valid. A handle
 * belongs to the caller until pelton_close.
 *
 * OPTIONS. Each kind of function that creates handles has a structure of options. NULL selects the defaults, and so
 * does 0 in a field. Begin with the structure's _INIT macro: struct_bytes is the structure's size, all else is 0. An
 * option that the function cannot use, for example `create` for a name that is not a path, is refused with
 * PELTON_OPTION.
 *
 * UNITS. Sizes are in bytes, times in nanoseconds.
 */
#ifndef PELTON_H
#define PELTON_H

#include <pelton/result.h>
#include <pelton/channel.h>
#include <pelton/broadcast.h>
#include <pelton/call.h>
#include <pelton/flush.h>
#include <pelton/file.h>

#endif
