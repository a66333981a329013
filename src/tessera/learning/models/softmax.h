/* A softmax over the candidates of a client, and its gradient, with vectors of LANES floats; `lags.c`
   includes this once for each length, with NAME for what it calls the function and TARGET for the
   instructions that it may use.

   Logits are made for BLOCK examples at a time, candidate by candidate: what is said of examples is
   then a vector, and no sum goes across lanes. */

#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)
#define INLINE TARGET static inline __attribute__((always_inline))
#define vector JOIN(NAME, _vector)
#define words JOIN(NAME, _words)
#define load JOIN(NAME, _load)
#define keep JOIN(NAME, _keep)
#define larger JOIN(NAME, _larger)
#define exp_below_0 JOIN(NAME, _exp)
#define products JOIN(NAME, _products)
#define to_rows JOIN(NAME, _to_rows)
#define to_examples JOIN(NAME, _to_examples)
#define BLOCK (GROUPS * LANES)

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t words __attribute__((vector_size(4 * LANES)));

INLINE vector load(const float *from)
{
    vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void keep(float *to, vector from) { memcpy(to, &from, sizeof from); }

INLINE vector larger(vector a, vector b)
{
    words first = a > b;
    return (vector)(((words)a & first) | ((words)b & ~first));
}

/* exp of numbers from -87 to 0, smaller ones as -87: 2^k times a polynomial (Cephes). */
INLINE vector exp_below_0(vector x)
{
    const vector least = (vector){0} - 87.0f;
    words low = x < least;
    x = (vector)(((words)x & ~low) | ((words)least & low));
    words k = __builtin_convertvector(x * 1.44269504f - 0.5f, words); /* towards 0 */
    vector whole = __builtin_convertvector(k, vector);
    vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (vector)((k + 127) << 23);
}

/* p (count, BLOCK) = rows (those of `which`) times turned (width, BLOCK). */
INLINE void products(const float *restrict rows, const int32_t *restrict which, size_t count,
                     size_t width, const float *restrict turned, float *restrict p)
{
    for (size_t c = 0; c < count; c += TOGETHER) {
        vector sum[TOGETHER][GROUPS] = {0};
        const float *row[TOGETHER];
        size_t left = count - c < TOGETHER ? count - c : TOGETHER;
        for (size_t j = 0; j < TOGETHER; j++) /* where there are fewer, the last again */
            row[j] = rows + (size_t)which[c + (j < left ? j : left - 1)] * width;
        for (size_t w = 0; w < width; w++)
            for (int j = 0; j < TOGETHER; j++)
                for (int g = 0; g < GROUPS; g++)
                    sum[j][g] += row[j][w] * load(turned + w * BLOCK + g * LANES);
        for (size_t j = 0; j < left; j++)
            for (int g = 0; g < GROUPS; g++)
                keep(p + (c + j) * BLOCK + g * LANES, sum[j][g]);
    }
}

/* of_rows (those of `which`) += p (count, BLOCK) times h (n, width). */
INLINE void to_rows(const float *restrict p, const int32_t *restrict which, size_t count,
                    const float *restrict h, size_t n, size_t width, float *restrict of_rows)
{
    for (size_t c = 0; c < count; c += TOGETHER) {
        size_t left = count - c < TOGETHER ? count - c : TOGETHER, w = 0;
        const float *from[TOGETHER];
        for (size_t j = 0; j < TOGETHER; j++)
            from[j] = p + (c + (j < left ? j : left - 1)) * BLOCK;
        for (; w + COLUMNS * LANES <= width; w += COLUMNS * LANES) {
            vector sum[TOGETHER][COLUMNS] = {0};
            for (size_t b = 0; b < n; b++)
                for (int j = 0; j < TOGETHER; j++)
                    for (int g = 0; g < COLUMNS; g++)
                        sum[j][g] += from[j][b] * load(h + b * width + w + g * LANES);
            for (size_t j = 0; j < left; j++)
                for (int g = 0; g < COLUMNS; g++) {
                    float *to = of_rows + (size_t)which[c + j] * width + w + g * LANES;
                    keep(to, load(to) + sum[j][g]);
                }
        }
        for (; w < width; w++)
            for (size_t j = 0; j < left; j++)
                for (size_t b = 0; b < n; b++)
                    of_rows[(size_t)which[c + j] * width + w] += from[j][b] * h[b * width + w];
    }
}

/* up (n, width) += p' (BLOCK, count) times rows (those of `which`); of examples from n on p is 0. */
INLINE void to_examples(const float *restrict p, const int32_t *restrict which, size_t count,
                        const float *restrict rows, size_t n, size_t width, float *restrict up)
{
    for (size_t b = 0; b < n; b += TOGETHER) {
        size_t left = n - b < TOGETHER ? n - b : TOGETHER, w = 0;
        for (; w + COLUMNS * LANES <= width; w += COLUMNS * LANES) {
            vector sum[TOGETHER][COLUMNS] = {0};
            for (size_t c = 0; c < count; c++) {
                const float *row = rows + (size_t)which[c] * width + w;
                for (int j = 0; j < TOGETHER; j++)
                    for (int g = 0; g < COLUMNS; g++)
                        sum[j][g] += p[c * BLOCK + b + j] * load(row + g * LANES);
            }
            for (size_t j = 0; j < left; j++)
                for (int g = 0; g < COLUMNS; g++) {
                    float *to = up + (b + j) * width + w + g * LANES;
                    keep(to, load(to) + sum[j][g]);
                }
        }
        for (; w < width; w++)
            for (size_t j = 0; j < left; j++)
                for (size_t c = 0; c < count; c++)
                    up[(b + j) * width + w] +=
                        p[c * BLOCK + b + j] * rows[(size_t)which[c] * width + w];
    }
}

/* As `tessera_lag_softmax` says. */
TARGET static void NAME(const float *restrict rows, const float *restrict bias,
                        const float *restrict weights, size_t k, size_t width,
                        const float *restrict h, const int64_t *restrict target, size_t n,
                        int beside, float *restrict losses, float *restrict up,
                        float *restrict of_rows, float *restrict of_bias,
                        int32_t *restrict which, float *restrict room)
{
    size_t count = 0;
    float *turned = room, *p = room + width * BLOCK;
    for (size_t c = 0; c < k; c++)
        if (weights[c] > -INFINITY)
            which[count++] = (int32_t)c;
    memset(up, 0, n * width * sizeof *up);
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t some = n - start < BLOCK ? n - start : BLOCK;
        const float *own = h + start * width;
        float right[BLOCK] = {0}, most[BLOCK], total[BLOCK], share[BLOCK] = {0};
        memset(turned, 0, width * BLOCK * sizeof *turned);
        for (size_t b = 0; b < some; b++)
            for (size_t w = 0; w < width; w++)
                turned[w * BLOCK + b] = own[b * width + w];
        for (size_t b = 0; b < some; b++) {
            size_t at = (size_t)target[start + b];
            for (size_t w = 0; w < width; w++)
                right[b] += own[b * width + w] * rows[at * width + w];
            right[b] += bias[at] + (beside ? 0 : weights[at]);
        }
        products(rows, which, count, width, turned, p);

        for (int g = 0; g < GROUPS; g++) {
            vector largest = load(right + g * LANES), sum = {0};
            for (size_t c = 0; c < count; c++) {
                float *to = p + c * BLOCK + g * LANES;
                keep(to, load(to) + (bias[which[c]] + weights[which[c]]));
                largest = larger(load(to), largest);
            }
            for (size_t c = 0; c < count; c++) {
                float *to = p + c * BLOCK + g * LANES;
                keep(to, exp_below_0(load(to) - largest));
                sum += load(to);
            }
            keep(most + g * LANES, largest);
            keep(total + g * LANES, sum);
        }
        for (size_t b = 0; b < some; b++) { /* `right` is the target's gradient from here on */
            float itself = beside ? expf(right[b] - most[b]) : 0;
            total[b] += itself;
            losses[start + b] = most[b] + logf(total[b]) - right[b];
            share[b] = 1 / (total[b] * (float)n);
            right[b] = itself * share[b] - 1 / (float)n;
        }
        for (size_t c = 0; c < count; c++) {
            float part[LANES], sum = 0;
            vector sums = {0};
            for (int g = 0; g < GROUPS; g++) {
                float *to = p + c * BLOCK + g * LANES;
                vector each = load(to) * load(share + g * LANES);
                keep(to, each);
                sums += each;
            }
            keep(part, sums);
            for (int j = 0; j < 4; j++)
                for (int i = j + 4; i < LANES; i += 4)
                    part[j] += part[i];
            for (int j = 0; j < 4; j++)
                sum += part[j];
            of_bias[which[c]] += sum;
        }
        to_rows(p, which, count, own, some, width, of_rows);
        to_examples(p, which, count, rows, some, width, up + start * width);
        for (size_t b = 0; b < some; b++) {
            size_t at = (size_t)target[start + b];
            of_bias[at] += right[b];
            for (size_t w = 0; w < width; w++) {
                of_rows[at * width + w] += right[b] * own[b * width + w];
                up[(start + b) * width + w] += right[b] * rows[at * width + w];
            }
        }
    }
}

#undef JOINED
#undef JOIN
#undef INLINE
#undef vector
#undef words
#undef load
#undef keep
#undef larger
#undef exp_below_0
#undef products
#undef to_rows
#undef to_examples
#undef BLOCK
