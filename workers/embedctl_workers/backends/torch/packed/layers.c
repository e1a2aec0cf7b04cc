/* The layers of a BERT-like encoder, apart from attention: in float32 (-DFLOATS), or with products of bytes.
 *
 * Every matrix is row-major and without gaps. Inputs and outputs of a product are multiples of 16. A product takes rows
 * that were prepared for it: copied, or as bytes. What follows a product is done while its sums are in the first cache,
 * and what follows a block of rows while that is in the second.
 */
#include "sums.h"
#include <limits.h>

/* Bytes of a weight that stay in the first cache. Zen 4 and later bring a whole panel from the second cache as fast, and
 * the next one by themselves, so that storing sums between parts and fetching only cost time there: 2 to 4 %. */
#if LANES == 16 && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__)) /* GCC 12 takes 4 for 3 */
#define CACHED LONG_MAX
#define FETCHES 0
#else
#define CACHED 24576
#define FETCHES 1
#endif

#if LANES == 16 && !defined(FLOATS)
#define COLUMNS EACH4
#define PANEL (4 * LANES)
#else
#define COLUMNS EACH2
#define PANEL (2 * LANES)
#endif

/* A weight as fused.py lays it out: by panels of so many outputs, padded; within, by steps of NUMBERS inputs. Each array
 * of floats has a number for every output, the padding included; scale and offset are of bytes. */
struct product {
    const char *weight;
    const float *scale, *offset, *bias;
    long inputs, outputs, pitch; /* pitch: bytes of all inputs of one output */
};

struct norm {
    const float *weight, *bias;
    float eps;
};

/* Rows as a product takes them, so many bytes apart; of bytes, how they are mapped back. */
struct rows {
    char *at;
    long stride;
    float *low, *step;
};

/* What the LANES outputs from one on have in common. */
struct outputs {
    floats scale, offset, bias;
};

/* BLOCK: rows that a thread takes at a time, at most; CHUNK: of the inner numbers of a feed-forward, how many a block has
 * at a time, 0: all of them. What is made of a block stays in the second cache. */
#if defined(FLOATS)
#define BLOCK 192
#define CHUNK 384
#define NUMBERS 1
const long fused_panel = PANEL, fused_most_byte = 0;
TILE(tile, COLUMNS, DOT32)

/* A row's gap keeps the rows of a tile from sharing the first cache's few places for addresses of one remainder. */
static long prepared_stride(long inputs) { return (inputs + 16) * (long)sizeof(float); }
INLINE void prepare(const float *x, long count, long width, struct rows to) {
    for (long r = 0; r < count; r++) memcpy(to.at + r * to.stride, x + r * width, width * sizeof(float));
}
INLINE struct outputs outputs_at(const struct product *by, long n) {
    return (struct outputs){.bias = load(by->bias + n)};
}
INLINE floats value_of(ints sum, struct outputs of, struct rows x, long r) { return (floats)sum + of.bias; }
#define GELU gelu_of
#else
#define BLOCK 96
#define CHUNK 0 /* a row has one scale */
#define NUMBERS 4
const long fused_panel = PANEL, fused_most_byte = MOST_BYTE;
TILE(tile, COLUMNS, DOT8)

static long prepared_stride(long inputs) { return inputs; }

/* Each row is mapped to 0…255 between its own least and greatest number. Each output of a weight has its own scale,
 * -MOST_BYTE…MOST_BYTE. With x = low + step * q and w = scale * v, a product is
 *     x . w = step * scale * (q . v) + low * offset,   offset = scale * (sum of v),
 * and q . v, which is exact, is the only part in bytes. All else is float32. A row with a number that is not finite
 * becomes NaN as a whole, and no other row is touched. */
INLINE void prepare(const float *x, long count, long width, struct rows to) {
    for (long r = 0; r < count; r++, x += width) {
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
            store_bytes_of(to.at + r * width + j, (ints)((load(x + j) - low) * factor + WHOLE));
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

INLINE struct outputs outputs_at(const struct product *by, long n) {
    return (struct outputs){load(by->scale + n), load(by->offset + n), load(by->bias + n)};
}
INLINE floats value_of(ints sum, struct outputs of, struct rows x, long r) {
    return __builtin_convertvector(sum, floats) * x.step[r] * of.scale + (of.offset * x.low[r] + of.bias);
}
#define GELU quick_gelu
#endif

static long prepared_size(long inputs) { return BLOCK * (prepared_stride(inputs) + 2 * (long)sizeof(float)); }
static struct rows prepared_at(char *memory, long inputs) {
    const long stride = prepared_stride(inputs);
    float *low = (float *)(memory + BLOCK * stride);
    return (struct rows){memory, stride, low, low + BLOCK};
}

/* Where a product goes: matrices of `width` outputs, `apart` numbers from one to the next, with rows of `row` numbers. */
struct place {
    float *at;
    long row, width, apart;
};
INLINE float *place_of(struct place to, long n) { return to.at + n / to.width * to.apart + n % to.width; }

/* What becomes of the sums: they replace what is there, with a bias; are added to it; or replace it after GELU. */
enum end { ADD_BIAS, ADD_TO, THEN_GELU };

/* The sums of one tile, each row `pitch` numbers after the last, to `y`, the place of its first row and output. */
INLINE void finish(const int *sums, long pitch, long here, struct outputs of, struct rows x, long first, float *y, long row,
                   const enum end end) {
    for (long i = 0; i < here; i++, y += row) {
        const floats v = value_of(load_ints(sums + i * pitch), of, x, first + i);
        store(y, end == THEN_GELU ? GELU(v) : end == ADD_TO ? load(y) + v : v);
    }
}

/* Fetches the share of `size` bytes that is due with the tile of this row, so that the next panel comes without a wait. */
INLINE void fetch(const char *next, long size, long row, long rows) {
    for (long at = up_to(size * row / rows, 64); at < size * (row + ROWS) / rows; at += 64)
        __builtin_prefetch(next + at, 0, 2);
}

/* x . w + bias to its place, and what `end` says. The inputs are taken by so many that a panel of them stays in the first
 * cache while all rows pass. Floats of a whole tile are summed in their place, from the bias or from what is there on. */
INLINE void multiply(struct rows x, long rows, const struct product *by, struct place to, const enum end end) {
    int sums[BLOCK * PANEL] __attribute__((aligned(64)));
    const long all_steps = by->inputs / NUMBERS, parts = (all_steps * PANEL * 4 - 1) / CACHED + 1;
    const long most = (all_steps + parts - 1) / parts;
    for (long n = 0; n < by->outputs; n += PANEL) {
        const long columns = by->outputs - n < PANEL ? by->outputs - n : PANEL;
        const int one_place = NUMBERS == 1 && columns == PANEL && n / to.width == (n + PANEL - 1) / to.width;
        const char *weight = by->weight + n * by->pitch;
        for (long k = 0; k < all_steps; k += most) {
            const long steps = all_steps - k < most ? all_steps - k : most;
            for (long r = 0; r < rows; r += ROWS) {
                const long here = rows - r < ROWS ? rows - r : ROWS;
                const int direct = one_place && here == ROWS;
                int *sum = direct ? (int *)(place_of(to, n) + r * to.row) : sums + r * PANEL;
                const long pitch = direct ? to.row : PANEL;
                if (FETCHES) fetch(weight + (k + steps) * PANEL * 4, steps * PANEL * 4, r, rows);
                const int *first = k || (direct && end == ADD_TO) ? sum : direct ? (const int *)(by->bias + n) : 0;
                tile(x.at + r * x.stride + k * 4, x.stride, weight + k * PANEL * 4, PANEL * 4, steps, first,
                     first == sum ? pitch : 0, sum, pitch);
                if (k + steps < all_steps || (direct && end != THEN_GELU)) continue;
                for (long j = 0; j < columns; j += LANES)
                    finish(sum + j, pitch, here, direct || end == ADD_TO ? (struct outputs){0} : outputs_at(by, n + j), x,
                           r, place_of(to, n + j) + r * to.row, to.row, end);
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

static long chunk_of(long wide) { return CHUNK && wide > CHUNK ? CHUNK : wide; }

/* Bytes of scratch memory that each thread needs, for products of at most so many inputs and outputs. */
long fused_scratch(long hidden, long wide) {
    const long chunk = chunk_of(wide);
    return up_to(prepared_size(hidden) + prepared_size(chunk) + BLOCK * (hidden + chunk) * (long)sizeof(float), 64);
}

/* y[outputs / width, tokens, width] = x w^T + bias */
void fused_linear(const float *x, const struct product *by, float *y, long width, long tokens, long threads,
                  char *scratch, long scratch_size) {
    const long block = block_of(tokens, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long from = 0; from < tokens; from += block) {
        const long rows = tokens - from < block ? tokens - from : block;
        const struct rows ready = prepared_at(scratch + omp_get_thread_num() * scratch_size, by->inputs);
        prepare(x + from * by->inputs, rows, by->inputs, ready);
        multiply(ready, rows, by, (struct place){y + from * width, width, width, tokens * width}, ADD_BIAS);
    }
}

/* y[rows, hidden] = down(GELU(up(x))), by chunks of what is between them, in `inner` */
INLINE void feed_forward(struct rows x, long rows, const struct product *up, const struct product *down, float *inner,
                         char *memory, struct place y) {
    const long wide = up->outputs, chunk = chunk_of(wide);
    for (long c = 0; c < wide; c += chunk) {
        const long here = wide - c < chunk ? wide - c : chunk;
        const struct product some_up = {up->weight + c * up->pitch, up->scale + c, up->offset + c, up->bias + c,
                                        up->inputs, here, up->pitch};
        struct product some_down = *down;
        some_down.weight += c / NUMBERS * PANEL * 4;
        some_down.inputs = here;
        const struct rows ready = prepared_at(memory, here);
#if defined(FLOATS)
        multiply(x, rows, &some_up, (struct place){(float *)ready.at, ready.stride / 4, here, 0}, THEN_GELU);
#else
        multiply(x, rows, &some_up, (struct place){inner, here, here, 0}, THEN_GELU);
        prepare(inner, rows, here, ready);
#endif
        multiply(ready, rows, &some_down, y, c ? ADD_TO : ADD_BIAS);
    }
}

/* What follows attention: x[tokens, hidden] = LayerNorm(x + out(context)), then LayerNorm(x + down(GELU(up(x)))) */
void fused_rest(float *x, const float *context, const struct product *out, const struct norm *attention_norm,
                const struct product *up, const struct product *down, const struct norm *norm, long tokens, long threads,
                char *scratch, long scratch_size) {
    const long block = block_of(tokens, threads), hidden = up->inputs;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long from = 0; from < tokens; from += block) {
        const long rows = tokens - from < block ? tokens - from : block;
        float *to = x + from * hidden, *y = (float *)(scratch + omp_get_thread_num() * scratch_size);
        float *inner = y + BLOCK * hidden;
        char *memory = (char *)(inner + BLOCK * chunk_of(up->outputs));
        const struct rows ready = prepared_at(memory, hidden);
        const struct place place = {y, hidden, hidden, 0};
        prepare(context + from * hidden, rows, hidden, ready);
        multiply(ready, rows, out, place, ADD_BIAS);
        add_norm(to, y, attention_norm, rows, hidden);
        prepare(to, rows, hidden, ready);
        feed_forward(ready, rows, up, down, inner, memory + prepared_size(hidden), place);
        add_norm(to, y, norm, rows, hidden);
    }
}
