/* The mask kernel: AES-128 counter-mode key streams, added straight into a vector.
 *
 * backend.py says what each function promises and checks every argument before a pointer comes
 * here; reference.py is the twin in NumPy. Nothing here allocates, and nothing branches on a key
 * or on key stream: the AES instructions take the same time for all data.
 *
 * The code of a path is written once, at the end of this file, and compiled three times by
 * including the file in itself with TESSERA_WIDTH set:
 *
 *     aesni     128-bit registers   AES-NI, SSE4.1, PCLMULQDQ
 *     vaes256   256-bit registers   AVX2, VAES, VPCLMULQDQ
 *     vaes512   512-bit registers   AVX-512 F/BW/DQ, VAES, VPCLMULQDQ
 *
 * Eight registers are in flight, which covers the latency of an AES round on current cores. Such a
 * "group" is 8, 16 or 32 blocks, and starts at a multiple of its size: then the counters of a group
 * differ from the first one in low bits of the last byte only, and one XOR makes each.
 *
 * Each function carries its own target attribute, so the file needs no -march and runs on any
 * x86-64; which path the machine (and its operating system) can run is asked at run time. On other
 * machines the file compiles to functions that say "no path".
 */
#ifndef TESSERA_WIDTH

#include "aes.h"
#include "packed.h"

#ifdef TESSERA_NATIVE

#include <cpuid.h>

#define CHUNK_BYTES 16384 /* of the accumulator: stays in cache while all keys go over it */
#define KEYS_AT_ONCE 128  /* expanded on the stack: 22 kB */
#define ROW_BLOCKS 256    /* key stream of rows that is made at once: 4 kB */

typedef struct {
    __m128i round_key[ROUNDS + 1];
    uint64_t nonce; /* as it lies in memory */
    int negative;
} stream;

/* The XOR of a group's first counter with its i-th: i in the last byte of a block. */
#define OFFSETS_4(i) {0, (uint64_t)(i) << 56}, {0, (uint64_t)(i + 1) << 56}, \
                     {0, (uint64_t)(i + 2) << 56}, {0, (uint64_t)(i + 3) << 56}
static const uint64_t offsets[32][2] __attribute__((aligned(64))) = {
    OFFSETS_4(0),  OFFSETS_4(4),  OFFSETS_4(8),  OFFSETS_4(12),
    OFFSETS_4(16), OFFSETS_4(20), OFFSETS_4(24), OFFSETS_4(28)};

static AES_TARGET void expand(stream *s, const uint8_t *key, const uint8_t *nonce, int negative) {
    expand_key(s->round_key, key);
    memcpy(&s->nonce, nonce, 8);
    s->negative = negative;
}

/* to += or -= from, words of the given width; the caller's constants remove the switch.
 * "Words of no bytes" are stored instead of added. */
#define ADD_LOOP(type)                                                                    \
    for (size_t i = 0; i + sizeof(type) <= size; i += sizeof(type)) {                     \
        type a, b;                                                                        \
        memcpy(&a, to + i, sizeof a);                                                     \
        memcpy(&b, from + i, sizeof b);                                                   \
        a = (type)(negative ? a - b : a + b);                                             \
        memcpy(to + i, &a, sizeof a);                                                     \
    }                                                                                     \
    break

INLINE void add_words(uint8_t *restrict to, const uint8_t *restrict from, size_t size,
                      int word_bytes, int negative) {
    __extension__ typedef unsigned __int128 limbs;
    switch (word_bytes) {
    case 0: memcpy(to, from, size); break;
    case 1: ADD_LOOP(uint8_t);
    case 2: ADD_LOOP(uint16_t);
    case 4: ADD_LOOP(uint32_t);
    case 8: ADD_LOOP(uint64_t);
    case 16: ADD_LOOP(limbs);
    }
}

/* The same for a row, which is short: registers of 16 and of 8 bytes, then what is left. */
INLINE AES_TARGET __m128i add_register(__m128i a, __m128i b, int word_bytes, int negative) {
    switch (word_bytes) {
    case 1: return negative ? _mm_sub_epi8(a, b) : _mm_add_epi8(a, b);
    case 2: return negative ? _mm_sub_epi16(a, b) : _mm_add_epi16(a, b);
    case 4: return negative ? _mm_sub_epi32(a, b) : _mm_add_epi32(a, b);
    default: return negative ? _mm_sub_epi64(a, b) : _mm_add_epi64(a, b);
    }
}

INLINE AES_TARGET void add_row(uint8_t *restrict to, const uint8_t *restrict from, size_t size,
                               int word_bytes, int negative) {
    size_t i = 0;
    if (word_bytes && word_bytes != 16) {
        for (; i + 16 <= size; i += 16)
            _mm_storeu_si128((__m128i *)(to + i),
                             add_register(_mm_loadu_si128((const __m128i *)(to + i)),
                                          _mm_loadu_si128((const __m128i *)(from + i)), word_bytes,
                                          negative));
        if (i + 8 <= size) {
            _mm_storel_epi64((__m128i *)(to + i),
                             add_register(_mm_loadl_epi64((const __m128i *)(to + i)),
                                          _mm_loadl_epi64((const __m128i *)(from + i)), word_bytes,
                                          negative));
            i += 8;
        }
    }
    add_words(to + i, from + i, size - i, word_bytes, negative);
}

/* Call `function` with word size and sign as constants, so that each combination is compiled to a
 * loop without branches. */
#define SPECIALISE(function, word_bytes, negative, ...)                                   \
    switch (word_bytes) {                                                                 \
    case 0: function(__VA_ARGS__, 0, 0); break;                                           \
    case 1: if (negative) function(__VA_ARGS__, 1, 1); else function(__VA_ARGS__, 1, 0); break; \
    case 2: if (negative) function(__VA_ARGS__, 2, 1); else function(__VA_ARGS__, 2, 0); break; \
    case 4: if (negative) function(__VA_ARGS__, 4, 1); else function(__VA_ARGS__, 4, 0); break; \
    case 8: if (negative) function(__VA_ARGS__, 8, 1); else function(__VA_ARGS__, 8, 0); break; \
    case 16: if (negative) function(__VA_ARGS__, 16, 1); else function(__VA_ARGS__, 16, 0); break; \
    }

/* Key stream that is to be added, where and how much. */
typedef struct {
    uint8_t *to;
    const uint8_t *from;
    size_t size;
} segment;

INLINE AES_TARGET void add_each(const segment *parts, size_t count, int word_bytes, int negative) {
    for (size_t i = 0; i < count; i++)
        add_row(parts[i].to, parts[i].from, parts[i].size, word_bytes, negative);
}

static NOINLINE AES_TARGET void add_segments(const segment *parts, size_t count, int word_bytes,
                                             int negative) {
    SPECIALISE(add_each, word_bytes, negative, parts, count)
}

#define TESSERA_WIDTH 128
#include "kernel.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 256
#include "kernel.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 512
#include "kernel.c"
#undef TESSERA_WIDTH

/* Which registers the operating system saves: XCR0 (Intel SDM, vol. 1, 13.3). */
static uint64_t saved_registers(void) {
    uint32_t low, high;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

EXPORT int tessera_paths(void) {
    unsigned a, b, c, d;
    int found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_AES) || !(c & bit_PCLMUL) || !(c & bit_SSE4_1))
        return 0;
    found |= 1 << AESNI;
    if (!(c & bit_OSXSAVE)) return found;
    uint64_t saved = saved_registers();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & bit_VAES)) return found;
    if (!(c & bit_VPCLMULQDQ)) return found;
    if ((b & bit_AVX2) && (saved & 0x06) == 0x06) {
        found |= 1 << VAES256;
#ifdef TESSERA_TWO
        found |= 1 << VAES512;
#else
        if ((b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512DQ) && (saved & 0xe6) == 0xe6)
            found |= 1 << VAES512;
#endif
    }
    return found;
}

/* out += the signed words of all streams, from byte `skip` of block `first_block` on. With
 * word_bytes 0 the one stream is stored. */
EXPORT void tessera_accumulate(int path, uint8_t *out, size_t size, int word_bytes,
                               const uint8_t *keys, const uint8_t *nonces, const int8_t *signs,
                               size_t streams, uint64_t first_block, size_t skip) {
    static void (*const accumulate[])(uint8_t *, size_t, int, const stream *, size_t, uint64_t,
                                      size_t) = {accumulate_128, accumulate_256, accumulate_512};
    stream expanded[KEYS_AT_ONCE];
    for (size_t done = 0; done < streams; done += KEYS_AT_ONCE) {
        size_t count = streams - done < KEYS_AT_ONCE ? streams - done : KEYS_AT_ONCE;
        for (size_t k = 0; k < count; k++)
            expand(&expanded[k], keys + 16 * (done + k), nonces + 8 * (done + k),
                   signs[done + k] < 0);
        accumulate[path](out, size, word_bytes, expanded, count, first_block, skip);
    }
    wipe(expanded, sizeof expanded);
}

/* Row index[i] of acc += the sign times row positions[i] of the stream, for i from bounds[k] to
 * bounds[k + 1] and every stream k. */
EXPORT void tessera_accumulate_rows(int path, uint8_t *acc, size_t row_bytes, int word_bytes,
                                    const uint8_t *keys, const uint8_t *nonces,
                                    const int8_t *signs, size_t streams, const int64_t *bounds,
                                    const int64_t *index, const uint64_t *positions) {
    static void (*const rows[])(uint8_t *, size_t, int, const stream *, size_t, const int64_t *,
                                const uint64_t *) = {rows_128, rows_256, rows_512};
    stream s;
    for (size_t k = 0; k < streams; k++) {
        size_t begin = (size_t)bounds[k], count = (size_t)bounds[k + 1] - begin;
        expand(&s, keys + 16 * k, nonces + 8 * k, signs[k] < 0);
        rows[path](acc, row_bytes, word_bytes, &s, count, index + begin, positions + begin);
    }
    wipe(&s, sizeof s);
}

/* Words as a little-endian bit stream: each takes `bits` bits, those above are zero. */
INLINE void pack_words(const uint8_t *words, size_t count, unsigned bits, uint8_t *out,
                       int word_bytes) {
    size_t limb_bytes = word_bytes == 16 ? 8 : (size_t)word_bytes;
    uint64_t held = 0; /* what does not fill 8 bytes yet: `fill` bits */
    unsigned fill = 0;
    for (size_t i = 0; i < count; i++) {
        for (unsigned left = bits; left; words += limb_bytes) {
            unsigned size = left < 64 ? left : 64;
            uint64_t word = 0;
            memcpy(&word, words, limb_bytes);
            held |= word << fill;
            fill += size;
            left -= size;
            if (fill >= 64) {
                memcpy(out, &held, 8);
                out += 8;
                fill -= 64;
                held = fill ? word >> (size - fill) : 0;
            }
        }
    }
    memcpy(out, &held, (fill + 7) / 8);
}

/* `width` <= 64 bits that begin `shift` < 8 bits into these nine bytes. */
INLINE uint64_t take(const uint8_t *from, unsigned shift, unsigned width) {
    uint64_t word;
    memcpy(&word, from, 8);
    word >>= shift;
    if (shift + width > 64) word |= (uint64_t)from[8] << (64 - shift);
    return word & UINT64_MAX >> (64 - width);
}

#define WINDOW 17 /* bytes that hold a word of 128 bits wherever it begins */

/* One word from bit `at` on: to a word, or (`add`) added to the one there is. */
INLINE void unpack_word(const uint8_t *from, unsigned shift, unsigned bits, uint8_t *to,
                        int word_bytes, int add) {
    const size_t limb = word_bytes == 16 ? 8 : (size_t)word_bytes;
    uint64_t word = take(from, shift, bits < 64 ? bits : 64), before = 0, carry = 0;
    if (add) {
        memcpy(&before, to, limb);
        word += before;
        carry = word < before;
    }
    memcpy(to, &word, limb);
    if (word_bytes == 16) {
        word = take(from + 8, shift, bits - 64);
        if (add) {
            memcpy(&before, to + 8, 8);
            word += before + carry;
        }
        memcpy(to + 8, &word, 8);
    }
}

INLINE void unpack_words(const uint8_t *data, size_t size, size_t count, unsigned bits,
                         uint8_t *words, int word_bytes, int add) {
    uint8_t end[2 * WINDOW] = {0}; /* the last words read from here, not beyond the data */
    size_t i = 0, at = 0;          /* at: in bits */
    const size_t inside = size < WINDOW ? 0 : 8 * (size - WINDOW) / bits;
    for (const size_t safe = inside < count ? inside : count; i < safe; i++, at += bits)
        unpack_word(data + at / 8, at % 8, bits, words + i * (size_t)word_bytes, word_bytes, add);
    for (; i < count; i++, at += bits) {
        const size_t left = size - at / 8;
        memcpy(end, data + at / 8, left < WINDOW ? left : WINDOW);
        unpack_word(end, at % 8, bits, words + i * (size_t)word_bytes, word_bytes, add);
    }
}

EXPORT void tessera_pack(const uint8_t *words, size_t count, int bits, uint8_t *out,
                         int word_bytes) {
    switch (word_bytes) {
    case 1: pack_words(words, count, (unsigned)bits, out, 1); break;
    case 2: pack_words(words, count, (unsigned)bits, out, 2); break;
    case 4: pack_words(words, count, (unsigned)bits, out, 4); break;
    case 8: pack_words(words, count, (unsigned)bits, out, 8); break;
    case 16: pack_words(words, count, (unsigned)bits, out, 16); break;
    }
}

/* As many words of 4 bytes as can be read four at a time, a multiple of 8; returns how many. */
static PACKED_TARGET size_t unpack_fours(const uint8_t *data, size_t size, size_t count,
                                         unsigned bits, uint8_t *words, int add) {
    unpacking u;
    begin_unpacking(&u, bits);
    const size_t inside = size < FOUR_WINDOW ? 0 : 8 * (size - FOUR_WINDOW) / bits;
    const size_t end = (inside < count ? inside : count) / 8 * 8;
    for (size_t i = 0; i < end; i += 4) {
        __m128i *to = (__m128i *)(void *)(words + 4 * i), four = four_packed(&u, data, i * bits);
        if (add) four = _mm_add_epi32(four, _mm_loadu_si128(to));
        _mm_storeu_si128(to, four);
    }
    return end;
}

EXPORT void tessera_unpack(const uint8_t *data, size_t size, size_t count, int bits,
                           uint8_t *words, int word_bytes, int add) {
    if (word_bytes == 4 && bits <= FOUR_BITS) {
        const size_t some = unpack_fours(data, size, count, (unsigned)bits, words, add);
        data += some / 8 * (size_t)bits, size -= some / 8 * (size_t)bits;
        words += 4 * some, count -= some;
    }
#define OF(n)                                                                \
    case n:                                                                  \
        add ? unpack_words(data, size, count, (unsigned)bits, words, n, 1)   \
            : unpack_words(data, size, count, (unsigned)bits, words, n, 0);  \
        break;
    switch (word_bytes) {
    OF(1)
    OF(2)
    OF(4)
    OF(8)
    OF(16)
    }
#undef OF
}

/* Encrypt counters 0 .. blocks and keep only their XOR: the machine's limit. */
EXPORT uint64_t tessera_aes_limit(int path, uint64_t blocks) {
    static uint64_t (*const limit[])(const stream *, uint64_t) = {limit_128, limit_256, limit_512};
    static const uint8_t zeros[16];
    stream s;
    expand(&s, zeros, zeros, 0);
    return limit[path](&s, blocks);
}

#else /* no AES instructions that we know how to use */

EXPORT int tessera_paths(void) { return 0; }

#endif

#ifndef TESSERA_WITHOUT_PYTHON
/* An empty module, so that setuptools builds, names and ships the library like any extension; the
 * functions are called through ctypes, which lets other threads run meanwhile. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native",
                                    "The mask kernel; loaded through ctypes.",
                                    -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
#endif

#else /* TESSERA_WIDTH: one path */

#include "width.h"

#define GROUP_BYTES (8 * REG_BYTES)
#define GROUP_BLOCKS (GROUP_BYTES / 16)

/* Declares x0 .. x7 and makes them the key stream of the group that starts at this block. */
#define GROUP(s, block)                                                                           \
    const REG first = SPREAD(_mm_xor_si128(                                                       \
        (s)->round_key[0],                                                                        \
        _mm_set_epi64x((long long)__builtin_bswap64(block), (long long)(s)->nonce)));             \
    EIGHT(ONE_COUNTER)                                                                            \
    ENCRYPT((s)->round_key)
#define ONE_COUNTER(i) REG x##i = XOR(first, LOAD((const uint8_t *)offsets + (i) * REG_BYTES));

INLINE TARGET REG NAME(combine)(REG a, REG b, int word_bytes, int negative) {
    switch (word_bytes) {
    case 1: return negative ? OP(sub_epi8)(a, b) : OP(add_epi8)(a, b);
    case 2: return negative ? OP(sub_epi16)(a, b) : OP(add_epi16)(a, b);
    case 4: return negative ? OP(sub_epi32)(a, b) : OP(add_epi32)(a, b);
    case 8: return negative ? OP(sub_epi64)(a, b) : OP(add_epi64)(a, b);
    }
    return b;
}

/* Whole groups, fused: key stream goes from the AES registers into the sum. */
INLINE TARGET void NAME(bulk)(uint8_t *to, size_t groups, const stream *s, uint64_t block,
                              int word_bytes, int negative) {
    for (; groups; groups--, to += GROUP_BYTES, block += GROUP_BLOCKS) {
        GROUP(s, block)
        if (word_bytes == 16) {
            uint8_t buffer[GROUP_BYTES] __attribute__((aligned(64)));
#define ONE_SPILL(i) STORE(buffer + (i) * REG_BYTES, x##i);
            EIGHT(ONE_SPILL)
#undef ONE_SPILL
            add_words(to, buffer, GROUP_BYTES, 16, negative);
        } else {
#define ONE_ADD(i) \
    STORE(to + (i) * REG_BYTES, \
          NAME(combine)(LOAD(to + (i) * REG_BYTES), x##i, word_bytes, negative));
#define ONE_STORE(i) STORE(to + (i) * REG_BYTES, x##i);
            if (word_bytes) { EIGHT(ONE_ADD) } else { EIGHT(ONE_STORE) }
#undef ONE_ADD
#undef ONE_STORE
        }
    }
}

/* Bytes skip .. skip + size of one group: where a span begins or ends within it. */
static NOINLINE TARGET void NAME(edge)(uint8_t *to, size_t size, size_t skip, const stream *s,
                                       uint64_t block, int word_bytes) {
    uint8_t buffer[GROUP_BYTES] __attribute__((aligned(64)));
    NAME(bulk)(buffer, 1, s, block, 0, 0);
    const segment part = {to, buffer + skip, size};
    add_segments(&part, 1, word_bytes, s->negative);
}

/* One stream over one span, which begins `skip` bytes into the group at `block`. */
static NOINLINE TARGET void NAME(span)(uint8_t *to, size_t size, size_t skip, const stream *s,
                                       uint64_t block, int word_bytes) {
    if (skip) {
        size_t part = size < GROUP_BYTES - skip ? size : GROUP_BYTES - skip;
        NAME(edge)(to, part, skip, s, block, word_bytes);
        to += part;
        size -= part;
        block += GROUP_BLOCKS;
    }
    size_t groups = size / GROUP_BYTES;
    SPECIALISE(NAME(bulk), word_bytes, s->negative, to, groups, s, block)
    if (size % GROUP_BYTES)
        NAME(edge)(to + groups * GROUP_BYTES, size % GROUP_BYTES, 0, s,
                   block + groups * GROUP_BLOCKS, word_bytes);
}

static TARGET void NAME(accumulate)(uint8_t *out, size_t size, int word_bytes, const stream *s,
                                    size_t streams, uint64_t first_block, size_t skip) {
    uint64_t block = first_block & ~(uint64_t)(GROUP_BLOCKS - 1);
    skip += (size_t)(first_block - block) * 16;
    while (size) { /* every chunk but the last ends with a group */
        size_t part = size < CHUNK_BYTES - skip ? size : CHUNK_BYTES - skip;
        for (size_t k = 0; k < streams; k++)
            NAME(span)(out, part, skip, &s[k], block, word_bytes);
        out += part;
        size -= part;
        skip = 0;
        block += CHUNK_BYTES / 16;
    }
}

/* Counter blocks, a multiple of a group of them, to key stream. */
static NOINLINE TARGET void NAME(encrypt)(const stream *s, const uint64_t (*counters)[2],
                                          uint8_t *to, size_t blocks) {
    const REG whitening = SPREAD(s->round_key[0]);
    for (size_t at = 0; at < blocks * 16; at += GROUP_BYTES) {
#define ONE_BLOCK(i) \
    REG x##i = XOR(whitening, LOAD((const uint8_t *)counters + at + (i) * REG_BYTES));
        EIGHT(ONE_BLOCK)
#undef ONE_BLOCK
        ENCRYPT(s->round_key)
#define ONE_STORE(i) STORE(to + at + (i) * REG_BYTES, x##i);
        EIGHT(ONE_STORE)
#undef ONE_STORE
    }
}

static TARGET void NAME(rows)(uint8_t *acc, size_t row_bytes, int word_bytes, const stream *s,
                              size_t count, const int64_t *index, const uint64_t *positions) {
    uint64_t counters[ROW_BLOCKS][2] __attribute__((aligned(64)));
    uint8_t buffer[16 * ROW_BLOCKS] __attribute__((aligned(64)));
    segment waiting[ROW_BLOCKS]; /* parts of rows whose counters are not encrypted yet */
    size_t blocks = 0, segments = 0;
    /* a pair often shares a few rows only: set up what they need, to the end of its group */
    for (size_t i = 0; i < ROW_BLOCKS && i < count * ((row_bytes + 15) / 16) + GROUP_BLOCKS; i++) {
        counters[i][0] = s->nonce;
        counters[i][1] = 0;
    }
    for (size_t i = 0; i < count; i++) {
        uint8_t *to = acc + (size_t)index[i] * row_bytes;
        uint64_t block = positions[i] * ((row_bytes + 15) / 16);
        size_t left = row_bytes;
        while (left) { /* rows are cut where the buffer ends, always between two blocks */
            size_t room = 16 * (ROW_BLOCKS - blocks);
            size_t size = left < room ? left : room;
            waiting[segments++] = (segment){to, buffer + 16 * blocks, size};
            for (size_t b = 0; b < (size + 15) / 16; b++)
                counters[blocks++][1] = __builtin_bswap64(block++);
            to += size;
            left -= size;
            if (blocks == ROW_BLOCKS || (i + 1 == count && !left)) {
                NAME(encrypt)(s, (const uint64_t (*)[2])counters, buffer, blocks);
                add_segments(waiting, segments, word_bytes, s->negative);
                blocks = segments = 0;
            }
        }
    }
}

static TARGET uint64_t NAME(limit)(const stream *s, uint64_t blocks) {
    REG kept = SPREAD(_mm_setzero_si128());
    uint64_t low[REG_BYTES / 8];
    for (uint64_t block = 0; block < blocks; block += GROUP_BLOCKS) {
        GROUP(s, block)
#define ONE_KEEP(i) kept = XOR(kept, x##i);
        EIGHT(ONE_KEEP)
#undef ONE_KEEP
    }
    STORE(low, kept);
    return low[0];
}

#include "width.h"
#undef GROUP_BYTES
#undef GROUP_BLOCKS
#undef GROUP
#undef ONE_COUNTER

#endif
