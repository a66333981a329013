/* The check that a client's point functions are such: sums of tags over the states of all leaves.
 *
 * points.py says what is promised and checks every argument before a pointer comes here;
 * points_reference.py is the twin in NumPy. Nothing branches on a key or on a node.
 *
 * Products are polynomials over GF(2), added up unreduced as three registers of 128 bits, at x^0,
 * x^64 and x^128, and reduced once per client.
 */
#ifndef TESSERA_WIDTH

#include "trees.h"

#ifdef TESSERA_NATIVE

#include <stdlib.h>

#define PRODUCTS __attribute__((target("aes,sse4.1,pclmul")))
#define PARTS 3 /* of an unreduced product */

typedef struct {
    const uint64_t *coefficients;          /* of every leaf */
    const uint8_t *const *corrections;     /* of each client: 32 bytes for every tree */
    uint8_t *factors, *scaled, *live;      /* of the leaves of a tile: r, r c, and that where t is set */
    uint8_t *sums;                         /* of each client: two unreduced products */
} verifying;

/* sum += a b. */
INLINE PRODUCTS void add_product(uint8_t *sum, __m128i a, __m128i b) {
    const __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x10),
                                         _mm_clmulepi64_si128(a, b, 0x01));
    store(sum, _mm_xor_si128(load(sum), _mm_clmulepi64_si128(a, b, 0x00)));
    store(sum + 16, _mm_xor_si128(load(sum + 16), middle));
    store(sum + 32, _mm_xor_si128(load(sum + 32), _mm_clmulepi64_si128(a, b, 0x11)));
}

/* Modulo x^128 + x^7 + x^2 + x + 1. */
static void reduce(const uint8_t *sum, uint8_t *to) {
    uint64_t p[2 * PARTS], w[4];
    memcpy(p, sum, sizeof p);
    w[0] = p[0], w[1] = p[1] ^ p[2], w[2] = p[3] ^ p[4], w[3] = p[5];
    for (int i = 3; i >= 2; i--) {
        w[i - 1] ^= w[i] >> 63 ^ w[i] >> 62 ^ w[i] >> 57;
        w[i - 2] ^= w[i] ^ w[i] << 1 ^ w[i] << 2 ^ w[i] << 7;
    }
    memcpy(to, w, 16);
}

static PRODUCTS void multiply(const uint8_t *a, const uint8_t *b, uint8_t *to) {
    uint8_t sum[16 * PARTS] = {0};
    add_product(sum, load(a), load(b));
    reduce(sum, to);
}

/* to = word * factor as polynomials, for each half of a factor: 16 bytes each. */
EXPORT PRODUCTS int tessera_products(size_t count, const uint64_t *words, const uint8_t *factors,
                                     uint8_t *to) {
    for (size_t i = 0; i < count; i++) {
        const __m128i word = _mm_set_epi64x(0, (long long)words[i]), both = load(factors + 16 * i);
        store(to + 32 * i, _mm_clmulepi64_si128(word, both, 0x00));
        store(to + 32 * i + 16, _mm_clmulepi64_si128(word, both, 0x10));
    }
    return 0;
}

/* to = x / c, block by block: 1 / c = c^(2^128 - 2) (Itoh, Tsujii 1988). */
EXPORT PRODUCTS int tessera_divide(size_t count, const uint64_t *divisors, size_t blocks,
                                   const uint8_t *from, uint8_t *to) {
    static const unsigned steps[] = {1, 2, 4, 8, 16, 32, 64};
    for (size_t i = 0; i < count; i++) {
        /* chain: c^(2^n - 1) for n = 1, 2, 4, .. 64; power: the same for 64 + 32 + .. + 1 = 127 */
        uint8_t chain[16] = {0}, power[16], moved[16];
        memcpy(chain, &divisors[i], 8);
        memcpy(power, chain, 16);
        for (size_t s = 1; s < sizeof steps / sizeof *steps; s++) {
            memcpy(moved, chain, 16);
            for (unsigned n = 0; n < steps[s - 1]; n++) multiply(moved, moved, moved);
            multiply(chain, moved, chain);
            memcpy(moved, power, 16);
            for (unsigned n = 0; n < steps[s]; n++) multiply(moved, moved, moved);
            multiply(chain, moved, power);
        }
        multiply(power, power, power);
        for (size_t b = 0; b < blocks; b++)
            multiply(from + 16 * (blocks * i + b), power, to + 16 * (blocks * i + b));
    }
    return 0;
}

#define TESSERA_WIDTH 128
#include "verify.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 256
#include "verify.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 512
#include "verify.c"
#undef TESSERA_WIDTH

typedef void add_leaf_tags(const cipher *, const uint8_t *, size_t, const uint8_t *,
                           const uint8_t *, uint8_t *, uint8_t *, int);
static add_leaf_tags *const add_tags[] = {add_tags_128, add_tags_256, add_tags_512};

static PRODUCTS void begin_check(job *j, const tile *t) {
    const verifying *v = j->own;
    if (j->leaves) load_sums(j, t);
    memset(v->factors, 0, 16 * (t->leaves + SLACK));
    memset(v->scaled, 0, 16 * (t->leaves + SLACK));
    for (size_t i = 0; i < t->pieces; i++) {
        const piece *p = &t->piece[i];
        const uint64_t *r = v->coefficients + j->f->first_leaf[p->tree] + p->first;
        for (size_t n = 0; n < p->count; n++) {
            const size_t at = 16 * (p->local + n * p->stride);
            const __m128i one = _mm_set_epi64x(0, (long long)r[n]);
            const __m128i position = _mm_set_epi64x(0, (long long)(p->first + n + 1));
            store(v->factors + at, one);
            store(v->scaled + at, _mm_clmulepi64_si128(one, position, 0x00));
        }
    }
}

static PRODUCTS void use_check(job *j, const tile *t, size_t client, const uint8_t *nodes,
                               const uint8_t *finals, size_t final_plane) {
    const verifying *v = j->own;
    uint8_t *sums = v->sums + 32 * PARTS * client;
    if (client + 1 < j->clients) /* those of all clients are too many for the nearer caches */
        for (size_t i = 0; i < t->pieces; i++)
            __builtin_prefetch(v->corrections[client + 1] + 32 * t->piece[i].tree);
    if (j->leaves) add_values(j, t, client, nodes, finals, final_plane);
    add_tags[j->path](&j->ciphers[client], nodes, t->leaves, v->factors, v->scaled, v->live, sums,
                      t->trees == 1);
    for (size_t i = 0; i < (t->trees == 1 ? 1 : t->pieces); i++) { /* r c over a tree, times its cs */
        const piece *p = &t->piece[i];
        const uint8_t *cs = v->corrections[client] + 32 * p->tree;
        __m128i live = t->trees == 1 ? load(v->live) : _mm_setzero_si128();
        for (size_t n = 0; t->trees > 1 && n < p->count; n++)
            live = _mm_xor_si128(live, load(v->live + 16 * (p->local + n * p->stride)));
        add_product(sums, live, load(cs));
        add_product(sums + 16 * PARTS, live, load(cs + 16));
    }
}

static void end_check(job *j, const tile *t) {
    if (j->leaves) store_sums(j, t);
}

EXPORT int tessera_dpf_verify(int path, size_t clients, const uint8_t *ciphers,
                              const uint8_t *const *roots, const uint8_t *const *keys,
                              size_t key_bytes, const forest *f, const leaf_shape *shape,
                              uint32_t epoch, size_t begin, size_t end,
                              const uint8_t *const *corrections, const uint64_t *coefficients,
                              uint8_t *leaves, const uint32_t *owners, size_t row_bytes,
                              int minus, uint8_t *out) {
    static const visitor check = {begin_check, use_check, end_check};
    verifying v = {.coefficients = coefficients, .corrections = corrections};
    job j = {.path = path, .clients = clients, .f = f, .shape = *shape, .epoch = epoch,
             .roots = roots, .keys = keys, .key_bytes = key_bytes, .visit = &check, .own = &v,
             .leaves = leaves, .owners = owners, .row_bytes = row_bytes, .minus = minus,
             .most = tile_leaves(shape)};
    const size_t plane = 16 * (j.most + SLACK), size = 3 * plane + 32 * PARTS * clients;
    uint8_t *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!memory) return 1;
    memset(memory, 0, size);
    v.factors = memory, v.scaled = memory + plane, v.live = memory + 2 * plane;
    v.sums = memory + 3 * plane;
    const int failed = begin_job(&j, ciphers, begin, end);
    if (!failed) {
        visit_trees(&j, begin, end);
        if (leaves) reduce_sums(&j, begin, end);
        for (size_t i = 0; i < 2 * clients; i++) {
            uint8_t sum[16];
            reduce(v.sums + 16 * PARTS * i, sum);
            for (size_t b = 0; b < 16; b++) out[16 * i + b] ^= sum[b];
        }
    }
    end_job(&j);
    free(memory);
    return failed;
}

#endif /* TESSERA_NATIVE */

#else /* TESSERA_WIDTH: one path */

#include "width.h"

/* Four registers of nodes at a time, of which each makes two blocks of tags. sums += r G(y); and
 * live = r c where the upper control bit is set: of every leaf, or their sum if they are of one
 * tree. */
INLINE TARGET void NAME(add_tags_of)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                     const uint8_t *factors, const uint8_t *scaled, uint8_t *live,
                                     uint8_t *sums, int single) {
    const REG white0 = SPREAD(_mm_xor_si128(tweak_of(TAG, 0, 0), k->round_key[0]));
    const REG white1 = SPREAD(_mm_xor_si128(tweak_of(TAG, 1, 0), k->round_key[0]));
    const REG zero = SPREAD(_mm_setzero_si128());
    REG low[2] = {zero, zero}, high[2] = {zero, zero}, alive = zero, held[8], other[4];
    const size_t some = 4 * REG_BYTES;
    size_t next = 0, at = 0;
#define ONE_NODE(i) \
    REG x##i = XOR(LOAD(nodes + next + (i) / 2 * REG_BYTES), (i) % 2 ? white1 : white0);
#define ONE_TAG(i)                                                              \
    {                                                                           \
        const size_t place = at + (i) / 2 * REG_BYTES;                          \
        const REG y = LOAD(nodes + place), r = LOAD(factors + place);           \
        const REG g = XOR(held[i], y);                                          \
        if ((i) & 2) { /* added up two at a time */                             \
            other[(i) % 2] = CLMUL(r, g, 0x00);                                 \
            other[2 + (i) % 2] = CLMUL(r, g, 0x10);                             \
        } else {                                                                \
            low[(i) % 2] = XOR_TWO(low[(i) % 2], other[(i) % 2], CLMUL(r, g, 0x00)); \
            high[(i) % 2] =                                                     \
                XOR_TWO(high[(i) % 2], other[2 + (i) % 2], CLMUL(r, g, 0x10));  \
        }                                                                       \
        if ((i) % 2 == 0 && single)                                             \
            alive = XOR_PICK(alive, UPPER(y), LOAD(scaled + place));            \
        else if ((i) % 2 == 0)                                                  \
            STORE(live + place, PICK(UPPER(y), LOAD(scaled + place)));          \
    }
    {
        EIGHT(ONE_NODE)
        ENCRYPT(k->round_key)
        EIGHT(HOLD)
    }
    for (next = some; next < 16 * leaves; next += some) {
        EIGHT(ONE_NODE)
        ENCRYPT_WITH(ONE_TAG)
        EIGHT(HOLD)
        at = next;
    }
    EIGHT_BACK(ONE_TAG)
#undef ONE_NODE
#undef ONE_TAG
    uint8_t lanes[REG_BYTES] __attribute__((aligned(64)));
#define FOLD(x, to)                                                   \
    STORE(lanes, x);                                                  \
    for (size_t l = 0; l < LANES; l++)                                \
        store(to, _mm_xor_si128(load(to), load(lanes + 16 * l)));
    for (size_t block = 0; block < 2; block++) {
        FOLD(low[block], sums + 16 * PARTS * block)
        FOLD(high[block], sums + 16 * (PARTS * block + 1))
    }
    if (single) {
        store(live, _mm_setzero_si128());
        FOLD(alive, live)
    }
#undef FOLD
}

static NOINLINE TARGET void NAME(add_tags)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                           const uint8_t *factors, const uint8_t *scaled,
                                           uint8_t *live, uint8_t *sums, int single) {
    single ? NAME(add_tags_of)(k, nodes, leaves, factors, scaled, live, sums, 1)
           : NAME(add_tags_of)(k, nodes, leaves, factors, scaled, live, sums, 0);
}

#include "width.h"

#endif
