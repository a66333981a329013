/* BLAKE2s (RFC 7693) of many short messages: a number of 64 bits and a row of bytes each.
 *
 * digests.py says what is promised and checks every argument before a pointer comes here. Nothing
 * here is secret. It is in C because a call of Python for each row takes ten times as long. */
#include "words.h"

#ifdef TESSERA_NATIVE

static const uint32_t INITIAL[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define BLOCK_BYTES 64
#define TURN(x, by) ((x) >> (by) | (x) << (32 - (by)))
#define MIX(a, b, c, d, x, y)          \
    a += b + (x);                      \
    d = TURN(d ^ a, 16);               \
    c += d;                            \
    b = TURN(b ^ c, 12);               \
    a += b + (y);                      \
    d = TURN(d ^ a, 8);                \
    c += d;                            \
    b = TURN(b ^ c, 7);

/* RFC 7693, section 3.2: `length` bytes have been read by the end of this block. */
static void compress(uint32_t h[8], const uint8_t *block, uint64_t length, int last) {
    uint32_t m[16], v[16];
    memcpy(m, block, BLOCK_BYTES);
    memcpy(v, h, 32);
    memcpy(v + 8, INITIAL, 32);
    v[12] ^= (uint32_t)length;
    v[13] ^= (uint32_t)(length >> 32);
    if (last) v[14] = ~v[14];
    for (size_t r = 0; r < 10; r++) {
        const uint8_t *s = ORDER[r];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
    }
    for (size_t i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

/* to = of each row the digest, 32 bytes, of its number and its bytes. */
EXPORT int tessera_row_digests(const uint8_t *person, size_t count, const uint64_t *numbers,
                               const uint8_t *rows, size_t row_bytes, uint8_t *to) {
    uint32_t first[8];
    uint32_t parameters[8] = {0x01010020}; /* 32 bytes of digest, no key, no tree */
    memcpy(parameters + 6, person, 8);
    for (size_t i = 0; i < 8; i++) first[i] = INITIAL[i] ^ parameters[i];
    for (size_t n = 0; n < count; n++, rows += row_bytes, to += 32) {
        uint8_t block[BLOCK_BYTES];
        uint32_t h[8];
        size_t at = 0, fill = 8, length = 8 + row_bytes;
        memcpy(h, first, sizeof h);
        memcpy(block, numbers + n, 8);
        for (;;) {
            const size_t some = row_bytes - at < BLOCK_BYTES - fill ? row_bytes - at : BLOCK_BYTES - fill;
            memcpy(block + fill, rows + at, some);
            at += some;
            fill += some;
            if (at == row_bytes) break;
            compress(h, block, 8 + at, 0);
            fill = 0;
        }
        memset(block + fill, 0, BLOCK_BYTES - fill);
        compress(h, block, length, 1);
        memcpy(to, h, 32);
    }
    return 0;
}

#endif
