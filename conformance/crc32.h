/* The CRC-32 of the reports, for the drivers in C and C++: zlib's, four bits at a time. */
#ifndef CRC32_H
#define CRC32_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t crc32(const void *data, size_t size) {
    static const uint32_t of_four_bits[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                              0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                              0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const unsigned char *byte = (const unsigned char *)data;
    uint32_t crc = UINT32_MAX;
    for (; size > 0; size--) {
        crc ^= *byte++;
        crc = crc >> 4 ^ of_four_bits[crc & 15];
        crc = crc >> 4 ^ of_four_bits[crc & 15];
    }
    return ~crc;
}

#endif
