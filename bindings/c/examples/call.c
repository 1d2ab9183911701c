/* Calls: a service that echoes, and its client.
 *
 *     call serve NAME              replies with the same bytes, until it is stopped
 *     call ask NAME TEXT...        prints the replies; NAME is a short name or unix:PATH
 *     call stop NAME               stops it
 */
#include <stdio.h>
#include <string.h>

#include "pelton.h"

static int complain(int code) {
    fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return 1;
}

static int serve(const char *name) {
    pelton_service *service;
    pelton_request request;
    int code = pelton_service_open(name, NULL, &service);
    if (code != PELTON_OK) return complain(code);
    while ((code = pelton_service_receive(service, PELTON_FOREVER, &request)) == PELTON_OK && request.responder) {
        if (pelton_responder_reply(request.responder, request.data, request.size) != PELTON_OK) fprintf(stderr, "the client has gone\n");
        pelton_service_release(service);
    }
    pelton_close(service);
    return code == PELTON_OK ? 0 : complain(code);
}

static int ask(pelton_client *client, const char *text) {
    pelton_completion answer;
    int code = pelton_client_call(client, text, strlen(text), pelton_deadline(INT64_C(5000000000)), &answer);
    if (code == PELTON_OK) {
        printf("%.*s\n", (int)answer.size, (const char *)answer.data);
        pelton_client_release(client);
    }
    return code;
}

int main(int argc, char **argv) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_client *client;
    if (argc < 3) return fprintf(stderr, "usage: call serve NAME | call ask NAME TEXT... | call stop NAME\n"), 2;
    if (strcmp(argv[1], "serve") == 0) return serve(argv[2]);
    options.deadline_ns = pelton_deadline(INT64_C(5000000000)); /* for the service to be there */
    int code = pelton_client_open(argv[2], &options, &client);
    for (int i = 3; i < argc && code == PELTON_OK; i++) code = ask(client, argv[i]);
    if (code == PELTON_OK && strcmp(argv[1], "stop") == 0) code = pelton_client_notify(client, NULL, 0, PELTON_FOREVER);
    if (code != PELTON_OK) return complain(code);
    pelton_close(client);
    return 0;
}
