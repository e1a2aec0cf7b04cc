/* What is done element by element or row by row of a BERT-like encoder: embeddings, LayerNorm, GELU.
 *
 * Every matrix is float32, row-major and without gaps.
 */
#include "vectors.h"

/* x[n] = gelu(x[n]) */
void gelu(float *x, long n) {
#pragma omp parallel for schedule(static)
    for (long block = 0; block < (n + 4095) / 4096; block++) {
        long j = block * 4096, end = j + 4096 < n ? j + 4096 : n;
        for (; j + LANES <= end; j += LANES) store(x + j, gelu_of(load(x + j)));
        for (; j < end; j++) x[j] = 0.5f * x[j] * (1.0f + erff(x[j] * 0.70710678f));
    }
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
