/* Atoms, errors, binaries, reductions, clocks. See nif.h. */
#include "nif.h"
#include "abi.h"
#include <erl_driver.h>
#include <sys/resource.h>
#include <time.h>

/* nif.c creates it. */
struct shared *shared;

#define ATOM_(name) ERL_NIF_TERM atom_##name;
ATOMS(ATOM_)
#undef ATOM_

/* By errno. The emulator has a name for each. */
#define ERRNOS_COUNT 256
static ERL_NIF_TERM errnos[ERRNOS_COUNT];

static struct {
    int code;
    ERL_NIF_TERM atom;
} codes[] = {
#define CODE_(code, name) {code, 0},
    CODE_ATOMS(CODE_)
#undef CODE_
};
#define CODES_COUNT (sizeof codes / sizeof *codes)

void terms_load(ErlNifEnv *env)
{
    size_t code_count = 0;
#define ATOM_(name) atom_##name = enif_make_atom(env, #name);
    ATOMS(ATOM_)
#undef ATOM_
#define CODE_(code, name) codes[code_count++].atom = enif_make_atom(env, #name);
    CODE_ATOMS(CODE_)
#undef CODE_
    /* Other functions have a timeout too, with OTP's word. */
    for (size_t i = 0; i < CODES_COUNT; i++)
        if (codes[i].code == PELTON_TIMED_OUT)
            codes[i].atom = atom_timeout;
    /* rename(2) and rmdir(2) return ENOTEMPTY, where `file` returns eexist. */
    for (int i = 0; i < ERRNOS_COUNT; i++)
        errnos[i] = enif_make_atom(env, erl_errno_id(i == ENOTEMPTY ? EEXIST : i));
}

ERL_NIF_TERM atom_of_errno(int number)
{
    return errnos[number < 0 || number >= ERRNOS_COUNT ? 0 : number];
}

ERL_NIF_TERM atom_of_code(int code)
{
    for (size_t i = 0; i < CODES_COUNT; i++)
        if (codes[i].code == code)
            return codes[i].atom;
    return atom_unknown;
}

int code_of_atom(ERL_NIF_TERM atom)
{
    for (size_t i = 0; i < CODES_COUNT; i++)
        if (enif_is_identical(codes[i].atom, atom))
            return codes[i].code;
    return PELTON_OK;
}

ERL_NIF_TERM error_of(ErlNifEnv *env, ERL_NIF_TERM reason)
{
    return enif_make_tuple2(env, atom_error, reason);
}

ERL_NIF_TERM error_of_code(ErlNifEnv *env, int code)
{
    return error_of(env, code == PELTON_SYSTEM && errno ? atom_of_errno(errno) : atom_of_code(code));
}

ERL_NIF_TERM bytes_of(ErlNifEnv *env, const void *data, size_t size)
{
    ERL_NIF_TERM term;
    unsigned char *bytes = enif_make_new_binary(env, size, &term);
    if (size)
        memcpy(bytes, data, size);
    return term;
}

ERL_NIF_TERM traceparent_of(ErlNifEnv *env, int found, const char *text)
{
    return found == 1 ? bytes_of(env, text, PELTON_TRACEPARENT_SIZE - 1) : atom_undefined;
}

bool text_at(ErlNifEnv *env, ERL_NIF_TERM term, const char **text)
{
    ErlNifBinary bytes;
    *text = NULL;
    if (enif_is_identical(term, atom_undefined))
        return true;
    if (!enif_inspect_binary(env, term, &bytes) || !bytes.size || bytes.data[bytes.size - 1])
        return false;
    /* One with a 0 inside is no valid text: as none. */
    if (memchr(bytes.data, 0, bytes.size) == &bytes.data[bytes.size - 1])
        *text = (const char *)bytes.data;
    return true;
}

uint64_t bytes_of_pieces(const ErlNifIOVec *pieces)
{
    uint64_t bytes = 0;
    for (int i = 0; i < pieces->iovcnt; i++)
        bytes += pieces->iov[i].iov_len;
    return bytes;
}

bool offset_at(ErlNifEnv *env, ERL_NIF_TERM term, uint64_t *offset)
{
    if (enif_is_identical(term, atom_undefined)) {
        *offset = PELTON_CURRENT;
        return true;
    }
    return enif_get_uint64(env, term, offset) && *offset <= INT64_MAX;
}

void charge_bytes(ErlNifEnv *env, uint64_t bytes)
{
    uint64_t percent = bytes >> 16;
    if (percent)
        enif_consume_timeslice(env, percent > 100 ? 100 : (int)percent);
}

void charge_us(ErlNifEnv *env, int64_t us)
{
    static _Thread_local int64_t uncharged;
    uncharged += us;
    int64_t percent = uncharged / 5;
    uncharged %= 5;
    if (percent)
        enif_consume_timeslice(env, percent > 100 ? 100 : (int)percent);
}

int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

long sleeps_of_this_thread(void)
{
    struct rusage usage = {0};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

long recent_sleeps(int64_t now)
{
    static _Thread_local int64_t found_us;
    static _Thread_local long found;
    if (now - found_us > 1000) {
        found = sleeps_of_this_thread();
        found_us = now;
    }
    return found;
}
