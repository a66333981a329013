/* Point functions: trees grown, evaluated at all leaves and summed over clients.
 *
 * points.py says what each function promises and checks every argument before a pointer comes
 * here; points_reference.py is the twin in NumPy. Nothing branches on a key or on a node.
 *
 * Evaluation goes over tiles in the outer loop and over the clients in the inner one. A tile is
 * some trees of a set, side by side: node i of tree t is block i T + t, so that a level of all of
 * them is grown at once, in place, and nothing has to be listed. Of trees with more leaves than a
 * tile has, the tops of all clients are grown first; a tile is then some nodes two levels above
 * the leaves and what grows from them. Sums of a tile are kept in planes: the first block of all
 * leaves, then the second block of all, and so on, so that a register holds blocks of one tweak.
 *
 * As in kernel.c, the code of a path is written once, at the end, and compiled for each width.
 */
#ifndef TESSERA_WIDTH

#include "trees.h"

#ifdef TESSERA_NATIVE

#include <stdlib.h>

#define GROWN 64              /* trees, or single points, that are worked on together */
#define TOPS_BYTES (64 << 20) /* that the tops of a large tree may take */
#define CROWD_LEVEL 64        /* nodes of a level that a crowd has grown, at most */
#define CROWD_BYTES (16 * SLACK * (1 + CROWD_LEVEL)) /* their steps and nodes */

#define HALVES_TARGET __attribute__((target("aes,sse4.1")))

/* x's halves where y's have their highest bit, the control bit, set; zero elsewhere. */
INLINE HALVES_TARGET __m128i pick(__m128i y, __m128i x) {
    return _mm_castpd_si128(
        _mm_blendv_pd(_mm_setzero_pd(), _mm_castsi128_pd(x), _mm_castsi128_pd(y)));
}

/* (low, high) -> (high, low ^ high). */
INLINE HALVES_TARGET __m128i sigma(__m128i x) {
    return _mm_xor_si128(_mm_shuffle_epi32(x, 0x4e), _mm_and_si128(x, _mm_set_epi64x(-1, 0)));
}

INLINE void ask(ahead *a) {
    if (!a->lines) return;
    a->lines--;
    _Pragma("GCC unroll 4") for (int i = 0; i < STREAMS; i++) {
        __builtin_prefetch(a->at[i]);
        a->at[i] += a->step[i];
    }
}

/* A pointer of which the compiler does not know that it is some other one plus an offset: it would
 * keep eight sums of the two. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

#define GROW_REGS 4 /* registers of nodes that are grown at a time */
#define ROW_DRAWN 6 /* blocks of a row that are drawn at a time, at most */
#define UNROLLED _Pragma("GCC unroll 7")

/* The sides to take from the root to a leaf: bit l says which child of the node at level l. */
static uint32_t path_to(size_t leaf, size_t leaves, size_t depth) {
    uint32_t path = 0;
    for (size_t l = depth; l-- > 0;) {
        size_t half = nodes_at(leaves, depth, l);
        uint32_t side = leaf >= half;
        leaf -= side * half;
        path |= side << l;
    }
    return path;
}

/* to = from the words of one block: beta + theirs - mine, or minus that where the half (for words
 * of 128 bits: the upper half) of `control` has its control bit set. */
#define COMBINE(type)                                                          \
    for (size_t i = 0; i < 16; i += sizeof(type)) {                            \
        type a, b, c;                                                          \
        const type negative = (type)(sizeof(type) == 16 ? bit[1] : bit[i / 8]); \
        memcpy(&a, beta + i, sizeof a);                                        \
        memcpy(&b, theirs + i, sizeof b);                                      \
        memcpy(&c, mine + i, sizeof c);                                        \
        a = (type)(a + b - c);                                                 \
        a = (type)((a ^ (type)(0 - negative)) + negative);                     \
        memcpy(to + i, &a, sizeof a);                                          \
    }

static void final_block(uint8_t *to, const uint8_t *beta, const uint8_t *mine,
                        const uint8_t *theirs, const uint8_t *control, int64_t kind) {
    const unsigned bit[2] = {control[7] >> 7, control[15] >> 7};
    switch (kind) {
    case KIND_XOR:
        for (size_t i = 0; i < 16; i++) to[i] = beta[i] ^ theirs[i] ^ mine[i];
        break;
    case KIND_32: COMBINE(uint32_t) break;
    case KIND_64: COMBINE(uint64_t) break;
    case KIND_128: COMBINE(wide) break;
    case KIND_61:
        for (size_t i = 0; i < 16; i += 8) {
            uint64_t a, b, c, plus, minus, keep = 0 - (uint64_t)bit[i / 8];
            memcpy(&a, beta + i, 8);
            memcpy(&b, theirs + i, 8);
            memcpy(&c, mine + i, 8);
            b &= PRIME;
            c &= PRIME;
            plus = reduce61(a + b + (PRIME - c));
            minus = reduce61(PRIME - plus);
            plus = (plus & ~keep) | (minus & keep);
            memcpy(to + i, &plus, 8);
        }
        break;
    }
}

#define TESSERA_WIDTH 128
#include "dpf.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 256
#include "dpf.c"
#undef TESSERA_WIDTH
#define TESSERA_WIDTH 512
#include "dpf.c"
#undef TESSERA_WIDTH

typedef void encrypt_blocks(const cipher *, uint8_t *, size_t);
typedef void grow_nodes(const cipher *, const uint8_t *, uint8_t *, size_t, const uint8_t *,
                        size_t, ahead *);
typedef void add_leaves(const cipher *, const uint8_t *, size_t, const uint8_t *, size_t, size_t,
                        size_t, uint32_t, uint8_t *, size_t, uint8_t *, int, int, ahead *);
typedef void grow_first(const uint8_t *, uint8_t *, size_t, const uint8_t *);
static encrypt_blocks *const encrypt[] = {encrypt_128, encrypt_256, encrypt_512};
static grow_nodes *const grow[] = {grow_128, grow_256, grow_512};
static add_leaves *const add[] = {add_128, add_256, add_512};
static grow_first *const grow_crowd[] = {grow_crowd_128, grow_crowd_256, grow_crowd_512};

/* H(s, tweak of the conversion) for some nodes. */
static AES_TARGET void convert_nodes(int path, const cipher *k, const uint8_t *nodes, size_t count,
                                     __m128i tweak, uint8_t *out) {
    for (size_t i = 0; i < count; i++)
        store(out + 16 * i, _mm_xor_si128(load(nodes + 16 * i), tweak));
    encrypt[path](k, out, count);
    for (size_t i = 0; i < count; i++)
        store(out + 16 * i, _mm_xor_si128(load(out + 16 * i), load(nodes + 16 * i)));
}

/* Words of up to 24 bits: the highest byte of each in three blocks, four words more. */
static AES_TARGET void spare_words(const uint8_t *three, uint8_t *to) {
    __m128i words = _mm_setzero_si128();
    for (size_t i = 3; i-- > 0;)
        words = _mm_or_si128(_mm_slli_epi32(words, 8), _mm_srli_epi32(load(three + 16 * i), 24));
    store(to, words);
}

/* -- last corrections: words of `bits` bits, joined. Those of full words are bytes. */

typedef struct {
    uint8_t *at;
    uint64_t held; /* what does not fill 8 bytes yet: `fill` bits */
    unsigned fill;
} packer;

static void pack(packer *p, uint64_t word, unsigned bits) {
    word &= UINT64_MAX >> (64 - bits);
    p->held |= word << p->fill;
    p->fill += bits;
    if (p->fill >= 64) {
        memcpy(p->at, &p->held, 8);
        p->at += 8;
        p->fill -= 64;
        p->held = p->fill ? word >> (bits - p->fill) : 0;
    }
}

static void pack_leaf(packer *p, const leaf_shape *s, const uint8_t *leaf) {
    size_t size = word_bytes_of(s), row = (size_t)s->words * size;
    size_t pitch = 16 * blocks_of(s) / (s->kind == KIND_XOR ? 1 : (size_t)s->rows);
    for (size_t r = 0; r < (s->kind == KIND_XOR ? 1 : (size_t)s->rows); r++, leaf += pitch) {
        if ((size_t)s->bits == 8 * size) {
            memcpy(p->at, leaf, row);
            p->at += row;
            continue;
        }
        for (size_t w = 0; w < (size_t)s->words; w++) {
            uint64_t half[2] = {0, 0};
            memcpy(half, leaf + size * w, size);
            pack(p, half[0], s->bits < 64 ? (unsigned)s->bits : 64);
            if (s->bits > 64) pack(p, half[1], (unsigned)s->bits - 64);
        }
    }
}

/* `bits` <= 64 bits from bit `at` of data that has `size` bytes. */
static uint64_t unpack(const uint8_t *data, size_t size, size_t at, unsigned bits) {
    uint64_t window[2] = {0, 0};
    const size_t first = at / 8, left = size - first;
    memcpy(window, data + first, left < 16 ? left : 16);
    const unsigned shift = at % 8;
    uint64_t word = window[0] >> shift;
    if (shift + bits > 64) word |= window[1] << (64 - shift);
    return word & UINT64_MAX >> (64 - bits);
}

/* The last correction of a tree, as blocks one after the other: those in place, or those made. */
static PACKED_TARGET const uint8_t *final_of(const job *j, size_t client, size_t tree,
                                             uint8_t *room) {
    const leaf_shape *s = &j->shape;
    const size_t steps = 16 * (size_t)j->f->first_step[j->f->count];
    const uint8_t *data = j->keys[client] + steps;
    const size_t left = j->key_bytes - steps, size = word_bytes_of(s), leaf = 16 * j->blocks;
    const size_t rows = s->kind == KIND_XOR ? 1 : (size_t)s->rows, words = (size_t)s->words;
    if ((size_t)s->bits == 8 * size) {
        if (rows * words * size == leaf) return data + leaf * tree;
        for (size_t r = 0; r < rows; r++)
            memcpy(room + leaf / rows * r, data + words * size * (rows * tree + r), words * size);
        return room;
    }
    size_t at = tree * rows * words * (size_t)s->bits, done = 0;
    if (s->kind == KIND_32 && rows == 1 && s->bits <= FOUR_BITS && j->unpacking.bits) {
        for (; done < words && at / 8 + FOUR_WINDOW <= left; done += 4, at += 4 * (size_t)s->bits)
            store(room + 4 * done, four_packed(&j->unpacking, data, at));
        if (done > words) memset(room + 4 * words, 0, 4 * (done - words)); /* of the next tree */
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t w = done; w < words; w++, at += (size_t)s->bits) {
            uint64_t half[2];
            half[0] = unpack(data, left, at, s->bits < 64 ? (unsigned)s->bits : 64);
            half[1] = s->bits > 64 ? unpack(data, left, at + 64, (unsigned)s->bits - 64) : 0;
            memcpy(room + leaf / rows * r + size * w, half, size);
        }
    return room;
}

/* -- keys made. Guo et al. (ia.cr/2022/1431), Figure 8: trees at .. at + count of one set. */

typedef struct {
    int path;
    const forest *f;
    leaf_shape shape;
    cipher ciphers[3]; /* of the report, and of the streams that the roots of both parties are */
    uint64_t nonce[2];
    uint32_t epoch;
    const int64_t *order, *points; /* of each tree: its bin; of each bin: its point */
    const uint8_t *values;         /* of each bin: its row; NULL for bits that are set */
    size_t value_bytes;
    uint8_t *steps;
    packer finals;
} making;

static AES_TARGET void roots_of(making *m, size_t at, size_t count, int party, uint8_t *roots) {
    for (size_t i = 0; i < count; i++)
        store(roots + 16 * i, _mm_set_epi64x((long long)__builtin_bswap64(at + i),
                                             (long long)m->nonce[party]));
    encrypt[m->path](&m->ciphers[1 + party], roots, count);
    for (size_t i = 0; i < 16 * count; i += 8)
        roots[i + 7] = (uint8_t)((roots[i + 7] & 0x7f) | party << 7);
}

/* Block `block` of the value of a tree's leaf at its point. */
static void value_block(const making *m, size_t tree, size_t block, uint8_t *to) {
    const int64_t bin = m->order[tree], point = m->points[bin];
    const size_t from = 16 * block;
    memset(to, 0, 16);
    if (point < 0) return;
    const size_t inside = (size_t)(point & (m->shape.rows - 1)), pitch = 16 / (size_t)m->shape.rows;
    if (m->shape.rows == 128) to[inside / 8] = (uint8_t)(1 << inside % 8);
    else if (from < m->value_bytes)
        memcpy(to + pitch * inside, m->values + m->value_bytes * (size_t)bin + from,
               m->value_bytes - from < 16 ? m->value_bytes - from : 16);
}

static HALVES_TARGET void make_some(making *m, size_t at, size_t count) {
    const size_t leaves = (size_t)m->f->leaves[at], depth = (size_t)m->f->depths[at];
    const size_t blocks = blocks_of(&m->shape);
    uint8_t y[32 * GROWN + 16 * SLACK] __attribute__((aligned(64))); /* party 0, then party 1 */
    uint8_t x[32 * GROWN + 16 * SLACK] __attribute__((aligned(64)));
    __m128i offset[GROWN];
    uint32_t path[GROWN];
    for (int party = 0; party < 2; party++) {
        roots_of(m, at, count, party, x);
        memcpy(y + 16 * count * (size_t)party, x, 16 * count);
    }
    for (size_t i = 0; i < count; i++) {
        const int64_t point = m->points[m->order[at + i]];
        const size_t leaf = point < 0 ? 0 : (size_t)(point / m->shape.rows);
        path[i] = path_to(leaf, leaves, depth);
        offset[i] = _mm_xor_si128(load(y + 16 * i), load(y + 16 * (count + i)));
    }
    for (size_t l = 0; l < depth; l++) {
        memcpy(x, y, 32 * count);
        encrypt[m->path](&m->ciphers[0], x, 2 * count);
        uint8_t *to = m->steps + 16 * step_at(m->f, at, l);
        for (size_t i = 0; i < count; i++) {
            const __m128i mine = load(y + 16 * i), theirs = load(y + 16 * (count + i));
            const __m128i h0 = sigma(_mm_xor_si128(load(x + 16 * i), mine));
            const __m128i h1 = sigma(_mm_xor_si128(load(x + 16 * (count + i)), theirs));
            const __m128i right = _mm_set1_epi64x(-(long long)(path[i] >> l & 1));
            /* the child which the point leaves becomes equal for both */
            const __m128i step =
                _mm_xor_si128(_mm_xor_si128(h0, h1), _mm_andnot_si128(right, offset[i]));
            const __m128i next = _mm_xor_si128(_mm_xor_si128(h0, pick(mine, step)),
                                               _mm_and_si128(right, mine));
            store(to + 16 * i, step);
            store(y + 16 * i, next);
            store(y + 16 * (count + i), _mm_xor_si128(next, offset[i]));
        }
    }
    if (blocks == 1) {
        convert_nodes(m->path, &m->ciphers[0], y, 2 * count, tweak_of(CONVERT, 0, m->epoch), x);
        for (size_t i = 0; i < count; i++) {
            uint8_t value[16], last[16];
            value_block(m, at + i, 0, value);
            final_block(last, value, x + 16 * i, x + 16 * (count + i), y + 16 * (count + i),
                        m->shape.kind);
            pack_leaf(&m->finals, &m->shape, last);
        }
    }
    for (size_t i = 0; blocks > 1 && i < count; i++) { /* tree by tree, a few blocks at a time */
        const size_t size = word_bytes_of(&m->shape);
        const int shorts = is_short(&m->shape);
        size_t words = (size_t)m->shape.words;
        for (size_t block = 0; block < blocks; block += GROWN) {
            const size_t some = blocks - block < GROWN ? blocks - block : GROWN;
            const size_t first = shorts ? block - block / 4 : block;
            const size_t drawn = shorts ? some - some / 4 : some;
            for (size_t b = 0; b < drawn; b++) {
                const __m128i tweak = tweak_of(CONVERT, (uint32_t)(first + b), m->epoch);
                store(x + 16 * b, _mm_xor_si128(load(y + 16 * i), tweak));
                store(x + 16 * (drawn + b), _mm_xor_si128(load(y + 16 * (count + i)), tweak));
            }
            encrypt[m->path](&m->ciphers[0], x, 2 * drawn);
            for (size_t b = 0; b < drawn; b++) {
                uint8_t *mine = x + 16 * b, *theirs = x + 16 * (drawn + b);
                store(mine, _mm_xor_si128(load(mine), load(y + 16 * i)));
                store(theirs, _mm_xor_si128(load(theirs), load(y + 16 * (count + i))));
            }
            for (size_t b = 0; b < some; b++) {
                uint8_t value[16], last[16], own[16], other[16];
                const uint8_t *mine = x + 16 * (shorts ? b - b / 4 : b), *theirs = mine + 16 * drawn;
                if (shorts && b % 4 == 3) {
                    spare_words(mine - 48, own);
                    spare_words(theirs - 48, other);
                    mine = own, theirs = other;
                }
                value_block(m, at + i, block + b, value);
                final_block(last, value, mine, theirs, y + 16 * (count + i), m->shape.kind);
                leaf_shape part = m->shape; /* the words of this block alone */
                part.rows = 1;
                part.words = (int64_t)(words < 16 / size ? words : 16 / size);
                words -= (size_t)part.words;
                pack_leaf(&m->finals, &part, last);
            }
        }
    }
    wipe(y, sizeof y);
    wipe(x, sizeof x);
    wipe(offset, sizeof offset);
    wipe(path, sizeof path);
}

EXPORT AES_TARGET int tessera_dpf_generate(int path, const uint8_t *key, const uint8_t *seeds,
                                           const forest *f, const leaf_shape *shape,
                                           uint32_t epoch, const int64_t *order,
                                           const int64_t *points, const uint8_t *values,
                                           size_t value_bytes, uint8_t *out) {
    making m = {.path = path, .f = f, .shape = *shape, .epoch = epoch, .order = order,
                .points = points, .values = values, .value_bytes = value_bytes, .steps = out};
    m.finals.at = out + 16 * (size_t)f->first_step[f->count];
    expand_key(m.ciphers[0].round_key, key);
    for (int party = 0; party < 2; party++) {
        expand_key(m.ciphers[1 + party].round_key, seeds + 24 * party);
        memcpy(&m.nonce[party], seeds + 24 * party + 16, 8);
    }
    for (size_t at = 0, count; at < (size_t)f->count; at += count) {
        const size_t end = (size_t)(f->set_first[at] + f->set_size[at]);
        count = end - at < GROWN ? end - at : GROWN;
        make_some(&m, at, count);
    }
    memcpy(m.finals.at, &m.finals.held, (m.finals.fill + 7) / 8);
    wipe(&m, sizeof m);
    return 0;
}

/* Root nodes of one server's trees. */
EXPORT AES_TARGET int tessera_dpf_roots(int path, const uint8_t *seed, int party, size_t count,
                                        uint8_t *roots) {
    making m = {.path = path};
    uint8_t some[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    expand_key(m.ciphers[1 + party].round_key, seed);
    memcpy(&m.nonce[party], seed + 16, 8);
    for (size_t at = 0; at < count; at += GROWN) {
        const size_t size = count - at < GROWN ? count - at : GROWN;
        roots_of(&m, at, size, party, some);
        memcpy(roots + 16 * at, some, 16 * size);
    }
    wipe(&m, sizeof m);
    wipe(some, sizeof some);
    return 0;
}

/* -- single points */

/* The nodes of some leaves, at most GROWN: s has room for a batch more. */
static HALVES_TARGET void walk(int path, const cipher *k, const uint8_t *roots, const uint8_t *keys,
                               const forest *f, size_t count, const int64_t *which,
                               const int64_t *points, uint8_t *s) {
    uint8_t x[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    uint32_t side[GROWN];
    size_t deepest = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t tree = (size_t)which[i], depth = (size_t)f->depths[tree];
        store(s + 16 * i, load(roots + 16 * tree));
        side[i] = path_to((size_t)points[i], (size_t)f->leaves[tree], depth);
        if (depth > deepest) deepest = depth;
    }
    for (size_t l = 0; l < deepest; l++) {
        memcpy(x, s, 16 * count);
        encrypt[path](k, x, count);
        for (size_t i = 0; i < count; i++) {
            const size_t tree = (size_t)which[i];
            if ((size_t)f->depths[tree] <= l) continue;
            const __m128i y = load(s + 16 * i);
            const __m128i step = load(keys + 16 * step_at(f, tree, l));
            const __m128i left =
                _mm_xor_si128(sigma(_mm_xor_si128(load(x + 16 * i), y)), pick(y, step));
            const __m128i right = _mm_set1_epi64x(-(long long)(side[i] >> l & 1));
            store(s + 16 * i, _mm_xor_si128(left, _mm_and_si128(right, y)));
        }
    }
    wipe(x, sizeof x);
}

EXPORT HALVES_TARGET int tessera_dpf_points(int path, const uint8_t *key, const uint8_t *roots,
                                            const uint8_t *keys, size_t key_bytes,
                                            const forest *f, const leaf_shape *shape,
                                            uint32_t epoch, size_t count, const int64_t *which,
                                            const int64_t *points, uint8_t *out) {
    const size_t blocks = blocks_of(shape);
    uint8_t s[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    uint8_t x[3][16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    static const uint8_t zeros[16];
    job j = {.f = f, .shape = *shape, .keys = &keys, .key_bytes = key_bytes, .blocks = blocks};
    cipher k;
    uint8_t *room = calloc(1, 16 * blocks);
    if (!room) return 1;
    memset(x, 0, sizeof x);
    expand_key(k.round_key, key);
    for (size_t at = 0; at < count; at += GROWN) {
        const size_t some = count - at < GROWN ? count - at : GROWN;
        walk(path, &k, roots, keys, f, some, which + at, points + at, s);
        for (size_t block = 0, drawn = 0; block < blocks; block++) {
            const int spare = is_short(shape) && block % 4 == 3;
            if (!spare) {
                const __m128i tweak = tweak_of(CONVERT, (uint32_t)drawn, epoch);
                convert_nodes(path, &k, s, some, tweak, x[drawn % 3]);
                drawn++;
            }
            for (size_t i = 0; i < some; i++) {
                uint8_t value[48], added[16], mixed[16];
                const uint8_t *last = final_of(&j, 0, (size_t)which[at + i], room) + 16 * block;
                const __m128i y = load(s + 16 * i);
                const __m128i control = shape->kind == KIND_128 ? _mm_shuffle_epi32(y, 0xee) : y;
                for (size_t b = 0; b < 3; b++) /* the last three */
                    memcpy(value + 16 * b, x[(drawn + b) % 3] + 16 * i, 16);
                if (spare) spare_words(value, value + 32);
                store(added, pick(control, load(last)));
                final_block(mixed, added, zeros, value + 32, zeros, shape->kind);
                memcpy(out + 16 * ((at + i) * blocks + block), mixed, 16);
            }
        }
    }
    wipe(s, sizeof s);
    wipe(x, sizeof x);
    wipe(&k, sizeof k);
    free(room);
    return 0;
}

/* G of some leaves: the two blocks of a tag, 32 bytes each. */
EXPORT AES_TARGET int tessera_dpf_tags(int path, const uint8_t *key, const uint8_t *roots,
                                       const uint8_t *keys, const forest *f, size_t count,
                                       const int64_t *which, const int64_t *points, uint8_t *out) {
    uint8_t s[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    uint8_t x[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    cipher k;
    expand_key(k.round_key, key);
    for (size_t at = 0; at < count; at += GROWN) {
        const size_t some = count - at < GROWN ? count - at : GROWN;
        walk(path, &k, roots, keys, f, some, which + at, points + at, s);
        for (size_t block = 0; block < 2; block++) {
            convert_nodes(path, &k, s, some, tweak_of(TAG, (uint32_t)block, 0), x);
            for (size_t i = 0; i < some; i++)
                memcpy(out + 32 * (at + i) + 16 * block, x + 16 * i, 16);
        }
    }
    wipe(s, sizeof s);
    wipe(x, sizeof x);
    wipe(&k, sizeof k);
    return 0;
}

/* -- all leaves */

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

AES_TARGET int begin_job(job *j, const uint8_t *ciphers, size_t begin, size_t end) {
    const forest *f = j->f;
    size_t tallest = 0;
    for (size_t i = begin; i < end; i++)
        if ((size_t)f->leaves[i] > j->most && (size_t)f->leaves[i] > tallest)
            tallest = (size_t)f->leaves[i];
    j->blocks = blocks_of(&j->shape);
    if (j->shape.bits <= FOUR_BITS) begin_unpacking(&j->unpacking, (unsigned)j->shape.bits);
    j->plane = 16 * (j->most + SLACK + j->beyond);
    /* of a large tree: the level above the leaves, and its last correction */
    j->top_bytes =
        tallest ? padded(16 * ((tallest + 1) / 2 + 2 + 2 * SLACK)) + padded(16 * j->blocks) : 0;
    const size_t batch = (size_t)8 << j->path, places = (j->clients + batch - 1) / batch * batch;
    j->together = tallest ? TOPS_BYTES / j->top_bytes / batch * batch + batch : j->clients;
    if (j->together > j->clients) j->together = j->clients;
    j->tops_size = j->together * j->top_bytes;
    const size_t sizes[] = {j->clients * sizeof(cipher),
                            16 * (2 * j->most + 2 * SLACK),
                            j->plane * j->blocks,
                            16 * (j->most + SLACK),
                            16 * (j->most + SLACK + 1) * j->blocks,
                            j->tops_size,
                            j->most * sizeof(piece),
                            tallest ? CROWD_BYTES + places * sizeof(cipher) : 0};
    j->memory_bytes = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) j->memory_bytes += padded(sizes[i]);
    uint8_t *at = j->memory = aligned_alloc(64, j->memory_bytes);
    if (!at) return 1;
    memset(at, 0, j->memory_bytes - padded(sizes[5]) - padded(sizes[6]) - padded(sizes[7]));
    j->ciphers = (cipher *)(void *)at;
    j->nodes = at += padded(sizes[0]);
    j->sums = at += padded(sizes[1]);
    j->steps = at += padded(sizes[2]);
    j->finals = at += padded(sizes[3]);
    j->tops = at += padded(sizes[4]);
    j->piece = (piece *)(void *)(at += padded(sizes[5]));
    j->crowd = at + padded(sizes[6]);
    memset(j->tops, 0, j->tops_size);
    for (size_t i = 0; i < j->clients; i++) expand_key(j->ciphers[i].round_key, ciphers + 16 * i);
    /* round keys of a crowd: places that are left take the first client again */
    for (size_t i = 0; tallest && i < places; i++)
        for (size_t r = 0; r <= ROUNDS; r++)
            store(j->crowd + CROWD_BYTES +
                      16 * (i / batch * batch * (ROUNDS + 1) + batch * r + i % batch),
                  j->ciphers[i < j->clients ? i : i / batch * batch].round_key[r]);
    return 0;
}

void end_job(job *j) {
    if (j->memory) wipe(j->memory, j->memory_bytes);
    free(j->memory);
}

/* `count` blocks, repeated for a batch that goes beyond them: those in place where none does. */
static const uint8_t *repeated(const uint8_t *blocks, size_t count, uint8_t *room) {
    if (count == 1 || count % SLACK == 0) return blocks;
    memcpy(room, blocks, 16 * count);
    for (size_t at = count; at < count + SLACK; at += count)
        memcpy(room + 16 * at, blocks,
               16 * (count + SLACK - at < count ? count + SLACK - at : count));
    return room;
}

/* Some trees of a set: their nodes from the roots to the leaves. */
static void grow_set(job *j, size_t client, size_t tree, size_t trees) {
    const size_t leaves = (size_t)j->f->leaves[tree], depth = (size_t)j->f->depths[tree];
    memcpy(j->nodes, j->roots[client] + 16 * tree, 16 * trees);
    for (size_t l = 0; l < depth; l++) {
        const uint8_t *steps = j->keys[client] + 16 * step_at(j->f, tree, l);
        grow[j->path](&j->ciphers[client], j->nodes, j->nodes, trees * nodes_at(leaves, depth, l),
                      repeated(steps, trees, j->steps), trees, &j->later);
    }
}

/* Their last corrections, in planes as long as *plane bytes. */
static const uint8_t *finals_of_set(job *j, size_t client, size_t tree, size_t trees,
                                    size_t *plane) {
    uint8_t *room = j->finals + 16 * (j->most + SLACK) * j->blocks; /* one leaf */
    *plane = trees == 1 ? 16 : 16 * (trees + SLACK);
    if (trees == 1) return final_of(j, client, tree, room);
    if (j->blocks == 1) {
        const uint8_t *first = final_of(j, client, tree, room);
        if (first != room) return repeated(first, trees, j->finals);
    }
    for (size_t t = 0; t < trees; t++) {
        const uint8_t *one = final_of(j, client, tree + t, room);
        for (size_t b = 0; b < j->blocks; b++)
            memcpy(j->finals + *plane * b + 16 * t, one + 16 * b, 16);
    }
    for (size_t b = 0; b < j->blocks; b++)
        for (size_t at = 0; at < SLACK; at++)
            memcpy(j->finals + *plane * b + 16 * (trees + at),
                   j->finals + *plane * b + 16 * (at % trees), 16);
    return j->finals;
}

/* Ask for a client's keys of some trees ahead of time: they are used once, a few kB in a place of
 * their own, too few for the machine to notice that it could have fetched them. */
static void fetch_ahead(job *j, size_t client, size_t tree, size_t trees) {
    const size_t depth = (size_t)j->f->depths[tree], size = 16 * trees * depth;
    const size_t all_steps = 16 * (size_t)j->f->first_step[j->f->count];
    const size_t final_bits = (size_t)(j->shape.kind == KIND_XOR ? 1 : j->shape.rows) *
                              (size_t)j->shape.words * (size_t)j->shape.bits;
    const uint8_t *steps = j->keys[client] + 16 * step_at(j->f, tree, 0);
    const uint8_t *finals = j->keys[client] + all_steps + final_bits * tree / 8;
    /* as many lines as the longest has; of the others some are asked for twice */
    const size_t lengths[STREAMS] = {16 * trees, final_bits * trees / 8, size / 2, size - size / 2};
    size_t longest = 64;
    for (int i = 0; i < STREAMS; i++)
        if (lengths[i] > longest) longest = lengths[i];
    j->later = (ahead){.at = {j->roots[client] + 16 * tree, finals, steps, steps + size / 2},
                       .lines = longest / 64 + 1};
    for (int i = 0; i < STREAMS; i++)
        j->later.step[i] = (lengths[i] + j->later.lines - 1) / j->later.lines;
}

/* ... and for some nodes of a client's top. */
static void fetch_nodes(job *j, const uint8_t *nodes, size_t count) {
    j->later = (ahead){.lines = count / (4 * STREAMS) + 1};
    for (int i = 0; i < STREAMS; i++) {
        j->later.at[i] = nodes + 16 * count / STREAMS * (size_t)i;
        j->later.step[i] = 64;
    }
}

/* Some trees of a set, of those before `end`. */
static void visit_set(job *j, size_t tree, size_t trees, size_t end) {
    const size_t leaves = (size_t)j->f->leaves[tree];
    tile t = {.pieces = trees, .leaves = trees * leaves, .trees = trees, .piece = j->piece};
    for (size_t i = 0; i < trees; i++)
        j->piece[i] = (piece){.tree = tree + i, .count = leaves, .local = i, .stride = trees};
    j->visit->begin(j, &t);
    for (size_t client = 0; client < j->clients; client++) {
        size_t plane;
        if (client + 1 < j->clients) fetch_ahead(j, client + 1, tree, trees);
        else if (tree + trees < end)
            fetch_ahead(j, 0, tree + trees, end - tree - trees < trees ? end - tree - trees : trees);
        else memset(&j->later, 0, sizeof j->later);
        grow_set(j, client, tree, trees);
        const uint8_t *finals = finals_of_set(j, client, tree, trees, &plane);
        j->visit->use(j, &t, client, j->nodes, finals, plane);
    }
    j->visit->end(j, &t);
}

/* The levels of a large tree that have fewer nodes than a batch: for a batch of clients at once,
 * each with its own key, node i of client c at i * batch + c. Returns how many. */
static size_t grow_first_levels(job *j, size_t tree, size_t first, size_t clients) {
    const size_t leaves = (size_t)j->f->leaves[tree], depth = (size_t)j->f->depths[tree];
    const size_t batch = (size_t)8 << j->path;
    uint8_t *steps = j->crowd, *nodes = steps + 16 * batch;
    size_t levels = 0;
    while (levels < depth - 1 && nodes_at(leaves, depth, levels) < SLACK) levels++;
    const size_t width = nodes_at(leaves, depth, levels);
    for (size_t at = 0; at < clients; at += batch) {
        const size_t some = clients - at < batch ? clients - at : batch;
        const uint8_t *keys = j->crowd + CROWD_BYTES + sizeof(cipher) * (first + at);
        for (size_t c = 0; c < batch; c++)
            memcpy(nodes + 16 * c, j->roots[first + at + (c < some ? c : 0)] + 16 * tree, 16);
        for (size_t l = 0; l < levels; l++) {
            for (size_t c = 0; c < batch; c++)
                memcpy(steps + 16 * c,
                       j->keys[first + at + (c < some ? c : 0)] + 16 * step_at(j->f, tree, l), 16);
            grow_crowd[j->path](keys, nodes, nodes_at(leaves, depth, l), steps);
        }
        for (size_t c = 0; c < some; c++)
            for (size_t i = 0; i < width; i++)
                memcpy(j->tops + (at + c) * j->top_bytes + 16 * i, nodes + 16 * (batch * i + c), 16);
    }
    return levels;
}

/* A tree with more leaves than a tile, for some clients. */
static void visit_large(job *j, size_t tree, size_t first, size_t clients) {
    const size_t leaves = (size_t)j->f->leaves[tree], depth = (size_t)j->f->depths[tree];
    const size_t level = depth - 1, most = j->most / 2, width = nodes_at(leaves, depth, level);
    const size_t final_at = j->top_bytes - padded(16 * j->blocks);
    const size_t shared = grow_first_levels(j, tree, first, clients);
    for (size_t c = 0; c < clients; c++) {
        /* the next tree's keys, of which there are few for each client */
        memset(&j->later, 0, sizeof j->later);
        if (tree + 1 < (size_t)j->f->count) fetch_ahead(j, first + c, tree + 1, 1);
        uint8_t *top = j->tops + c * j->top_bytes;
        for (size_t l = shared; l < level; l++)
            grow[j->path](&j->ciphers[first + c], top, top, nodes_at(leaves, depth, l),
                          j->keys[first + c] + 16 * step_at(j->f, tree, l), 1, &j->later);
        const uint8_t *last = final_of(j, first + c, tree, top + final_at);
        if (last != top + final_at) memcpy(top + final_at, last, 16 * j->blocks);
    }
    for (size_t at = 0; at < width; at += most) {
        const size_t some = width - at < most ? width - at : most;
        tile t = {.leaves = 2 * some, .trees = 1, .pieces = 1, .piece = j->piece};
        j->piece[0] = (piece){tree, at, some, 0, 1};
        if (width + at < leaves) {
            const size_t rights = leaves - width - at < some ? leaves - width - at : some;
            j->piece[t.pieces++] = (piece){tree, width + at, rights, some, 1};
        }
        j->visit->begin(j, &t);
        for (size_t c = 0; c < clients; c++) {
            const uint8_t *top = j->tops + c * j->top_bytes;
            const uint8_t *next = c + 1 < clients ? top + j->top_bytes : j->tops + 16 * most;
            fetch_nodes(j, next + 16 * at, some);
            grow[j->path](&j->ciphers[first + c], top + 16 * at, j->nodes, some,
                          j->keys[first + c] + 16 * step_at(j->f, tree, level), 1, &j->later);
            j->visit->use(j, &t, first + c, j->nodes, top + final_at, 16);
        }
        j->visit->end(j, &t);
    }
}

void visit_trees(job *j, size_t begin, size_t end) {
    for (size_t tree = begin, count; tree < end; tree += count) {
        const size_t leaves = (size_t)j->f->leaves[tree];
        size_t last = (size_t)(j->f->set_first[tree] + j->f->set_size[tree]);
        if (last > end) last = end;
        count = leaves > j->most ? 1 : j->most / leaves;
        if (count > SLACK) count -= count % SLACK;
        if (count > last - tree) count = last - tree;
        if (leaves <= j->most) visit_set(j, tree, count, end);
        else
            for (size_t c = 0; c < j->clients; c += j->together)
                visit_large(j, tree, c, j->clients - c < j->together ? j->clients - c : j->together);
    }
}

/* -- sums of leaf values */

static void use_values(job *j, const tile *t, size_t client, const uint8_t *nodes,
                       const uint8_t *finals, size_t final_plane, int kind) {
    add[j->path](&j->ciphers[client], nodes, t->leaves, finals, t->trees, final_plane, j->blocks,
                 j->epoch, j->sums, j->plane, j->steps, kind, is_short(&j->shape), &j->later);
}

/* Rows are all over the memory, and leaves go to them when a tile is done. With many clients each
 * asks for its share of them; with few, `scatter_of` asks ahead. */
#define MANY 16
static void fetch_rows(const job *j, const tile *t, size_t client) {
    const size_t rows = (size_t)j->shape.rows;
    for (size_t i = 0; i < (t->trees > 1 ? 1 : t->pieces); i++) { /* trees of a set follow each other */
        const piece *p = &t->piece[i];
        const size_t first = rows * ((size_t)j->f->first_leaf[p->tree] + p->first);
        const size_t count = rows * (t->trees > 1 ? t->leaves : p->count);
        const size_t turn = client + MANY - j->clients, end = first + count * (turn + 1) / MANY;
        for (size_t slot = first + count * turn / MANY; slot < end; slot++) {
            const uint8_t *row = j->leaves + j->row_bytes * j->owners[slot];
            for (size_t b = 0; b < j->row_bytes; b += 64) __builtin_prefetch(row + b, 1, 2);
            __builtin_prefetch(row + j->row_bytes - 1, 1, 2);
        }
    }
}

void add_values(job *j, const tile *t, size_t client, const uint8_t *nodes, const uint8_t *finals,
                size_t final_plane) {
    if (j->owners && j->clients >= MANY && client + MANY >= j->clients) fetch_rows(j, t, client);
    use_values(j, t, client, nodes, finals, final_plane, (int)j->shape.kind);
}

void set_values(job *j, const tile *t, size_t client, const uint8_t *nodes, const uint8_t *finals) {
    use_values(j, t, client, nodes, finals, 16, KIND_SET);
}

/* Between leaf space and planes: 16 bytes at a time. */
#define MOVE_SUMS(to, from)                                                                     \
    for (size_t i = 0; i < t->pieces; i++) {                                                    \
        const piece *p = &t->piece[i];                                                          \
        uint8_t *out = j->leaves +                                                              \
                       16 * j->blocks * ((size_t)j->f->first_leaf[p->tree] + p->first);         \
        for (size_t b = 0; b < j->blocks; b++) {                                                \
            uint8_t *sum = j->sums + j->plane * b + 16 * p->local;                              \
            for (size_t n = 0; n < p->count; n++)                                               \
                memcpy(to, from, 16);                                                           \
        }                                                                                       \
    }
#define LEAF_BLOCK (out + 16 * (n * j->blocks + b))
#define PLANE_BLOCK (sum + 16 * n * p->stride)

/* Leaves go straight from a tile to their rows, without a leaf space in memory. Rows are all over
 * the memory, so their places are asked for ahead of time: those of trees side by side while the
 * tile before is added, so that they come while the trees are grown. */
#define ROWS_AHEAD(t) ((t)->trees > 1 ? 512 : 16)

INLINE void scatter_of(const job *j, const tile *t, int kind, size_t size) {
    const size_t rows = (size_t)j->shape.rows, all = rows * (size_t)j->f->first_leaf[j->f->count];
    for (size_t i = 0; i < t->pieces; i++) {
        const piece *p = &t->piece[i];
        const uint8_t *from = j->sums + 16 * p->local;
        size_t slot = rows * ((size_t)j->f->first_leaf[p->tree] + p->first);
        for (size_t n = 0; n < p->count; n++, from += 16 * p->stride)
            for (size_t r = 0; r < rows; r++, slot++) {
                const size_t later = slot + ROWS_AHEAD(t) < all ? slot + ROWS_AHEAD(t) : slot;
                const uint8_t *soon = j->leaves + size * j->owners[later];
                for (size_t b = 0; j->clients < MANY && b < size; b += 64)
                    __builtin_prefetch(soon + b, 1, 2);
                uint8_t *to = j->leaves + size * j->owners[slot];
                size_t at = 0;
                for (size_t b = 0; at + 16 <= size; at += 16, b++)
                    add_words(to + at, from + j->plane * b, 16, kind, j->minus);
                if (at < size)
                    add_words(to + at, from + j->plane * (at / 16) + 16 / rows * r, size - at,
                              kind, j->minus);
            }
    }
}

static void scatter_sums(const job *j, const tile *t) {
    switch (j->shape.kind) {
    case KIND_32: scatter_of(j, t, KIND_32, j->row_bytes); break;
    case KIND_64: scatter_of(j, t, KIND_64, j->row_bytes); break;
    case KIND_61: scatter_of(j, t, KIND_61, j->row_bytes); break;
    default:
        j->row_bytes == 16 ? scatter_of(j, t, KIND_128, 16)
                           : scatter_of(j, t, KIND_128, j->row_bytes);
    }
}

void load_sums(job *j, const tile *t) {
    if (j->owners)
        for (size_t b = 0; b < j->blocks; b++) memset(j->sums + j->plane * b, 0, 16 * t->leaves);
    else MOVE_SUMS(PLANE_BLOCK, LEAF_BLOCK)
}

void store_sums(job *j, const tile *t) {
    if (j->owners) scatter_sums(j, t);
    else MOVE_SUMS(LEAF_BLOCK, PLANE_BLOCK)
}

size_t tile_leaves(const leaf_shape *shape) { return blocks_of(shape) == 1 ? 512 : 256; }

void reduce_sums(const job *j, size_t begin, size_t end) {
    const size_t row = 16 * j->blocks;
    for (size_t i = row * (size_t)j->f->first_leaf[begin];
         j->shape.kind == KIND_61 && !j->owners && i < row * (size_t)j->f->first_leaf[end]; i += 8) {
        uint64_t word;
        memcpy(&word, j->leaves + i, 8);
        word = reduce61(word);
        memcpy(j->leaves + i, &word, 8);
    }
}

EXPORT int tessera_dpf_evaluate(int path, size_t clients, const uint8_t *ciphers,
                                const uint8_t *const *roots, const uint8_t *const *keys,
                                size_t key_bytes, const forest *f, const leaf_shape *shape,
                                uint32_t epoch, size_t begin, size_t end, uint8_t *sum,
                                const uint32_t *owners, size_t row_bytes, int minus) {
    static const visitor add_all = {load_sums, add_values, store_sums};
    job j = {.path = path, .clients = clients, .f = f, .shape = *shape, .epoch = epoch,
             .roots = roots, .keys = keys, .key_bytes = key_bytes, .visit = &add_all,
             .leaves = sum, .owners = owners, .row_bytes = row_bytes, .minus = minus,
             .most = tile_leaves(shape)};
    if (begin_job(&j, ciphers, begin, end)) return 1;
    visit_trees(&j, begin, end);
    reduce_sums(&j, begin, end);
    end_job(&j);
    return 0;
}

#endif /* TESSERA_NATIVE */

#else /* TESSERA_WIDTH: one path */

#include "width.h"

/* Blocks to cipher blocks, in place; the memory goes on to a multiple of 8 registers. */
static NOINLINE TARGET void NAME(encrypt)(const cipher *k, uint8_t *blocks, size_t count) {
    const REG whitening = SPREAD(k->round_key[0]);
    for (size_t at = 0; at < 16 * count; at += 8 * REG_BYTES) {
#define ONE_BLOCK(i) REG x##i = XOR(whitening, LOAD(blocks + at + (i) * REG_BYTES));
        EIGHT(ONE_BLOCK)
#undef ONE_BLOCK
        ENCRYPT(k->round_key)
#define ONE_STORE(i) STORE(blocks + at + (i) * REG_BYTES, x##i);
        EIGHT(ONE_STORE)
#undef ONE_STORE
    }
}

/* Parents to their children, the left ones and then the right ones; also in place, where the left
 * ones take the places of their parents.
 *
 * From the last batch to the first. A batch may go beyond the parents, and leaves lefts of
 * nothing there; the rights of earlier parents, which are written later, take their place. */
INLINE TARGET void NAME(grow_of)(const cipher *k, const uint8_t *from, uint8_t *nodes,
                                 size_t parents, const uint8_t *steps, size_t period, ahead *later,
                                 int single) {
    const REG whitening = SPREAD(k->round_key[0]), last_key = SPREAD(k->round_key[ROUNDS]);
    const REG upper = SPREAD(_mm_set_epi64x(-1, 0)), only = SPREAD(load(steps));
    const size_t batch = GROW_REGS * LANES, back = batch % period;
    size_t at = (parents - 1) / batch * batch, in_period = at % period;
    for (;;) {
        REG x[GROW_REGS], y[GROW_REGS];
        uint8_t *lefts = nodes + 16 * at, *rights = lefts + 16 * parents;
        ask(later);
        UNROLLED for (int i = 0; i < GROW_REGS; i++) {
            y[i] = LOAD(from + 16 * at + i * REG_BYTES);
            x[i] = XOR(y[i], whitening);
        }
        _Pragma("GCC unroll 9") for (int r = 1; r < ROUNDS; r++) {
            const REG key = SPREAD(k->round_key[r]);
            UNROLLED for (int i = 0; i < GROW_REGS; i++) x[i] = ROUND(x[i], key);
        }
        UNROLLED for (int i = GROW_REGS - 1; i >= 0; i--) {
            const REG h = LAST(x[i], XOR(y[i], last_key));
            const REG step = single ? only : LOAD(steps + 16 * in_period + i * REG_BYTES);
            const REG left = XOR_PICK(XOR_AND(SWAP(h), h, upper), y[i], step);
            STORE(lefts + i * REG_BYTES, left);
            STORE(rights + i * REG_BYTES, XOR(left, y[i]));
        }
        if (!at) break;
        at -= batch;
        in_period = in_period >= back ? in_period - back : in_period + period - back;
    }
}

static NOINLINE TARGET void NAME(grow)(const cipher *k, const uint8_t *from, uint8_t *nodes,
                                       size_t parents, const uint8_t *steps, size_t period,
                                       ahead *later) {
    period == 1 ? NAME(grow_of)(k, from, nodes, parents, steps, 1, later, 1)
                : NAME(grow_of)(k, from, nodes, parents, steps, period, later, 0);
}

/* The same for a batch of clients, one tree of each, with round keys of their own. */
static NOINLINE TARGET void NAME(grow_crowd)(const uint8_t *keys, uint8_t *nodes, size_t parents,
                                             const uint8_t *steps) {
    const REG upper = SPREAD(_mm_set_epi64x(-1, 0));
    for (size_t at = parents; at-- > 0;) {
        uint8_t *from = nodes + 16 * BATCH * at;
#define KEY(r, i) LOAD(keys + 16 * BATCH * (r) + (i) * REG_BYTES)
#define ONE_NODE(i) REG x##i = XOR(LOAD(from + (i) * REG_BYTES), KEY(0, i));
#define ONE_MORE(i) x##i = ROUND(x##i, KEY(r, i));
#define ONE_PAIR(i)                                                                          \
    {                                                                                        \
        const REG y = LOAD(from + (i) * REG_BYTES), h = XOR(LAST(x##i, KEY(ROUNDS, i)), y);  \
        const REG step = LOAD(steps + (i) * REG_BYTES);                                      \
        const REG left = XOR_PICK(XOR_AND(SWAP(h), h, upper), y, step);                      \
        STORE(from + (i) * REG_BYTES, left);                                                 \
        STORE(from + 16 * BATCH * parents + (i) * REG_BYTES, XOR(left, y));                  \
    }
        EIGHT(ONE_NODE)
        _Pragma("GCC unroll 9") for (size_t r = 1; r < ROUNDS; r++) { EIGHT(ONE_MORE) }
        EIGHT(ONE_PAIR)
#undef KEY
#undef ONE_NODE
#undef ONE_MORE
#undef ONE_PAIR
    }
}

/* 128-bit words. */
INLINE TARGET REG NAME(add128)(REG a, REG b) {
    const REG sum = OP(add_epi64)(a, b);
    return OP(add_epi64)(sum, UP(OP(srli_epi64)(CARRIES(a, b, sum), 63), 8));
}

/* sum + value + final, for words of one kind. */
INLINE TARGET REG NAME(total)(REG sum, REG value, REG final, int kind) {
    switch (kind) {
    case KIND_XOR: return XOR(sum, XOR(value, final));
    case KIND_SET: return XOR(value, final);
    case KIND_32: return OP(add_epi32)(sum, OP(add_epi32)(value, final));
    case KIND_64: return OP(add_epi64)(sum, OP(add_epi64)(value, final));
    case KIND_61: {
        const REG prime = SPREAD(_mm_set1_epi64x((long long)PRIME));
        const REG wide = OP(add_epi64)(sum, OP(add_epi64)(AND(value, prime), final));
        return OP(add_epi64)(AND(wide, prime), OP(srli_epi64)(wide, 61));
    }
    default: return NAME(add128)(sum, NAME(add128)(value, final));
    }
}

/* sums += the values of these leaves, plane by plane. Planes go on for a batch beyond.
 *
 * From the last batch to the first, since `grow` writes the first one last. With one tree (`single`)
 * a plane has one last correction; what of it is added to each leaf is worked out once, as masks. */
INLINE TARGET void NAME(add_of)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                const uint8_t *finals, size_t period, size_t final_plane,
                                size_t blocks, uint32_t epoch, uint8_t *sums, size_t plane,
                                uint8_t *masks, int kind, ahead *later, int single) {
    const size_t end = (leaves - 1) / BATCH * BATCH, last_in_period = end % period;
    const size_t back = BATCH % period;
    const __m128i first = _mm_xor_si128(tweak_of(CONVERT, 0, epoch), k->round_key[0]);
    REG whitening = SPREAD(first), only = SPREAD(load(finals)), held[8];
    size_t at = end, block = 0, in_period = last_in_period;
    const uint8_t *next = nodes + 16 * at;
#define SWITCH(y, x) PICK(kind == KIND_128 ? UPPER(y) : y, x)
#define ONE_LEAF(i) REG x##i = XOR(LOAD(next + (i) * REG_BYTES), whitening);
#define ONE_SUM(i)                                                                       \
    {                                                                                    \
        const REG y = LOAD(from + (i) * REG_BYTES), value = XOR(held[i], y);             \
        const REG picked = !single ? SWITCH(y, LOAD(corrections + (i) * REG_BYTES))      \
                           : kind == KIND_XOR || kind == KIND_SET                        \
                               ? SWITCH(y, last)                                         \
                               : AND(last, LOAD(mask + (i) * REG_BYTES));                \
        uint8_t *out = to + (i) * REG_BYTES;                                             \
        STORE(out, NAME(total)(LOAD(out), value, picked, kind));                         \
    }
    if (single && kind != KIND_XOR && kind != KIND_SET) { /* these have one block */
        const REG ones = SPREAD(_mm_set1_epi64x(-1));
        for (size_t i = 0; i < 16 * (end + BATCH); i += REG_BYTES)
            STORE(masks + i, SWITCH(LOAD(nodes + i), ones));
    }
    {
        EIGHT(ONE_LEAF)
        ENCRYPT(k->round_key)
        EIGHT(HOLD)
    }
    for (size_t left = blocks * (end / BATCH + 1); left; left--) {
        const uint8_t *from = next, *mask = masks + 16 * at;
        const uint8_t *corrections = finals + final_plane * block + 16 * in_period;
        uint8_t *to = sums + plane * block + 16 * at;
        const REG last = only;
        if (left == 1) {
            EIGHT(ONE_SUM)
            break;
        }
        if (at) {
            at -= BATCH;
            in_period = in_period >= back ? in_period - back : in_period + period - back;
        } else {
            at = end;
            in_period = last_in_period;
            block++;
            whitening = SPREAD(_mm_xor_si128(
                first, _mm_set_epi64x(0, (long long)((uint64_t)block << 32))));
            only = SPREAD(load(finals + final_plane * block));
        }
        next = nodes + 16 * at;
        OPAQUE(next);
        OPAQUE(to);
        OPAQUE(mask);
        ask(later);
        EIGHT(ONE_LEAF)
        ENCRYPT_WITH(ONE_SUM)
        EIGHT(HOLD)
    }
#undef SWITCH
#undef ONE_LEAF
#undef ONE_SUM
}

/* The same for rows of several blocks of 32-bit words: a register of nodes after the other, and for
 * each some blocks of its rows. Those that are drawn are numbered from `first` on. With `shorts` the
 * fourth block of them is made of the highest bytes of the three before it.
 *
 * As few AES blocks at a time as there are need no work between their rounds: the core sees far
 * enough to begin with the next ones while it ends these. H's last XOR is part of the last round's
 * key. */
INLINE TARGET void NAME(rows_of)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                 const uint8_t *finals, size_t period, size_t final_plane,
                                 size_t first, uint32_t epoch, uint8_t *sums, size_t plane,
                                 ahead *later, int drawn, int shorts, int single) {
    const REG last_key = SPREAD(k->round_key[ROUNDS]);
    const size_t forward = LANES % period;
    size_t in_period = 0;
    REG whitening[ROW_DRAWN], only[ROW_DRAWN + 1], spare = last_key;
    UNROLLED for (int b = 0; b < drawn; b++)
        whitening[b] = SPREAD(_mm_xor_si128(tweak_of(CONVERT, (uint32_t)first + (uint32_t)b, epoch),
                                            k->round_key[0]));
    UNROLLED for (int b = 0; b < drawn + shorts; b++)
        only[b] = SPREAD(load(finals + final_plane * (size_t)b));
    for (size_t at = 0; at < 16 * leaves; at += REG_BYTES) {
        REG x[ROW_DRAWN];
        const REG y = LOAD(nodes + at), key = XOR(last_key, y);
        const SWITCHES on = SWITCHES_OF(y);
        ask(later);
        UNROLLED for (int b = 0; b < drawn; b++) x[b] = XOR(y, whitening[b]);
        _Pragma("GCC unroll 9") for (int r = 1; r < ROUNDS; r++) {
            const REG round_key = SPREAD(k->round_key[r]);
            UNROLLED for (int b = 0; b < drawn; b++) x[b] = ROUND(x[b], round_key);
        }
#define ONE_SUM(b, value)                                                           \
    {                                                                               \
        uint8_t *out = sums + plane * (size_t)(b) + at;                             \
        const uint8_t *final = finals + final_plane * (size_t)(b) + 16 * in_period; \
        const REG sum = OP(add_epi32)(LOAD(out), value);                            \
        STORE(out, ADD_WHERE(sum, on, single ? only[b] : LOAD(final)));             \
    }
        UNROLLED for (int b = 0; b < drawn; b++) {
            const REG value = LAST(x[b], key);
            ONE_SUM(b + (shorts && b > 2), value)
            if (shorts && b == 0) spare = OP(srli_epi32)(value, 24);
            if (shorts && b == 1)
                spare = XOR_AND(spare, OP(srli_epi32)(value, 16), SPREAD(_mm_set1_epi32(0xff00)));
            if (shorts && b == 2) {
                spare = XOR_AND(spare, OP(srli_epi32)(value, 8), SPREAD(_mm_set1_epi32(0xff0000)));
                ONE_SUM(3, spare)
            }
        }
#undef ONE_SUM
        in_period += forward;
        if (in_period >= period) in_period -= period;
    }
}

static NOINLINE TARGET void NAME(add_rows)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                           const uint8_t *finals, size_t period,
                                           size_t final_plane, size_t blocks, uint32_t epoch,
                                           uint8_t *sums, size_t plane, int shorts, ahead *later) {
    for (size_t at = 0, some, first = 0; at < blocks; at += some) {
        some = blocks - at;
        if (shorts && some > 3) some = some > 7 ? 4 : some;
        else if (some > 5) some = 5;
        const int has_spare = shorts && some > 3;
        const uint8_t *from = finals + final_plane * at;
        uint8_t *to = sums + plane * at;
#define SOME(n, spare)                                                                            \
    case 2 * (n) + (spare):                                                                       \
        period == 1 ? NAME(rows_of)(k, nodes, leaves, from, 1, final_plane, first, epoch, to,     \
                                    plane, later, n, spare, 1)                                    \
                    : NAME(rows_of)(k, nodes, leaves, from, period, final_plane, first, epoch, to, \
                                    plane, later, n, spare, 0);                                   \
        break;
        switch (2 * ((int)some - has_spare) + has_spare) {
        SOME(1, 0)
        SOME(2, 0)
        SOME(3, 0)
        SOME(4, 0)
        SOME(5, 0)
        SOME(3, 1)
        SOME(4, 1)
        SOME(5, 1)
        SOME(6, 1)
        }
#undef SOME
        first += some - (size_t)has_spare;
    }
}

static NOINLINE TARGET void NAME(add)(const cipher *k, const uint8_t *nodes, size_t leaves,
                                      const uint8_t *finals, size_t period, size_t final_plane,
                                      size_t blocks, uint32_t epoch, uint8_t *sums, size_t plane,
                                      uint8_t *masks, int kind, int shorts, ahead *later) {
#define OF_KIND(kind)                                                                            \
    case kind:                                                                                   \
        period == 1 ? NAME(add_of)(k, nodes, leaves, finals, 1, final_plane, blocks, epoch, sums, \
                                   plane, masks, kind, later, 1)                                 \
                    : NAME(add_of)(k, nodes, leaves, finals, period, final_plane, blocks, epoch, \
                                   sums, plane, masks, kind, later, 0);                          \
        break;
    if (kind == KIND_32 && blocks > 1) {
        NAME(add_rows)(k, nodes, leaves, finals, period, final_plane, blocks, epoch, sums, plane,
                       shorts, later);
        return;
    }
    switch (kind) {
    OF_KIND(KIND_XOR)
    OF_KIND(KIND_SET)
    OF_KIND(KIND_32)
    OF_KIND(KIND_64)
    OF_KIND(KIND_61)
    OF_KIND(KIND_128)
    }
#undef OF_KIND
}

#include "width.h"

#endif
