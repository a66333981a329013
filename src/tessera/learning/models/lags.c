/* A lag model's sums over histories, its softmax, and their gradients: what `lags.py` beside it
   says in words.

   rows (K, width) and lags (length, width) are floats, ids (n, length) places of rows, below 0 where
   there is none. Called through ctypes; the caller has checked every place. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BY_CPU
#endif

#define LANES 16 /* columns that are summed up in registers */

BY_CPU void tessera_lag_sums(const float *restrict rows, const int64_t *restrict ids,
                             const float *restrict lags, size_t n, size_t length, size_t width,
                             float *restrict out)
{
    for (size_t b = 0; b < n; b++, ids += length, out += width) {
        size_t w = 0;
        for (; w + LANES <= width; w += LANES) {
            float sum[LANES] = {0};
            for (size_t t = 0; t < length; t++) {
                if (ids[t] < 0)
                    continue;
                const float *row = rows + (size_t)ids[t] * width + w, *lag = lags + t * width + w;
                for (int j = 0; j < LANES; j++)
                    sum[j] += row[j] * lag[j];
            }
            for (int j = 0; j < LANES; j++)
                out[w + j] = sum[j];
        }
        for (; w < width; w++) {
            float sum = 0;
            for (size_t t = 0; t < length; t++)
                if (ids[t] >= 0)
                    sum += rows[(size_t)ids[t] * width + w] * lags[t * width + w];
            out[w] = sum;
        }
    }
}

/* `up` (n, width) is the gradient of the sums; of_rows and of_lags are added to. */
BY_CPU void tessera_lag_gradients(const float *restrict rows, const int64_t *restrict ids,
                                  const float *restrict lags, size_t n, size_t length, size_t width,
                                  const float *restrict up, float *restrict of_rows,
                                  float *restrict of_lags)
{
    for (size_t b = 0; b < n; b++, ids += length, up += width)
        for (size_t t = 0; t < length; t++) {
            if (ids[t] < 0)
                continue;
            const float *row = rows + (size_t)ids[t] * width, *lag = lags + t * width;
            float *to_row = of_rows + (size_t)ids[t] * width, *to_lag = of_lags + t * width;
            for (size_t w = 0; w < width; w++) {
                to_row[w] += up[w] * lag[w];
                to_lag[w] += up[w] * row[w];
            }
        }
}

/* A step of gradient descent: `gradient` becomes what it changes `values` by; whether all of that is
   finite. */
BY_CPU int tessera_lag_step(const float *restrict values, float *restrict gradient, size_t n,
                            float decay, float rate)
{
    int32_t flaw = 0;
    for (size_t i = 0; i < n; i++) {
        float delta = -rate * (gradient[i] + decay * values[i]);
        uint32_t bits;
        memcpy(&bits, &delta, sizeof bits);
        flaw |= (bits & 0x7f800000u) == 0x7f800000u;
        gradient[i] = delta;
    }
    return !flaw;
}

/* ---- softmax -------------------------------------------------------------------------------------

   The same for vectors of three lengths; the longest that the CPU has is taken. */

enum {
    TOGETHER = 4, /* rows of one factor of a product whose sums are in registers */
    GROUPS = 3,   /* vectors of examples */
    COLUMNS = 2,  /* vectors of columns */
    MOST_EXAMPLES = 16 * GROUPS
};

#pragma GCC diagnostic ignored "-Wpsabi" /* of functions that return vectors: all are inlined */
#undef LANES
#define LANES 4
#define NAME softmax_4
#define TARGET
#include "softmax.h"

#if defined(__x86_64__) && defined(__GNUC__)
#undef LANES
#undef NAME
#undef TARGET
#define LANES 8
#define NAME softmax_8
#define TARGET __attribute__((target("avx2,fma")))
#include "softmax.h"

#undef LANES
#undef NAME
#undef TARGET
#define LANES 16
#define NAME softmax_16
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#include "softmax.h"
#endif

/* Losses (n) of a softmax, and the gradient of their mean: of h (n, width) into `up`, of rows and
   biases added to of_rows and of_bias. Candidates are rows of finite weight, which is added to their
   logits; with `beside` each example's target is one more, without a weight, and else it is among
   them. `which` has room for k places, `room` for (k + width) * tessera_lag_examples() floats. */
void tessera_lag_softmax(const float *rows, const float *bias, const float *weights, size_t k,
                         size_t width, const float *h, const int64_t *target, size_t n, int beside,
                         float *losses, float *up, float *of_rows, float *of_bias, int32_t *which,
                         float *room)
{
    void (*longest)(const float *, const float *, const float *, size_t, size_t, const float *,
                    const int64_t *, size_t, int, float *, float *, float *, float *, int32_t *,
                    float *) = softmax_4;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        longest = softmax_8;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        longest = softmax_16;
#endif
    longest(rows, bias, weights, k, width, h, target, n, beside, losses, up, of_rows, of_bias, which,
            room);
}

size_t tessera_lag_examples(void) { return MOST_EXAMPLES; }

/* An empty module, so that setuptools builds and ships the library like any extension. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lags",
                                    "Sums over histories; loaded through ctypes.",
                                    -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lags(void) { return PyModule_Create(&module); }
