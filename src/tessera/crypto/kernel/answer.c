/* Retrieval: for every client and tree the XOR of the rows that it selects, and sums of products.
 *
 * points.py says what is promised and checks every argument before a pointer comes here;
 * points_reference.py is the twin in NumPy. Nothing branches on a key, a node or a selector; which
 * subset of four rows is added up is an address, and all subsets of a tile are in the caches.
 *
 * "Four Russians": the XORs of all 16 subsets of every four rows are made once per tile, and each
 * client picks one of them. For few clients that does not pay, and each row is masked.
 */
#ifndef TESSERA_WIDTH

#include "trees.h"

#ifdef TESSERA_NATIVE

#include <stdlib.h>

#define ROWS 4
#define SUBSETS (1 << ROWS)
#define FEW 8                   /* clients for which no subsets are made */
#define SOON 8                  /* fours of rows that are asked for ahead of their use */
#define AHEAD (ROWS * SOON)
#define SUBSET_BYTES (256 << 10) /* that the subsets of a tile may take, about */

typedef struct {
    size_t row_bytes, pitch;  /* of a row: in the table, and with its padding to a register */
    const int64_t *starts;    /* of each tree: its first member */
    const uint32_t *members;  /* of every position of every tree: a row of the table */
    const uint8_t *table, *factors;
    size_t factor_bytes;
    uint8_t *rows, *products; /* what is asked for */
    uint8_t *subsets;         /* of every four rows of a tile: 16 rows */
    uint8_t *evens, *odds;    /* factors of the first and of the second row of every leaf */
    uint8_t *picks;           /* of every four rows: which subset */
    uint8_t *sum;             /* one row */
    uint8_t *zeros;           /* one row */
} answering;

/* Leaves in blocks of four rows, of which the last one may have fewer. */
INLINE size_t groups_of(const job *j, const piece *p) {
    return (p->count * (size_t)j->shape.rows + ROWS - 1) / ROWS;
}

/* Rows of a piece that exist: its last leaf may have fewer than others. */
INLINE size_t rows_of(const job *j, const answering *a, const piece *p) {
    const size_t size = (size_t)(a->starts[p->tree + 1] - a->starts[p->tree]);
    const size_t first = p->first * (size_t)j->shape.rows, all = p->count * (size_t)j->shape.rows;
    return size - first < all ? size - first : all;
}

/* The members of a piece. */
INLINE const uint32_t *members_of(const job *j, const answering *a, const piece *p) {
    return a->members + a->starts[p->tree] + p->first * (size_t)j->shape.rows;
}

#define TESSERA_WIDTH 128
#include "answer.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 256
#include "answer.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 512
#include "answer.c"
#undef TESSERA_WIDTH

/* Which rows of every four are selected: as bits of a number each. */
static AES_TARGET void pick_rows(const job *j, const piece *p, uint8_t *picks) {
    const uint8_t *values = j->sums + 16 * p->local;
    const size_t groups = groups_of(j, p);
    if (j->shape.rows == 2 && p->stride == 1 && j->path == VAES512) {
        pick_pairs_512(values, groups, picks);
        return;
    }
    if (j->shape.rows == 2) {
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *at = values + 16 * 2 * g * p->stride;
            const __m128i low = _mm_slli_epi64(load(at), 63);
            const __m128i high = _mm_slli_epi64(load(at + 16 * p->stride), 63);
            picks[g] = (uint8_t)(_mm_movemask_pd(_mm_castsi128_pd(low)) |
                                 _mm_movemask_pd(_mm_castsi128_pd(high)) << 2);
        }
        return;
    }
    for (size_t n = 0; n < p->count; n++)
        for (size_t b = 0; b < 16; b++) {
            const uint8_t bits = values[16 * n * p->stride + b];
            picks[32 * n + 2 * b] = bits & 15;
            picks[32 * n + 2 * b + 1] = bits >> 4;
        }
}

typedef void xor_subsets(const uint8_t *, size_t, const uint8_t *, size_t, uint8_t *);
typedef void add_subsets(const uint8_t *const *, size_t, size_t, uint8_t *);
typedef void multiply_words(const uint8_t *, size_t, size_t, const uint8_t *, const uint8_t *,
                            uint8_t *);
static xor_subsets *const xor_picked[] = {xor_picked_128, xor_picked_256, xor_picked_512};
static add_subsets *const subsets[] = {subsets_128, subsets_256, subsets_512};
static multiply_words *const multiply[] = {multiply_128, multiply_256, multiply_512};

/* The 16 subsets of every four rows, whose places are asked for ahead of their use. */
static void make_subsets(job *j, const answering *a, const piece *p, uint8_t *to) {
    const size_t groups = groups_of(j, p), rows = rows_of(j, a, p);
    const uint32_t *members = members_of(j, a, p);
    for (size_t g = 0; g < groups; g++, to += SUBSETS * a->pitch) {
        const uint8_t *four[ROWS];
        for (size_t r = 0; r < ROWS; r++) {
            const size_t row = ROWS * g + r, later = row + AHEAD;
            four[r] = row < rows ? a->table + a->row_bytes * members[row] : a->zeros;
            for (size_t at = 0; later < rows && at < a->row_bytes; at += 64)
                __builtin_prefetch(a->table + a->row_bytes * members[later] + at);
        }
        subsets[j->path](four, a->row_bytes, a->pitch, to);
    }
}

static void begin_tile(job *j, const tile *t) {
    const answering *a = j->own;
    uint8_t *to = a->subsets, *evens = a->evens, *odds = a->odds;
    for (size_t i = 0; i < t->pieces; i++) {
        const piece *p = &t->piece[i];
        if (j->clients >= FEW) make_subsets(j, a, p, to);
        to += SUBSETS * a->pitch * groups_of(j, p);
        if (!a->products) continue;
        const size_t rows = rows_of(j, a, p), leaves = (p->count + 3) / 4 * 4;
        memset(evens, 0, 16 * leaves);
        memset(odds, 0, 16 * leaves);
        const uint32_t *members = members_of(j, a, p);
        for (size_t r = 0; r < rows; r++) {
            const size_t later = r + AHEAD < rows ? r + AHEAD : r;
            __builtin_prefetch(a->factors + a->factor_bytes * members[later]);
            memcpy((r % 2 ? odds : evens) + 16 * (r / 2), a->factors + a->factor_bytes * members[r],
                   16);
        }
        evens += 16 * leaves;
        odds += 16 * leaves;
    }
}

static void use_tile(job *j, const tile *t, size_t client, const uint8_t *nodes,
                     const uint8_t *finals, size_t final_plane) {
    const answering *a = j->own;
    const uint8_t *subsets = a->subsets, *evens = a->evens, *odds = a->odds;
    (void)final_plane; /* there is one block */
    set_values(j, t, client, nodes, finals);
    for (size_t i = 0; i < t->pieces; i++) {
        const piece *p = &t->piece[i];
        const size_t groups = groups_of(j, p);
        const size_t at = p->tree * j->clients + client; /* clients follow each other */
        uint8_t *out = a->rows + a->row_bytes * at;
        pick_rows(j, p, a->picks);
        if (j->clients >= FEW) {
            xor_picked[j->path](a->picks, groups, subsets, a->pitch, a->sum);
            for (size_t b = 0; b < a->row_bytes; b += 8) {
                uint64_t sum, more;
                memcpy(&sum, out + b, 8);
                memcpy(&more, a->sum + b, 8);
                sum ^= more;
                memcpy(out + b, &sum, 8);
            }
        } else
            (j->path == AESNI ? xor_masked_128 : xor_masked_256)(
                a->picks, a->table, members_of(j, a, p), rows_of(j, a, p), a->row_bytes, out);
        subsets += SUBSETS * a->pitch * groups;
        if (!a->products) continue;
        multiply[j->path](j->sums + 16 * p->local, p->stride, p->count, evens, odds,
                          a->products + 32 * at);
        evens += (p->count + 3) / 4 * 64;
        odds += (p->count + 3) / 4 * 64;
    }
}

static void end_tile(job *j, const tile *t) {
    (void)j;
    (void)t;
}

EXPORT int tessera_dpf_answer(int path, size_t clients, const uint8_t *ciphers,
                              const uint8_t *const *roots, const uint8_t *const *keys,
                              size_t key_bytes, const forest *f, const leaf_shape *shape,
                              const int64_t *starts, const uint32_t *members,
                              const uint8_t *table, size_t row_bytes, const uint8_t *factors,
                              size_t factor_bytes, uint8_t *rows, uint8_t *products) {
    static const visitor select = {begin_tile, use_tile, end_tile};
    answering a = {.row_bytes = row_bytes, .pitch = (row_bytes + 63) / 64 * 64, .starts = starts,
                   .members = members, .table = table, .factors = factors, .factor_bytes = factor_bytes, .rows = rows,
                   .products = products};
    job j = {.path = path, .clients = clients, .f = f, .shape = *shape, .roots = roots,
             .keys = keys, .key_bytes = key_bytes, .visit = &select, .own = &a, .most = 8};
    const size_t each = SUBSETS / ROWS * a.pitch * (size_t)shape->rows; /* subsets of a leaf */
    while (j.most < 256 && 2 * j.most * each <= SUBSET_BYTES) j.most *= 2;
    j.beyond = 3 * j.most;
    const size_t groups = j.most * ((size_t)shape->rows / ROWS + 1);
    const size_t factor_room = 16 * (4 * j.most);
    const size_t made = clients >= FEW ? SUBSETS * a.pitch * groups : 0;
    const size_t size = made + 2 * factor_room + 2 * a.pitch + groups;
    uint8_t *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!memory) return 1;
    memset(memory, 0, size);
    a.subsets = memory;
    a.evens = memory + made;
    a.odds = a.evens + factor_room;
    a.sum = a.odds + factor_room;
    a.zeros = a.sum + a.pitch;
    a.picks = a.zeros + a.pitch;
    const int failed = begin_job(&j, ciphers, 0, (size_t)f->count);
    if (!failed) visit_trees(&j, 0, (size_t)f->count);
    end_job(&j);
    wipe(a.sum, 2 * a.pitch + groups);
    free(memory);
    return failed;
}

#endif /* TESSERA_NATIVE */

#else /* TESSERA_WIDTH: one path */

#include "width.h"

/* Some registers of the subsets that were picked, of every four rows one. */
INLINE TARGET void NAME(xor_columns)(const uint8_t *picks, size_t groups, const uint8_t *subsets,
                                     size_t pitch, uint8_t *to, int columns) {
    REG sum[4];
    _Pragma("GCC unroll 4") for (int c = 0; c < columns; c++)
        sum[c] = SPREAD(_mm_setzero_si128());
    for (size_t g = 0; g < groups; g++, subsets += SUBSETS * pitch) {
        const uint8_t *row = subsets + pitch * picks[g];
        _Pragma("GCC unroll 4") for (int c = 0; c < columns; c++)
            sum[c] = XOR(sum[c], LOAD(row + c * REG_BYTES));
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < columns; c++) STORE(to + c * REG_BYTES, sum[c]);
}

static NOINLINE TARGET void NAME(xor_picked)(const uint8_t *picks, size_t groups,
                                             const uint8_t *subsets, size_t pitch, uint8_t *to) {
    size_t at = 0;
#define COLUMNS(n)                                                          \
    for (; at + (n) * REG_BYTES <= pitch; at += (n) * REG_BYTES)            \
        NAME(xor_columns)(picks, groups, subsets + at, pitch, to + at, n);
    COLUMNS(4)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}

/* products ^= word * factor over all rows, as polynomials over GF(2): leaves of two words, of which
 * the first has its factors in `evens` and the second in `odds`, both ending with zeros. */
static NOINLINE TARGET void NAME(multiply)(const uint8_t *words, size_t stride, size_t leaves,
                                           const uint8_t *evens, const uint8_t *odds,
                                           uint8_t *products) {
    REG first = SPREAD(_mm_setzero_si128()), second = first;
    uint8_t lanes[2][REG_BYTES] __attribute__((aligned(64)));
    for (size_t n = 0; n < leaves; n += LANES) {
        const uint8_t *at = words + 16 * n * stride;
        const REG word = stride == 1 ? LOAD(at) : GATHER(at, 16 * stride);
        const REG even = LOAD(evens + 16 * n), odd = LOAD(odds + 16 * n);
        first = XOR_TWO(first, CLMUL(word, even, 0x00), CLMUL(word, odd, 0x01));
        second = XOR_TWO(second, CLMUL(word, even, 0x10), CLMUL(word, odd, 0x11));
    }
    STORE(lanes[0], first);
    STORE(lanes[1], second);
    for (size_t half = 0; half < 2; half++) {
        __m128i sum = load(products + 16 * half);
        for (size_t l = 0; l < LANES; l++) sum = _mm_xor_si128(sum, load(lanes[half] + 16 * l));
        store(products + 16 * half, sum);
    }
}

#if TESSERA_WIDTH == 512
/* The lowest bits of pairs of words: those of four words are a number. */
static NOINLINE TARGET void NAME(pick_pairs)(const uint8_t *words, size_t groups, uint8_t *picks) {
    for (size_t g = 0; g < groups; g += 2) {
        const unsigned both = LOWEST_BITS(LOAD(words + 32 * g));
        picks[g] = both & 15;
        picks[g + 1] = (uint8_t)(both >> 4);
    }
}

/* Rows are whole multiples of 32 bytes, their subsets have room for a register. */
static NOINLINE TARGET void NAME(subsets)(const uint8_t *const *four, size_t row_bytes, size_t pitch,
                                          uint8_t *to) {
    size_t at = 0;
    for (; at + REG_BYTES <= row_bytes; at += REG_BYTES) {
        REG subset[SUBSETS];
        subset[0] = SPREAD(_mm_setzero_si128());
        subset[1] = LOAD(four[0] + at);
        _Pragma("GCC unroll 3") for (size_t r = 1, n = 2; r < ROWS; r++, n *= 2) {
            const REG one = LOAD(four[r] + at);
            _Pragma("GCC unroll 8") for (size_t s = 0; s < n; s++)
                subset[n + s] = XOR(subset[s], one);
        }
        _Pragma("GCC unroll 16") for (size_t s = 0; s < SUBSETS; s++)
            STORE(to + pitch * s + at, subset[s]);
    }
    if (at < row_bytes) {
        const uint8_t *rest[ROWS] = {four[0] + at, four[1] + at, four[2] + at, four[3] + at};
        subsets_256(rest, row_bytes - at, pitch, to + at);
    }
}
#else
/* Rows are whole multiples of 32 bytes. */
static NOINLINE TARGET void NAME(subsets)(const uint8_t *const *four, size_t row_bytes, size_t pitch,
                                          uint8_t *to) {
    for (size_t at = 0; at < row_bytes; at += REG_BYTES) {
        REG subset[SUBSETS], one;
        subset[0] = SPREAD(_mm_setzero_si128());
        subset[1] = LOAD(four[0] + at);
#define WITH(row, n)                                       \
    one = LOAD(four[row] + at);                            \
    _Pragma("GCC unroll 8") for (size_t s = 0; s < n; s++) \
        subset[n + s] = XOR(subset[s], one);
        WITH(1, 2)
        WITH(2, 4)
        WITH(3, 8)
#undef WITH
        _Pragma("GCC unroll 16") for (size_t s = 0; s < SUBSETS; s++)
            STORE(to + pitch * s + at, subset[s]);
    }
}

/* to ^= the members that were picked, each masked; rows are whole multiples of 32 bytes. */
static NOINLINE TARGET void NAME(xor_masked)(const uint8_t *picks, const uint8_t *table,
                                             const uint32_t *members, size_t count,
                                             size_t row_bytes, uint8_t *to) {
    size_t at = 0;
#define COLUMNS(n)                                                                               \
    for (; at + (n) * REG_BYTES <= row_bytes; at += (n) * REG_BYTES) {                           \
        REG sum[n];                                                                              \
        for (int c = 0; c < (n); c++) sum[c] = LOAD(to + at + c * REG_BYTES);                    \
        for (size_t i = 0; i < count; i++) {                                                     \
            const REG mask = OP(set1_epi64x)(-(long long)(picks[i / ROWS] >> i % ROWS & 1));     \
            const uint8_t *row = table + row_bytes * members[i] + at;                            \
            const size_t later = i + AHEAD < count ? i + AHEAD : i;                              \
            const uint8_t *soon = table + row_bytes * members[later] + at;                       \
            for (int c = 0; c < (n) * REG_BYTES; c += 64) __builtin_prefetch(soon + c);          \
            __builtin_prefetch(soon + (n) * REG_BYTES - 1);                                      \
            for (int c = 0; c < (n); c++)                                                        \
                sum[c] = XOR_AND(sum[c], LOAD(row + c * REG_BYTES), mask);                       \
        }                                                                                        \
        for (int c = 0; c < (n); c++) STORE(to + at + c * REG_BYTES, sum[c]);                    \
    }
    COLUMNS(4)
    COLUMNS(3)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}
#endif

#include "width.h"

#endif
