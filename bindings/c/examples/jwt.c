/* Has JSON Web Tokens verified by a service in another process, and another language, from a libuv loop: as many at a
 * time as there may be. The service is `examples/jwt`, which also makes tokens: `jwt serve NAME`, and
 *
 *     jwt tokens 100 | jwt-ask NAME       prints a verdict for each line, in their order
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pelton_uv.h"

typedef struct token {
    pelton_uv_call_t call;
    char *text;
    char *verdict;
} token;

static token *tokens;
static size_t count, asked, answered;

static int fail(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    exit(1);
}

static void read_tokens(void) {
    char line[4096];
    for (size_t room = 0; fgets(line, sizeof line, stdin); count++) {
        if (count == room) tokens = (token *)realloc(tokens, (room = room * 2 + 16) * sizeof *tokens);
        memset(&tokens[count], 0, sizeof *tokens);
        line[strcspn(line, "\n")] = '\0';
        tokens[count].text = strdup(line);
    }
}

static void ask(pelton_uv_client_t *handle);

static void on_answer(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    static const char *const refusals[] = {"refused", "malformed", "forged", "expired", "early"};
    pelton_uv_client_t *handle = call->handle;
    token *own = (token *)call->data;
    if (code != PELTON_OK) fail("the service has gone", code);
    const char *verdict = answer->outcome == PELTON_REPLY ? "valid" : refusals[answer->code < 5 ? answer->code : 0];
    size_t size = strlen(verdict) + answer->size + 3;
    own->verdict = (char *)malloc(size);
    snprintf(own->verdict, size, "%s: %.*s", verdict, (int)answer->size, (const char *)answer->data);
    if (++answered == count) {
        pelton_uv_client_close(handle, NULL);
    } else {
        pelton_client_release(handle->client);
        ask(handle);
    }
}

/* Asks for as many as there is room for; on_answer, or on_space, goes on. */
static void ask(pelton_uv_client_t *handle) {
    int code = PELTON_OK;
    while (asked < count && code == PELTON_OK) {
        token *next = &tokens[asked];
        next->call.data = next;
        code = pelton_uv_call_start(&next->call, handle, next->text, strlen(next->text), 0, on_answer);
        if (code == PELTON_OK) asked++;
    }
    if (code != PELTON_OK && code != PELTON_AGAIN) fail("asking", code);
}

static void on_end(pelton_uv_client_t *handle, int code) {
    (void)handle;
    fail("the service has gone", code);
}

int main(int argc, char **argv) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_client *client;
    pelton_uv_client_t handle;
    if (argc != 2) return fprintf(stderr, "usage: jwt-ask NAME < TOKENS\n"), 2;
    options.deadline_ns = pelton_deadline(INT64_C(30000000000)); /* for the service to be there; nothing runs in the loop yet */
    int code = pelton_client_open(argv[1], &options, &client);
    if (code == PELTON_OK) code = pelton_uv_client_init(uv_default_loop(), &handle, client);
    if (code == PELTON_OK) code = pelton_uv_client_start(&handle, ask, on_end);
    if (code != PELTON_OK) fail("connecting", code);
    read_tokens();
    if (count == 0) pelton_uv_client_close(&handle, NULL);
    ask(&handle);
    uv_run(uv_default_loop(), UV_RUN_DEFAULT);
    for (size_t i = 0; i < count; i++) {
        puts(tokens[i].verdict);
        free(tokens[i].verdict);
        free(tokens[i].text);
    }
    free(tokens);
    return uv_loop_close(uv_default_loop()) == 0 ? 0 : 1;
}
