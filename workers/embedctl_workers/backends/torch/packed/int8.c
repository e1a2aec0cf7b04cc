/* The layers of a BERT-like encoder in int8, apart from attention.
 *
 * Activations: each row is mapped to 0…255 between its own least and greatest number. Weights: each output has its own
 * scale, -127…127. With x = low + step * q and w = scale * v, a product is
 *     x . w = step * scale * (q . v) + low * offset,   offset = scale * (sum of v),
 * and q . v, which is exact, is the only part in bytes. All else is float32. A row with a number that is not finite
 * becomes NaN as a whole, and no other row is touched.
 *
 * Every matrix is row-major and without gaps. Inputs and outputs of a product are multiples of 16.
 */
#include "int8.h"

#if LANES == 16
#define COLUMNS EACH4
#define PANEL (4 * LANES)
#else
#define COLUMNS EACH2
#define PANEL (2 * LANES)
#endif
TILE(tile, COLUMNS, DOT8)

/* Rows that a thread takes at a time, at most: what a feed-forward makes of them stays in the second cache. */
#define BLOCK 96

/* A weight as int8.py lays it out: by panels of so many outputs, padded; within, by steps of 4 inputs. Each array of
 * floats has a number for every output, the padding included. */
const long int8_panel = PANEL;
struct product {
    const char *weight;
    const float *scale, *offset, *bias;
    long inputs, outputs;
};

struct norm {
    const float *weight, *bias;
    float eps;
};

/* Rows as bytes, and how they are mapped back. */
struct quantised {
    char *bytes;
    float *low, *step;
};

static long quantised_size(long inputs) { return BLOCK * (inputs + 2 * (long)sizeof(float)); }
static struct quantised quantised_at(char *memory, long inputs) {
    float *low = (float *)(memory + BLOCK * inputs);
    return (struct quantised){memory, low, low + BLOCK};
}

/* The rows of x[rows, width] */
INLINE void quantise(const float *x, long rows, long width, struct quantised to) {
    for (long r = 0; r < rows; r++, x += width) {
        floats least = load(x), most = least, poison = least * 0.0f;
        for (long j = LANES; j < width; j += LANES) {
            const floats v = load(x + j);
            least = least_of_two(least, v);
            most = most_of_two(most, v);
            poison += v * 0.0f; /* NaN from a number that is not finite */
        }
        const float low = -largest_of(-least), spread = largest_of(most) - low;
        const float factor = spread > 1e-30f ? 255.0f / spread : 0.0f;
        to.low[r] = low + sum_of(poison);
        to.step[r] = spread > 1e-30f ? spread / 255.0f : 0.0f;
        for (long j = 0; j < width; j += LANES) 
            store_bytes_of(to.bytes + r * width + j, (ints)((load(x + j) - low) * factor + WHOLE));
    }
}

/* x * Phi(x), to 1e-4. Phi - 1/2 is an odd polynomial up to 4.2, and 1/2 beyond. */
INLINE floats quick_gelu(floats x) {
    const floats end = all(4.2f), z = least_of_two(end, most_of_two(-end, x)), t = z * z;
    floats p = all(-9.01736101e-10f);
    p = p * t + 7.94121898e-8f;
    p = p * t - 3.03789725e-6f;
    p = p * t + 6.68901889e-5f;
    p = p * t - 9.50653385e-4f;
    p = p * t + 9.29821138e-3f;
    p = p * t - 6.55281649e-2f;
    p = p * t + 3.98465847e-1f;
    return x * (p * z + 0.5f);
}

/* x . w + bias, then GELU if asked for, into `y`: matrices of `width` outputs, one after the other, `apart` numbers from
 * one to the next. */
INLINE void multiply(struct quantised x, long rows, const struct product *by, float *y, long width, long apart,
                     const int gelu) {
    int sums[ROWS * PANEL] __attribute__((aligned(64)));
    for (long n = 0; n < by->outputs; n += PANEL) {
        const long columns = by->outputs - n < PANEL ? by->outputs - n : PANEL;
        for (long r = 0; r < rows; r += ROWS) {
            const long here = rows - r < ROWS ? rows - r : ROWS;
            tile(x.bytes + r * by->inputs, by->inputs, by->weight + n * by->inputs, PANEL * 4, by->inputs / 4, 0, sums,
                 PANEL);
            for (long j = 0; j < columns; j += LANES) {
                const floats scale = load(by->scale + n + j), offset = load(by->offset + n + j);
                const floats bias = load(by->bias + n + j);
                float *to = y + (n + j) / width * apart + (n + j) % width + r * width;
                for (long i = 0; i < here; i++) {
                    const floats sum = __builtin_convertvector(load_ints(sums + i * PANEL + j), floats);
                    const floats v = sum * x.step[r + i] * scale + (offset * x.low[r + i] + bias);
                    store(to + i * width, gelu ? quick_gelu(v) : v);
                }
            }
        }
    }
}

/* x[rows, width] = LayerNorm(x + y) */
INLINE void add_norm(float *x, const float *y, const struct norm *norm, long rows, long width) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        floats sums = {0}, squares = {0};
        for (long j = 0; j < width; j += LANES) {
            const floats v = load(x + j) + load(y + j);
            store(x + j, v);
            sums += v;
        }
        const float mean = sum_of(sums) / width;
        for (long j = 0; j < width; j += LANES) {
            const floats d = load(x + j) - mean;
            squares += d * d;
        }
        const float scale = 1.0f / sqrtf(sum_of(squares) / width + norm->eps);
        for (long j = 0; j < width; j += LANES)
            store(x + j, (load(x + j) - mean) * scale * load(norm->weight + j) + load(norm->bias + j));
    }
}

/* How the rows are dealt to the threads: blocks of equal size, a whole number of them for each thread. */
static long block_of(long tokens, long threads) {
    const long blocks = up_to((tokens + BLOCK - 1) / BLOCK, threads);
    return up_to((tokens + blocks - 1) / blocks, ROWS);
}

/* Bytes of scratch memory that each thread needs, for products of at most so many inputs and outputs. */
long int8_scratch(long hidden, long wide) {
    const long most = hidden > wide ? hidden : wide;
    return up_to(quantised_size(most) + BLOCK * (hidden + wide) * (long)sizeof(float), 64);
}

/* y[outputs / width, tokens, width] = x w^T + bias */
void int8_linear(const float *x, const struct product *by, float *y, long width, long tokens, long threads,
                 char *scratch, long scratch_size) {
    const long block = block_of(tokens, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long from = 0; from < tokens; from += block) {
        const long rows = tokens - from < block ? tokens - from : block;
        const struct quantised q = quantised_at(scratch + omp_get_thread_num() * scratch_size, by->inputs);
        quantise(x + from * by->inputs, rows, by->inputs, q);
        multiply(q, rows, by, y + from * width, width, tokens * width, 0);
    }
}

/* What follows attention: x[tokens, hidden] = LayerNorm(x + out(context)), then LayerNorm(x + down(GELU(up(x)))) */
void int8_rest(float *x, const float *context, const struct product *out, const struct norm *attention_norm,
               const struct product *up, const struct product *down, const struct norm *norm, long tokens, long threads,
               char *scratch, long scratch_size) {
    const long block = block_of(tokens, threads), hidden = up->inputs, wide = up->outputs;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long from = 0; from < tokens; from += block) {
        const long rows = tokens - from < block ? tokens - from : block;
        float *to = x + from * hidden, *y = (float *)(scratch + omp_get_thread_num() * scratch_size);
        float *inner = y + BLOCK * hidden;
        char *memory = (char *)(inner + BLOCK * wide);
        const struct quantised narrow = quantised_at(memory, hidden), broad = quantised_at(memory, wide);
        quantise(context + from * hidden, rows, hidden, narrow);
        multiply(narrow, rows, out, y, hidden, 0, 0);
        add_norm(to, y, attention_norm, rows, hidden);
        quantise(to, rows, hidden, narrow);
        multiply(narrow, rows, up, inner, wide, 0, 1);
        quantise(inner, rows, wide, broad);
        multiply(broad, rows, down, y, hidden, 0, 0);
        add_norm(to, y, norm, rows, hidden);
    }
}
