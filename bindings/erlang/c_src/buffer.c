/* The memory of delayed_write and read_ahead. See file.h. */
#include "file.h"
#include <unistd.h>

/* Initial memory for delayed bytes. */
#define WRITTEN_MIN (64 << 10)

struct buffer *buffer_create(uint64_t written_max, uint64_t delay_ms, uint64_t ahead_max)
{
    struct buffer *buffer = enif_alloc(sizeof *buffer);
    if (!buffer)
        return NULL;
    *buffer = (struct buffer){.written_max = written_max, .delay_ms = (int64_t)delay_ms, .ahead_max = ahead_max};
    buffer->lock = enif_mutex_create("pelton_buffer");
    if (!buffer->lock) {
        enif_free(buffer);
        return NULL;
    }
    return buffer;
}

static void free_binary(ErlNifBinary *binary)
{
    if (binary->data)
        enif_release_binary(binary);
    *binary = (ErlNifBinary){0};
}

void buffer_free(struct buffer *buffer)
{
    if (!buffer)
        return;
    free_binary(&buffer->written);
    free_binary(&buffer->ahead);
    enif_mutex_destroy(buffer->lock);
    enif_free(buffer);
}

/* ---- Delayed writes ---- */

bool buffer_append(struct buffer *buffer, const ErlNifIOVec *pieces, size_t size)
{
    size_t wanted = buffer->written_size + size;
    if (!buffer->written.data) {
        size_t first = buffer->written_max < WRITTEN_MIN ? buffer->written_max : WRITTEN_MIN;
        if (!enif_alloc_binary(wanted > first ? wanted : first, &buffer->written))
            return false;
    } else if (buffer->written.size < wanted && !enif_realloc_binary(&buffer->written, wanted * 2)) {
        return false;
    }
    for (int i = 0; i < pieces->iovcnt; i++) {
        memcpy(buffer->written.data + buffer->written_size, pieces->iov[i].iov_base, pieces->iov[i].iov_len);
        buffer->written_size += pieces->iov[i].iov_len;
    }
    return true;
}

size_t buffer_take_written(struct buffer *buffer, ErlNifBinary *memory)
{
    size_t size = buffer ? buffer->written_size : 0;
    if (size) {
        *memory = buffer->written;
        buffer->written = (ErlNifBinary){0};
        buffer->written_size = 0;
    }
    return size;
}

/* ---- Read ahead ---- */

void buffer_seek_back(struct buffer *buffer, int fd)
{
    off_t unread = (off_t)(buffer->to - buffer->from);
    if (unread && lseek(fd, -unread, SEEK_CUR) < 0)
        return;
    buffer->from = buffer->to = 0;
    free_binary(&buffer->ahead);
}

size_t buffer_line(const struct buffer *buffer)
{
    size_t size = buffer->to - buffer->from;
    unsigned char *begin = buffer->ahead.data + buffer->from, *end = size ? memchr(begin, '\n', size) : NULL;
    return end ? (size_t)(end - begin) + 1 : 0;
}

/* It copies the smaller part: the taken bytes or the remaining ones. */
bool buffer_take_ahead(struct buffer *buffer, size_t size, ErlNifBinary *taken)
{
    size_t remaining = buffer->to - buffer->from - size;
    if (size <= remaining || buffer->from) {
        if (!enif_alloc_binary(size, taken))
            return false;
        memcpy(taken->data, buffer->ahead.data + buffer->from, size);
        buffer->from += size;
        return true;
    }
    ErlNifBinary rest = {0};
    if (remaining && !enif_alloc_binary(remaining, &rest))
        return false;
    if (remaining)
        memcpy(rest.data, buffer->ahead.data + size, remaining);
    *taken = buffer->ahead;
    buffer->ahead = rest;
    buffer->from = 0;
    buffer->to = remaining;
    if (taken->size != size && !enif_realloc_binary(taken, size)) {
        enif_release_binary(taken);
        return false;
    }
    return true;
}

void buffer_set_ahead(struct buffer *buffer, ErlNifBinary memory, size_t size)
{
    free_binary(&buffer->ahead);
    buffer->ahead = memory;
    buffer->from = 0;
    buffer->to = size;
}
