/* A register of 512 bits made of two of 256, with the operations that width.h names: for a test of
 * the 512-bit source where there are no such registers. */
#ifndef TESSERA_TWO_H
#define TESSERA_TWO_H

#include "aes.h"

#ifdef TESSERA_NATIVE

#define TWO_TARGET __attribute__((target("aes,avx2,vaes,pclmul,vpclmulqdq")))

typedef struct {
    __m256i low, high;
} two;

INLINE TWO_TARGET two two_load(const uint8_t *p) {
    return (two){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}

INLINE TWO_TARGET void two_store(uint8_t *p, two x) {
    _mm256_storeu_si256((__m256i *)p, x.low);
    _mm256_storeu_si256((__m256i *)(p + 32), x.high);
}

INLINE TWO_TARGET two two_spread(__m128i x) {
    return (two){_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)};
}

INLINE TWO_TARGET two two_gather(const uint8_t *p, size_t step) {
#define ONE(i) _mm_loadu_si128((const __m128i *)(p + (i) * step))
    return (two){_mm256_inserti128_si256(_mm256_castsi128_si256(ONE(0)), ONE(1), 1),
                 _mm256_inserti128_si256(_mm256_castsi128_si256(ONE(2)), ONE(3), 1)};
#undef ONE
}

#define OF_TWO(name, from)                                               \
    INLINE TWO_TARGET two two_##name(two a, two b) {                     \
        return (two){from(a.low, b.low), from(a.high, b.high)};          \
    }
OF_TWO(xor, _mm256_xor_si256)
OF_TWO(and, _mm256_and_si256)
OF_TWO(or, _mm256_or_si256)
OF_TWO(and_not, _mm256_andnot_si256)
OF_TWO(round, _mm256_aesenc_epi128)
OF_TWO(last, _mm256_aesenclast_epi128)
OF_TWO(add_epi8, _mm256_add_epi8)
OF_TWO(add_epi16, _mm256_add_epi16)
OF_TWO(add_epi32, _mm256_add_epi32)
OF_TWO(add_epi64, _mm256_add_epi64)
OF_TWO(sub_epi8, _mm256_sub_epi8)
OF_TWO(sub_epi16, _mm256_sub_epi16)
OF_TWO(sub_epi32, _mm256_sub_epi32)
OF_TWO(sub_epi64, _mm256_sub_epi64)
#undef OF_TWO

INLINE TWO_TARGET two two_srli_epi64(two x, unsigned bits) {
    return (two){_mm256_srli_epi64(x.low, (int)bits), _mm256_srli_epi64(x.high, (int)bits)};
}

INLINE TWO_TARGET two two_srli_epi32(two x, unsigned bits) {
    return (two){_mm256_srli_epi32(x.low, (int)bits), _mm256_srli_epi32(x.high, (int)bits)};
}

INLINE TWO_TARGET two two_srai_epi32(two x, int bits) {
    return (two){_mm256_srai_epi32(x.low, bits), _mm256_srai_epi32(x.high, bits)};
}

INLINE TWO_TARGET two two_shuffle_epi32(two x, int order) {
    if (order == 0x4e)
        return (two){_mm256_shuffle_epi32(x.low, 0x4e), _mm256_shuffle_epi32(x.high, 0x4e)};
    if (order == 0xf5)
        return (two){_mm256_shuffle_epi32(x.low, 0xf5), _mm256_shuffle_epi32(x.high, 0xf5)};
    return (two){_mm256_shuffle_epi32(x.low, 0xee), _mm256_shuffle_epi32(x.high, 0xee)};
}

/* Of the eight halves. */
INLINE TWO_TARGET unsigned two_lowest_bits(two x) {
    const __m256i low = _mm256_slli_epi64(x.low, 63), high = _mm256_slli_epi64(x.high, 63);
    return (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(low)) |
           (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(high)) << 4;
}

INLINE TWO_TARGET two two_up(two x) {
    return (two){_mm256_bslli_epi128(x.low, 8), _mm256_bslli_epi128(x.high, 8)};
}

INLINE TWO_TARGET two two_carries(two a, two b, two sum) {
    return two_or(two_and(a, b), two_and_not(sum, two_or(a, b)));
}

INLINE TWO_TARGET two two_pick(two y, two x) {
#define ONE(part)                                                                             \
    _mm256_castpd_si256(_mm256_blendv_pd(_mm256_setzero_pd(), _mm256_castsi256_pd(x.part),    \
                                         _mm256_castsi256_pd(y.part)))
    return (two){ONE(low), ONE(high)};
#undef ONE
}

#endif
#endif
