/* What threads may rely on, for ThreadSanitizer to judge: plain memory on both sides of a message is ordered by it.
 *
 *     races            no race
 *     races seeded     one, which a sanitizer that sees anything reports */
#include "check.h"
#include <sched.h>

enum { ROUNDS = 20000, LARGEST = 3000 };

static long before_send[ROUNDS + 1];  /* written by the sender before it sends, read by the receiver */
static long before_release[ROUNDS + 1]; /* written by the receiver before it releases, read by the sender */
static pelton_sender *sender;
static pelton_receiver *receiver;
static pelton_held *held[ROUNDS + 1]; /* every third message: a third thread reads it and gives it back */
static const unsigned char *held_data[ROUNDS + 1];

static size_t size_of(long round) {
    return (size_t)(1 + round * 7 % LARGEST);
}

static void *release_all(void *nothing) {
    for (long round = 3; round <= ROUNDS; round += 3) {
        pelton_held *one;
        while (!(one = __atomic_load_n(&held[round], __ATOMIC_ACQUIRE))) sched_yield();
        for (size_t at = 0; at < size_of(round); at++) CHECK(held_data[round][at] == (unsigned char)round);
        OK(pelton_close(one));
    }
    return nothing;
}

static void *receive_all(void *seeded) {
    pelton_message message;
    for (long round = 1; round <= ROUNDS; round++) {
        OK(pelton_receiver_receive(receiver, SOON, &message));
        const unsigned char *data = (const unsigned char *)message.data;
        CHECK(message.size == size_of(round) && data[0] == (unsigned char)round && data[message.size - 1] == data[0]);
        CHECK(before_send[round] == round);
        before_release[round] = round;
        if (round % 3 == 0) {
            pelton_held *one;
            OK(pelton_receiver_hold(receiver, &one));
            held_data[round] = data;
            __atomic_store_n(&held[round], one, __ATOMIC_RELEASE);
        } else {
            OK(pelton_receiver_release(receiver));
        }
    }
    /* What others hold comes back while it waits. */
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    if (seeded) before_release[0]++;
    return NULL;
}

static void messages_order_the_memory_around_them(int seeded) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pthread_t thread, releasing;
    /* Small: the same bytes again and again, and both sides sleep at times. */
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, &sender, &receiver));
    CHECK(pthread_create(&thread, NULL, receive_all, seeded ? &seeded : NULL) == 0);
    CHECK(pthread_create(&releasing, NULL, release_all, NULL) == 0);
    for (long round = 1; round <= ROUNDS; round++) {
        void *room;
        before_send[round] = round;
        OK(pelton_sender_reserve(sender, size_of(round), SOON, &room));
        memset(room, (int)(round & 0xff), size_of(round));
        OK(pelton_sender_commit(sender, size_of(round)));
        if (round % 1000 == 0) {
            OK(pelton_sender_wait_released(sender, SOON));
            CHECK(before_release[round] == round && before_release[round - 999] == round - 999);
        }
    }
    OK(pelton_close(sender));
    if (seeded) before_release[0]++;
    CHECK(pthread_join(thread, NULL) == 0 && pthread_join(releasing, NULL) == 0);
    OK(pelton_close(receiver));
}

int main(int argc, char **argv) {
    alarm(200);
    messages_order_the_memory_around_them(argc > 1 && strcmp(argv[1], "seeded") == 0);
    return 0;
}
