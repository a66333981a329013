/* Point functions: trees grown, evaluated at all leaves and summed over clients.
 *
 * points.py says what each function promises and checks every argument before a pointer comes
 * here; points_reference.py is the twin in NumPy. Nothing branches on a key or on a node.
 *
 * Evaluation goes over the trees in the outer loop and over the clients in the inner one. Trees of
 * one depth are taken together, about CHUNK leaves at a time, so that their nodes stay in the
 * first-level cache and small trees share registers. Which node goes where is listed once per
 * chunk, for all clients; a node that no leaf needs is at most written, to be overwritten by its
 * neighbour. Trees of more than 2^HEIGHT leaves are cut: their top is grown first, and each node
 * at its bottom is the root of a chunk.
 *
 * As in kernel.c, the code of a path is written once, at the end, and compiled for each width.
 */
#ifndef TESSERA_WIDTH

#include "aes.h"
#include "words.h"

#ifdef TESSERA_NATIVE

#include <stdlib.h>

#define HEIGHT 10           /* of the trees in a chunk */
#define CHUNK 512           /* leaves of a chunk, unless it is one tree */
#define CAP (1 << HEIGHT)   /* nodes in a level of a chunk */
#define SLACK 32            /* nodes that a batch may touch beyond a level's end */
#define GROWN 64            /* trees, or single points, that are worked on together */

typedef struct {
    __m128i round_key[ROUNDS + 1];
} cipher;

/* One level of a chunk, by parents: where the children go, and the step that corrects them. */
typedef struct {
    size_t parents;
    uint32_t *child, *step;
} level;

/* Some trees (or parts of one) of one height, whose lists are set up. */
typedef struct {
    size_t trees, leaves;
    unsigned height;
    level levels[HEIGHT];
    /* Trees of L leaves and height h have at most L + h nodes above the leaves, and L > 2^(h-1). */
    uint32_t child[2 * CAP + HEIGHT * SLACK], step[2 * CAP + HEIGHT * SLACK];
    uint32_t finals_at[CAP + SLACK]; /* of each leaf: its tree's last correction, in blocks */
    uint32_t count[CAP];           /* leaves of each tree */
    uint8_t nodes[2][16 * (CAP + SLACK)] __attribute__((aligned(64)));
} chunk;

/* Memory to be asked for ahead of its use, a line with every batch: all at once would stall. */
typedef struct {
    const uint8_t *at, *end;
} ahead;
#define ASK(a)                                \
    {                                         \
        __builtin_prefetch((a)->at);          \
        (a)->at += (a)->at < (a)->end ? 64 : 0; \
    }

/* (purpose, block, epoch) -> tweak. */
enum purpose { LEFT = 0, RIGHT = 1, CONVERT = 2 };
INLINE AES_TARGET __m128i tweak_of(enum purpose purpose, uint32_t block, uint32_t epoch) {
    return _mm_set_epi64x((long long)((uint64_t)purpose << 56 | epoch),
                          (long long)((uint64_t)block << 32));
}

INLINE AES_TARGET __m128i load(const uint8_t *from) {
    return _mm_loadu_si128((const __m128i *)from);
}

INLINE AES_TARGET void store(uint8_t *to, __m128i x) { _mm_storeu_si128((__m128i *)to, x); }

/* All ones if the block's highest bit, its control bit, is set. */
INLINE AES_TARGET __m128i control(__m128i s) {
    return _mm_srai_epi32(_mm_shuffle_epi32(s, 0xff), 31);
}

/* The lists of `trees` trees of one height: trees `first` and on, or, if `whole` is given, one part
 * of a tree with that many leaves. `skip` levels lie above. */
static void list_nodes(chunk *c, const int64_t *leaves, const int64_t *first_step, size_t first,
                       size_t trees, unsigned height, unsigned skip, size_t whole,
                       size_t blocks) {
    size_t used = 0;
    c->trees = trees;
    c->height = height;
    c->leaves = 0;
    /* Eight entries at a time, beyond the end of a tree: the next one writes over them. */
    for (size_t t = 0; t < trees; t++) {
        c->count[t] = (uint32_t)(whole ? whole : (size_t)leaves[first + t]);
        for (size_t i = 0; i < c->count[t]; i += 8)
            for (size_t e = 0; e < 8; e++)
                c->finals_at[c->leaves + i + e] = (uint32_t)(t * blocks);
        c->leaves += c->count[t];
    }
    for (size_t i = c->leaves; i < c->leaves + SLACK; i++) c->finals_at[i] = 0;
    for (unsigned l = 0; l < height; l++) {
        level *at = &c->levels[l];
        size_t parents = 0, children = 0;
        at->child = c->child + used;
        at->step = c->step + used;
        for (size_t t = 0; t < trees; t++) {
            size_t below = (c->count[t] + ((size_t)1 << (height - 1 - l)) - 1) >> (height - 1 - l);
            uint32_t step = (uint32_t)((size_t)(first_step[first + t] - first_step[first]) + skip + l);
            for (size_t i = 0; 2 * i < below; i += 8)
                for (size_t e = 0; e < 8; e++) {
                    at->child[parents + i + e] = (uint32_t)(children + 2 * (i + e));
                    at->step[parents + i + e] = step;
                }
            parents += (below + 1) / 2;
            children += below;
        }
        at->parents = parents;
        for (size_t i = parents; i < parents + SLACK; i++) { /* for the end of a batch */
            at->child[i] = (uint32_t)children;
            at->step[i] = at->step[0];
        }
        used += parents + SLACK;
    }
}

/* to = from the words of one block: beta + theirs - mine, or minus that. */
#define COMBINE(type)                                                          \
    for (size_t i = 0; i < 16; i += sizeof(type)) {                            \
        type a, b, c;                                                          \
        memcpy(&a, beta + i, sizeof a);                                        \
        memcpy(&b, theirs + i, sizeof b);                                      \
        memcpy(&c, mine + i, sizeof c);                                        \
        a = (type)(a + b - c);                                                 \
        a = (type)((a ^ (type)(0 - (type)negative)) + (type)negative);         \
        memcpy(to + i, &a, sizeof a);                                          \
    }

static void final_block(uint8_t *to, const uint8_t *beta, const uint8_t *mine,
                        const uint8_t *theirs, unsigned negative, int kind) {
    switch (kind) {
    case KIND_XOR:
        for (size_t i = 0; i < 16; i++) to[i] = beta[i] ^ theirs[i] ^ mine[i];
        break;
    case KIND_32: COMBINE(uint32_t) break;
    case KIND_64: COMBINE(uint64_t) break;
    case KIND_128: COMBINE(wide) break;
    case KIND_61:
        for (size_t i = 0; i < 16; i += 8) {
            uint64_t a, b, c, plus, minus, keep = 0 - (uint64_t)negative;
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
static encrypt_blocks *const encrypt[] = {encrypt_128, encrypt_256, encrypt_512};

/* H(s, tweaks of the conversion) for some nodes: `count` * blocks blocks, node by node. */
static AES_TARGET void convert_nodes(int path, const cipher *k, const uint8_t *nodes, size_t count,
                                     size_t block, uint32_t epoch, uint8_t *out) {
    const __m128i tweak = tweak_of(CONVERT, (uint32_t)block, epoch);
    for (size_t i = 0; i < count; i++)
        store(out + 16 * i, _mm_xor_si128(load(nodes + 16 * i), tweak));
    encrypt[path](k, out, count);
    for (size_t i = 0; i < count; i++)
        store(out + 16 * i, _mm_xor_si128(load(out + 16 * i), load(nodes + 16 * i)));
}

/* Boyle, Gilboa, Ishai, Figure 1, Gen: trees at .. at + count, all of one depth. */
static AES_TARGET void grow_some(int path, const cipher *k, size_t at, size_t count, unsigned depth,
                                 const int64_t *first_step, const uint8_t *const roots[2],
                                 const int64_t *points, const uint8_t *values, int kind,
                                 size_t blocks, uint32_t epoch, uint8_t *steps, uint8_t *finals) {
    const __m128i top = _mm_set_epi64x((long long)(1ull << 63), 0), right = tweak_of(RIGHT, 0, 0);
    uint8_t s[2][16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    uint8_t x[16 * (4 * GROWN + SLACK)] __attribute__((aligned(64)));
    for (int p = 0; p < 2; p++) memcpy(s[p], roots[p] + 16 * at, 16 * count);
    for (unsigned l = 0; l < depth; l++) {
        for (size_t i = 0; i < count; i++) { /* left and right of party 0, then of party 1 */
            for (int p = 0; p < 2; p++) {
                __m128i node = load(s[p] + 16 * i);
                store(x + 64 * i + 32 * p, node);
                store(x + 64 * i + 32 * p + 16, _mm_xor_si128(node, right));
            }
        }
        encrypt[path](k, x, 4 * count);
        for (size_t i = 0; i < count; i++) {
            const uint8_t *y = x + 64 * i;
            __m128i a = load(s[0] + 16 * i), b = load(s[1] + 16 * i);
            __m128i left0 = _mm_xor_si128(load(y), a), right0 = _mm_xor_si128(load(y + 16), a);
            __m128i left1 = _mm_xor_si128(load(y + 32), b), right1 = _mm_xor_si128(load(y + 48), b);
            __m128i left_step = _mm_xor_si128(left0, left1);
            __m128i right_step = _mm_xor_si128(right0, right1);
            uint64_t bit = (uint64_t)points[at + i] >> (depth - 1 - l) & 1;
            __m128i bits = _mm_set_epi64x((long long)(bit << 63), 0);
            __m128i goes_right = control(bits);
            /* the side which the point leaves becomes equal for both */
            __m128i lost = _mm_xor_si128(
                right_step, _mm_and_si128(_mm_xor_si128(left_step, right_step), goes_right));
            lost = _mm_andnot_si128(top, lost);
            left_step = _mm_andnot_si128(_mm_xor_si128(left_step, bits), top);
            right_step = _mm_and_si128(top, _mm_xor_si128(right_step, bits));
            left_step = _mm_or_si128(lost, left_step);
            right_step = _mm_or_si128(lost, right_step);
            uint8_t *to = steps + 32 * ((size_t)first_step[at + i] + l);
            store(to, left_step);
            store(to + 16, right_step);
#define TAKE(l, r) _mm_xor_si128(l, _mm_and_si128(_mm_xor_si128(l, r), goes_right))
            __m128i taken = TAKE(left_step, right_step);
            __m128i next0 = TAKE(left0, right0), next1 = TAKE(left1, right1);
#undef TAKE
            store(s[0] + 16 * i, _mm_xor_si128(next0, _mm_and_si128(taken, control(a))));
            store(s[1] + 16 * i, _mm_xor_si128(next1, _mm_and_si128(taken, control(b))));
        }
    }
    for (size_t block = 0; block < blocks; block++) {
        uint8_t *mine = x, *theirs = x + 16 * (GROWN + SLACK);
        convert_nodes(path, k, s[0], count, block, epoch, mine);
        convert_nodes(path, k, s[1], count, block, epoch, theirs);
        for (size_t i = 0; i < count; i++) {
            size_t place = 16 * ((at + i) * blocks + block);
            final_block(finals + place, values + place, mine + 16 * i, theirs + 16 * i,
                        s[1][16 * i + 15] >> 7, kind);
        }
    }
    wipe(s, sizeof s);
    wipe(x, sizeof x);
}

EXPORT AES_TARGET int tessera_dpf_grow(int path, const uint8_t *key, size_t trees,
                                       const int64_t *depths, const int64_t *first_step,
                                       const uint8_t *roots0, const uint8_t *roots1,
                                       const int64_t *points, const uint8_t *values, int kind,
                                       size_t blocks, uint32_t epoch, uint8_t *steps,
                                       uint8_t *finals) {
    const uint8_t *const roots[2] = {roots0, roots1};
    cipher k;
    expand_key(k.round_key, key);
    for (size_t at = 0, count; at < trees; at += count) {
        for (count = 1; count < GROWN && at + count < trees; count++)
            if (depths[at + count] != depths[at]) break;
        grow_some(path, &k, at, count, (unsigned)depths[at], first_step, roots, points, values, kind,
                  blocks, epoch, steps, finals);
    }
    wipe(&k, sizeof k);
    return 0;
}

/* Single points: out is zeros before. */
EXPORT AES_TARGET int tessera_dpf_points(int path, const uint8_t *key, const uint8_t *roots,
                                         const uint8_t *steps, const uint8_t *finals,
                                         const int64_t *depths, const int64_t *first_step,
                                         size_t count, const int64_t *which, const int64_t *points,
                                         int kind, size_t blocks, uint32_t epoch, uint8_t *out) {
    const __m128i right = tweak_of(RIGHT, 0, 0);
    uint8_t s[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    uint8_t x[16 * (GROWN + SLACK)] __attribute__((aligned(64)));
    static const uint8_t zeros[16];
    cipher k;
    expand_key(k.round_key, key);
    for (size_t at = 0; at < count; at += GROWN) {
        size_t some = count - at < GROWN ? count - at : GROWN;
        int64_t deepest = 0;
        for (size_t i = 0; i < some; i++) {
            store(s + 16 * i, load(roots + 16 * which[at + i]));
            if (depths[which[at + i]] > deepest) deepest = depths[which[at + i]];
        }
        for (int64_t l = 0; l < deepest; l++) {
            for (size_t i = 0; i < some; i++) {
                int64_t depth = depths[which[at + i]];
                int side = depth > l && (points[at + i] >> (depth - 1 - l) & 1);
                __m128i node = load(s + 16 * i);
                store(x + 16 * i, side ? _mm_xor_si128(node, right) : node);
            }
            encrypt[path](&k, x, some);
            for (size_t i = 0; i < some; i++) {
                int64_t depth = depths[which[at + i]];
                if (depth <= l) continue;
                int side = points[at + i] >> (depth - 1 - l) & 1;
                __m128i node = load(s + 16 * i);
                __m128i step = load(steps + 32 * (first_step[which[at + i]] + l) + 16 * side);
                store(s + 16 * i, _mm_xor_si128(_mm_xor_si128(load(x + 16 * i), node),
                                                _mm_and_si128(step, control(node))));
            }
        }
        for (size_t block = 0; block < blocks; block++) {
            convert_nodes(path, &k, s, some, block, epoch, x);
            for (size_t i = 0; i < some; i++) {
                uint8_t added[16];
                store(added, _mm_and_si128(load(finals + 16 * ((size_t)which[at + i] * blocks + block)),
                                           control(load(s + 16 * i))));
                final_block(out + 16 * ((at + i) * blocks + block), added, zeros, x + 16 * i, 0, kind);
            }
        }
    }
    wipe(s, sizeof s);
    wipe(x, sizeof x);
    wipe(&k, sizeof k);
    return 0;
}

typedef struct {
    size_t clients, blocks;
    const cipher *ciphers;
    const uint8_t *const *roots, *const *steps, *const *finals;
    const int64_t *leaves, *first_leaf, *depths, *first_step;
    int kind;
    uint32_t epoch;
    chunk *c;
    uint8_t *tweaks, *buffer; /* for rows of several blocks: one row, and 8 * LANES rows */
    uint8_t *top[2]; /* nodes above the chunks of a large tree */
    size_t listed;   /* leaves of the part of a large tree that `c` has the lists of */
    ahead later;
    void *memory[3]; /* ciphers, c, and the rest */
} job;

typedef void grow_nodes(const cipher *, const uint8_t *, uint8_t *, const uint32_t *,
                        const uint32_t *, size_t, const uint8_t *, ahead *);
typedef void add_single(const cipher *, const chunk *, const uint8_t *, const uint8_t *, uint8_t *,
                        __m128i, int, ahead *);
typedef void add_many(const cipher *, const chunk *, const uint8_t *, const uint8_t *, uint8_t *,
                      size_t, uint32_t, uint8_t *, uint8_t *, int);
static grow_nodes *const grow_level[] = {grow_level_128, grow_level_256, grow_level_512};
static add_single *const add_leaves[] = {add_leaves_128, add_leaves_256, add_leaves_512};
static add_many *const add_rows[] = {add_rows_128, add_rows_256, add_rows_512};

/* One client's part of a chunk, from its first nodes, which are in nodes[0], to the sum. */
static AES_TARGET void evaluate_chunk(int path, job *j, size_t client, size_t tree, uint8_t *sum) {
    chunk *c = j->c;
    const cipher *k = &j->ciphers[client];
    const uint8_t *steps = j->steps[client] + 32 * (size_t)j->first_step[tree];
    const uint8_t *finals = j->finals[client] + 16 * j->blocks * tree;
    for (unsigned l = 0; l < c->height; l++)
        grow_level[path](k, c->nodes[l % 2], c->nodes[(l + 1) % 2], c->levels[l].child,
                         c->levels[l].step, c->levels[l].parents, steps, &j->later);
    const uint8_t *nodes = c->nodes[c->height % 2];
    if (j->blocks == 1)
        add_leaves[path](k, c, nodes, finals, sum, tweak_of(CONVERT, 0, j->epoch), j->kind, &j->later);
    else
        add_rows[path](k, c, nodes, finals, sum, j->blocks, j->epoch, j->tweaks, j->buffer,
                       j->kind);
}

/* A tree of more than CAP leaves: grow its top, then every part of CAP leaves by itself. */
static void evaluate_large(int path, job *j, size_t client, size_t tree, uint8_t *sum) {
    chunk *c = j->c;
    size_t leaves = (size_t)j->leaves[tree], parts = (leaves + CAP - 1) / CAP;
    unsigned skip = (unsigned)j->depths[tree] - HEIGHT;
    const uint8_t *steps = j->steps[client] + 32 * (size_t)j->first_step[tree];
    uint32_t child[CAP + SLACK], step[CAP + SLACK];
    for (size_t i = 0; i < CAP + SLACK; i++) child[i] = (uint32_t)(2 * i);
    memcpy(j->top[0], j->roots[client] + 16 * tree, 16);
    for (unsigned l = 0; l < skip; l++) {
        size_t parents = (parts + ((size_t)1 << (skip - l)) - 1) >> (skip - l);
        for (size_t i = 0; i < CAP + SLACK; i++) step[i] = l;
        for (size_t done = 0; done < parents; done += CAP)
            grow_level[path](&j->ciphers[client], j->top[l % 2] + 16 * done,
                             j->top[(l + 1) % 2] + 32 * done, child, step,
                             parents - done < CAP ? parents - done : CAP, steps, &j->later);
    }
    for (size_t part = 0; part < parts; part++) {
        size_t count = part + 1 < parts ? CAP : leaves - part * CAP;
        if (j->listed != count)
            list_nodes(c, j->leaves, j->first_step, tree, 1, HEIGHT, skip, count, j->blocks);
        j->listed = count;
        memcpy(c->nodes[0], j->top[skip % 2] + 16 * part, 16);
        evaluate_chunk(path, j, client, tree, sum + 16 * j->blocks * CAP * part);
    }
}

/* Ask for one client's keys of some trees ahead of time: they are used once, a few kB in a place
 * of their own, too few for the machine to notice that it could have fetched them. */
static void fetch_ahead(job *j, size_t client, size_t tree, size_t trees) {
    const uint8_t *roots = j->roots[client] + 16 * tree;
    const uint8_t *steps = j->steps[client] + 32 * (size_t)j->first_step[tree];
    const uint8_t *finals = j->finals[client] + 16 * j->blocks * tree;
    const size_t size = 32 * (size_t)(j->first_step[tree + trees] - j->first_step[tree]);
    for (size_t at = 0; at < 16 * trees; at += 64) __builtin_prefetch(roots + at);
    j->later = (ahead){steps, steps + size};
    for (size_t at = 0; at < 16 * j->blocks * trees; at += 64) __builtin_prefetch(finals + at);
}

/* How many of the trees from `tree` on are worked on together; their lists are then set up. */
static size_t take_trees(job *j, size_t tree, size_t end) {
    int64_t depth = j->depths[tree];
    size_t count = 1, leaves = (size_t)j->leaves[tree];
    j->listed = 0;
    if (depth > HEIGHT) return 1;
    for (; tree + count < end && j->depths[tree + count] == depth; count++) {
        leaves += (size_t)j->leaves[tree + count];
        if (leaves > CHUNK) break;
    }
    list_nodes(j->c, j->leaves, j->first_step, tree, count, (unsigned)depth, 0, 0, j->blocks);
    return count;
}

/* sum += one client's leaves of these trees; what it or the next one needs after them is asked for. */
static void evaluate_some(int path, job *j, size_t client, size_t tree, size_t count, size_t end,
                          uint8_t *sum) {
    size_t next = tree + count, left = end - next;
    if (client + 1 < j->clients) fetch_ahead(j, client + 1, tree, count);
    else if (left) fetch_ahead(j, 0, next, left < count ? left : count);
    if (j->depths[tree] > HEIGHT) {
        evaluate_large(path, j, client, tree, sum);
        return;
    }
    memcpy(j->c->nodes[0], j->roots[client] + 16 * tree, 16 * count);
    evaluate_chunk(path, j, client, tree, sum);
}

/* Round keys and room to work in, for these trees; `extra` bytes of it for the caller's own use. */
static AES_TARGET int begin_job(job *j, const uint8_t *keys, size_t begin, size_t end, size_t extra,
                                uint8_t **own) {
    size_t most = 0;
    for (size_t i = begin; i < end; i++)
        if ((size_t)j->leaves[i] > most) most = (size_t)j->leaves[i];
    size_t top = 16 * (most / CAP + 1 + 2 * SLACK), row = 16 * j->blocks;
    cipher *ciphers = aligned_alloc(64, (j->clients * sizeof(cipher) + 63) / 64 * 64);
    chunk *c = aligned_alloc(64, (sizeof(chunk) + 63) / 64 * 64);
    uint8_t *rest = calloc(1, 2 * top + 33 * row + extra);
    j->memory[0] = ciphers, j->memory[1] = c, j->memory[2] = rest;
    if (!ciphers || !c || !rest) return 1;
    memset(c->nodes, 0, sizeof c->nodes);
    for (size_t i = 0; i < j->clients; i++) expand_key(ciphers[i].round_key, keys + 16 * i);
    j->ciphers = ciphers, j->c = c;
    j->top[0] = rest, j->top[1] = rest + top;
    j->tweaks = rest + 2 * top, j->buffer = j->tweaks + row;
    if (own) *own = j->buffer + 32 * row;
    j->later = (ahead){keys, keys};
    return 0;
}

static void end_job(job *j) {
    if (j->memory[0]) wipe(j->memory[0], j->clients * sizeof(cipher));
    if (j->memory[1]) wipe(j->memory[1], sizeof(chunk));
    if (j->tweaks) wipe(j->memory[2], (size_t)(j->tweaks - (uint8_t *)j->memory[2]));
    for (int i = 0; i < 3; i++) free(j->memory[i]);
}

EXPORT int tessera_dpf_evaluate(int path, size_t clients, const uint8_t *keys,
                                const uint8_t *const *roots, const uint8_t *const *steps,
                                const uint8_t *const *finals, size_t begin, size_t end,
                                const int64_t *leaves, const int64_t *first_leaf,
                                const int64_t *depths, const int64_t *first_step, int kind,
                                size_t blocks, uint32_t epoch, uint8_t *sum) {
    job j = {.clients = clients, .blocks = blocks, .roots = roots, .steps = steps,
             .finals = finals, .leaves = leaves, .first_leaf = first_leaf, .depths = depths,
             .first_step = first_step, .kind = kind, .epoch = epoch};
    int failed = begin_job(&j, keys, begin, end, 0, NULL);
    for (size_t tree = begin, count; !failed && tree < end; tree += count) {
        count = take_trees(&j, tree, end);
        for (size_t client = 0; client < clients; client++)
            evaluate_some(path, &j, client, tree, count, end,
                          sum + 16 * blocks * (size_t)first_leaf[tree]);
    }
    if (!failed && kind == KIND_61)
        for (size_t i = 16 * blocks * (size_t)first_leaf[begin];
             i < 16 * blocks * (size_t)first_leaf[end]; i += 8) {
            uint64_t word;
            memcpy(&word, sum + i, 8);
            word = reduce61(word);
            memcpy(sum + i, &word, 8);
        }
    end_job(&j);
    return failed;
}

/* Polynomials over GF(2): the sum of word * factor, for both numbers of a factor. */
static __attribute__((target("pclmul,sse2"))) void multiply(const uint8_t *words,
                                                            const uint8_t *factors, size_t stride,
                                                            size_t count, uint8_t *to) {
    __m128i first = _mm_setzero_si128(), second = first;
    for (size_t i = 0; i < count; i++) {
        __m128i word = _mm_loadl_epi64((const __m128i *)(words + 8 * i));
        __m128i both = _mm_loadu_si128((const __m128i *)(factors + stride * i));
        first = _mm_xor_si128(first, _mm_clmulepi64_si128(word, both, 0x00));
        second = _mm_xor_si128(second, _mm_clmulepi64_si128(word, both, 0x10));
    }
    _mm_storeu_si128((__m128i *)to, first);
    _mm_storeu_si128((__m128i *)(to + 16), second);
}

/* A client's bits of a tree are used while they are in the cache, and never all kept. */
EXPORT int tessera_dpf_answer(int path, size_t clients, const uint8_t *keys,
                              const uint8_t *const *roots, const uint8_t *const *steps,
                              const uint8_t *const *finals, size_t trees, const int64_t *leaves,
                              const int64_t *first_leaf, const int64_t *depths,
                              const int64_t *first_step, int spacing, const int64_t *starts,
                              const uint8_t *table, size_t row_bytes, const uint8_t *factors,
                              size_t factor_bytes, uint8_t *rows, uint8_t *products) {
    job j = {.clients = clients, .blocks = 1, .roots = roots, .steps = steps, .finals = finals,
             .leaves = leaves, .first_leaf = first_leaf, .depths = depths,
             .first_step = first_step, .kind = KIND_XOR};
    size_t most = CHUNK;
    for (size_t i = 0; i < trees; i++)
        if ((size_t)leaves[i] > most) most = (size_t)leaves[i];
    uint8_t *bits;
    int failed = begin_job(&j, keys, 0, trees, 16 * most, &bits);
    for (size_t tree = 0, count; !failed && tree < trees; tree += count) {
        count = take_trees(&j, tree, trees);
        size_t size = 16 * (size_t)(first_leaf[tree + count] - first_leaf[tree]);
        for (size_t client = 0; client < clients; client++) {
            memset(bits, 0, size);
            evaluate_some(path, &j, client, tree, count, trees, bits);
            for (size_t t = tree; t < tree + count; t++) {
                const uint8_t *own = bits + 16 * (size_t)(first_leaf[t] - first_leaf[tree]);
                size_t some = (size_t)(starts[t + 1] - starts[t]), at = client * trees + t;
                (path == AESNI ? xor_some_128 : xor_some_256)(
                    own, spacing, table + row_bytes * (size_t)starts[t], some, row_bytes,
                    rows + row_bytes * at);
                if (products)
                    multiply(own, factors + factor_bytes * (size_t)starts[t], factor_bytes, some,
                             products + 32 * at);
            }
        }
    }
    if (!failed) wipe(bits, 16 * most);
    end_job(&j);
    return failed;
}

#endif /* TESSERA_NATIVE */

#else /* TESSERA_WIDTH: one path */

#include "width.h"

/* Control bits of the blocks in a register, as masks. */
#if TESSERA_WIDTH == 512
#define HIGHEST(x) _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xff)
#else
#define HIGHEST(x) OP(shuffle_epi32)(x, 0xff)
#endif
#define CONTROL(x) OP(srai_epi32)(HIGHEST(x), 31)

/* Blocks from anywhere, one for each lane. */
#if TESSERA_WIDTH == 128
#define FETCH(base, at, i) load((base) + 16 * (size_t)(at)[i])
#elif TESSERA_WIDTH == 256
#define FETCH(base, at, i)                                                              \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load((base) + 16 * (size_t)(at)[i])), \
                            load((base) + 16 * (size_t)(at)[(i) + 1]), 1)
#else
#define FETCH_TWO(base, at, i)                                                          \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load((base) + 16 * (size_t)(at)[i])), \
                            load((base) + 16 * (size_t)(at)[(i) + 1]), 1)
#define FETCH(base, at, i)                                                              \
    _mm512_inserti64x4(_mm512_castsi256_si512(FETCH_TWO(base, at, i)),                  \
                       FETCH_TWO(base, at, (i) + 2), 1)
#endif

/* A register's blocks from and to places `step` bytes apart. */
#if TESSERA_WIDTH == 128
#define JOINED(at, step) load(at)
#define SPLIT(at, step, x) store(at, x)
#elif TESSERA_WIDTH == 256
#define JOINED(at, step) \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load(at)), load((at) + (step)), 1)
#define SPLIT(at, step, x)                                            \
    {                                                                 \
        const REG out = x;                                            \
        store(at, _mm256_castsi256_si128(out));                       \
        store((at) + (step), _mm256_extracti128_si256(out, 1));       \
    }
#else
#define JOINED_TWO(at, step) \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load(at)), load((at) + (step)), 1)
#define JOINED(at, step)                                                  \
    _mm512_inserti64x4(_mm512_castsi256_si512(JOINED_TWO(at, step)),      \
                       JOINED_TWO((at) + 2 * (step), step), 1)
#define SPLIT(at, step, x)                                                \
    {                                                                     \
        const REG out = x;                                                \
        store(at, _mm512_castsi512_si128(out));                           \
        store((at) + (step), _mm512_extracti32x4_epi32(out, 1));          \
        store((at) + 2 * (step), _mm512_extracti32x4_epi32(out, 2));      \
        store((at) + 3 * (step), _mm512_extracti32x4_epi32(out, 3));      \
    }
#endif

/* Register i of a batch of parents: their nodes twice, their steps, and where children go. */
#if TESSERA_WIDTH == 128
#define PARENTS 4
#define NODES(i) load(src + 16 * (p + (i) / 2))
#define STEPS(i) load(steps + 32 * (size_t)step[p + (i) / 2] + 16 * ((i) % 2))
#define SIDES(i) ((i) % 2 ? right : left)
#define PUT(i, x) store(dst + 16 * ((size_t)child[p + (i) / 2] + (i) % 2), x)
#elif TESSERA_WIDTH == 256
#define PARENTS 8
#define NODES(i) _mm256_broadcastsi128_si256(load(src + 16 * (p + (i))))
#define STEPS(i) LOAD(steps + 32 * (size_t)step[p + (i)])
#define SIDES(i) sides
#define PUT(i, x) STORE(dst + 16 * (size_t)child[p + (i)], x)
#else
#define PARENTS 16
#define TWICE(at) _mm256_broadcastsi128_si256(load(at))
#define PAIR(at) _mm256_loadu_si256((const __m256i *)(at))
#define BOTH(a, b) _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)
#define NODES(i) BOTH(TWICE(src + 16 * (p + 2 * (i))), TWICE(src + 16 * (p + 2 * (i) + 1)))
#define STEPS(i)                                         \
    BOTH(PAIR(steps + 32 * (size_t)step[p + 2 * (i)]),   \
         PAIR(steps + 32 * (size_t)step[p + 2 * (i) + 1]))
#define SIDES(i) sides
#define PUT(i, x)                                                                          \
    _mm256_storeu_si256((__m256i *)(dst + 16 * (size_t)child[p + 2 * (i)]),                \
                        _mm512_castsi512_si256(x));                                        \
    _mm256_storeu_si256((__m256i *)(dst + 16 * (size_t)child[p + 2 * (i) + 1]),            \
                        _mm512_extracti64x4_epi64(x, 1))
#endif

/* The rounds of one batch, and between them, register by register, what is left to do for the batch
 * before it: a core cannot look far enough ahead to mix the two by itself, and AES alone leaves
 * half of it idle. */
#define ROUND_WITH(r, work)                            \
    {                                                  \
        const REG key = SPREAD(k->round_key[r]);       \
        EIGHT(ONE_ROUND)                               \
        work                                           \
    }
#define ENCRYPT_WITH(work)                                                            \
    ROUND_WITH(1, work(0)) ROUND_WITH(2, work(1)) ROUND_WITH(3, work(2))              \
    ROUND_WITH(4, work(3)) ROUND_WITH(5, work(4)) ROUND_WITH(6, work(5))              \
    ROUND_WITH(7, work(6)) ROUND_WITH(8, work(7)) ROUND_WITH(9, )                     \
    {                                                                                 \
        const REG key = SPREAD(k->round_key[ROUNDS]);                                 \
        EIGHT(ONE_LAST)                                                               \
    }
#define HOLD(i) held[i] = x##i;

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

/* Children of all parents of a level: H(s, side) ^ t * step. */
static NOINLINE TARGET void NAME(grow_level)(const cipher *k, const uint8_t *src, uint8_t *dst,
                                             const uint32_t *child, const uint32_t *step,
                                             size_t parents, const uint8_t *steps,
                                             ahead *later) {
    ahead next = *later;
    const __m128i left_tweak = _mm_xor_si128(tweak_of(LEFT, 0, 0), k->round_key[0]);
    const __m128i right_tweak = _mm_xor_si128(tweak_of(RIGHT, 0, 0), k->round_key[0]);
#if TESSERA_WIDTH == 128
    const REG left = left_tweak, right = right_tweak;
#elif TESSERA_WIDTH == 256
    const REG sides = _mm256_inserti128_si256(_mm256_castsi128_si256(left_tweak), right_tweak, 1);
#else
    const __m256i half = _mm256_inserti128_si256(_mm256_castsi128_si256(left_tweak), right_tweak, 1);
    const REG sides = _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
#endif
    REG held[8];
    if (!parents) return;
#define ONE_NODE(i) REG x##i = XOR(NODES(i), SIDES(i));
#define ONE_CHILD(i)                                                                   \
    {                                                                                  \
        const REG s = NODES(i);                                                        \
        const REG child_node = XOR(XOR(held[i], s), AND(STEPS(i), CONTROL(s)));        \
        PUT(i, child_node);                                                            \
    }
    size_t p = 0;
    {
        EIGHT(ONE_NODE)
        ENCRYPT(k->round_key)
        EIGHT(HOLD)
    }
    for (; p + PARENTS < parents; ) {
        p += PARENTS;
        EIGHT(ONE_NODE)
        p -= PARENTS;
        ASK(&next)
        ENCRYPT_WITH(ONE_CHILD)
        p += PARENTS;
        EIGHT(HOLD)
    }
    EIGHT(ONE_CHILD)
    ASK(&next)
    *later = next;
#undef ONE_NODE
#undef ONE_CHILD
}

INLINE TARGET REG NAME(add128)(REG a, REG b) {
    const REG sum = OP(add_epi64)(a, b);
    /* the carry out of each half: both top bits set, or one of them and not the sum's */
    const REG carry = OP(srli_epi64)(OR(AND(a, b), AND_NOT(OR(a, b), sum)), 63);
#if TESSERA_WIDTH == 128
    return _mm_add_epi64(sum, _mm_slli_si128(carry, 8));
#else
    return OP(add_epi64)(sum, OP(bslli_epi128)(carry, 8));
#endif
}

/* sum + value + final, for words of one kind. */
INLINE TARGET REG NAME(total)(REG sum, REG value, REG final, int kind) {
    switch (kind) {
    case KIND_XOR: return XOR(sum, XOR(value, final));
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

/* Leaves of one block each. */
INLINE TARGET void NAME(add_leaves_of)(const cipher *k, const chunk *c, const uint8_t *nodes,
                                       const uint8_t *finals, uint8_t *sum, REG tweak, int kind,
                                       ahead *later) {
    ahead next = *later;
    const size_t batch = 8 * REG_BYTES, bytes = 16 * c->leaves, whole = bytes / batch * batch;
    uint8_t rest[8 * REG_BYTES] __attribute__((aligned(64))) = {0};
    REG held[8];
    size_t at = 0;
    uint8_t *to = sum;
#define ONE_LEAF(i) REG x##i = XOR(LOAD(nodes + at + (i) * REG_BYTES), tweak);
#define ONE_SUM(i)                                                                            \
    {                                                                                         \
        const REG s = LOAD(nodes + at + (i) * REG_BYTES);                                     \
        const REG final = AND(FETCH(finals, c->finals_at + at / 16, (i) * LANES), CONTROL(s)); \
        STORE(to + (i) * REG_BYTES,                                                           \
              NAME(total)(LOAD(to + (i) * REG_BYTES), XOR(held[i], s), final, kind));         \
    }
    /* the last ones go by way of a buffer: beyond them is another tree's sum */
    memcpy(rest, sum + whole, bytes - whole);
    if (!whole) to = rest;
    {
        EIGHT(ONE_LEAF)
        ENCRYPT(k->round_key)
        EIGHT(HOLD)
    }
    while (at + batch < bytes) {
        at += batch;
        EIGHT(ONE_LEAF)
        at -= batch;
        ASK(&next)
        ENCRYPT_WITH(ONE_SUM)
        at += batch;
        to = at < whole ? sum + at : rest;
        EIGHT(HOLD)
    }
    EIGHT(ONE_SUM)
    memcpy(sum + whole, rest, bytes - whole);
#undef ONE_LEAF
#undef ONE_SUM
}

static NOINLINE TARGET void NAME(add_leaves)(const cipher *k, const chunk *c, const uint8_t *nodes,
                                             const uint8_t *finals, uint8_t *sum, __m128i tweak,
                                             int kind, ahead *later) {
    const REG whitened = SPREAD(_mm_xor_si128(tweak, k->round_key[0]));
    switch (kind) {
    case KIND_XOR: NAME(add_leaves_of)(k, c, nodes, finals, sum, whitened, KIND_XOR, later); break;
    case KIND_32: NAME(add_leaves_of)(k, c, nodes, finals, sum, whitened, KIND_32, later); break;
    case KIND_64: NAME(add_leaves_of)(k, c, nodes, finals, sum, whitened, KIND_64, later); break;
    case KIND_61: NAME(add_leaves_of)(k, c, nodes, finals, sum, whitened, KIND_61, later); break;
    case KIND_128: NAME(add_leaves_of)(k, c, nodes, finals, sum, whitened, KIND_128, later); break;
    }
}

/* Registers of a batch that goes over rows of several blocks: of each row `each` registers, from
 * byte `inside` on. With each = 0 a register has one block of LANES rows. */
#define ROWS_PER_BATCH(each) ((each) ? 8 / (each) : 8 * LANES)
#define ROW(i) ((each) ? (i) / (each) : (i) * LANES)
#define INSIDE(i) ((each) ? (i) % (each) * REG_BYTES : 0)

INLINE TARGET REG NAME(of_rows)(const uint8_t *blocks, int each) {
    return each ? SPREAD(load(blocks)) : LOAD(blocks);
}

INLINE TARGET void NAME(add_columns)(const cipher *k, const chunk *c, const uint8_t *nodes,
                                     const uint8_t *masks, const uint8_t *tweaks,
                                     const uint8_t *finals, uint8_t *sum, size_t row_bytes,
                                     uint8_t *buffer, int kind, int each) {
    const size_t rows = ROWS_PER_BATCH(each), whole = c->leaves / rows * rows;
    const uint32_t *finals_at = c->finals_at;
    REG held[8];
    size_t row = 0;
    uint8_t *to = whole ? sum : buffer;
#define TWEAK(i) (each ? LOAD(tweaks + INSIDE(i)) : SPREAD(load(tweaks)))
#define ONE_NODE(i) REG x##i = XOR(NAME(of_rows)(nodes + 16 * (row + ROW(i)), each), TWEAK(i));
#define ONE_SUM(i)                                                                            \
    {                                                                                         \
        const REG s = NAME(of_rows)(nodes + 16 * (row + ROW(i)), each);                       \
        const REG mask = NAME(of_rows)(masks + 16 * (row + ROW(i)), each);                    \
        if (each) {                                                                           \
            uint8_t *at = to + ROW(i) * row_bytes + INSIDE(i);                                \
            const REG final = LOAD(finals + 16 * (size_t)finals_at[row + ROW(i)] + INSIDE(i)); \
            STORE(at, NAME(total)(LOAD(at), XOR(held[i], s), AND(final, mask), kind));        \
        } else {                                                                              \
            const REG final = FETCH(finals, finals_at + row, ROW(i));                         \
            uint8_t *at = to + ROW(i) * row_bytes;                                            \
            SPLIT(at, row_bytes, NAME(total)(JOINED(at, row_bytes), XOR(held[i], s),          \
                                             AND(final, mask), kind));                        \
        }                                                                                     \
    }
    /* the last rows go by way of a buffer: beyond them is another tree's sum */
    const size_t last = c->leaves - whole, width = each ? (size_t)each * REG_BYTES : 16;
    const size_t tail = last ? row_bytes * (last - 1) + width : 0; /* of the last row no more */
    memcpy(buffer, sum + row_bytes * whole, tail);
    {
        EIGHT(ONE_NODE)
        ENCRYPT(k->round_key)
        EIGHT(HOLD)
    }
    while (row + rows < c->leaves) {
        row += rows;
        EIGHT(ONE_NODE)
        row -= rows;
        ENCRYPT_WITH(ONE_SUM)
        row += rows;
        to = row < whole ? to + rows * row_bytes : buffer;
        EIGHT(HOLD)
    }
    EIGHT(ONE_SUM)
    memcpy(sum + row_bytes * whole, buffer, tail);
#undef TWEAK
#undef ONE_NODE
#undef ONE_SUM
}

INLINE TARGET void NAME(add_rows_of)(const cipher *k, const chunk *c, const uint8_t *nodes,
                                     const uint8_t *finals, uint8_t *sum, size_t blocks,
                                     const uint8_t *tweaks, uint8_t *buffer, int kind) {
    uint8_t masks[16 * (CAP + SLACK)] __attribute__((aligned(64)));
    const size_t row_bytes = 16 * blocks;
    size_t inside = 0;
    for (size_t at = 0; at < 16 * c->leaves + 8 * REG_BYTES; at += REG_BYTES)
        STORE(masks + at, CONTROL(LOAD(nodes + at)));
#define COLUMNS(bytes, each)                                                                  \
    for (; inside + (bytes) <= row_bytes; inside += (bytes))                                  \
        NAME(add_columns)(k, c, nodes, masks, tweaks + inside, finals + inside, sum + inside, \
                          row_bytes, buffer, kind, each);
    COLUMNS(8 * REG_BYTES, 8)
    COLUMNS(4 * REG_BYTES, 4)
    COLUMNS(2 * REG_BYTES, 2)
    COLUMNS(REG_BYTES, 1)
#if TESSERA_WIDTH > 128
    COLUMNS(16, 0)
#endif
#undef COLUMNS
}

static NOINLINE TARGET void NAME(add_rows)(const cipher *k, const chunk *c, const uint8_t *nodes,
                                           const uint8_t *finals, uint8_t *sum, size_t blocks,
                                           uint32_t epoch, uint8_t *tweaks, uint8_t *buffer,
                                           int kind) {
    for (size_t block = 0; block < blocks; block++)
        store(tweaks + 16 * block,
              _mm_xor_si128(tweak_of(CONVERT, (uint32_t)block, epoch), k->round_key[0]));
    switch (kind) {
    case KIND_32: NAME(add_rows_of)(k, c, nodes, finals, sum, blocks, tweaks, buffer, KIND_32); break;
    case KIND_64: NAME(add_rows_of)(k, c, nodes, finals, sum, blocks, tweaks, buffer, KIND_64); break;
    case KIND_61: NAME(add_rows_of)(k, c, nodes, finals, sum, blocks, tweaks, buffer, KIND_61); break;
    case KIND_128: NAME(add_rows_of)(k, c, nodes, finals, sum, blocks, tweaks, buffer, KIND_128); break;
    }
}

#if TESSERA_WIDTH != 512
/* Some registers of every row, XORed where the row's bit is set. */
INLINE TARGET void NAME(xor_columns)(const uint8_t *bits, int spacing, const uint8_t *row,
                                     size_t count, size_t row_bytes, uint8_t *to, int columns) {
    REG sum[4] = {OP(set1_epi32)(0), OP(set1_epi32)(0), OP(set1_epi32)(0), OP(set1_epi32)(0)};
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++, row += row_bytes) {
        if (spacing == 64 || i % 64 == 0) memcpy(&word, bits + i * (size_t)spacing / 8, 8);
        const REG mask = OP(set1_epi64x)(-(long long)(word & 1));
        word >>= 1;
        _Pragma("GCC unroll 4") for (int c = 0; c < columns; c++)
            sum[c] = XOR(sum[c], AND(LOAD(row + c * REG_BYTES), mask));
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < columns; c++) STORE(to + c * REG_BYTES, sum[c]);
}

/* to = the XOR of the rows whose bit is set; rows are whole multiples of 32 bytes. */
static NOINLINE TARGET void NAME(xor_some)(const uint8_t *bits, int spacing, const uint8_t *rows,
                                           size_t count, size_t row_bytes, uint8_t *to) {
    size_t at = 0;
#define COLUMNS(n)                                                                               \
    for (; at + (n) * REG_BYTES <= row_bytes; at += (n) * REG_BYTES)                             \
        spacing == 64 ? NAME(xor_columns)(bits, 64, rows + at, count, row_bytes, to + at, n)     \
                      : NAME(xor_columns)(bits, 1, rows + at, count, row_bytes, to + at, n);
    COLUMNS(4)
    COLUMNS(3)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}
#endif

#include "width.h"
#undef ROUND_WITH
#undef ENCRYPT_WITH
#undef HOLD
#undef HIGHEST
#undef CONTROL
#undef FETCH
#undef FETCH_TWO
#undef JOINED
#undef JOINED_TWO
#undef SPLIT
#undef ROWS_PER_BATCH
#undef ROW
#undef INSIDE
#undef PARENTS
#undef NODES
#undef STEPS
#undef SIDES
#undef PUT
#undef TWICE
#undef PAIR
#undef BOTH

#endif
