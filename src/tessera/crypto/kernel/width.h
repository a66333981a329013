/* The registers of one path, for code that is written once and compiled for each TESSERA_WIDTH.
 *
 *     128   aesni     AES-NI
 *     256   vaes256   AVX2 + VAES
 *     512   vaes512   AVX-512 F/BW + VAES
 *
 * Included before such code; the second inclusion, after it, takes everything back. */
#ifndef TARGET

#if TESSERA_WIDTH == 128
#define TARGET __attribute__((target("aes,sse2")))
#define REG __m128i
#define LOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE(p, x) _mm_storeu_si128((__m128i *)(p), x)
#define SPREAD(x) (x)
#define OP(name) _mm_##name
#define XOR _mm_xor_si128
#define AND _mm_and_si128
#define AND_NOT(a, b) _mm_andnot_si128(b, a)
#define OR _mm_or_si128
#define ROUND _mm_aesenc_si128
#define LAST _mm_aesenclast_si128
#elif TESSERA_WIDTH == 256
#define TARGET __attribute__((target("aes,avx2,vaes")))
#define REG __m256i
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, x) _mm256_storeu_si256((__m256i *)(p), x)
#define SPREAD(x) _mm256_broadcastsi128_si256(x)
#define OP(name) _mm256_##name
#define XOR _mm256_xor_si256
#define AND _mm256_and_si256
#define AND_NOT(a, b) _mm256_andnot_si256(b, a)
#define OR _mm256_or_si256
#define ROUND _mm256_aesenc_epi128
#define LAST _mm256_aesenclast_epi128
#else
#define TARGET __attribute__((target("aes,avx2,avx512f,avx512bw,vaes")))
#define REG __m512i
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, x) _mm512_storeu_si512(p, x)
#define SPREAD(x) _mm512_broadcast_i32x4(x)
#define OP(name) _mm512_##name
#define XOR _mm512_xor_si512
#define AND _mm512_and_si512
#define AND_NOT(a, b) _mm512_andnot_si512(b, a)
#define OR _mm512_or_si512
#define ROUND _mm512_aesenc_epi128
#define LAST _mm512_aesenclast_epi128
#endif

#define NAME(name) JOIN(name, TESSERA_WIDTH)
#define REG_BYTES (TESSERA_WIDTH / 8)
#define LANES (REG_BYTES / 16)

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

#else

#undef TARGET
#undef REG
#undef LOAD
#undef STORE
#undef SPREAD
#undef OP
#undef XOR
#undef AND
#undef AND_NOT
#undef OR
#undef ROUND
#undef LAST
#undef NAME
#undef REG_BYTES
#undef LANES
#undef ENCRYPT
#undef ONE_ROUND
#undef ONE_LAST

#endif
