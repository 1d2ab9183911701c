/* The sides in C have this in common: the structs of bench/src/systems/c.rs, and the messages with their numbers and
 * checks.
 *
 * The benchmark compiles each side with `cc -O3 -fPIC -shared` and loads it. A side does the same as Rust's sides of
 * `stream` and `roundtrip` (bench/src/workloads), message by message. The benchmark itself measures clock, CPU time,
 * system calls and percentiles. It also checks all bytes of a few messages, which is not part of the measurement. */
#ifndef SIDE_H
#define SIDE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum role { RECEIVER, SENDER, ASKER, ANSWERER, CLIENT, SERVICE };
enum how { SPIN, BLOCK, EPOLL, UV, UV_BULK };

/* One side. systems/c.rs has the same struct: it fills in the first part. */
struct side {
    const char *forward_name; /* the channels' names, there and back; the first is also the service's */
    const char *backward_name;
    uint64_t capacity;
    int64_t connect_ns;
    uint32_t role;
    uint32_t how;
    uint32_t size_min, size_max;
    uint32_t in_place;
    uint64_t delay_ns;
    uint64_t work_steps;
    uint8_t *payloads; /* buffer_count payloads of size_max bytes each, used by round-robin */
    uint32_t buffer_count;
    uint8_t *buffer; /* of size_max bytes, for copies */
    int (*is_whole)(const uint8_t *message, size_t size);
    void (*work)(uint64_t steps);

    struct pelton_sender *sender;
    struct pelton_receiver *receiver;
    struct pelton_client *client;
    struct pelton_service *service;
    int sender_epoll, receiver_epoll; /* a client has the second */
    uint32_t seed;
    char error[512];
};

/* One pass over the channel. */
struct pass {
    uint64_t count;
    uint64_t whole_from; /* every byte is checked from this message on */
    int warms_up;        /* all of the largest size, no delay and no work */
    void (*timed)(void *of, uint64_t ns); /* each round's time, unless NULL */
    void *of;
    uint64_t bytes; /* sent by a sender or asker, received by the others */
};

/* ---- Messages: their sizes and numbers, as bench/src/parameters.rs and payload.rs have them ------------------- */

static size_t next_size(struct side *side) {
    if (side->size_min == side->size_max) return side->size_max;
    side->seed = side->seed * 1664525u + 1013904223u;
    return side->size_min + (side->seed >> 8) % (side->size_max - side->size_min + 1);
}

/* Message n, already prepared. */
static uint8_t *payload(struct side *side, uint64_t n) { return side->payloads + (n & (side->buffer_count - 1)) * side->size_max; }

/* Writes number n into the payload that message n will use. */
static void prepare(struct side *side, uint64_t n) {
    memcpy(payload(side, n), &n, side->size_max < sizeof n ? side->size_max : sizeof n);
}

/* Writes the first numbers. */
static void begin(struct side *side) {
    for (uint32_t n = 0; n < side->buffer_count; n++) prepare(side, n);
}

/* Message n is sent: its payload is free for another, see `Payloads` in bench/src/payload.rs. */
static void sent(struct side *side, uint64_t n) { prepare(side, n + side->buffer_count); }

static uint64_t number(const uint8_t *message, size_t size) {
    uint64_t n = 0;
    if (size >= sizeof n) memcpy(&n, message, sizeof n);
    else memcpy(&n, message, size);
    return n;
}

static uint64_t expected(uint64_t n, size_t size) {
    return size >= sizeof n ? n : n & ((UINT64_C(1) << (8 * size)) - 1);
}

static int wrong(struct side *side, uint64_t n, uint64_t found, size_t size) {
    if (found != expected(n, size)) {
        snprintf(side->error, sizeof side->error,
                 "message %llu has the number %llu: messages were lost, doubled or reordered", (unsigned long long)n,
                 (unsigned long long)found);
    } else {
        snprintf(side->error, sizeof side->error, "message %llu has wrong bytes", (unsigned long long)n);
    }
    return -1;
}

static int check(struct side *side, const struct pass *pass, uint64_t n, const uint8_t *message, size_t size) {
    uint64_t found = number(message, size);
    if (found != expected(n, size) || (n >= pass->whole_from && !side->is_whole(message, size))) {
        return wrong(side, n, found, size);
    }
    return 0;
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void delay(uint64_t ns) {
    if (ns == 0) return;
    for (uint64_t end = now_ns() + ns; now_ns() < end;) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

static void work(struct side *side, const struct pass *pass) {
    if (side->work_steps > 0 && !pass->warms_up) side->work(side->work_steps);
}

#endif
