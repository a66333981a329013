/* Trees of point functions, grown for one client after the other: what dpf.c does and others use.
 *
 * points.py says how trees and keys are laid out. Trees of a set, side by side, and tiles of large
 * trees come to a `visitor` as blocks of nodes, one for each leaf. */
#ifndef TESSERA_TREES_H
#define TESSERA_TREES_H

#include "packed.h"
#include "words.h"

#ifdef TESSERA_NATIVE

#define HIDDEN __attribute__((visibility("hidden")))
#define SLACK 32 /* blocks that a batch may touch beyond the end, on the widest path */

typedef struct {
    __m128i round_key[ROUNDS + 1];
} cipher;

/* `Trees` of points.py, array by array. */
typedef struct {
    const int64_t *leaves, *depths, *first_leaf, *first_step, *set_first, *set_size;
    int64_t count;
} forest;

/* `LeafShape` of points.py. */
typedef struct {
    int64_t kind, rows, words, bits;
} leaf_shape;

INLINE size_t word_bytes_of(const leaf_shape *s) {
    return s->kind == KIND_61 ? 8 : s->kind == KIND_XOR ? 16 : (size_t)s->kind;
}

INLINE size_t blocks_of(const leaf_shape *s) {
    size_t row = (size_t)s->words * word_bytes_of(s);
    return s->kind == KIND_XOR || row <= 16 ? 1 : (row + 15) / 16;
}

/* Words of up to 24 bits leave a byte of each 32 bits over: every fourth block of a row is made of
 * those of the three before it, and not drawn from AES. */
#define SHORT_BITS 24
INLINE int is_short(const leaf_shape *s) {
    return s->kind == KIND_32 && s->bits <= SHORT_BITS && blocks_of(s) > 3;
}

/* Nodes of a level in a tree. */
INLINE size_t nodes_at(size_t leaves, size_t depth, size_t level) {
    return (leaves + ((size_t)1 << (depth - level)) - 1) >> (depth - level);
}

/* The number of a tree's step for a level. */
INLINE size_t step_at(const forest *f, size_t tree, size_t level) {
    size_t first = (size_t)f->set_first[tree];
    return (size_t)f->first_step[first] + level * (size_t)f->set_size[tree] + tree - first;
}

INLINE AES_TARGET __m128i load(const uint8_t *from) {
    return _mm_loadu_si128((const __m128i *)from);
}

INLINE AES_TARGET void store(uint8_t *to, __m128i x) { _mm_storeu_si128((__m128i *)to, x); }

/* (purpose, block, epoch) -> tweak. */
enum purpose { GROW = 0, CONVERT = 1, TAG = 2 };
INLINE AES_TARGET __m128i tweak_of(enum purpose purpose, uint32_t block, uint32_t epoch) {
    return _mm_set_epi64x((long long)((uint64_t)purpose << 56 | epoch),
                          (long long)((uint64_t)block << 32));
}

/* Memory to be asked for ahead of its use, a line of each with every batch: all at once would
 * stall. */
#define STREAMS 4
typedef struct {
    const uint8_t *at[STREAMS];
    size_t step[STREAMS], lines;
} ahead;

/* Consecutive leaves of one tree, and where their nodes are: block `local` and every `stride`-th. */
typedef struct {
    size_t tree, first, count, local, stride;
} piece;

/* Some leaves of some trees, the same for all clients. */
typedef struct {
    size_t pieces, leaves, trees; /* trees: side by side, so that finals repeat after as many */
    piece *piece;
} tile;

typedef struct job job;

/* What is done with the nodes of a tile: before the first client, for each, and after the last. */
typedef struct {
    void (*begin)(job *, const tile *);
    void (*use)(job *, const tile *, size_t client, const uint8_t *nodes, const uint8_t *finals,
                size_t final_plane);
    void (*end)(job *, const tile *);
} visitor;

struct job {
    int path;
    size_t clients;
    const forest *f;
    leaf_shape shape;
    uint32_t epoch;
    const uint8_t *const *roots, *const *keys; /* of each client: root nodes; steps and finals */
    size_t key_bytes;                          /* of all steps and finals */
    const visitor *visit;
    void *own;      /* of the visitor */
    uint8_t *leaves; /* of all trees, where sums go; or the rows, where there are owners */
    const uint32_t *owners; /* of every slot of leaf space: its row */
    size_t row_bytes;       /* of a row, in memory */
    int minus;              /* whether sums are taken off the rows */
    size_t most;    /* leaves of a tile */
    size_t beyond;  /* blocks that the visitor may read beyond them */
    /* set up by begin_job: */
    size_t blocks;
    cipher *ciphers;
    uint8_t *nodes, *sums, *steps, *finals, *tops, *crowd;
    size_t plane;                         /* bytes of a plane of `sums`: one block of every leaf */
    size_t together, top_bytes, tops_size; /* clients of which tops are kept, and their size */
    piece *piece;
    unpacking unpacking; /* of last corrections whose words are short */
    ahead later;
    size_t memory_bytes;
    void *memory;
};

/* Memory and round keys for trees begin .. end; not 0 if there is no memory. */
HIDDEN int begin_job(job *, const uint8_t *ciphers, size_t begin, size_t end);
HIDDEN void visit_trees(job *, size_t begin, size_t end);
HIDDEN void end_job(job *);
/* Sums of a tile: into planes and back to leaves or rows, and those of a field reduced at the end. */
HIDDEN size_t tile_leaves(const leaf_shape *);
HIDDEN void load_sums(job *, const tile *);
HIDDEN void store_sums(job *, const tile *);
HIDDEN void reduce_sums(const job *, size_t begin, size_t end);
HIDDEN void add_values(job *, const tile *, size_t client, const uint8_t *nodes,
                       const uint8_t *finals, size_t final_plane);
/* Selectors of a tile, which nothing is added to: in the first plane of `sums`. */
HIDDEN void set_values(job *, const tile *, size_t client, const uint8_t *nodes,
                       const uint8_t *finals);

#endif
#endif
