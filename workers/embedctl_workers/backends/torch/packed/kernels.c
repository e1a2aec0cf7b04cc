/* What lies between the matrix products of a BERT-like encoder, on packed tokens.
 *
 * Every matrix is float32, row-major and without gaps. Written with the vector extensions of GCC and clang, so that one
 * source serves AVX-512, AVX2 and NEON. NaN comes out wherever NaN went in.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define EACH(F, h)                                                                                                     \
    F(h, 0), F(h, 1), F(h, 2), F(h, 3), F(h, 4), F(h, 5), F(h, 6), F(h, 7), F(h, 8), F(h, 9), F(h, 10), F(h, 11),      \
        F(h, 12), F(h, 13), F(h, 14), F(h, 15)
#define QUERIES 8
#elif defined(__AVX__)
#define LANES 8
#define EACH(F, h) F(h, 0), F(h, 1), F(h, 2), F(h, 3), F(h, 4), F(h, 5), F(h, 6), F(h, 7)
#define QUERIES 4 /* 16 registers: two accumulators a query and what feeds them */
#else
#define LANES 4
#define EACH(F, h) F(h, 0), F(h, 1), F(h, 2), F(h, 3)
#define QUERIES 8
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, F, h) __builtin_shufflevector(a, b, EACH(F, h))
#else
#define SHUFFLE(a, b, F, h) __builtin_shuffle(a, b, (ints){EACH(F, h)})
#endif

static inline floats load(const float *at) { return *(const unaligned *)at; }
static inline void store(float *at, floats value) { *(unaligned *)at = value; }
static inline floats all(float value) { return value - (floats){0}; }
static inline floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

#define SWAP(h, lane) ((lane) ^ (h))
static inline float sum_of(floats v) {
#if LANES > 8
    v += SHUFFLE(v, v, SWAP, 8);
#endif
#if LANES > 4
    v += SHUFFLE(v, v, SWAP, 4);
#endif
    v += SHUFFLE(v, v, SWAP, 2);
    v += SHUFFLE(v, v, SWAP, 1);
    return v[0];
}

static inline floats larger(floats a, floats b) { return choose(a > b, a, b); }
static inline float largest_of(floats v) {
#if LANES > 8
    v = larger(v, SHUFFLE(v, v, SWAP, 8));
#endif
#if LANES > 4
    v = larger(v, SHUFFLE(v, v, SWAP, 4));
#endif
    v = larger(v, SHUFFLE(v, v, SWAP, 2));
    v = larger(v, SHUFFLE(v, v, SWAP, 1));
    return v[0];
}

/* Transposes LANES rows in place: blocks of h lanes change places, for h = 1, 2, 4, … */
#define LOWER(h, lane) (((lane) & (h)) ? LANES + (lane) - (h) : (lane))
#define UPPER(h, lane) (((lane) & (h)) ? LANES + (lane) : (lane) + (h))
#define STAGE(rows, h)                                                                                                 \
    for (int i = 0; i < LANES; i++)                                                                                    \
        if (!(i & (h))) {                                                                                              \
            floats a = rows[i], b = rows[i + (h)];                                                                     \
            rows[i] = SHUFFLE(a, b, LOWER, h);                                                                         \
            rows[i + (h)] = SHUFFLE(a, b, UPPER, h);                                                                   \
        }
static inline void transpose(floats rows[LANES]) {
    STAGE(rows, 1)
    STAGE(rows, 2)
#if LANES > 4
    STAGE(rows, 4)
#endif
#if LANES > 8
    STAGE(rows, 8)
#endif
}

/* e^x for x <= 88; relative error below 2e-7. Coefficients: Cephes, expf.c. */
static inline floats exponential(floats x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = choose(x < -87.0f, all(-87.0f), x);
    floats n = x * 1.44269504f + shift - shift;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (floats)power;
}

/* x * Phi(x); erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7. */
static inline floats gelu_of(floats x) {
    floats z = x * 0.70710678f;
    floats a = (floats)((ints)z & 0x7fffffff);
    floats t = 1.0f / (a * 0.3275911f + 1.0f);
    floats q = all(1.061405429f);
    q = q * t - 1.453152027f;
    q = q * t + 1.421413741f;
    q = q * t - 0.284496736f;
    q = q * t + 0.254829592f;
    floats tail = q * t * exponential(-(a * a)); /* 1 - erf(|z|) */
    floats twice = choose(z < 0.0f, tail, 2.0f - tail);
    return x * 0.5f * twice;
}

/* x[n] = gelu(x[n]) */
void gelu(float *x, long n) {
#pragma omp parallel for schedule(static)
    for (long block = 0; block < (n + 4095) / 4096; block++) {
        long j = block * 4096, end = j + 4096 < n ? j + 4096 : n;
        for (; j + LANES <= end; j += LANES) store(x + j, gelu_of(load(x + j)));
        for (; j < end; j++) x[j] = 0.5f * x[j] * (1.0f + erff(x[j] * 0.70710678f));
    }
}

static inline void normalise(float *x, const float *weight, const float *bias, long width, float eps) {
    floats sums = {0};
    float sum = 0;
    long j = 0;
    for (; j + LANES <= width; j += LANES) sums += load(x + j);
    for (; j < width; j++) sum += x[j];
    float mean = (sum + sum_of(sums)) / width;
    floats squares = {0};
    float square = 0;
    for (j = 0; j + LANES <= width; j += LANES) {
        floats d = load(x + j) - mean;
        squares += d * d;
    }
    for (; j < width; j++) square += (x[j] - mean) * (x[j] - mean);
    float scale = 1.0f / sqrtf((square + sum_of(squares)) / width + eps);
    for (j = 0; j + LANES <= width; j += LANES)
        store(x + j, (load(x + j) - mean) * scale * load(weight + j) + load(bias + j));
    for (; j < width; j++) x[j] = (x[j] - mean) * scale * weight[j] + bias[j];
}

/* x[tokens, width] = LayerNorm(x + y) */
void add_layer_norm(float *x, const float *y, const float *weight, const float *bias, long tokens, long width,
                    float eps) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < tokens; t++) {
        float *to = x + t * width;
        const float *from = y + t * width;
        long j = 0;
        for (; j + LANES <= width; j += LANES) store(to + j, load(to + j) + load(from + j));
        for (; j < width; j++) to[j] += from[j];
        normalise(to, weight, bias, width, eps);
    }
}

/* x[tokens, width] = LayerNorm(words[ids] + places[positions]) */
void embed(float *x, const long long *ids, const long long *positions, const float *words, const float *places,
           const float *weight, const float *bias, long tokens, long width, float eps) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < tokens; t++) {
        float *to = x + t * width;
        const float *word = words + ids[t] * width, *place = places + positions[t] * width;
        long j = 0;
        for (; j + LANES <= width; j += LANES) store(to + j, load(word + j) + load(place + j));
        for (; j < width; j++) to[j] = word[j] + place[j];
        normalise(to, weight, bias, width, eps);
    }
}

static inline long up_to(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

/* keys[c, t] of one head, from rows of `stride`; what is beyond the text is zero */
static void transpose_keys(float *keys, const float *from, long length, long padded, long head, long stride) {
    for (long t = 0; t < padded; t += LANES) {
        long rows = length - t < LANES ? length - t : LANES;
        long c = 0;
        for (; c + LANES <= head; c += LANES) {
            floats block[LANES];
            for (long i = 0; i < LANES; i++) block[i] = i < rows ? load(from + (t + i) * stride + c) : (floats){0};
            transpose(block);
            for (long i = 0; i < LANES; i++) store(keys + (c + i) * padded + t, block[i]);
        }
        for (; c < head; c++)
            for (long i = 0; i < LANES; i++) keys[c * padded + t + i] = i < rows ? from[(t + i) * stride + c] : 0.0f;
    }
}

/* scores[q, j] = queries[q] . keys[:, j], for QUERIES queries and `width` vectors of keys from j on */
#define SCORES(width)                                                                                                  \
    {                                                                                                                  \
        floats sums[QUERIES][width];                                                                                   \
        for (int q = 0; q < QUERIES; q++)                                                                              \
            for (int w = 0; w < width; w++) sums[q][w] = (floats){0};                                                  \
        for (long c = 0; c < head; c++)                                                                                \
            for (int w = 0; w < width; w++) {                                                                          \
                floats key = load(keys + c * padded + j + w * LANES);                                                  \
                for (int q = 0; q < QUERIES; q++) sums[q][w] += queries[q][c] * key;                                   \
            }                                                                                                          \
        for (int q = 0; q < QUERIES; q++)                                                                              \
            for (int w = 0; w < width; w++) store(scores + q * padded + j + w * LANES, sums[q][w]);                    \
    }

/* context[q, c…] = scale[q] * sum over t of scores[q, t] * values[t, c…], for `width` vectors of c */
#define CONTEXT(width)                                                                                                 \
    {                                                                                                                  \
        floats sums[QUERIES][width];                                                                                   \
        for (int q = 0; q < QUERIES; q++)                                                                              \
            for (int w = 0; w < width; w++) sums[q][w] = (floats){0};                                                  \
        for (long t = 0; t < length; t++)                                                                              \
            for (int w = 0; w < width; w++) {                                                                          \
                floats value = load(values + t * stride + c + w * LANES);                                              \
                for (int q = 0; q < QUERIES; q++) sums[q][w] += scores[q * padded + t] * value;                        \
            }                                                                                                          \
        for (int q = 0; q < rows; q++)                                                                                 \
            for (int w = 0; w < width; w++) store(to + q * hidden + c + w * LANES, sums[q][w] * scale[q]);             \
    }

/* The whole of one head over one text. Copying the values first, to have them without gaps, was no gain (Zen 5). */
static void attend(const float *from, float *to, long length, long head, long hidden, float *keys, float *scores) {
    const long stride = 3 * hidden, padded = up_to(length, LANES);
    const float *values = from + 2 * hidden;
    transpose_keys(keys, from + hidden, length, padded, head, stride);
    for (long first = 0; first < length; first += QUERIES, to += QUERIES * hidden) {
        const int rows = length - first < QUERIES ? length - first : QUERIES;
        const float *queries[QUERIES];
        float scale[QUERIES];
        for (int q = 0; q < QUERIES; q++) queries[q] = from + (first + (q < rows ? q : 0)) * stride;
        long j = 0;
        for (; j + 2 * LANES <= padded; j += 2 * LANES) SCORES(2)
        for (; j < padded; j += LANES) SCORES(1)
        for (int q = 0; q < rows; q++) {
            float *row = scores + q * padded;
            for (long t = length; t < padded; t++) row[t] = -INFINITY;
            floats most = load(row), sum = {0};
            for (j = LANES; j < padded; j += LANES) most = larger(most, load(row + j));
            const float top = largest_of(most);
            for (j = 0; j < padded; j += LANES) {
                floats e = exponential(load(row + j) - top);
                store(row + j, e);
                sum += e;
            }
            /* e^-87 of what is beyond the text is lost in a sum of at least 1 */
            scale[q] = 1.0f / sum_of(sum);
        }
        long c = 0;
        for (; c + 2 * LANES <= head; c += 2 * LANES) CONTEXT(2)
        for (; c + LANES <= head; c += LANES) CONTEXT(1)
        for (; c < head; c++)
            for (int q = 0; q < rows; q++) {
                float total = 0;
                for (long t = 0; t < length; t++) total += scores[q * padded + t] * values[t * stride + c];
                to[q * hidden + c] = total * scale[q];
            }
    }
}

/* context[tokens, heads * head] = softmax(q k^T) v for each text and head, from qkv[tokens, 3 * heads * head]; texts
 * begin at offsets[0…texts]; queries are scaled already. Returns 0, or 1 for want of memory. */
int attention(const float *qkv, float *context, const long long *offsets, long texts, long heads, long head,
              long longest) {
    const long hidden = heads * head, padded = up_to(longest, LANES);
    int failed = 0;
#pragma omp parallel
    {
        float *keys = malloc(sizeof(float) * padded * (head + QUERIES));
        if (!keys) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (long work = 0; work < texts * heads; work++) {
                const long text = work / heads, column = work % heads * head;
                attend(qkv + offsets[text] * 3 * hidden + column, context + offsets[text] * hidden + column,
                       offsets[text + 1] - offsets[text], head, hidden, keys, keys + padded * head);
            }
        }
        free(keys);
    }
    return failed;
}
