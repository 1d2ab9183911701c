/* What a head must be beyond what llhttp asks for, the same with each version of llhttp. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FIELDS_MAX = 256 };

/* In the order of `reasons` in http_nif.c. */
enum reason {
    NONE, METHOD, TARGET, VERSION, REQUEST_LINE, STATUS_LINE, HEADER_LINE, HEADER_NAME, HEADER_VALUE, LINE_END, HOST,
    CONTENT_LENGTH, TRANSFER_ENCODING, TRAILER, CHUNK, MALFORMED, UNFINISHED, AFTER_CLOSE, HEAD_BYTES_MAX, HEADERS_MAX,
    NAME_BYTES_MAX, VALUE_BYTES_MAX, REASONS
};

/* Offsets are from the begin of the head's text. `known` is the index of the name in `struct known`, or 0. */
struct field {
    uint32_t name, name_bytes, value, value_bytes, known;
};

/* The usual names of headers, for which Erlang already has terms. The first is not used. */
enum { KNOWN_MAX = 128, KNOWN_BYTES_MAX = 32 };
struct known {
    uint32_t count, host, content_length, transfer_encoding;
    uint8_t bytes[KNOWN_MAX];
    char names[KNOWN_MAX][KNOWN_BYTES_MAX];
    /* By hash: an index, or 0. */
    uint8_t slots[256];
};

struct head {
    const struct known *known;
    const char *text;
    /* As many as can be read: the body may follow. */
    size_t bytes;
    uint32_t method, method_bytes, target, target_bytes;
    uint32_t minor_version;
    uint32_t field_count;
    struct field fields[FIELDS_MAX];
};

/* The character in lower case, or 0 if it cannot be in a name. */
extern const unsigned char lower_case[256];

/* The names are in lower case, and fewer than KNOWN_MAX. False if one is too long, or one of the three that are checked
 * is missing. */
bool know(struct known *known, const char *const names[], const size_t bytes[], uint32_t count);

/* Each gives the size of the head, trims the values, and sets method, version and the known names. `method` is what
 * llhttp found. */
enum reason check_request(struct head *head, const char *method, size_t method_bytes, size_t *bytes);
enum reason check_response(struct head *head, size_t *bytes);
enum reason check_trailers(struct head *head);
