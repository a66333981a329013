/* What every part of the kernel shares: the paths, round keys, and how they are wiped.
 *
 * TESSERA_NATIVE is set where there are AES instructions that we know how to use; elsewhere the
 * library has functions that say "no path", and nothing else. */
#ifndef TESSERA_AES_H
#define TESSERA_AES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum path { AESNI = 0, VAES256 = 1, VAES512 = 2 };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TESSERA_PORTABLE)
#define TESSERA_NATIVE 1

#include <immintrin.h>

#define NOINLINE __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))
#define AES_TARGET __attribute__((target("aes,sse2")))

#define ROUNDS 10

INLINE AES_TARGET __m128i next_round_key(__m128i key, __m128i assist) {
    assist = _mm_shuffle_epi32(assist, 0xff);
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, assist);
}

/* FIPS 197, 5.2. */
INLINE AES_TARGET void expand_key(__m128i k[ROUNDS + 1], const uint8_t *key) {
    k[0] = _mm_loadu_si128((const __m128i *)key);
#define ROUND(i, rcon) k[i] = next_round_key(k[i - 1], _mm_aeskeygenassist_si128(k[i - 1], rcon))
    ROUND(1, 0x01);
    ROUND(2, 0x02);
    ROUND(3, 0x04);
    ROUND(4, 0x08);
    ROUND(5, 0x10);
    ROUND(6, 0x20);
    ROUND(7, 0x40);
    ROUND(8, 0x80);
    ROUND(9, 0x1b);
    ROUND(10, 0x36);
#undef ROUND
}

/* Clear round keys when done; the barrier keeps the compiler from dropping it. */
static inline void wipe(void *memory, size_t size) {
    memset(memory, 0, size);
    __asm__ __volatile__("" : : "r"(memory) : "memory");
}

#define EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#endif /* TESSERA_NATIVE */
#endif
