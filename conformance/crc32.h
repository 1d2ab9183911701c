/* The CRC-32 of the reports, zlib's, for the drivers in C and C++. */
#ifndef CRC32_H
#define CRC32_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t crc32(const void *data, size_t size) {
    static uint32_t of_byte[256];
    for (uint32_t i = 0; i < 256 && of_byte[255] == 0; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
        of_byte[i] = crc;
    }
    const unsigned char *byte = (const unsigned char *)data;
    uint32_t crc = UINT32_MAX;
    for (; size > 0; size--) crc = crc >> 8 ^ of_byte[(crc ^ *byte++) & 255];
    return ~crc;
}

#endif
