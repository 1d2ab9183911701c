/* Backpressure both ways in one libuv loop: each message of a channel becomes a call, each reply a message of another
 * channel. Nothing is queued beyond one message and one reply. When the service is busy, the sender of IN waits; when
 * the receiver of OUT is slow, the service waits.
 *
 *     uv_relay IN SERVICE OUT      listens at IN for a sender; OUT is a receiver that listens
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pelton_uv.h>

static pelton_uv_receiver_t input;
static pelton_uv_client_t client;
static pelton_uv_sender_t output;
static int in_flight, input_has_ended;

/* A message that waits for space for its request, without a copy; and a reply that waits for space in OUT. */
static pelton_message waiting;
static pelton_held *held;
static char *reply;
static size_t reply_size;

static void fail(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    exit(1);
}

static void on_message(pelton_uv_receiver_t *handle, const pelton_message *message);
static void on_input_end(pelton_uv_receiver_t *handle, int code);
static void on_request_space(pelton_uv_client_t *handle);

static void on_client_end(pelton_uv_client_t *handle, int code) {
    (void)handle;
    fail("the service has ended", code);
}

static void on_output_end(pelton_uv_sender_t *handle, int code) {
    (void)handle;
    fail("the receiver of OUT has ended", code);
}

static void close_when_done(void) {
    if (!input_has_ended || in_flight > 0 || held || reply) return;
    pelton_uv_receiver_close(&input, NULL);
    pelton_uv_client_close(&client, NULL);
    pelton_uv_sender_close(&output, NULL);
}

/* ---- Replies to OUT ---- */

static void on_output_space(pelton_uv_sender_t *handle) {
    int code = pelton_sender_send(handle->sender, reply, reply_size, PELTON_NO_WAIT);
    if (code == PELTON_AGAIN) return;
    if (code != PELTON_OK) fail("sending", code);
    free(reply);
    reply = NULL;
    pelton_uv_sender_stop(handle);
    if ((code = pelton_uv_client_start(&client, on_request_space, on_client_end)) != PELTON_OK) fail("starting the client", code);
    close_when_done();
}

static void on_reply(pelton_uv_call_t *call, int code, const pelton_completion *completion) {
    free(call);
    if (code != PELTON_OK || completion->outcome != PELTON_REPLY) fail("calling", code);
    in_flight--;
    code = pelton_sender_send(output.sender, completion->data, completion->size, PELTON_NO_WAIT);
    if (code == PELTON_AGAIN) {
        /* A completion cannot be held, so this one is copied; the others stay in the service's lane while the client
         * is stopped. */
        reply_size = completion->size;
        if (!(reply = (char *)malloc(reply_size + 1))) exit(1);
        memcpy(reply, completion->data, reply_size);
        pelton_uv_client_stop(&client);
        code = pelton_uv_sender_start(&output, reply_size, on_output_space, on_output_end);
    }
    if (code != PELTON_OK) fail("sending", code);
    close_when_done();
}

/* ---- Messages of IN to the service ---- */

static int start_call(const pelton_message *message) {
    pelton_uv_call_t *call = (pelton_uv_call_t *)malloc(sizeof *call);
    if (!call) exit(1);
    int code = pelton_uv_call_start(call, &client, message->data, message->size, 0, on_reply);
    if (code == PELTON_OK) in_flight++;
    else free(call);
    if (code != PELTON_OK && code != PELTON_AGAIN) fail("submitting", code);
    return code;
}

static void on_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    if (start_call(message) == PELTON_OK) return;
    waiting = *message;
    int code = pelton_receiver_hold(handle->receiver, &held);
    if (code != PELTON_OK) fail("holding", code);
    pelton_uv_receiver_stop(handle);
}

static void on_request_space(pelton_uv_client_t *handle) {
    (void)handle;
    if (!held || start_call(&waiting) != PELTON_OK) return;
    pelton_close(held);
    held = NULL;
    int code = pelton_uv_receiver_start(&input, on_message, on_input_end);
    if (code != PELTON_OK) on_input_end(&input, code);
}

static void on_input_end(pelton_uv_receiver_t *handle, int code) {
    (void)handle;
    if (code != PELTON_CLOSED) fail("receiving", code);
    input_has_ended = 1;
    close_when_done();
}

/* ---- Opening ---- */

static void begin_when_open(void) {
    if (!client.client || !output.sender) return;
    int code = pelton_uv_client_start(&client, on_request_space, on_client_end);
    if (code == PELTON_OK) code = pelton_uv_receiver_start(&input, on_message, on_input_end);
    if (code != PELTON_OK) fail("starting", code);
}

static void on_open(pelton_uv_open_t *request, int code) {
    if (code != PELTON_OK) {
        fprintf(stderr, "opening: %s\n", request->detail);
        exit(1);
    }
    code = request->client ? pelton_uv_client_init(uv_default_loop(), &client, request->client)
                           : pelton_uv_sender_init(uv_default_loop(), &output, request->sender);
    if (code != PELTON_OK) fail("libuv", code);
    begin_when_open();
}

int main(int argc, char **argv) {
    pelton_client_options of_client = PELTON_CLIENT_OPTIONS_INIT;
    pelton_channel_options of_output = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_uv_open_t opening[2];
    pelton_listener *listener;
    pelton_receiver *receiver;
    uv_loop_t *loop = uv_default_loop();
    if (argc != 4) return fprintf(stderr, "usage: uv_relay IN SERVICE OUT\n"), 2;
    /* Small, so that they are full at times. */
    of_client.capacity = of_output.capacity = 64 << 10;
    of_client.deadline_ns = of_output.deadline_ns = pelton_deadline(INT64_C(5000000000));
    /* Nothing else runs yet, so this may wait. */
    int code = pelton_listener_open(argv[1], NULL, &listener);
    if (code == PELTON_OK) code = pelton_listener_accept_receiver(listener, PELTON_FOREVER, &receiver);
    if (code == PELTON_OK) code = pelton_close(listener);
    if (code == PELTON_OK) code = pelton_uv_receiver_init(loop, &input, receiver);
    if (code == PELTON_OK) code = pelton_uv_client_open(loop, &opening[0], argv[2], &of_client, on_open);
    if (code == PELTON_OK) code = pelton_uv_sender_open(loop, &opening[1], argv[3], &of_output, on_open);
    if (code != PELTON_OK) fail("opening", code);
    uv_run(loop, UV_RUN_DEFAULT);
    return uv_loop_close(loop) == 0 ? 0 : 1;
}
