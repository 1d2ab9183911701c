/* A first program: one process receives, another sends.
 *
 *     hello receive &
 *     hello send 'good morning'
 */
#include <pelton.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    int code;
    if (argc == 3 && strcmp(argv[1], "send") == 0) {
        pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
        pelton_sender *sender;
        options.deadline_ns = pelton_deadline(INT64_C(5000000000)); /* for the receiver to be there */
        code = pelton_sender_open("hello", &options, &sender);
        if (code == PELTON_OK) code = pelton_sender_send(sender, argv[2], strlen(argv[2]), PELTON_FOREVER);
        if (code == PELTON_OK) code = pelton_close(sender);
    } else if (argc == 2 && strcmp(argv[1], "receive") == 0) {
        pelton_receiver *receiver;
        pelton_message message;
        code = pelton_receiver_gather("hello", NULL, &receiver);
        if (code == PELTON_OK) code = pelton_receiver_receive(receiver, PELTON_FOREVER, &message);
        if (code == PELTON_OK) {
            printf("%.*s\n", (int)message.size, (const char *)message.data); /* in the shared memory, until the release */
            pelton_receiver_release(receiver);
            code = pelton_close(receiver);
        }
    } else {
        return fprintf(stderr, "usage: hello receive | hello send TEXT\n"), 2;
    }
    if (code != PELTON_OK) fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return code != PELTON_OK;
}
