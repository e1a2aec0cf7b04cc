/* Attention over packed texts, in float32.
 *
 * Every matrix is float32, row-major and without gaps.
 */
#include "vectors.h"
#include <stdlib.h>

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
 * begin at offsets[0…texts] and are taken by `order`; queries are scaled already. Returns 0, or 1 for want of memory. */
int attention(const float *qkv, float *context, const long long *offsets, const long long *order, long texts,
              long heads, long head, long longest) {
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
                const long text = order[work / heads], column = work % heads * head;
                attend(qkv + offsets[text] * 3 * hidden + column, context + offsets[text] * hidden + column,
                       offsets[text + 1] - offsets[text], head, hidden, keys, keys + padded * head);
            }
        }
        free(keys);
    }
    return failed;
}
