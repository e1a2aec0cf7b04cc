/* What is done between the products of a BERT-like encoder: attention over packed texts, embeddings, LayerNorm, GELU.
 *
 * Every matrix is float32 and row-major, and without gaps where nothing else is said.
 */
#define FLOATS
#include "sums.h"
#include <stdlib.h>

/* ---- attention ---- */

#define PANEL (2 * LANES)
TILE(tile, EACH2, DOT32)

/* Where a thread lays out one head of one text:
 *   keys[t / PANEL, c, t % PANEL], the last key standing for those beyond the text;
 *   values[c / PANEL, t, c % PANEL], zero beyond the head, of a head that fills no panels;
 *   the text's last queries, which fill no tile;
 *   and of ROWS queries, the scores, and the sums of values. */
struct desk {
    float *keys, *values, *queries, *scores, *sums;
};

static long desk_numbers(long length, long head) {
    const long padded = up_to(length, PANEL), wide = up_to(head, PANEL);
    return padded * (head + wide + ROWS) + ROWS * (head + wide);
}

static struct desk desk_at(float *memory, long length, long head) {
    const long padded = up_to(length, PANEL), wide = up_to(head, PANEL);
    float *values = memory + padded * head, *queries = values + padded * wide, *scores = queries + ROWS * head;
    return (struct desk){memory, values, queries, scores, scores + ROWS * padded};
}

static void transpose_keys(float *keys, const float *from, long length, long head, long row) {
    for (long t = 0; t < up_to(length, PANEL); t += LANES) {
        float *to = keys + t / PANEL * PANEL * head + t % PANEL;
        const float *rows[LANES];
        for (long i = 0; i < LANES; i++) rows[i] = from + (t + i < length ? t + i : length - 1) * row;
        long c = 0;
        for (; c + LANES <= head; c += LANES, to += LANES * PANEL) {
            floats block[LANES];
            UNROLLED for (long i = 0; i < LANES; i++) block[i] = load(rows[i] + c);
            transpose(block);
            UNROLLED for (long i = 0; i < LANES; i++) store(to + i * PANEL, block[i]);
        }
        for (; c < head; c++, to += PANEL)
            for (long i = 0; i < LANES; i++) to[i] = rows[i][c];
    }
}

static void lay_out_values(float *values, const float *from, long length, long head, long row) {
    for (long c = 0; c < head; c += PANEL)
        for (long t = 0; t < length; t++)
            for (long i = c; i < c + PANEL; i++) *values++ = i < head ? from[t * row + i] : 0.0f;
}

/* 2^x for x <= 127, not below 2^-126; relative error below 2e-7 */
INLINE floats power_of_two(floats x) {
    x = most_of_two(all(-126.0f), x);
    const floats whole = x + (WHOLE + 127.0f), r = x - (whole - (WHOLE + 127.0f));
    floats p = all(1.326472615e-03f);
    p = p * r + 9.671512991e-03f;
    p = p * r + 5.550733581e-02f;
    p = p * r + 2.402224243e-01f;
    p = p * r + 6.931470037e-01f;
    p = p * r + 1.0f;
    return p * (floats)((ints)whole << 23);
}

#define PLACE(h, i) i
static const ints places = {EACH(PLACE, 0)};
/* The lanes before `count` as they are, 0 in the others. */
INLINE floats up_to_lane(floats x, long count) { return (floats)((ints)x & (places < (int)count)); }

/* A row of scores becomes e^(score - the greatest); returns 1 / their sum */
INLINE float weigh(float *row, long length) {
    const long padded = up_to(length, PANEL);
    floats most = load(row), most2 = load(row + LANES), sum = {0}, sum2 = {0};
    for (long j = PANEL; j < padded; j += PANEL)
        most = most_of_two(load(row + j), most), most2 = most_of_two(load(row + j + LANES), most2);
    const float log2e = 1.44269504f, top = largest_of(most_of_two(most, most2)) * log2e;
    for (long j = 0; j < padded; j += PANEL) {
        floats a = power_of_two(load(row + j) * log2e - top), b = power_of_two(load(row + j + LANES) * log2e - top);
        store(row + j, a), store(row + j + LANES, b);
        if (j + PANEL > length) a = up_to_lane(a, length - j), b = up_to_lane(b, length - j - LANES);
        sum += a, sum2 += b;
    }
    return 1.0f / sum_of(sum + sum2);
}

/* sums[ROWS, columns] = x[ROWS, steps] . w. A panel of w has a row of columns every `step` numbers; panels lie `apart`. */
INLINE void multiply(const float *x, long row, const float *w, long step, long apart, long steps, float *sums,
                     long columns) {
    for (long c = 0; c < columns; c += PANEL, w += apart)
        tile((const char *)x, row * 4, (const char *)w, step * 4, steps, 0, 0, (int *)(sums + c), columns);
}

/* One head over one text. The queries begin at `from`, the keys `key` numbers on, the values as many after those. */
static void attend(const float *from, long row, long key, float *to, long hidden, long length, long head,
                   float *memory) {
    const long padded = up_to(length, PANEL), wide = up_to(head, PANEL);
    const struct desk desk = desk_at(memory, length, head);
    const float *values = from + 2 * key;
    transpose_keys(desk.keys, from + key, length, head, row);
    if (wide > head) lay_out_values(desk.values, values, length, head, row);
    for (long first = 0; first < length; first += ROWS, from += ROWS * row, to += ROWS * hidden) {
        const long rows = length - first < ROWS ? length - first : ROWS;
        if (rows < ROWS)
            for (long q = 0; q < rows; q++) memcpy(desk.queries + q * head, from + q * row, head * sizeof(float));
        multiply(rows < ROWS ? desk.queries : from, rows < ROWS ? head : row, desk.keys, PANEL, PANEL * head, head,
                 desk.scores, padded);
        float scale[ROWS];
        for (long q = 0; q < rows; q++) scale[q] = weigh(desk.scores + q * padded, length);
        if (wide > head) multiply(desk.scores, padded, desk.values, PANEL, PANEL * length, length, desk.sums, wide);
        else multiply(desk.scores, padded, values, row, PANEL, length, desk.sums, wide);
        for (long q = 0; q < rows; q++) {
            const float *sums = desk.sums + q * wide;
            long c = 0;
            for (; c + LANES <= head; c += LANES) store(to + q * hidden + c, load(sums + c) * scale[q]);
            for (; c < head; c++) to[q * hidden + c] = sums[c] * scale[q];
        }
    }
}

/* context[tokens, heads * head] = softmax(q k^T) v for each text and head, from qkv[3 * heads, tokens, head], whose rows
 * are `row` numbers apart, and its heads `apart`. Texts begin at offsets[0…texts] and are taken by `order`; queries are
 * scaled already. Returns 0, or 1 for want of memory. */
int attention(const float *qkv, float *context, const long long *offsets, const long long *order, long texts,
              long heads, long head, long longest, long row, long apart) {
    const long hidden = heads * head;
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, up_to(desk_numbers(longest, head) * sizeof(float), 64));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (long work = 0; work < texts * heads; work++) {
                const long text = order[work / heads], column = work % heads;
                attend(qkv + offsets[text] * row + column * apart, row, heads * apart,
                       context + offsets[text] * hidden + column * head, hidden, offsets[text + 1] - offsets[text], head,
                       memory);
            }
        }
        free(memory);
    }
    return failed;
}

/* ---- what is done row by row ---- */

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
