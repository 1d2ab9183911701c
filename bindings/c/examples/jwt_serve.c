/* Verifies JSON Web Tokens (RFC 7519) for clients in any language, by libjwt 1: as `examples/jwt`, which
 * makes tokens. jwt.c asks it from an event loop, bindings/nginx/examples/jwt.conf from nginx.
 *
 *     jwt_serve NAME      replies with a token's claims as JSON, or fails the call:
 *                         1 malformed, 2 wrong signature, 3 expired, 4 not valid yet
 *
 * The keys are published ones. A real service would have its own.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <jwt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "pelton.h"

enum { MALFORMED = 1, SIGNATURE, EXPIRED, EARLY };
enum { TOKEN_BYTES_MAX = 16384 }; /* libjwt decodes on the stack, of which a thread has 2 MiB; nginx takes headers of 8 KiB */

static const char shared[] = "a secret of both sides, of 32 bytes";
static const char public_key[] = "-----BEGIN PUBLIC KEY-----\n" /* of RFC 7515, appendix A.3 */
                                 "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEf83OJ3D2xF1Bg8vub9tLe1gHMzV7\n"
                                 "6e8Tus9uPHvRVEXH8UTNG72bfocs3+257rn0s2ldbqkLJK2KRiMohYjlrQ==\n"
                                 "-----END PUBLIC KEY-----\n";

/* Three parts of base64url between dots. libjwt leaves out what is not of it, ends at a NUL, and writes past what it
 * has for an empty part. */
static int is_well_formed(const char *token, size_t size) {
    const char *at = token;
    for (int part = 0; part < 3; part++, at++) {
        size_t length = strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_");
        at += length;
        if (length == 0 || length % 4 == 1 || *at != (part < 2 ? '.' : '\0')) return 0;
    }
    return at == token + size + 1;
}

/* A claim that is a time: 1 and its seconds, 0 where there is none, -1 where it is no number. Not by _int, for which a
 * fraction is 0. */
static int time_of(jwt_t *jwt, const char *claim, double *seconds) {
    char *text = jwt_get_grants_json(jwt, claim), *end = text;
    if (text) *seconds = strtod(text, &end);
    int found = !text ? 0 : end == text ? -1 : 1;
    free(text);
    return found;
}

/* 0 and the claims, to be freed; else a code and why. */
static uint32_t verify(const char *token, char **claims, const char **why) {
    jwt_t *jwt = NULL;
    const char *key = NULL, *algorithm;
    /* Without a key it is only looked at: the token may choose between the keys, not what they are used for. */
    if (jwt_decode(&jwt, token, NULL, 0) == 0 && (algorithm = jwt_get_header(jwt, "alg")) != NULL) {
        key = strcmp(algorithm, "HS256") == 0 ? shared : strcmp(algorithm, "ES256") == 0 ? public_key : NULL;
    }
    jwt_free(jwt);
    if (!key) return *why = "wanted a JSON Web Token by HS256 or ES256", MALFORMED;
    if (jwt_decode(&jwt, token, (const unsigned char *)key, (int)strlen(key)) != 0) return *why = "the signature is not its issuer's", SIGNATURE;
    double expires = 0, begins = 0, now = (double)time(NULL);
    uint32_t code = 0;
    if (time_of(jwt, "exp", &expires) != 1) *why = "wanted a number, exp: when it expires", code = MALFORMED;
    else if (time_of(jwt, "nbf", &begins) < 0) *why = "wanted a number, nbf: when it begins to be valid", code = MALFORMED;
    else if (expires <= now) *why = "it has expired", code = EXPIRED;
    else if (begins > now) *why = "it is not valid yet", code = EARLY;
    if (code == 0 && !(*claims = jwt_get_grants_json(jwt, NULL))) *why = "its claims cannot be written as JSON", code = MALFORMED;
    jwt_free(jwt);
    return code;
}

/* On several threads at once. */
static void answer(void *context, const pelton_request *request) {
    char token[TOKEN_BYTES_MAX + 1], *claims = NULL;
    const char *why = "wanted three parts of base64url, of 16384 bytes together at most";
    uint32_t code = MALFORMED;
    (void)context;
    if (!request->responder) return;
    if (request->size <= TOKEN_BYTES_MAX) {
        memcpy(token, request->data, request->size);
        token[request->size] = '\0';
        if (is_well_formed(token, request->size)) code = verify(token, &claims, &why);
    }
    int sent = code == 0 ? pelton_responder_reply(request->responder, claims, strlen(claims))
                         : pelton_responder_fail(request->responder, code, why, strlen(why));
    if (sent == PELTON_TOO_LARGE) pelton_close(request->responder); /* for this client; a client that has gone needs no reply */
    free(claims);
}

int main(int argc, char **argv) {
    pelton_service *service;
    if (argc != 2) return fprintf(stderr, "usage: jwt_serve NAME\n"), 2;
    int code = pelton_service_open(argv[1], NULL, &service);
    if (code == PELTON_OK) code = pelton_service_run(service, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN), answer, NULL);
    fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return 1;
}
