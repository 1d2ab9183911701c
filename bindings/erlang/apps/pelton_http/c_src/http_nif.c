/* Heads and bodies of HTTP/1 as Erlang terms, over llhttp.
 *
 * One process at a time feeds a parser: `is_busy` refuses a second one at the same moment, nothing waits. The text
 * of a head or of trailers that one packet does not complete is kept in `kept`, and further packets are appended and
 * parsed there, so the parts of a name or value are always side by side. Everything else is parsed in the packet.
 *
 * Versions, methods and the usual names are not made: Erlang's code has them as literals, in a tuple that is passed to
 * each function that needs them, `Literals`. */
#include "head.h"

#include <arpa/inet.h>
#include <erl_nif.h>
#include <llhttp.h>
#include <stdatomic.h>
#include <string.h>

#if LLHTTP_VERSION_MAJOR < 8
#error "found an llhttp before 8.1, wanted 8.1 or later: see README.md, Build"
#endif

/* So much of a packet in one call, as a scheduler should not be kept for more than a millisecond. */
enum { CALL_BYTES = 65536 };

/* Places in `Literals`: {{1, 0}, {1, 1}, <<>>, <<"OK">>, Method or name in lower case, ...}. */
enum { VERSIONS = 0, EMPTY = 2, STATUS_OK = 3, FIRST_TEXT = 4, METHODS_MAX = 64 };

struct limits {
    uint32_t head_bytes_max, headers_max, name_bytes_max, value_bytes_max;
    bool refers;
};

/* What is known about `Literals` and the limits without options, with which an instance of this library was loaded. */
struct library {
    struct limits defaults;
    struct known known;
    uint32_t count;
    /* Of llhttp's number of a method, and of the index of a name: the place, or 0. */
    uint32_t method_literals[METHODS_MAX], name_literals[KNOWN_MAX];
};

struct parser {
    llhttp_t llhttp;
    atomic_flag is_busy;
    bool answers_head, answers_connect;
    struct limits limits;
    const struct library *library;
    enum { HEAD, BODY, TRAILERS } part;
    enum { NEITHER, NAME, VALUE } last;
    /* Once set, nothing more is parsed. */
    enum reason reason;
    bool is_closed, is_upgrade, is_done, keeps_alive;
    /* Only the head is wanted. */
    bool stops;
    uint32_t extension_bytes;
    size_t head_bytes;
    struct head head;
    char *kept;
    size_t kept_bytes, kept_capacity;
    /* During a call: */
    ErlNifEnv *env;
    ERL_NIF_TERM packet;
    const ERL_NIF_TERM *literals;
    /* llhttp reads here, from..end, which is the packet from `offset` on; the packet itself, or a copy of it. */
    const char *from, *end;
    size_t offset;
    bool is_copy;
    ERL_NIF_TERM *events;
    size_t event_count, event_capacity;
};

#define METHOD_NAME(number, name, string) [number] = {#string, sizeof #string - 1},
static const struct {
    const char *text;
    size_t bytes;
} methods[METHODS_MAX] = {HTTP_ALL_METHOD_MAP(METHOD_NAME)};
static const char *const reasons[REASONS] = {
    "none", "method", "target", "version", "request_line", "status_line", "header_line", "header_name", "header_value",
    "line_end", "host", "content_length", "transfer_encoding", "trailer", "chunk", "malformed", "unfinished",
    "after_close", "head_bytes_max", "headers_max", "name_bytes_max", "value_bytes_max",
};
static ERL_NIF_TERM reason_atoms[REASONS], ok, error, more, request, response, body, done, upgrade, true_, false_, default_;
static ErlNifResourceType *parser_type;

static int fails(struct parser *parser, enum reason reason) {
    parser->reason = reason;
    return HPE_USER;
}

/* --- Terms --- */

static void add_event(struct parser *parser, ERL_NIF_TERM event) {
    if (parser->event_count == parser->event_capacity) {
        parser->event_capacity = parser->event_capacity ? 2 * parser->event_capacity : 16;
        parser->events = enif_realloc(parser->events, parser->event_capacity * sizeof *parser->events);
    }
    parser->events[parser->event_count++] = event;
}

static ERL_NIF_TERM part_of_packet(struct parser *parser, const char *at, size_t bytes) {
    return enif_make_sub_binary(parser->env, parser->packet, parser->offset + (size_t)(at - parser->from), bytes);
}

static ERL_NIF_TERM text_term(struct parser *parser, uint32_t at, uint32_t bytes) {
    const char *text = parser->head.text + at;
    if (bytes == 0) return parser->literals[EMPTY];
    if (parser->limits.refers && !parser->is_copy) return part_of_packet(parser, text, bytes);
    ERL_NIF_TERM term;
    unsigned char *copy = enif_make_new_binary(parser->env, bytes, &term);
    memcpy(copy, text, bytes);
    return term;
}

/* From so many bytes on, enif_make_new_binary allocates. Those of one head have one allocation together. */
enum { LONG_BYTES = 65 };

static ERL_NIF_TERM fields_term(struct parser *parser) {
    ErlNifEnv *env = parser->env;
    const struct head *head = &parser->head;
    bool copies = !parser->limits.refers || parser->is_copy;
    size_t long_bytes = 0;
    for (uint32_t i = 0; copies && i < head->field_count; i++)
        if (head->fields[i].value_bytes >= LONG_BYTES) long_bytes += head->fields[i].value_bytes;
    ERL_NIF_TERM long_values;
    unsigned char *copy = long_bytes ? enif_make_new_binary(env, long_bytes, &long_values) : NULL;
    size_t end = long_bytes;
    ERL_NIF_TERM fields[FIELDS_MAX], pair[2];
    for (uint32_t i = head->field_count; i-- > 0;) {
        const struct field *field = &head->fields[i];
        if (field->known) {
            pair[0] = parser->literals[parser->library->name_literals[field->known]];
        } else {
            unsigned char *lower = enif_make_new_binary(env, field->name_bytes, &pair[0]);
            const unsigned char *text = (const unsigned char *)head->text + field->name;
            for (uint32_t j = 0; j < field->name_bytes; j++) lower[j] = lower_case[text[j]];
        }
        if (copies && field->value_bytes >= LONG_BYTES) {
            end -= field->value_bytes;
            memcpy(copy + end, head->text + field->value, field->value_bytes);
            pair[1] = enif_make_sub_binary(env, long_values, end, field->value_bytes);
        } else {
            pair[1] = text_term(parser, field->value, field->value_bytes);
        }
        fields[i] = enif_make_tuple_from_array(env, pair, 2);
    }
    return enif_make_list_from_array(env, fields, head->field_count);
}

/* {request, Method, Target, Version, Headers}, {response, Version, Status, Text, Headers}, or with {ok, ..., Rest}. */
static ERL_NIF_TERM head_term(struct parser *parser, const ERL_NIF_TERM *rest) {
    struct head *head = &parser->head;
    bool is_ok = head->target_bytes == 2 && memcmp(head->text + head->target, "OK", 2) == 0;
    ERL_NIF_TERM text = is_ok ? parser->literals[STATUS_OK] : text_term(parser, head->target, head->target_bytes);
    ERL_NIF_TERM fields = fields_term(parser);
    ERL_NIF_TERM version = parser->literals[VERSIONS + head->minor_version];
    if (parser->llhttp.type == HTTP_REQUEST) {
        uint32_t literal = parser->library->method_literals[parser->llhttp.method];
        ERL_NIF_TERM method =
            literal ? parser->literals[literal] : text_term(parser, head->method, head->method_bytes);
        return rest ? enif_make_tuple6(parser->env, ok, method, text, version, fields, *rest)
                    : enif_make_tuple5(parser->env, request, method, text, version, fields);
    }
    ERL_NIF_TERM status = enif_make_uint(parser->env, parser->llhttp.status_code);
    return rest ? enif_make_tuple6(parser->env, ok, version, status, text, fields, *rest)
                : enif_make_tuple5(parser->env, response, version, status, text, fields);
}

/* --- What llhttp finds --- */

static uint32_t offset_of(struct parser *parser, const char *at) { return (uint32_t)(at - parser->head.text); }

static int on_target(llhttp_t *llhttp, const char *at, size_t bytes) {
    struct head *head = &((struct parser *)llhttp->data)->head;
    if (head->target_bytes == 0) head->target = offset_of(llhttp->data, at);
    head->target_bytes = offset_of(llhttp->data, at) + (uint32_t)bytes - head->target;
    return 0;
}

static int on_name(llhttp_t *llhttp, const char *at, size_t bytes) {
    struct parser *parser = llhttp->data;
    struct head *head = &parser->head;
    if (parser->part == BODY) {
        parser->part = TRAILERS;
        head->text = at;
        head->bytes = 0;
        head->field_count = 0;
        parser->last = NEITHER;
    }
    if (parser->last != NAME) {
        if (head->field_count == parser->limits.headers_max) return fails(parser, HEADERS_MAX);
        head->fields[head->field_count++] = (struct field){.name = offset_of(parser, at)};
        parser->last = NAME;
    }
    struct field *field = &head->fields[head->field_count - 1];
    field->name_bytes = offset_of(parser, at) + (uint32_t)bytes - field->name;
    return field->name_bytes > parser->limits.name_bytes_max ? fails(parser, NAME_BYTES_MAX) : 0;
}

static int on_value(llhttp_t *llhttp, const char *at, size_t bytes) {
    struct parser *parser = llhttp->data;
    if (parser->head.field_count == 0) return fails(parser, HEADER_LINE);
    struct field *field = &parser->head.fields[parser->head.field_count - 1];
    if (field->value_bytes == 0) field->value = offset_of(parser, at);
    parser->last = VALUE;
    field->value_bytes = offset_of(parser, at) + (uint32_t)bytes - field->value;
    return field->value_bytes > parser->limits.value_bytes_max ? fails(parser, VALUE_BYTES_MAX) : 0;
}

/* Of those that llhttp knows, the ones of RTSP, of Icecast, and the first word of HTTP/2. */
static bool is_foreign(uint8_t method) { return method >= 33 && method <= 45; }

static int on_head(llhttp_t *llhttp) {
    struct parser *parser = llhttp->data;
    struct head *head = &parser->head;
    head->bytes = (size_t)(parser->end - head->text);
    bool is_request = llhttp->type == HTTP_REQUEST;
    if (is_request && is_foreign(llhttp->method)) return fails(parser, METHOD);
    enum reason reason;
    if (is_request)
        reason = check_request(head, methods[llhttp->method].text, methods[llhttp->method].bytes, &parser->head_bytes);
    else
        reason = check_response(head, &parser->head_bytes);
    if (!reason && parser->head_bytes > parser->limits.head_bytes_max) reason = HEAD_BYTES_MAX;
    if (reason) return fails(parser, reason);
    parser->part = BODY;
    if (parser->stops) return HPE_PAUSED;
    add_event(parser, head_term(parser, NULL));
    parser->extension_bytes = 0;
    if (parser->answers_head) return 1;
    return parser->answers_connect && llhttp->status_code / 100 == 2 ? 2 : 0;
}

static int on_body(llhttp_t *llhttp, const char *at, size_t bytes) {
    struct parser *parser = llhttp->data;
    add_event(parser, enif_make_tuple2(parser->env, body, part_of_packet(parser, at, bytes)));
    return 0;
}

static int on_extension(llhttp_t *llhttp, const char *at, size_t bytes) {
    (void)at;
    struct parser *parser = llhttp->data;
    if (bytes > parser->limits.value_bytes_max - parser->extension_bytes) return fails(parser, VALUE_BYTES_MAX);
    parser->extension_bytes += (uint32_t)bytes;
    return 0;
}

static int on_done(llhttp_t *llhttp) {
    struct parser *parser = llhttp->data;
    ERL_NIF_TERM trailers = enif_make_list(parser->env, 0);
    if (parser->part == TRAILERS) {
        parser->head.bytes = (size_t)(parser->end - parser->head.text);
        enum reason reason = check_trailers(&parser->head);
        if (reason) return fails(parser, reason);
        trailers = fields_term(parser);
    }
    parser->is_done = true;
    parser->is_upgrade = llhttp->upgrade;
    parser->keeps_alive = llhttp_should_keep_alive(llhttp);
    add_event(parser, enif_make_tuple3(parser->env, done, trailers, parser->keeps_alive ? true_ : false_));
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_url = on_target, .on_status = on_target, .on_header_field = on_name, .on_header_value = on_value,
    .on_headers_complete = on_head, .on_body = on_body, .on_message_complete = on_done,
    .on_chunk_extension_name = on_extension, .on_chunk_extension_value = on_extension,
};

static enum reason reason_of(llhttp_errno_t code) {
    switch ((int)code) {
    case HPE_INVALID_METHOD: return METHOD;
    case HPE_INVALID_URL: return TARGET;
    case HPE_INVALID_VERSION: case HPE_INVALID_CONSTANT: return VERSION;
    case HPE_INVALID_STATUS: return STATUS_LINE;
    case HPE_INVALID_HEADER_TOKEN: case HPE_UNEXPECTED_SPACE: return HEADER_LINE;
    case HPE_STRICT: case HPE_LF_EXPECTED: case HPE_CR_EXPECTED: return LINE_END;
    case HPE_INVALID_CONTENT_LENGTH: case HPE_UNEXPECTED_CONTENT_LENGTH: return CONTENT_LENGTH;
    case HPE_INVALID_TRANSFER_ENCODING: return TRANSFER_ENCODING;
    case HPE_INVALID_CHUNK_SIZE: return CHUNK;
    case HPE_INVALID_EOF_STATE: return UNFINISHED;
    case HPE_CLOSED_CONNECTION: return AFTER_CLOSE;
    default: return MALFORMED;
    }
}

static void begin_message(struct parser *parser) {
    parser->part = HEAD;
    parser->last = NEITHER;
    parser->is_done = false;
    parser->head.text = NULL;
    parser->head.target = parser->head.target_bytes = 0;
    parser->head.field_count = 0;
    parser->kept_bytes = 0;
}

/* <<IsReferred:32, HeadBytesMax:32, HeadersMax:32, NameBytesMax:32, ValueBytesMax:32>>, as pelton_http.erl checked. */
static bool read_limits(ErlNifEnv *env, ERL_NIF_TERM term, struct limits *limits) {
    ErlNifBinary of;
    uint32_t numbers[5];
    if (!enif_inspect_binary(env, term, &of) || of.size != sizeof numbers) return false;
    memcpy(numbers, of.data, sizeof numbers);
    *limits = (struct limits){.head_bytes_max = ntohl(numbers[1]), .headers_max = ntohl(numbers[2]),
                              .name_bytes_max = ntohl(numbers[3]), .value_bytes_max = ntohl(numbers[4]),
                              .refers = numbers[0] != 0};
    return limits->headers_max <= FIELDS_MAX;
}

/* Limits: a binary, or `default`. */
static bool begin(struct parser *parser, ERL_NIF_TERM type, ErlNifEnv *env, ERL_NIF_TERM limits) {
    if (type != request && type != response) return false;
    parser->library = enif_priv_data(env);
    if (limits == default_) parser->limits = parser->library->defaults;
    else if (!read_limits(env, limits, &parser->limits)) return false;
    llhttp_init(&parser->llhttp, type == request ? HTTP_REQUEST : HTTP_RESPONSE, &settings);
    parser->llhttp.data = parser;
    parser->reason = NONE;
    parser->is_closed = parser->is_upgrade = false;
    begin_message(parser);
    return true;
}

static bool set_literals(struct parser *parser, ErlNifEnv *env, ERL_NIF_TERM literals) {
    int count;
    parser->library = enif_priv_data(env);
    parser->head.known = &parser->library->known;
    return enif_get_tuple(env, literals, &count, &parser->literals) && (uint32_t)count == parser->library->count;
}

/* --- Functions --- */

/* parse(Type, Packet, Limits, Literals) */
static ERL_NIF_TERM parse(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    (void)argc;
    struct parser parser;
    ErlNifBinary packet;
    if (!enif_inspect_binary(env, argv[1], &packet) || !begin(&parser, argv[0], env, argv[2]) ||
        !set_literals(&parser, env, argv[3]))
        return enif_make_badarg(env);
    /* One byte more than a head may have, to see that it has more. */
    size_t bytes = packet.size <= parser.limits.head_bytes_max ? packet.size : (size_t)parser.limits.head_bytes_max + 1;
    parser.stops = true;
    parser.env = env;
    parser.packet = argv[1];
    parser.from = parser.head.text = (const char *)packet.data;
    parser.end = parser.from + bytes;
    parser.offset = 0;
    parser.is_copy = false;
    llhttp_errno_t code = llhttp_execute(&parser.llhttp, parser.from, bytes);
    if (bytes >> 14) (void)enif_consume_timeslice(env, (int)(bytes >> 14));
    if (code == HPE_OK && bytes <= parser.limits.head_bytes_max) return more;
    if (code == HPE_OK) parser.reason = HEAD_BYTES_MAX;
    if (code != HPE_OK && code != HPE_PAUSED && !parser.reason) parser.reason = reason_of(code);
    if (parser.reason) return enif_make_tuple2(env, error, reason_atoms[parser.reason]);
    ERL_NIF_TERM rest = packet.size == parser.head_bytes ? parser.literals[EMPTY]
                      : enif_make_sub_binary(env, argv[1], parser.head_bytes, packet.size - parser.head_bytes);
    return head_term(&parser, &rest);
}

/* new(Type, Limits, none | head | connect) */
static ERL_NIF_TERM new(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    (void)argc;
    struct parser *parser = enif_alloc_resource(parser_type, sizeof *parser);
    memset(parser, 0, sizeof *parser);
    atomic_flag_clear(&parser->is_busy);
    char answered[8] = "";
    bool is_good = begin(parser, argv[0], env, argv[1]) &&
                   enif_get_atom(env, argv[2], answered, sizeof answered, ERL_NIF_LATIN1) > 0;
    parser->answers_head = strcmp(answered, "head") == 0;
    parser->answers_connect = strcmp(answered, "connect") == 0;
    ERL_NIF_TERM term = enif_make_resource(env, parser);
    enif_release_resource(parser);
    return is_good ? term : enif_make_badarg(env);
}

/* Appends to what is kept. */
static void keep(struct parser *parser, const char *text, size_t bytes) {
    if (parser->kept_capacity - parser->kept_bytes < bytes) {
        size_t wanted = parser->kept_bytes + bytes;
        parser->kept_capacity = wanted < 1024 ? 1024 : wanted + wanted / 2;
        parser->kept = enif_realloc(parser->kept, parser->kept_capacity);
    }
    memcpy(parser->kept + parser->kept_bytes, text, bytes);
    parser->kept_bytes += bytes;
}

/* A head or trailers go on in the next packet. */
static void keep_text(struct parser *parser) {
    size_t bytes = (size_t)(parser->end - parser->head.text);
    if (parser->head.text == parser->kept) return;
    if (parser->is_copy) {
        memmove(parser->kept, parser->head.text, bytes);
        parser->kept_bytes = bytes;
    } else {
        parser->kept_bytes = 0;
        keep(parser, parser->head.text, bytes);
    }
}

/* Parses text..text + bytes, and gives how many bytes of it were parsed: fewer than all after a message, after a
 * failure, or because no more may be kept. */
static size_t parse_some(struct parser *parser, const char *text, size_t bytes, size_t offset) {
    parser->offset = offset;
    parser->is_copy = parser->part != BODY && parser->kept_bytes > 0;
    if (parser->is_copy) {
        size_t room = (size_t)parser->limits.head_bytes_max + 1 - parser->kept_bytes;
        if (bytes > room) bytes = room;
        size_t before = parser->kept_bytes;
        keep(parser, text, bytes);
        parser->head.text = parser->kept;
        parser->from = parser->kept + before;
    } else {
        parser->from = text;
        if (parser->part == HEAD) parser->head.text = text;
    }
    parser->end = parser->from + bytes;
    llhttp_errno_t code = llhttp_execute(&parser->llhttp, parser->from, bytes);
    if (code == HPE_PAUSED && !parser->reason) {
        parser->kept_bytes = 0;
        return (size_t)(llhttp_get_error_pos(&parser->llhttp) - parser->from);
    }
    if (code != HPE_OK) {
        if (!parser->reason) parser->reason = reason_of(code);
        return 0;
    }
    if (parser->part == BODY) {
        parser->kept_bytes = 0;
    } else if ((size_t)(parser->end - parser->head.text) > parser->limits.head_bytes_max) {
        parser->reason = HEAD_BYTES_MAX;
    } else {
        keep_text(parser);
    }
    return bytes;
}

/* `ok` is short for {ok, []}. */
static ERL_NIF_TERM result(struct parser *parser, ErlNifEnv *env) {
    if (!parser->events && !parser->reason) return ok;
    ERL_NIF_TERM events = enif_make_list_from_array(env, parser->events, (unsigned)parser->event_count);
    enif_free(parser->events);
    parser->events = NULL;
    parser->event_count = parser->event_capacity = 0;
    if (parser->reason) return enif_make_tuple3(env, error, reason_atoms[parser->reason], events);
    return enif_make_tuple2(env, ok, events);
}

/* feed_some(Parser, Packet, Offset, Literals):
 * ok | {ok, Events} | {error, Reason, Events} | {more, Events, NextOffset} */
static ERL_NIF_TERM feed(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    (void)argc;
    struct parser *parser;
    ErlNifBinary packet;
    ErlNifUInt64 offset;
    if (!enif_get_resource(env, argv[0], parser_type, (void **)&parser) ||
        !enif_inspect_binary(env, argv[1], &packet) || !enif_get_uint64(env, argv[2], &offset) || offset > packet.size ||
        atomic_flag_test_and_set_explicit(&parser->is_busy, memory_order_acquire))
        return enif_make_badarg(env);
    if (!set_literals(parser, env, argv[3])) {
        atomic_flag_clear_explicit(&parser->is_busy, memory_order_release);
        return enif_make_badarg(env);
    }
    parser->env = env;
    parser->packet = argv[1];
    size_t at = offset, end = packet.size - at > CALL_BYTES ? at + CALL_BYTES : packet.size;
    while (at < end && !parser->reason) {
        if (parser->is_closed) {
            parser->reason = AFTER_CLOSE;
            break;
        }
        at += parse_some(parser, (const char *)packet.data + at, end - at, at);
        if (!parser->is_done || parser->reason) continue;
        bool is_upgrade = parser->is_upgrade;
        parser->is_closed = !is_upgrade && !parser->keeps_alive;
        llhttp_reset(&parser->llhttp);
        begin_message(parser);
        if (is_upgrade) {
            add_event(parser, enif_make_tuple2(env, upgrade, enif_make_sub_binary(env, argv[1], at, packet.size - at)));
            at = packet.size;
        }
    }
    int spent = (int)((at - offset) >> 12) + (int)(parser->event_count >> 6);
    if (spent) (void)enif_consume_timeslice(env, spent);
    ERL_NIF_TERM term = result(parser, env);
    if (at < packet.size && !parser->reason) {
        const ERL_NIF_TERM *of;
        int count;
        ERL_NIF_TERM events = enif_get_tuple(env, term, &count, &of) ? of[1] : enif_make_list(env, 0);
        term = enif_make_tuple3(env, more, events, enif_make_uint64(env, at));
    }
    atomic_flag_clear_explicit(&parser->is_busy, memory_order_release);
    return term;
}

static ERL_NIF_TERM finish(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    (void)argc;
    struct parser *parser;
    if (!enif_get_resource(env, argv[0], parser_type, (void **)&parser) ||
        atomic_flag_test_and_set_explicit(&parser->is_busy, memory_order_acquire))
        return enif_make_badarg(env);
    if (!set_literals(parser, env, argv[1])) {
        atomic_flag_clear_explicit(&parser->is_busy, memory_order_release);
        return enif_make_badarg(env);
    }
    parser->env = env;
    if (!parser->reason && !parser->is_closed) {
        llhttp_errno_t code = llhttp_finish(&parser->llhttp);
        if (code != HPE_OK && !parser->is_done) parser->reason = UNFINISHED;
        parser->is_closed = true;
    }
    ERL_NIF_TERM term = result(parser, env);
    atomic_flag_clear_explicit(&parser->is_busy, memory_order_release);
    return term;
}

static ERL_NIF_TERM llhttp_version(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    (void)argc, (void)argv;
    return enif_make_tuple3(env, enif_make_int(env, LLHTTP_VERSION_MAJOR), enif_make_int(env, LLHTTP_VERSION_MINOR),
                            enif_make_int(env, LLHTTP_VERSION_PATCH));
}

static void free_parser(ErlNifEnv *env, void *parser) {
    (void)env;
    enif_free(((struct parser *)parser)->kept);
}

/* Information = {Literals, Limits}. Sorts the texts into methods and names. */
static bool read_information(ErlNifEnv *env, struct library *library, ERL_NIF_TERM information) {
    const ERL_NIF_TERM *of;
    int count;
    const char *names[KNOWN_MAX];
    size_t bytes[KNOWN_MAX];
    uint32_t name_count = 1;
    if (!enif_get_tuple(env, information, &count, &of) || count != 2 ||
        !read_limits(env, of[1], &library->defaults) || !enif_get_tuple(env, of[0], &count, &of))
        return false;
    library->count = (uint32_t)count;
    for (int i = FIRST_TEXT; i < count; i++) {
        ErlNifBinary text;
        if (!enif_inspect_binary(env, of[i], &text)) return false;
        int method = 0;
        while (method < METHODS_MAX && (methods[method].bytes != text.size ||
                                        memcmp(methods[method].text, text.data, text.size) != 0))
            method++;
        if (text.size > 0 && method < METHODS_MAX) {
            library->method_literals[method] = (uint32_t)i;
        } else {
            if (name_count == KNOWN_MAX) return false;
            names[name_count] = (const char *)text.data;
            bytes[name_count] = text.size;
            library->name_literals[name_count++] = (uint32_t)i;
        }
    }
    return know(&library->known, names, bytes, name_count);
}

static int load(ErlNifEnv *env, void **data, ERL_NIF_TERM information) {
    struct library *library = enif_alloc(sizeof *library);
    memset(library, 0, sizeof *library);
    if (!read_information(env, library, information)) {
        enif_free(library);
        return 1;
    }
    *data = library;
    for (int i = 0; i < REASONS; i++) reason_atoms[i] = enif_make_atom(env, reasons[i]);
    ok = enif_make_atom(env, "ok"), error = enif_make_atom(env, "error"), more = enif_make_atom(env, "more");
    request = enif_make_atom(env, "request"), response = enif_make_atom(env, "response");
    body = enif_make_atom(env, "body"), done = enif_make_atom(env, "done"), upgrade = enif_make_atom(env, "upgrade");
    true_ = enif_make_atom(env, "true"), false_ = enif_make_atom(env, "false");
    default_ = enif_make_atom(env, "default");
    parser_type = enif_open_resource_type(env, NULL, "parser", free_parser,
                                          ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER, NULL);
    return parser_type == NULL;
}

static int take_over(ErlNifEnv *env, void **data, void **old_data, ERL_NIF_TERM information) {
    (void)old_data;
    return load(env, data, information);
}

static void unload(ErlNifEnv *env, void *library) {
    (void)env;
    enif_free(library);
}

static ErlNifFunc functions[] = {
    {"parse", 4, parse, 0}, {"new_parser", 3, new, 0}, {"feed_some", 4, feed, 0}, {"finish_parser", 2, finish, 0},
    {"llhttp_version", 0, llhttp_version, 0},
};
ERL_NIF_INIT(pelton_http, functions, load, NULL, take_over, unload)
