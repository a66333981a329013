/* The sum of a lag model over histories, and its gradient: what `lags.py` beside it says in words.

   rows (K, width) and lags (length, width) are floats, ids (n, length) places of rows, below 0 where
   there is none. Called through ctypes; the caller has checked every place. */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BY_CPU
#endif

enum { LANES = 16 }; /* columns that are summed up in registers */

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

/* An empty module, so that setuptools builds and ships the library like any extension. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lags",
                                    "Sums over histories; loaded through ctypes.",
                                    -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lags(void) { return PyModule_Create(&module); }
