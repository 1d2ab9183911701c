/* Request and answer over two channels, one each way.
 *
 *     echo serve NAME              answers one client, until it closes
 *     echo ask NAME TEXT...        prints the answers; NAME is a short name or unix:PATH
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pelton.h"

static int check(int code, const char *what) {
    if (code != PELTON_OK && code != PELTON_CLOSED) {
        fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
        exit(1);
    }
    return code;
}

static int serve(const char *to, const char *back) {
    pelton_listener *asked, *answered;
    pelton_receiver *questions;
    pelton_sender *answers;
    pelton_message message;
    check(pelton_listener_open(to, NULL, &asked), "listening");
    check(pelton_listener_open(back, NULL, &answered), "listening");
    check(pelton_listener_accept_receiver(asked, PELTON_FOREVER, &questions), "accepting");
    check(pelton_listener_accept_sender(answered, PELTON_FOREVER, &answers), "accepting");
    while (check(pelton_receiver_receive(questions, PELTON_FOREVER, &message), "receiving") != PELTON_CLOSED) {
        check(pelton_sender_send(answers, message.data, message.size, PELTON_FOREVER), "answering");
        pelton_receiver_release(questions);
    }
    pelton_close(questions);
    pelton_close(answers);
    pelton_close(asked);
    pelton_close(answered);
    return 0;
}

static int ask(const char *to, const char *back, char **texts, int count) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *questions;
    pelton_receiver *answers;
    pelton_message message;
    options.deadline_ns = pelton_deadline(INT64_C(5000000000));
    check(pelton_sender_open(to, &options, &questions), "opening");
    check(pelton_receiver_open(back, &options, &answers), "opening");
    for (int i = 0; i < count; i++) {
        check(pelton_sender_send(questions, texts[i], strlen(texts[i]), PELTON_FOREVER), "asking");
        if (check(pelton_receiver_receive(answers, pelton_deadline(INT64_C(5000000000)), &message), "waiting for the answer") == PELTON_CLOSED) break;
        printf("%.*s\n", (int)message.size, (const char *)message.data);
        pelton_receiver_release(answers);
    }
    pelton_close(questions);
    pelton_close(answers);
    return 0;
}

int main(int argc, char **argv) {
    char to[200], back[200];
    if (argc < 3 || (strcmp(argv[1], "serve") != 0 && strcmp(argv[1], "ask") != 0)) {
        fprintf(stderr, "usage: echo serve NAME | echo ask NAME TEXT...\n");
        return 2;
    }
    snprintf(to, sizeof to, "%s.to", argv[2]);
    snprintf(back, sizeof back, "%s.back", argv[2]);
    return strcmp(argv[1], "serve") == 0 ? serve(to, back) : ask(to, back, argv + 3, argc - 3);
}
