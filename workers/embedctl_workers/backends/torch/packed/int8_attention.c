/* Attention over packed texts in integers, for one head of one text at a time.
 *
 * Scores: queries are mapped to -127…127 and keys to -MOST_BYTE…MOST_BYTE, each by its own greatest magnitude, and
 * multiplied in bytes; queries are shifted by 128, because the instruction takes them unsigned. Softmax is float32. The weights become numbers of 16
 * bits, and so do the values, each column by its own greatest magnitude. Bytes would be too coarse for the weights:
 * where one token draws most of the attention, the sum of the many small ones counts, and each would be rounded to 0.
 *
 * A text with a number that is not finite becomes NaN as a whole, and no other text is touched.
 */
#include "sums.h"

#define MOST_HEAD 256
/* The greatest weight, a little less than 2^14; and how many keys' products are summed in 32 bits. */
#define WEIGHTS 16378.0f
#define LOG2_WEIGHTS 13.9995f
#define MOST_KEYS 512

typedef unsigned counts __attribute__((vector_size(4 * LANES)));

TILE(scores_of_two, EACH2, DOT8)
TILE(scores_of_one, EACH1, DOT8)
TILE(context_of_two, EACH2, DOT16)
TILE(context_of_one, EACH1, DOT16)

/* Memory of one thread. `padded` is the length of a text, up to a multiple of LANES. */
struct work {
    char *keys;                 /* [head / 4, padded, 4] */
    int *shift;                 /* [padded]: what the shift of the queries adds to a score, negated */
    float *key_scale, *outside; /* [padded]; outside: 0, or -infinity beyond the text */
    char *queries;              /* [ROWS, head] */
    float *scores;              /* [ROWS, padded]; integers first */
    int16_t *weights;           /* [ROWS, padded] */
    int *values;                /* [padded / 2, head], each two numbers of 16 bits */
    float *value_scale;         /* [head] */
    int *sums;                  /* [ROWS, head] */
    long size;
};

static void *take(struct work *work, char *memory, long size) {
    char *at = memory + work->size;
    work->size += up_to(size, 64);
    return at;
}

static struct work work_at(char *memory, long padded, long head) {
    struct work work = {0};
    work.keys = take(&work, memory, head * padded);
    work.shift = take(&work, memory, 4 * padded);
    work.key_scale = take(&work, memory, 4 * padded);
    work.outside = take(&work, memory, 4 * padded);
    work.queries = take(&work, memory, ROWS * head);
    work.scores = take(&work, memory, ROWS * 4 * padded);
    work.weights = take(&work, memory, ROWS * 2 * padded);
    work.values = take(&work, memory, 2 * padded * head);
    work.value_scale = take(&work, memory, 4 * head);
    work.sums = take(&work, memory, ROWS * 4 * head);
    return work;
}

/* Bytes of scratch memory that each thread needs, for texts of at most so many tokens. */
long int8_attention_scratch(long longest, long head) {
    return work_at(0, up_to(longest, LANES), head).size;
}

/* The greatest magnitude in a row, and NaN, to be added to what depends on it, if a number is not finite. */
INLINE float magnitude_of(const float *x, long width, float *poison) {
    floats most = {0}, bad = {0};
    for (long c = 0; c < width; c += LANES) {
        most = most_of_two(most, magnitude(load(x + c)));
        bad += load(x + c) * 0.0f;
    }
    *poison += sum_of(bad);
    return largest_of(most);
}
INLINE float levels_over(float levels, float most) { return most > 1e-30f ? levels / most : 0.0f; }

/* Returns NaN if one of the keys is not finite, else 0. */
INLINE float lay_out_keys(const float *from, long length, long padded, long head, struct work *work) {
    float poison = 0;
    for (long t = 0; t < padded; t++, from += head) {
        int8_t key[MOST_HEAD] = {0};
        ints sums = {0};
        work->key_scale[t] = 0;
        work->outside[t] = t < length ? 0.0f : -INFINITY;
        if (t < length) {
            const float most = magnitude_of(from, head, &poison), factor = levels_over(MOST_BYTE, most);
            work->key_scale[t] = most / MOST_BYTE;
            for (long c = 0; c < head; c += LANES) {
                const ints level = (ints)(load(from + c) * factor + WHOLE);
                store_bytes_of(key + c, level);
                sums += level << 24 >> 24;
            }
        }
        for (long c = 0; c < head; c += 4) memcpy(work->keys + (c * padded + t * 4), key + c, 4);
        work->shift[t] = -128 * (int)sum_of(__builtin_convertvector(sums, floats));
    }
    return poison;
}

INLINE float lay_out_values(const float *from, long length, long padded, long head, float levels,
                            struct work *work) {
    floats bad = {0};
    for (long c = 0; c < head; c += LANES) {
        floats most = {0};
        for (long t = 0; t < length; t++) {
            most = most_of_two(most, magnitude(load(from + t * head + c)));
            bad += load(from + t * head + c) * 0.0f;
        }
        const floats factor = choose(most > 1e-30f, levels / most, (floats){0});
        store(work->value_scale + c, most / levels);
        for (long t = 0; t < padded; t += 2) {
            const ints even = t < length ? (ints)(load(from + t * head + c) * factor + WHOLE) : (ints){0};
            const ints odd = t + 1 < length ? (ints)(load(from + (t + 1) * head + c) * factor + WHOLE) : (ints){0};
            store_ints(work->values + t / 2 * head + c, (even & 0xffff) | (odd << 16));
        }
    }
    return sum_of(bad);
}

/* 2^x for |x| < 100; relative error below 4e-6 */
INLINE floats power_of_two(floats x) {
    const floats n = x + WHOLE, f = x - (n - WHOLE);
    floats p = all(9.57009965e-3f);
    p = p * f + 5.59178658e-2f;
    p = p * f + 2.40247449e-1f;
    p = p * f + 6.93121814e-1f;
    p = p * f + 9.99999261e-1f;
    return (floats)((ints)p + ((ints)n << 23));
}

/* One query's weights, 0…WEIGHTS, from its scores in integers; `scale` is the query's. Returns what the sum of the
 * weights must be divided by: their number, or NaN if a score is not finite. */
INLINE float softmax(float *scores, int16_t *weights, long padded, float scale, const struct work *work) {
    floats most = all(-INFINITY);
    for (long j = 0; j < padded; j += LANES) {
        const floats sum = __builtin_convertvector(load_ints(scores + j), floats);
        const floats score = sum * load(work->key_scale + j) + load(work->outside + j);
        store(scores + j, score);
        most = most_of_two(most, score);
    }
    const float factor = scale * 1.44269504f + 1e-30f; /* not 0, for what is outside must stay so */
    const float top = largest_of(most) * factor;
    counts total = {0};
    for (long j = 0; j < padded; j += LANES) {
        const floats weight = power_of_two(most_of_two(all(-20.0f), load(scores + j) * factor - (top - LOG2_WEIGHTS))) + WHOLE;
        store_shorts_of(weights + j, (ints)weight);
        total += (counts)(ints)weight & 0xffff;
    }
    return sum_of(__builtin_convertvector(total, floats)) + top * 0.0f;
}

/* What `keys` keys from t on, MOST_KEYS at most, add to the context of the queries at hand; the first ones begin it. */
INLINE void add_context(const struct work *work, long t, long keys, long padded, long head, const float *unit, float *to,
                        long rows, long hidden) {
    const char *weights = (const char *)(work->weights + t);
    const int *values = work->values + t / 2 * head;
    long c = 0;
    for (; c + 2 * LANES <= head; c += 2 * LANES)
        context_of_two(weights, padded * 2, (const char *)(values + c), head * 4, keys / 2, 0, 0, work->sums + c, head);
    for (; c < head; c += LANES)
        context_of_one(weights, padded * 2, (const char *)(values + c), head * 4, keys / 2, 0, 0, work->sums + c, head);
    for (long i = 0; i < rows; i++, to += hidden)
        for (c = 0; c < head; c += LANES) {
            const floats sum = __builtin_convertvector(load_ints(work->sums + i * head + c), floats);
            store(to + c, (t ? load(to + c) : all(0.0f)) + sum * load(work->value_scale + c) * unit[i]);
        }
}

/* One head of one text: context[length, head], in rows of `hidden`, from its queries, keys and values[length, head] */
static void attend(const float *queries, const float *keys, const float *values, float *to, long length, long head,
                   long hidden, char *memory) {
    const long padded = up_to(length, LANES);
    struct work work = work_at(memory, padded, head);
    /* so that the sum of MOST_KEYS products of weights and values stays below 2^31 */
    const float levels = fminf(floorf(2147000000.0f / WEIGHTS / (length < MOST_KEYS ? length : MOST_KEYS)), 16383.0f);
    const float poison = lay_out_keys(keys, length, padded, head, &work) +
                         lay_out_values(values, length, padded, head, levels, &work);
    for (long first = 0; first < length; first += ROWS) {
        const long rows = length - first < ROWS ? length - first : ROWS;
        float scale[ROWS], unit[ROWS];
        for (long i = 0; i < rows; i++) {
            const float *query = queries + (first + i) * head;
            unit[i] = poison;
            const float size = magnitude_of(query, head, unit + i), factor = levels_over(127.0f, size);
            scale[i] = size / 127.0f;
            for (long c = 0; c < head; c += LANES)
                store_bytes_of(work.queries + i * head + c, (ints)(load(query + c) * factor + (128.0f + WHOLE)));
        }
        long j = 0;
        for (; j + 2 * LANES <= padded; j += 2 * LANES)
            scores_of_two(work.queries, head, work.keys + j * 4, padded * 4, head / 4, work.shift + j, 0,
                          (int *)work.scores + j, padded);
        for (; j < padded; j += LANES)
            scores_of_one(work.queries, head, work.keys + j * 4, padded * 4, head / 4, work.shift + j, 0,
                          (int *)work.scores + j, padded);
        for (long i = 0; i < rows; i++)
            unit[i] += 1.0f / softmax(work.scores + i * padded, work.weights + i * padded, padded, scale[i], &work);
        for (long t = 0; t < padded; t += MOST_KEYS)
            add_context(&work, t, padded - t < MOST_KEYS ? padded - t : MOST_KEYS, padded, head, unit,
                        to + first * hidden, rows, hidden);
    }
}

/* context[tokens, heads * head] = softmax(q k^T) v for each text and head, from qkv[3 * heads, tokens, head]; texts begin
 * at offsets[0…texts] and are taken by `order`; queries are scaled already. `head` is a multiple of 16, MOST_HEAD at
 * most. */
void int8_attention(const float *qkv, float *context, const long long *offsets, const long long *order, long texts,
                    long heads, long head, long threads, char *scratch, long scratch_size) {
    const long hidden = heads * head, all_tokens = offsets[texts];
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long work = 0; work < texts * heads; work++) {
        const long text = order[work / heads], column = work % heads, first = offsets[text];
        const float *queries = qkv + (column * all_tokens + first) * head;
        attend(queries, queries + all_tokens * hidden, queries + 2 * all_tokens * hidden,
               context + first * hidden + column * head, offsets[text + 1] - first, head, hidden,
               scratch + omp_get_thread_num() * scratch_size);
    }
}
