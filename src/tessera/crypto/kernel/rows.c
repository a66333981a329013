/* What point functions need besides trees: sums of rows from leaf space, and cuckoo placement.
 *
 * points.py says what each function promises and checks every argument before a pointer comes
 * here; points_reference.py is the twin in NumPy. */
#include "words.h"

#ifdef TESSERA_NATIVE

#include <stdlib.h>

/* Sums of rows from leaf space: leaves in order, each into its row. Rows are all over the memory, so
 * their places are asked for ahead of time. (To go by rows and pick up their leaves takes twice as
 * long: leaves are three times as many bytes.) */
#define AHEAD 128
INLINE void add_to_rows(const uint8_t *restrict leaves, size_t leaf_bytes, size_t slots,
                        const uint32_t *restrict owners, int kind, size_t row_bytes, int minus,
                        uint8_t *restrict out) {
    for (size_t i = 0; i < slots; i++) {
        const uint8_t *from = leaves + leaf_bytes * i;
        uint8_t *to = out + row_bytes * (size_t)owners[i];
        const uint8_t *later = out + row_bytes * (size_t)owners[i + AHEAD < slots ? i + AHEAD : i];
        for (size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(later + b, 1);
        add_words(to, from, row_bytes, kind, minus);
    }
}

EXPORT int tessera_dpf_to_rows(const uint8_t *leaves, size_t leaf_bytes, size_t slots,
                               const uint32_t *owners, int kind, size_t row_bytes, int minus,
                               uint8_t *out) {
#define AS(k, size)                                                                    \
    (minus ? add_to_rows(leaves, leaf_bytes, slots, owners, k, size, 1, out)           \
           : add_to_rows(leaves, leaf_bytes, slots, owners, k, size, 0, out))
    switch (kind) {
    case KIND_32: row_bytes == 4 ? AS(KIND_32, 4) : AS(KIND_32, row_bytes); break;
    case KIND_64: row_bytes == 8 ? AS(KIND_64, 8) : AS(KIND_64, row_bytes); break;
    case KIND_61: AS(KIND_61, row_bytes); break;
    default: row_bytes == 16 ? AS(KIND_128, 16) : AS(KIND_128, row_bytes); break;
    }
#undef AS
    return 0;
}

EXPORT int tessera_peel(size_t items, const int64_t *chosen, size_t bins, int64_t *placed) {
    typedef struct {
        uint32_t count, mixed; /* items that chose the bin, and their XOR */
    } bin;
    bin *table = calloc(bins, sizeof *table);
    uint32_t *touched = malloc((bins > 3 * items ? bins : 3 * items) * sizeof *touched);
    uint32_t *taken = malloc(items * sizeof *taken);
    int failed = !table || !touched || !taken;
    if (!failed) {
        for (size_t i = 0; i < 3 * items; i++) {
            table[chosen[i]].count++;
            table[chosen[i]].mixed ^= (uint32_t)(i / 3);
        }
        size_t candidates = bins;
        for (size_t b = 0; b < bins; b++) touched[b] = (uint32_t)b;
        while (candidates) {
            size_t gone = 0;
            for (size_t i = 0; i < candidates; i++) {
                uint32_t b = touched[i], item = table[b].mixed;
                if (table[b].count != 1) continue;
                if (placed[item] < 0) taken[gone++] = item;
                if (placed[item] < 0 || b < placed[item]) placed[item] = b;
            }
            candidates = 0;
            for (size_t i = 0; i < gone; i++)
                for (int c = 0; c < 3; c++) {
                    size_t b = (size_t)chosen[3 * (size_t)taken[i] + (size_t)c];
                    table[b].count--;
                    table[b].mixed ^= taken[i];
                    if (table[b].count == 1) touched[candidates++] = (uint32_t)b;
                }
        }
    }
    free(table);
    free(touched);
    free(taken);
    return failed;
}

#endif
