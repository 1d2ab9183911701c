/* pelton/broadcast.h: publish and subscribe.
 *
 * One publisher sends each message to up to 64 subscribers, in processes or threads, which join and leave at any time.
 * The message is copied into the lane once, however many read it. A broadcast is created
 *   - by name, "prices" or "unix:PATH", as in pelton/channel.h: its messages exist as long as the publisher;
 *   - in a directory, "path:DIR", which keeps the lane: the publisher and the subscribers come and go in any order, and
 *     each successor continues where its predecessor was. A subscriber with a durable name keeps its place there while
 *     no process uses the name. Each process that may write to the directory can change all of it;
 *   - between threads of one process.
 *
 * Each subscriber chooses its policy: what the publisher does when it falls behind. Messages come in order, each once
 * or counted as missed.
 *   PELTON_GATE     by the whole capacity: the publisher waits for it. Nothing is lost
 *   PELTON_LAG      by its slack or more: the publisher overwrites, and the subscriber learns how many it has missed
 *   PELTON_LATEST   it receives the newest message only
 *
 * If the slowest subscriber gates on the publisher's own processor, pelton_publisher_send also pauses once 2 MiB are
 * unreleased, for at most 10 ms, so that this subscriber can run; then the rest of the capacity is used. Not with
 * PELTON_NO_WAIT, the option history, or while a subscriber may lag.
 *
 * The publisher admits subscribers, and notices their ends, within its own calls: one that sends does that if 10 ms
 * have passed since the last time. A publisher that sends rarely calls pelton_publisher_wait_subscribers with
 * PELTON_NO_WAIT when its descriptor is readable. In a directory subscribers join by themselves.
 *
 *     pelton_publisher *publisher;
 *     pelton_publisher_open("prices", NULL, &publisher);
 *     pelton_publisher_wait_subscribers(publisher, 1, PELTON_FOREVER);
 *     pelton_publisher_send(publisher, "17", 2, PELTON_FOREVER);
 *     pelton_publisher_wait_released(publisher, PELTON_FOREVER);
 *     pelton_close(publisher);
 *
 * and in the other processes
 *
 *     pelton_subscriber *subscriber;
 *     pelton_delivery delivery;
 *     pelton_subscriber_open("prices", NULL, &subscriber);
 *     while (pelton_subscriber_receive(subscriber, PELTON_FOREVER, &delivery) == 0) {
 *         use(delivery.data, delivery.size, delivery.missed);
 *         pelton_subscriber_release(subscriber);
 *     }
 *     pelton_close(subscriber);
 */
#ifndef PELTON_BROADCAST_H
#define PELTON_BROADCAST_H

#include <pelton/result.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Closing the publisher: its subscribers receive what the lane has for them, then PELTON_CLOSED. A process that exits
 * without closing is reported to them as PELTON_PEER_DIED. */
typedef struct pelton_publisher pelton_publisher;
/* Closing the subscriber: it leaves, and holds nothing up. A durable one keeps its place, and still counts by its
 * policy: one that gates holds the publisher up once the lane is full, until it returns or is removed
 * (pelton_subscription_remove). */
typedef struct pelton_subscriber pelton_subscriber;
/* An open in progress. Closing it cancels the open. */
typedef struct pelton_subscriber_opening pelton_subscriber_opening;
/* Subscribers of many publishers, for which one thread waits. Closing the set: its subscribers are removed from it, and
 * stay open. Close them afterwards. */
typedef struct pelton_subscriber_set pelton_subscriber_set;

/* ---- Publishing --------------------------------------------------------------------------------------------------- *
 * The end of a subscriber is no error. */

/* hold_max_ns of a publisher that waits for no subscriber. */
#define PELTON_NO_HOLD INT64_C(-1)

/* Options of publishers. */
typedef struct pelton_publisher_options {
    uint32_t struct_bytes;       /* sizeof(pelton_publisher_options): PELTON_PUBLISHER_OPTIONS_INIT sets it */
    uint32_t wait;               /* enum pelton_wait */
    uint64_t capacity;           /* bytes of the lane: 64 MiB, from 4 KiB to 16 GiB, rounded up to 64 KiB. Memory is
                                    used only as needed, and kept until the publisher is closed */
    uint64_t message_bytes_max;  /* largest message: half the capacity less 32 bytes. A subscriber of another user
                                    takes 1 MiB, unless its own option is larger */
    uint64_t history;            /* messages kept for subscribers that join later, as far as they fit into half the
                                    capacity and no message needs the space: 0 */
    int64_t hold_max_ns;         /* how long one subscriber may hold the publisher up at one message. One that could do
                                    so for longer is refused. 0: no limit. PELTON_NO_HOLD: each must lag. By path the
                                    limit stays until the next publisher begins */
    int64_t deadline_ns;         /* path: opening waits until then while another publisher is alive, or a subscription
                                    may hold it up for longer than hold_max_ns; with a time that has passed it does not
                                    wait. 0: for 200 ms, which the kernel may take to end a process */
    const uint32_t *uids;        /* users that may subscribe, besides this process's own, */
    uint32_t uid_count;          /* and their number */
    uint32_t mode;               /* path: permission bits of a created directory, 0700. One that exists, and has more
                                    bits, is refused: PELTON_NOT_A_CHANNEL */
} pelton_publisher_options;

#define PELTON_PUBLISHER_OPTIONS_INIT {(uint32_t)sizeof(pelton_publisher_options), 0, 0, 0, 0, 0, 0, NULL, 0, 0}

/* Publishes under "prices" or "unix:PATH". name may be NULL: then only threads of this process subscribe
 * (pelton_publisher_subscriber). Does not wait. The name exists until the publisher is closed. The socket of a dead
 * process is replaced. "path:DIR" creates the broadcast in that directory, or continues after the last message of the
 * predecessor, with the sizes that the broadcast was created with. Without a subscriber, later messages overwrite
 * earlier ones, except the last ones by the option history.
 * Errors: PELTON_NAME, PELTON_OPTION. By name: PELTON_IN_USE. By path: PELTON_ROLE_TAKEN: another publisher is alive.
 * PELTON_REFUSED: a subscription, perhaps one that no process uses, may hold it up for longer than hold_max_ns.
 * PELTON_NOT_A_CHANNEL, PELTON_NO_SPACE, PELTON_CORRUPT. PELTON_REBOOTED: remove the directory. */
PELTON_MUST_USE int pelton_publisher_open(const char *name, const pelton_publisher_options *options,
                                          pelton_publisher **out);

/* Copies a message into the lane. Waits while a subscriber that gates has not released the space, and may pause (see
 * above). Without subscribers it does not wait. data may be NULL if size is 0. Errors: PELTON_AGAIN: there is no space;
 * nothing was sent. PELTON_TOO_LARGE. */
PELTON_MUST_USE int pelton_publisher_send(pelton_publisher *publisher, const void *data, size_t size,
                                          int64_t deadline_ns);

/* Admits subscribers, and lets go those that have ended. Waits until there are count. With PELTON_NO_WAIT it only
 * admits: so call it when the descriptor is readable and there is nothing to send.
 * Errors: PELTON_AGAIN: there are fewer. */
PELTON_MUST_USE int pelton_publisher_wait_subscribers(pelton_publisher *publisher, size_t count, int64_t deadline_ns);

/* Waits until each subscriber that gates has released every message. One with lag_after_ns that releases nothing for
 * so long lags from then on, and is not waited for. There is no arm for it: an event loop repeats it by a timer, with
 * PELTON_NO_WAIT. Errors: PELTON_AGAIN: not yet. */
PELTON_MUST_USE int pelton_publisher_wait_released(pelton_publisher *publisher, int64_t deadline_ns);

/* What happens when a subscriber falls behind. */
enum pelton_policy {
    PELTON_GATE = 0,  /* the publisher waits, with lag_after_ns for so long; the message is received in place */
    PELTON_LAG = 1,   /* the publisher goes on, and the subscriber misses messages; it copies each */
    PELTON_LATEST = 2 /* the subscriber receives the newest message, and skips those before; it copies */
};

/* A subscriber, as its publisher sees it. */
typedef struct pelton_subscriber_state {
    uint32_t pid;         /* its process; of a thread, this one; 0: a durable one that no process uses */
    uint32_t uid;         /* its user */
    char durable[72];     /* the name of its durable subscription; "": none */
    uint32_t policy;      /* enum pelton_policy */
    uint32_t lags;        /* 1: the publisher does not wait for it now */
    int64_t lag_after_ns; /* with PELTON_GATE: how long the publisher waits for it at one message; 0: no limit */
    int64_t holds_ns;     /* how long it has been holding the publisher up, at least 1; 0: it does not */
    uint64_t behind;      /* messages sent and not released by it */
    uint64_t messages;    /* messages received, as it says */
    uint64_t missed;      /* messages missed, as it says */
} pelton_subscriber_state;

/* Writes the state of each subscriber that has joined, and of each durable one. Does not wait or admit. *out_count is
 * their number, at most 64; also with PELTON_TOO_SMALL. out may be NULL if capacity is 0.
 * Errors: PELTON_TOO_SMALL: capacity is less. */
PELTON_MUST_USE int pelton_publisher_subscribers(pelton_publisher *publisher, pelton_subscriber_state *out,
                                                 size_t capacity, size_t *out_count);

/* The descriptor to poll for reading. Constant; not to be closed, read or written. */
int pelton_publisher_fd(const pelton_publisher *publisher);

/* Busy-polls for space for a message of size bytes ("Event loops" in pelton.h). Errors: PELTON_AGAIN: no space yet.
 * PELTON_TOO_LARGE. */
PELTON_MUST_USE int pelton_publisher_poll(pelton_publisher *publisher, size_t size);

/* Makes the descriptor readable once there is space for a message of size bytes. It is readable also while a subscriber
 * waits to be admitted or has ended; this function admits it. Returns PELTON_OK, or PELTON_READY: there is space, as
 * usually. A call that sends or admits meanwhile ends this, and makes the descriptor readable: arm again.
 * Errors: PELTON_TOO_LARGE. */
PELTON_MUST_USE int pelton_publisher_arm(pelton_publisher *publisher, size_t size);

/* Ends what pelton_publisher_arm began. */
int pelton_publisher_disarm(pelton_publisher *publisher);

/* A publisher's figures. Set struct_bytes before the call; a newer program gets 0 in fields that the library does not
 * have. */
typedef struct pelton_publisher_info {
    uint32_t struct_bytes;      /* sizeof(pelton_publisher_info) */
    uint32_t subscribers;       /* that have joined, and not left as far as known; also durable ones that no process
                                   uses */
    uint64_t next_number;       /* number of the next message, from 1 on */
    uint64_t capacity;          /* bytes of the lane */
    uint64_t message_bytes_max; /* largest message */
    uint64_t corrupt;           /* subscribers removed because their cursor violated the layout; by path also those of
                                   users that the options do not permit */
    uint64_t messages;          /* sent */
    uint64_t bytes;             /* of their payload */
    uint64_t waits;             /* times that there was no space */
    uint64_t sleeps;            /* times that it slept, or armed its descriptor */
    uint64_t wakes_sent;        /* times that it woke a subscriber */
} pelton_publisher_info;

/* Errors: PELTON_OPTION: struct_bytes is 0, no multiple of 8, or above 4096. */
int pelton_publisher_get_info(pelton_publisher *publisher, pelton_publisher_info *out);

/* ---- Subscribing -------------------------------------------------------------------------------------------------- *
 * After the last message of a publisher that has gone, functions that receive, poll or arm return PELTON_CLOSED or
 * PELTON_PEER_DIED; PELTON_CORRUPT after it violated the layout. Until a received message is released, all functions
 * return PELTON_NOT_RELEASED except release, fd, disarm and get_info. */

/* start_from: the oldest message that the publisher has. */
#define PELTON_OLDEST UINT64_MAX

/* Options of subscribers. */
typedef struct pelton_subscriber_options {
    uint32_t struct_bytes;      /* sizeof(pelton_subscriber_options): PELTON_SUBSCRIBER_OPTIONS_INIT sets it */
    uint32_t wait;              /* enum pelton_wait */
    uint64_t start_from;        /* the first message. 0: the next one. A number: so many before that one.
                                   PELTON_OLDEST. The publisher has earlier ones by its option history. Of a durable
                                   subscription only the first subscriber begins there */
    int64_t lag_after_ns;       /* PELTON_GATE: it holds the publisher up for so long at one message; then it lags until
                                   it has caught up, and may miss messages. 0: no limit */
    uint64_t slack;             /* PELTON_LAG, or lag_after_ns: bytes that it may be behind before the publisher passes
                                   it. 256 KiB, at most half the publisher's capacity. More is slower */
    uint64_t capacity;          /* largest lane that it accepts: of the same user 16 GiB, else 64 MiB */
    uint64_t message_bytes_max; /* largest message that it accepts. Of another user's publisher 1 MiB. Not by path */
    int64_t deadline_ns;        /* opening waits until then for a publisher. 0: not at all. By path it waits for the
                                   directory, not for a publisher, and for the durable name. 0: 200 ms for the name */
    const char *durable;        /* path: the subscription keeps its place under this name, over restarts of both sides.
                                   1 to 64 letters, digits, '.', '_' or '-'. NULL: it ends with the subscriber. Not with
                                   PELTON_LATEST */
    const uint32_t *uids;       /* users that may be the publisher, besides this process's own, */
    uint32_t uid_count;         /* and their number */
    uint32_t policy;            /* enum pelton_policy: PELTON_GATE */
    uint32_t mode;              /* path: permission bits that the directory may have, 0700 */
    uint32_t reserved;          /* 0 */
} pelton_subscriber_options;

#define PELTON_SUBSCRIBER_OPTIONS_INIT \
    {(uint32_t)sizeof(pelton_subscriber_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0, 0, 0}

/* Subscribes to the publisher under "prices" or "unix:PATH". Waits until options.deadline_ns for a publisher, and some
 * seconds to be admitted. Errors: as pelton_sender_open. PELTON_REFUSED: also if the publisher has 64 subscribers, or
 * takes none that could hold it up for so long. "path:DIR" subscribes in that directory, with or without a publisher,
 * and does not wait for one. Errors there: PELTON_NO_CHANNEL. PELTON_ROLE_TAKEN: another process uses the durable name.
 * PELTON_REFUSED: there are 64 subscribers and durable subscriptions; or the publisher, also the last one that there
 * was, takes none that could hold it up for so long; or the durable one gates now, and could be passed
 * before: remove it to begin anew. PELTON_CORRUPT, PELTON_NOT_A_CHANNEL, PELTON_NO_SPACE, PELTON_REBOOTED. */
PELTON_MUST_USE int pelton_subscriber_open(const char *name, const pelton_subscriber_options *options,
                                           pelton_subscriber **out);

/* Removes the durable subscription of "path:DIR", which no process uses: it holds the publisher up no more. Waits for
 * at most 200 ms, while another process opens or removes a durable subscription there. Any thread. Errors:
 * PELTON_TIMED_OUT: that process has stopped. PELTON_REFUSED: there is none of this name. PELTON_ROLE_TAKEN: a process
 * uses it. PELTON_NAME, PELTON_NO_CHANNEL, PELTON_NOT_A_CHANNEL: also if the directory is another user's. */
PELTON_MUST_USE int pelton_subscription_remove(const char *name, const char *durable);

/* Creates a subscriber for a thread of the publisher's process, which has joined already. Does not wait. Makes the
 * publisher's descriptor readable: an event loop that waits arms again. The options capacity, message_bytes_max,
 * deadline_ns, durable, uids and mode have no use here. Errors: PELTON_REFUSED: as pelton_subscriber_open, and of a
 * publisher in a directory, where threads use pelton_subscriber_open too. */
PELTON_MUST_USE int pelton_publisher_subscriber(pelton_publisher *publisher, const pelton_subscriber_options *options,
                                                pelton_subscriber **out);

/* Starts to subscribe, for event loops: as pelton_sender_open_start. */
PELTON_MUST_USE int pelton_subscriber_open_start(const char *name, const pelton_subscriber_options *options,
                                                 pelton_subscriber_opening **out);
int pelton_subscriber_opening_fd(const pelton_subscriber_opening *opening);
PELTON_MUST_USE int pelton_subscriber_opening_finish(pelton_subscriber_opening *opening, pelton_subscriber **out);

/* A received message: in the lane if the subscriber gates, which trusts the publisher not to write there; a copy
 * otherwise. */
typedef struct pelton_delivery {
    const void *data; /* never NULL; in the lane it is aligned to 8. Valid until the release */
    size_t size;
    uint64_t number;  /* each publisher counts its messages from 1; by path it continues its predecessor's count. A
                         durable subscriber that is killed before the release gets the message again, with the same
                         number */
    uint64_t missed;  /* messages that the subscriber has missed directly before this one, also while away */
} pelton_delivery;

/* Receives the next message. Waits for one. Errors: PELTON_AGAIN: there is none. */
PELTON_MUST_USE int pelton_subscriber_receive(pelton_subscriber *subscriber, int64_t deadline_ns,
                                              pelton_delivery *out);

/* Releases the received message. Does not wait. Errors: PELTON_NOT_RECEIVED. */
int pelton_subscriber_release(pelton_subscriber *subscriber);

/* After PELTON_PEER_DIED or PELTON_CLOSED: waits for the publisher's successor under the same name, and joins it with
 * the same options. Its messages count from 1; all of the former publisher were received before. The descriptor stays
 * the same. Errors: PELTON_AGAIN: no successor has admitted it yet, which takes two of the publisher's calls. The next
 * call continues there, also with PELTON_NO_WAIT; the successor may count the subscriber already, so call it again, or
 * close it. PELTON_REFUSED: the publisher is there, or in this process alone. As pelton_subscriber_open; it can be
 * tried again. By path the lane and its numbers continue. */
PELTON_MUST_USE int pelton_subscriber_resume(pelton_subscriber *subscriber, int64_t deadline_ns);

/* The descriptor to poll for reading. As pelton_publisher_fd. */
int pelton_subscriber_fd(const pelton_subscriber *subscriber);

/* Busy-polls for a message ("Event loops" in pelton.h). Errors: PELTON_AGAIN: none yet. As
 * pelton_subscriber_receive. */
PELTON_MUST_USE int pelton_subscriber_poll(pelton_subscriber *subscriber);

/* Makes the descriptor readable once there is a message, or the publisher has gone. Returns PELTON_OK, or PELTON_READY:
 * there is a message. Errors: as pelton_subscriber_receive. */
PELTON_MUST_USE int pelton_subscriber_arm(pelton_subscriber *subscriber);

/* Ends what pelton_subscriber_arm began. Also while a message is received. */
int pelton_subscriber_disarm(pelton_subscriber *subscriber);

/* A subscriber's figures. */
typedef struct pelton_subscriber_info {
    uint32_t struct_bytes;      /* sizeof(pelton_subscriber_info), as in pelton_publisher_info */
    uint32_t peer_pid;          /* the publisher's process; of a thread, this one; 0: none is known */
    uint32_t peer_uid;          /* its user */
    uint32_t continues;         /* 1: of a durable subscription, which an earlier process has begun */
    uint64_t next_number;       /* number of the next message */
    uint64_t capacity;          /* bytes of the lane */
    uint64_t message_bytes_max; /* largest message */
    uint64_t messages;          /* received */
    uint64_t bytes;             /* of their payload */
    uint64_t missed;            /* messages missed, also at the very end of a broadcast; with PELTON_LATEST, skipped */
    uint64_t waits;             /* times that there was no message */
    uint64_t sleeps;
    uint64_t wakes_sent;
} pelton_subscriber_info;

/* Also while a message is received. Errors: as pelton_publisher_get_info. */
int pelton_subscriber_get_info(pelton_subscriber *subscriber, pelton_subscriber_info *out);

/* ---- Many publishers ---------------------------------------------------------------------------------------------- *
 * One thread receives from the subscribers of a set. The messages of a publisher arrive in order; between publishers
 * there is no order. Those with messages take turns, of 64 messages each. Publishers, policies and sizes may differ. A
 * sleep costs from a fraction of a microsecond to some microseconds for each subscriber.
 *
 *     pelton_subscriber_set_open(PELTON_BLOCK, &set);
 *     pelton_subscriber_set_add(set, bids);
 *     pelton_subscriber_set_add(set, offers);
 *     while ((code = pelton_subscriber_set_receive(set, PELTON_FOREVER, &from, &delivery)) == PELTON_OK || from) {
 *         if (code == PELTON_OK) {
 *             use(from == bids ? "bid" : "offer", delivery.data, delivery.size);
 *             pelton_subscriber_set_release(set);
 *         } else {
 *             pelton_close(from);
 *         }
 *     }
 *     pelton_close(set);
 *
 * Until a received message is released, all functions of the set return PELTON_NOT_RELEASED except release, fd, disarm
 * and get_info. */

/* Creates an empty set. Does not wait. wait is how it waits, enum pelton_wait, whatever the subscribers' options say.
 * Errors: PELTON_OPTION. */
PELTON_MUST_USE int pelton_subscriber_set_open(uint32_t wait, pelton_subscriber_set **out);

/* Adds a subscriber, which the set uses until it is removed or its publisher leaves: until then each other use of the
 * subscriber, and closing it, returns PELTON_WRONG_THREAD. Does not wait. Makes the set's descriptor readable: an event
 * loop that waits arms again. Errors: PELTON_NOT_RELEASED: the subscriber has received a message. PELTON_WRONG_THREAD:
 * a set has it already. */
PELTON_MUST_USE int pelton_subscriber_set_add(pelton_subscriber_set *set, pelton_subscriber *subscriber);

/* Removes a subscriber, which can be used as before and keeps its place: what the set has not delivered it receives
 * itself. Does not wait. Errors: PELTON_REFUSED: it is not in this set. */
int pelton_subscriber_set_remove(pelton_subscriber_set *set, pelton_subscriber *subscriber);

/* Receives the next message. Waits for one. *from is the subscriber whose message it is. If a publisher has left, and
 * all its messages were received, returns the code that pelton_subscriber_receive would, for example PELTON_CLOSED or
 * PELTON_PEER_DIED; *from is its subscriber, which has been removed: close it, or resume it and add it again. While a
 * resume waits, nothing is received from the others: use PELTON_NO_WAIT between receives. With each other error *from
 * is NULL. Errors: PELTON_AGAIN: there is no message; with PELTON_FOREVER: the set is empty, and nothing can arrive.
 * PELTON_SYSTEM: try again. */
PELTON_MUST_USE int pelton_subscriber_set_receive(pelton_subscriber_set *set, int64_t deadline_ns,
                                                  pelton_subscriber **from, pelton_delivery *out);

/* Releases the received message. Does not wait. Errors: PELTON_NOT_RECEIVED. */
int pelton_subscriber_set_release(pelton_subscriber_set *set);

/* The descriptor to poll for reading: one for all subscribers. As pelton_publisher_fd. */
int pelton_subscriber_set_fd(const pelton_subscriber_set *set);

/* Makes the descriptor readable once there is a message, a publisher has left, or a subscriber is added. Returns
 * PELTON_OK, or PELTON_READY: receive with PELTON_NO_WAIT. */
PELTON_MUST_USE int pelton_subscriber_set_arm(pelton_subscriber_set *set);

/* Ends what pelton_subscriber_set_arm began. Also while a message is received. */
int pelton_subscriber_set_disarm(pelton_subscriber_set *set);

/* The figures of a subscriber in the set. Also while a message is received. Errors: as pelton_subscriber_get_info.
 * PELTON_REFUSED: it is not in this set. */
int pelton_subscriber_set_get_info(pelton_subscriber_set *set, pelton_subscriber *subscriber,
                                   pelton_subscriber_info *out);

#ifdef __cplusplus
}
#endif

#endif
