/* The registers of one path, for code that is written once and compiled for each TESSERA_WIDTH.
 *
 *     128   aesni     AES-NI, SSE4.1, PCLMULQDQ
 *     256   vaes256   AVX2, VAES, VPCLMULQDQ
 *     512   vaes512   AVX-512 F/BW/DQ, VAES, VPCLMULQDQ
 *
 * With TESSERA_TWO the registers of 512 bits are made of two of 256, so that a test can run that
 * path's source where there are none (two.h). Included before such code; the second inclusion,
 * after it, takes everything back. A "half" is 64 bits of a block. */
#ifndef TARGET

#if TESSERA_WIDTH == 128
#define TARGET __attribute__((target("aes,sse4.1,pclmul")))
#define REG __m128i
#define LOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE(p, x) _mm_storeu_si128((__m128i *)(p), x)
#define SPREAD(x) (x)
#define OP(name) _mm_##name
#define XOR _mm_xor_si128
#define AND _mm_and_si128
#define ROUND _mm_aesenc_si128
#define LAST _mm_aesenclast_si128
#define UP _mm_slli_si128
#define CLMUL _mm_clmulepi64_si128
#define XOR_AND(a, b, c) XOR(a, AND(b, c))
#define CARRIES(a, b, sum) _mm_or_si128(AND(a, b), _mm_andnot_si128(sum, _mm_or_si128(a, b)))
#define PICK(y, x)                                                                            \
    _mm_castpd_si128(_mm_blendv_pd(_mm_setzero_pd(), _mm_castsi128_pd(x), _mm_castsi128_pd(y)))
#define XOR_PICK(a, y, x) XOR(a, PICK(y, x))
#define GATHER(at, step) LOAD(at)
#define SWITCHES REG
#elif TESSERA_WIDTH == 256
#define TARGET __attribute__((target("aes,avx2,vaes,pclmul,vpclmulqdq")))
#define REG __m256i
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, x) _mm256_storeu_si256((__m256i *)(p), x)
#define SPREAD(x) _mm256_broadcastsi128_si256(x)
#define OP(name) _mm256_##name
#define XOR _mm256_xor_si256
#define AND _mm256_and_si256
#define ROUND _mm256_aesenc_epi128
#define LAST _mm256_aesenclast_epi128
#define UP _mm256_bslli_epi128
#define CLMUL _mm256_clmulepi64_epi128
#define XOR_AND(a, b, c) XOR(a, AND(b, c))
#define CARRIES(a, b, sum) _mm256_or_si256(AND(a, b), _mm256_andnot_si256(sum, _mm256_or_si256(a, b)))
#define PICK(y, x)                                                                       \
    _mm256_castpd_si256(                                                                 \
        _mm256_blendv_pd(_mm256_setzero_pd(), _mm256_castsi256_pd(x), _mm256_castsi256_pd(y)))
#define XOR_PICK(a, y, x) XOR(a, PICK(y, x))
#define GATHER(at, step)                                                        \
    _mm256_inserti128_si256(                                                    \
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(at))),         \
        _mm_loadu_si128((const __m128i *)((at) + (step))), 1)
#define SWITCHES REG
#elif !defined(TESSERA_TWO)
#define TARGET __attribute__((target("aes,avx2,avx512f,avx512bw,avx512dq,vaes,pclmul,vpclmulqdq")))
#define REG __m512i
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, x) _mm512_storeu_si512(p, x)
#define SPREAD(x) _mm512_broadcast_i32x4(x)
#define OP(name) _mm512_##name
#define XOR _mm512_xor_si512
#define AND _mm512_and_si512
#define ROUND _mm512_aesenc_epi128
#define LAST _mm512_aesenclast_epi128
#define UP _mm512_bslli_epi128
#define CLMUL _mm512_clmulepi64_epi128
#define XOR_AND(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x78)
#define XOR_TWO(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define LOWEST_BITS(x) _mm512_test_epi64_mask(x, _mm512_set1_epi64(1))
#define CARRIES(a, b, sum) _mm512_ternarylogic_epi64(a, b, sum, 0xd4) /* two of a, b, not sum */
#define PICK(y, x) _mm512_maskz_mov_epi64(_mm512_movepi64_mask(y), x)
#define XOR_PICK(a, y, x) _mm512_mask_xor_epi64(a, _mm512_movepi64_mask(y), a, x)
#define GATHER_TWO(at, step)                                                    \
    _mm256_inserti128_si256(                                                    \
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(at))),         \
        _mm_loadu_si128((const __m128i *)((at) + (step))), 1)
#define GATHER(at, step)                                                        \
    _mm512_inserti64x4(_mm512_castsi256_si512(GATHER_TWO(at, step)),            \
                       GATHER_TWO((at) + 2 * (step), step), 1)
#define SWITCHES __mmask16
#define SWITCHES_OF(y) _mm512_movepi32_mask(OP(shuffle_epi32)(y, (_MM_PERM_ENUM)0xf5))
#define ADD_WHERE(sum, on, x) _mm512_mask_add_epi32(sum, on, sum, x)
#else
#include "two.h"
#define TARGET TWO_TARGET
#define REG two
#define LOAD(p) two_load((const uint8_t *)(p))
#define STORE(p, x) two_store((uint8_t *)(p), x)
#define SPREAD(x) two_spread(x)
#define OP(name) two_##name
#define XOR two_xor
#define AND two_and
#define ROUND two_round
#define LAST two_last
#define UP(x, bytes) two_up(x)
#define CLMUL(a, b, halves) \
    ((two){_mm256_clmulepi64_epi128((a).low, (b).low, halves), \
           _mm256_clmulepi64_epi128((a).high, (b).high, halves)})
#define XOR_AND(a, b, c) XOR(a, AND(b, c))
#define CARRIES(a, b, sum) two_carries(a, b, sum)
#define PICK(y, x) two_pick(y, x)
#define XOR_PICK(a, y, x) XOR(a, PICK(y, x))
#define LOWEST_BITS(x) two_lowest_bits(x)
#define GATHER(at, step) two_gather(at, step)
#define SWITCHES REG
#endif

#ifndef XOR_TWO
#define XOR_TWO(a, b, c) XOR(a, XOR(b, c))
#endif
#ifndef SWITCHES_OF /* of words of 32 bits: those whose half has its control bit set */
#define SWITCHES_OF(y) OP(srai_epi32)(OP(shuffle_epi32)(y, 0xf5), 31)
#define ADD_WHERE(sum, on, x) OP(add_epi32)(sum, AND(on, x))
#endif

#define NAME(name) JOIN(name, TESSERA_WIDTH)
#define REG_BYTES (TESSERA_WIDTH / 8)
#define LANES (REG_BYTES / 16)
#define BATCH (8 * LANES) /* blocks */

/* x0 .. x7, which hold the input XOR the first round key, become the eight cipher registers. */
#define ENCRYPT(round_keys)                                           \
    _Pragma("GCC unroll 9") for (int r = 1; r < ROUNDS; r++) {        \
        const REG key = SPREAD((round_keys)[r]);                      \
        EIGHT(ONE_ROUND)                                              \
    }                                                                 \
    {                                                                 \
        const REG key = SPREAD((round_keys)[ROUNDS]);                 \
        EIGHT(ONE_LAST)                                               \
    }
#define ONE_ROUND(i) x##i = ROUND(x##i, key);
#define ONE_LAST(i) x##i = LAST(x##i, key);

/* The rounds of one batch, and between them, register by register, what is left to do for the batch
 * before it: a core cannot look far enough ahead to mix the two by itself, and AES alone leaves
 * half of it idle. From the last register to the first: see `grow`. */
#define ROUND_WITH(r, work)                            \
    {                                                  \
        const REG key = SPREAD(k->round_key[r]);       \
        EIGHT(ONE_ROUND)                               \
        work                                           \
    }
#define ENCRYPT_WITH(work)                                                            \
    ROUND_WITH(1, work(7)) ROUND_WITH(2, work(6)) ROUND_WITH(3, work(5))              \
    ROUND_WITH(4, work(4)) ROUND_WITH(5, work(3)) ROUND_WITH(6, work(2))              \
    ROUND_WITH(7, work(1)) ROUND_WITH(8, work(0)) ROUND_WITH(9, )                     \
    {                                                                                 \
        const REG key = SPREAD(k->round_key[ROUNDS]);                                 \
        EIGHT(ONE_LAST)                                                               \
    }
#define EIGHT_BACK(X) X(7) X(6) X(5) X(4) X(3) X(2) X(1) X(0)
#define HOLD(i) held[i] = x##i;
#define SWAP(x) OP(shuffle_epi32)(x, (_MM_PERM_ENUM)0x4e)
#define UPPER(x) OP(shuffle_epi32)(x, (_MM_PERM_ENUM)0xee)

#else

#undef TARGET
#undef REG
#undef LOAD
#undef STORE
#undef SPREAD
#undef OP
#undef XOR
#undef AND
#undef ROUND
#undef LAST
#undef UP
#undef CLMUL
#undef XOR_AND
#undef XOR_TWO
#undef LOWEST_BITS
#undef CARRIES
#undef PICK
#undef XOR_PICK
#undef GATHER
#undef GATHER_TWO
#undef SWITCHES
#undef SWITCHES_OF
#undef ADD_WHERE
#undef NAME
#undef REG_BYTES
#undef LANES
#undef BATCH
#undef ENCRYPT
#undef ONE_ROUND
#undef ONE_LAST
#undef ROUND_WITH
#undef ENCRYPT_WITH
#undef EIGHT_BACK
#undef HOLD
#undef SWAP
#undef UPPER

#endif
