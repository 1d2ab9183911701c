/* Whether a head is one that every proxy and server reads alike. llhttp found the places of the target, the names and
 * the values; here each byte between them is compared with what it must be, so leniency of one version of llhttp does
 * not matter. */
#include "head.h"

#include <string.h>
#include <strings.h>

#define SAME(c) [c] = c
#define LETTER(c) [c] = c, [c - 32] = c
const unsigned char lower_case[256] = {
    LETTER('a'), LETTER('b'), LETTER('c'), LETTER('d'), LETTER('e'), LETTER('f'), LETTER('g'), LETTER('h'),
    LETTER('i'), LETTER('j'), LETTER('k'), LETTER('l'), LETTER('m'), LETTER('n'), LETTER('o'), LETTER('p'),
    LETTER('q'), LETTER('r'), LETTER('s'), LETTER('t'), LETTER('u'), LETTER('v'), LETTER('w'), LETTER('x'),
    LETTER('y'), LETTER('z'), SAME('0'), SAME('1'), SAME('2'), SAME('3'), SAME('4'), SAME('5'), SAME('6'), SAME('7'),
    SAME('8'), SAME('9'), SAME('!'), SAME('#'), SAME('$'), SAME('%'), SAME('&'), SAME('\''), SAME('*'), SAME('+'),
    SAME('-'), SAME('.'), SAME('^'), SAME('_'), SAME('`'), SAME('|'), SAME('~'),
};

static bool has(const struct head *head, size_t at, const char *wanted, size_t bytes) {
    return at <= head->bytes && head->bytes - at >= bytes && memcmp(head->text + at, wanted, bytes) == 0;
}

static size_t after_blanks(const struct head *head, size_t at) {
    while (at < head->bytes && (head->text[at] == ' ' || head->text[at] == '\t')) at++;
    return at;
}

/* Without branches, so that the compiler handles many bytes at a time; at most 255, for a sum in one byte. */
static uint8_t some_controls(const unsigned char *text, size_t bytes) {
    uint8_t sum = 0;
    for (size_t i = 0; i < bytes; i++) sum += ((text[i] < 0x20) & (text[i] != '\t')) | (text[i] == 0x7f);
    return sum;
}

static size_t controls(const char *text, size_t bytes) {
    enum { AT_ONCE = 240 };
    size_t sum = 0;
    for (; bytes > AT_ONCE; text += AT_ONCE, bytes -= AT_ONCE) sum += some_controls((const unsigned char *)text, AT_ONCE);
    return sum + some_controls((const unsigned char *)text, bytes);
}

static bool is_name(const unsigned char *text, size_t bytes) {
    unsigned good = bytes > 0;
    for (size_t i = 0; i < bytes; i++) good &= lower_case[text[i]] != 0;
    return good;
}

/* --- The usual names --- */

/* The factors were found by trying: 7 of 90 names are not in their first slot. */
static uint8_t slot_of(const char *text, size_t bytes) {
    return (uint8_t)((text[0] | 32) * 173u + (text[bytes / 2] | 32) * 122u + (text[bytes - 1] | 32) * 125u + bytes * 182u);
}

/* The bits in which the text differs from the name, 0 if only by capitals. Names have letters, digits and "-", of which
 * letters alone have bit 6; bit 5 is what makes a letter a small one. */
static uint64_t differs(const char *text, const char *name, size_t bytes) {
    uint64_t t = 0, n = 0;
    memcpy(&t, text, bytes);
    memcpy(&n, name, bytes);
    return (t | (n & 0x4040404040404040) >> 1) ^ n;
}

static bool is_same(const char *text, const char *name, size_t bytes) {
    if (bytes < 4) return differs(text, name, bytes) == 0;
    if (bytes < 8) return (differs(text, name, 4) | differs(text + bytes - 4, name + bytes - 4, 4)) == 0;
    uint64_t found = differs(text + bytes - 8, name + bytes - 8, 8);
    for (size_t i = 0; i + 8 < bytes; i += 8) found |= differs(text + i, name + i, 8);
    return found == 0;
}

/* 0 if it is none of them. One that is found needs no is_name. */
static uint32_t find(const struct known *known, const char *text, size_t bytes) {
    if (bytes == 0) return 0;
    for (uint8_t slot = slot_of(text, bytes); known->slots[slot]; slot++) {
        uint32_t i = known->slots[slot];
        if (known->bytes[i] == bytes && is_same(text, known->names[i], bytes)) return i;
    }
    return 0;
}

bool know(struct known *known, const char *const names[], const size_t bytes[], uint32_t count) {
    memset(known, 0, sizeof *known);
    for (uint32_t i = 1; i < count; i++) {
        if (bytes[i] == 0 || bytes[i] > KNOWN_BYTES_MAX) return false;
        known->bytes[i] = (uint8_t)bytes[i];
        memcpy(known->names[i], names[i], bytes[i]);
        uint8_t slot = slot_of(names[i], bytes[i]);
        while (known->slots[slot]) slot++;
        known->slots[slot] = (uint8_t)i;
    }
    known->count = count;
    known->host = find(known, "host", 4);
    known->content_length = find(known, "content-length", 14);
    known->transfer_encoding = find(known, "transfer-encoding", 17);
    return known->host && known->content_length && known->transfer_encoding;
}

/* --- Fields --- */

static bool are_digits(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] < '0' || text[i] > '9') return false;
    return bytes > 0;
}

/* NAME ":" blanks VALUE blanks CRLF, each directly after the one before. */
static enum reason check_fields(struct head *head, size_t *at) {
    size_t begin = *at;
    for (struct field *field = head->fields; field < head->fields + head->field_count; field++) {
        if (field->name != *at) return HEADER_LINE;
        const char *name = head->text + field->name;
        field->known = find(head->known, name, field->name_bytes);
        if (!field->known && !is_name((const unsigned char *)name, field->name_bytes)) return HEADER_NAME;
        size_t colon = (size_t)field->name + field->name_bytes;
        if (!has(head, colon, ":", 1)) return HEADER_LINE;
        size_t value = after_blanks(head, colon + 1);
        if (field->value_bytes > 0 && field->value != value) return HEADER_LINE;
        size_t end = value + field->value_bytes;
        if (end > head->bytes) return HEADER_LINE;
        *at = after_blanks(head, end);
        if (!has(head, *at, "\r\n", 2))
            return controls(head->text + value, field->value_bytes) ? HEADER_VALUE : LINE_END;
        *at += 2;
        while (end > value && (head->text[end - 1] == ' ' || head->text[end - 1] == '\t')) end--;
        field->value = (uint32_t)value;
        field->value_bytes = (uint32_t)(end - value);
    }
    /* Names have no control characters, and each line ends with two: any other one is in a value. */
    return controls(head->text + begin, *at - begin) == 2 * (size_t)head->field_count ? NONE : HEADER_VALUE;
}

/* Each of the three at most once; the length in digits; no coding but chunked, and then no length. */
static enum reason check_framing(const struct head *head, const struct field **host) {
    const struct field *length = NULL, *coding = NULL;
    const struct known *known = head->known;
    *host = NULL;
    for (const struct field *field = head->fields; field < head->fields + head->field_count; field++) {
        if (field->known == 0) continue;
        const char *value = head->text + field->value;
        if (field->known == known->host) {
            if (*host) return HOST;
            *host = field;
        } else if (field->known == known->content_length) {
            if (length || !are_digits(value, field->value_bytes)) return CONTENT_LENGTH;
            length = field;
        } else if (field->known == known->transfer_encoding) {
            if (coding || head->minor_version == 0 || field->value_bytes != 7 || strncasecmp(value, "chunked", 7) != 0)
                return TRANSFER_ENCODING;
            coding = field;
        }
    }
    return length && coding ? CONTENT_LENGTH : NONE;
}

/* What may be in an authority's name (RFC 3986: unreserved, "%", sub-delims but ","), in an address in brackets, and
 * what may not be in a target. */
enum { AUTHORITY = 1, ADDRESS = 2, NO_TARGET = 4 };
static const unsigned char uses[256] = {
    [0 ... 0x20] = NO_TARGET, [0x7f ... 0xff] = NO_TARGET, ['#'] = NO_TARGET, ['"'] = NO_TARGET, ['<'] = NO_TARGET,
    ['>'] = NO_TARGET, ['0' ... '9'] = AUTHORITY | ADDRESS, ['a' ... 'f'] = AUTHORITY | ADDRESS, ['g' ... 'z'] = AUTHORITY,
    ['A' ... 'F'] = AUTHORITY | ADDRESS, ['G' ... 'Z'] = AUTHORITY, [':'] = ADDRESS, ['.'] = AUTHORITY | ADDRESS,
    ['-'] = AUTHORITY, ['_'] = AUTHORITY, ['~'] = AUTHORITY, ['%'] = AUTHORITY, ['!'] = AUTHORITY, ['$'] = AUTHORITY,
    ['&'] = AUTHORITY, ['\''] = AUTHORITY, ['('] = AUTHORITY, [')'] = AUTHORITY, ['*'] = AUTHORITY, ['+'] = AUTHORITY,
    [';'] = AUTHORITY, ['='] = AUTHORITY,
};

/* A name or an address, and perhaps ":" and digits. */
static bool is_authority(const char *text, size_t bytes, bool needs_port) {
    const unsigned char *at = (const unsigned char *)text;
    size_t name = 0;
    if (bytes > 0 && text[0] == '[') {
        const char *end = memchr(text, ']', bytes);
        if (!end) return false;
        name = (size_t)(end - text) + 1;
        for (size_t i = 1; i + 1 < name; i++)
            if (!(uses[at[i]] & ADDRESS)) return false;
        if (name < 4) return false;
    } else {
        while (name < bytes && (uses[at[name]] & AUTHORITY)) name++;
    }
    if (name == 0) return bytes == 0 && !needs_port;
    if (name == bytes) return !needs_port;
    return text[name] == ':' && (are_digits(text + name + 1, bytes - name - 1) || (bytes == name + 1 && !needs_port));
}

static enum reason check_target(const struct head *head, const struct field *host) {
    const char *target = head->text + head->target;
    size_t bytes = head->target_bytes;
    unsigned found = 0;
    for (size_t i = 0; i < bytes; i++) found |= uses[(unsigned char)target[i]];
    if (found & NO_TARGET) return TARGET;
    const char *method = head->text + head->method;
    if (head->method_bytes == 7 && memcmp(method, "CONNECT", 7) == 0)
        return is_authority(target, bytes, true) ? NONE : TARGET;
    if (bytes > 0 && target[0] == '/') return NONE;
    if (bytes == 1 && target[0] == '*') return head->method_bytes == 7 && memcmp(method, "OPTIONS", 7) == 0 ? NONE : TARGET;
    size_t scheme = bytes > 7 && strncasecmp(target, "http://", 7) == 0 ? 7
                  : bytes > 8 && strncasecmp(target, "https://", 8) == 0 ? 8 : 0;
    if (scheme == 0) return TARGET;
    size_t end = scheme;
    while (end < bytes && target[end] != '/' && target[end] != '?') end++;
    if (end == scheme || !is_authority(target + scheme, end - scheme, false)) return TARGET;
    /* Two servers of which one goes by the target and the other by Host would take it for different ones. */
    if (host && (host->value_bytes != end - scheme ||
                 strncasecmp(head->text + host->value, target + scheme, host->value_bytes) != 0))
        return TARGET;
    return NONE;
}

enum reason check_request(struct head *head, const char *method, size_t method_bytes, size_t *bytes) {
    size_t at = 0;
    while (has(head, at, "\r\n", 2)) at += 2;
    if (!has(head, at, method, method_bytes)) return LINE_END;
    head->method = (uint32_t)at;
    head->method_bytes = (uint32_t)method_bytes;
    at += method_bytes;
    if (!has(head, at, " ", 1) || head->target != at + 1) return REQUEST_LINE;
    at += 1 + head->target_bytes;
    if (!has(head, at, " ", 1)) return REQUEST_LINE;
    if (has(head, at, " HTTP/1.1", 9)) head->minor_version = 1;
    else if (has(head, at, " HTTP/1.0", 9)) head->minor_version = 0;
    else return has(head, at, "  ", 2) ? REQUEST_LINE : VERSION;
    at += 9;
    if (!has(head, at, "\r\n", 2)) return LINE_END;
    at += 2;
    const struct field *host;
    enum reason reason = check_fields(head, &at);
    if (!reason) reason = check_framing(head, &host);
    if (reason) return reason;
    if (!has(head, at, "\r\n", 2)) return LINE_END;
    *bytes = at + 2;
    if (host ? !is_authority(head->text + host->value, host->value_bytes, false) : head->minor_version == 1) return HOST;
    return check_target(head, host);
}

/* The text after the status is optional. */
enum reason check_response(struct head *head, size_t *bytes) {
    size_t at = 0;
    while (has(head, at, "\r\n", 2)) at += 2;
    if (has(head, at, "HTTP/1.1 ", 9)) head->minor_version = 1;
    else if (has(head, at, "HTTP/1.0 ", 9)) head->minor_version = 0;
    else return VERSION;
    at += 9;
    if (head->bytes - at < 3 || !are_digits(head->text + at, 3) || head->text[at] == '0') return STATUS_LINE;
    at += 3;
    if (has(head, at, " ", 1)) at += 1;
    if (head->target_bytes > 0 && head->target != at) return STATUS_LINE;
    if (head->target_bytes > head->bytes - at) return STATUS_LINE;
    if (controls(head->text + at, head->target_bytes)) return STATUS_LINE;
    at += head->target_bytes;
    if (!has(head, at, "\r\n", 2)) return LINE_END;
    at += 2;
    const struct field *host;
    enum reason reason = check_fields(head, &at);
    if (!reason) reason = check_framing(head, &host);
    if (reason) return reason;
    if (!has(head, at, "\r\n", 2)) return LINE_END;
    *bytes = at + 2;
    return NONE;
}

enum reason check_trailers(struct head *head) {
    size_t at = 0;
    enum reason reason = check_fields(head, &at);
    if (reason) return reason;
    const struct known *known = head->known;
    for (const struct field *field = head->fields; field < head->fields + head->field_count; field++)
        if (field->known && (field->known == known->host || field->known == known->content_length ||
                             field->known == known->transfer_encoding))
            return TRAILER;
    return has(head, at, "\r\n", 2) ? NONE : LINE_END;
}
