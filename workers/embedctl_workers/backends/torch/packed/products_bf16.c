/* The products of an encoder's layer in bf16 on tiles, and what follows each of them, while its rows are in the cache.
 *
 * Values between the layers are float32, as are LayerNorm, GELU and every sum. All widths are multiples of 32.
 */
#include "tiles.h"
#include <omp.h>

/* Rows that a thread takes at a time, so that the values between two products stay in L2. */
#define MOST_ROWS 256
/* Bytes of the values between the feed-forward's products up to which a thread takes so many; beyond, fewer. */
#define MOST_INNER (256 * 1536 * 2)
/* Bytes of a panel of weights that stay in L1 from one panel of rows to the next. */
#define IN_L1 (24 * 1024)

/* ---- GELU ---- */

/* Phi(x) - 1/2 for x from 0 to REACH, by a cubic for each of 32 intervals; absolute error below 3e-7 */
#define REACH 5.5
static floats16 cubics[4][2];

static void __attribute__((constructor)) fit_cubics(void) {
    for (int i = 0; i < 32; i++) {
        /* through the Chebyshev nodes u of the interval, u in [0, 1), by Newton's divided differences */
        double u[4], f[4], c[4] = {0, 0, 0, 0};
        for (int j = 0; j < 4; j++) {
            u[j] = 0.5 + 0.5 * cos((2 * j + 1) * 3.14159265358979323846 / 8);
            f[j] = 0.5 * erf((i + u[j]) * (REACH / 32) * 0.70710678118654752440);
        }
        for (int d = 1; d < 4; d++)
            for (int j = 3; j >= d; j--) f[j] = (f[j] - f[j - 1]) / (u[j] - u[j - d]);
        for (int j = 3; j >= 0; j--) {
            for (int d = 3; d > 0; d--) c[d] = c[d - 1] - u[j] * c[d];
            c[0] = f[j] - u[j] * c[0];
        }
        for (int d = 0; d < 4; d++) cubics[d][i / 16][i % 16] = c[d];
    }
}

ALWAYS floats16 quick_gelu(floats16 x) {
    const floats16 a = (floats16)((ints16)x & 0x7fffffff) * (float)(32 / REACH);
    const ints16 inside = a < 32.0f; /* not of a NaN */
    const floats16 at = choose16(inside, a, (floats16){0});
    const ints16 i = __builtin_convertvector(at, ints16);
    const floats16 u = at - __builtin_convertvector(i, floats16);
    floats16 p = __builtin_shuffle(cubics[3][0], cubics[3][1], i);
    for (int d = 2; d >= 0; d--) p = p * u + __builtin_shuffle(cubics[d][0], cubics[d][1], i);
    p = choose16(inside, p, (floats16){0} + 0.5f);
    p = (floats16)((ints16)p | ((ints16)x & (int)0x80000000));
    return x * (p + 0.5f);
}

/* ---- weights ---- */

static long wide_of(long n) { return up_to(n, 32) / 32; }

long packed_bytes(long outputs, long inputs, int parts) {
    return wide_of(outputs) * wide_of(inputs) * 2 * TILE * parts;
}

/* w[outputs, inputs], packed, with zeros up to whole panels and blocks */
void pack_weight(const float *w, char *to, long outputs, long inputs, int parts) {
    const long blocks = wide_of(inputs);
#pragma omp parallel for schedule(static)
    for (long panel = 0; panel < wide_of(outputs); panel++)
        for (long block = 0; block < blocks; block++) {
            uint16_t *at = (uint16_t *)(to + (panel * blocks + block) * 2 * TILE * parts);
            for (long o = 0; o < 32; o++)
                for (long i = 0; i < 32; i++) {
                    const long row = panel * 32 + o, column = block * 32 + i;
                    const float value = row < outputs && column < inputs ? w[row * inputs + column] : 0.0f;
                    const long place = o / 16 * (TILE / 2) + i / 2 * 32 + o % 16 * 2 + i % 2;
                    at[place] = half_of(value);
                    if (parts == 2) at[TILE + place] = half_of(value - float_of(at[place]));
                }
        }
}

/* ---- rows ---- */

static long rows_bytes(long rows, long width, int parts) { return up_to(rows, 32) * width * 2 * parts; }

/* where row r and block b of packed rows begin */
ALWAYS char *row_at(char *packed, long r, long b, long blocks, const int parts) {
    return packed + ((r / 32 * blocks + b) * parts * 2 + r / 16 % 2) * TILE + r % 16 * 64;
}

/* x[rows, width], packed */
ALWAYS void pack_rows(const float *x, long rows, long width, char *to, const int parts) {
    const long blocks = width / 32;
    for (long r = 0; r < rows; r++)
        for (long b = 0; b < blocks; b++) {
            const float *from = x + r * width + b * 32;
            split(load16(from), load16(from + 16), row_at(to, r, b, blocks, parts), 2 * TILE, parts);
        }
}

/* the same of rows that are bf16 already */
ALWAYS void pack_halves(const uint16_t *x, long rows, long width, char *to) {
    const long blocks = width / 32;
    for (long r = 0; r < rows; r++)
        for (long b = 0; b < blocks; b++)
            *(aligned32 *)row_at(to, r, b, blocks, 1) = load32(x + r * width + b * 32);
}

/* What follows a product: where its results go. */
enum after { TO_FLOATS, TO_HALVES, ADDED, TO_PACKED_GELU };

/* a w^T + bias, of packed rows and weights, and what follows.
 *
 * TO_FLOATS, TO_HALVES: to[rows, outputs]. ADDED: to[rows, outputs] += it. TO_PACKED_GELU: GELU of it, as packed rows.
 * `sums` is scratch of 4 KB for each panel of rows.
 */
ALWAYS void multiply(const char *a, const char *w, const float *bias, void *to, float *sums, long rows, long inputs,
                     long outputs, const int parts, const enum after after) {
    const long blocks = inputs / 32, step = 2 * TILE * parts, panels = wide_of(rows), wide = outputs / 32;
    const long turns = (blocks * step + IN_L1 - 1) / IN_L1, at_once = (blocks + turns - 1) / turns;
    const long lines = (step / 64 + panels - 1) / panels;
    for (long panel = 0; panel < wide; panel++)
        for (long b = 0; b < blocks; b += at_once) {
            const long count = blocks - b < at_once ? blocks - b : at_once;
            const int last = b + count == blocks;
            const char *weights = w + (panel * blocks + b) * step;
            const char *next = last && panel + 1 == wide ? w : weights + count * step;
            for (long r = 0; r < rows; r += 32, next += count * lines * 64) {
                const int high = rows - r > 16 ? 2 : 1;
                const long left = rows - r < 32 ? rows - r : 32;
                float *sum = sums + r * 32;
                product_of(packed_side(a + (r / 32 * blocks + b) * step, parts), packed_side(weights, parts),
                           b ? sum : bias + panel * 32, b ? 128 : 0, sum, 128, count, parts, high, 2, next, lines);
                if (!last) continue;
                if (after == TO_PACKED_GELU) {
                    for (long i = 0; i < 16 * high; i++)
                        split(quick_gelu(load16(sum + i * 32)), quick_gelu(load16(sum + i * 32 + 16)),
                              row_at(to, r + i, panel, wide, parts), 2 * TILE, parts);
                    continue;
                }
                for (long i = 0; i < left; i++) {
                    const floats16 x = load16(sum + i * 32), y = load16(sum + i * 32 + 16);
                    const long place = (r + i) * outputs + panel * 32;
                    if (after == TO_HALVES) {
                        *(unaligned32 *)((uint16_t *)to + place) = halves_of(x, y);
                        continue;
                    }
                    float *at = (float *)to + place;
                    store16(at, after == ADDED ? load16(at) + x : x);
                    store16(at + 16, after == ADDED ? load16(at + 16) + y : y);
                }
            }
        }
}

/* Rows in chunks of whole panels, as many as make the threads' shares equal. */
struct chunks {
    long rows, count;
};
static struct chunks chunks_of(long rows, long most) {
    const long count = up_to((rows + most - 1) / most, omp_get_max_threads());
    const long each = up_to((rows + count - 1) / count, 32);
    return (struct chunks){each, (rows + each - 1) / each};
}
static long most_rows(long wide, int parts) {
    const long fit = MOST_INNER / (wide * 2 * parts) / 32 * 32;
    return fit < 32 ? 32 : fit < MOST_ROWS ? fit : MOST_ROWS;
}

/* ---- what the layer calls ---- */

int may_run(void) { return permitted(); }

/* Scratch of each thread (bytes) for both functions below; `wide` is the feed-forward's width or that of attention. */
long scratch_bytes(long hidden, long wide, int parts) {
    return MOST_ROWS * 128 + rows_bytes(MOST_ROWS, hidden, parts) + rows_bytes(MOST_ROWS, wide, parts);
}

ALWAYS void project_as(const float *x, const char *w, const float *bias, void *to, long rows, long inputs, long outputs,
                       char *scratch, long each, const int parts) {
    const struct chunks chunks = chunks_of(rows, MOST_ROWS);
#pragma omp parallel
    {
        float *sums = (float *)(scratch + omp_get_thread_num() * each);
        char *a = (char *)(sums + MOST_ROWS * 32);
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks.count; c++) {
            const long from = c * chunks.rows, count = rows - from < chunks.rows ? rows - from : chunks.rows;
            pack_rows(x + from * inputs, count, inputs, a, parts);
            if (parts == 1)
                multiply(a, w, bias, (uint16_t *)to + from * outputs, sums, count, inputs, outputs, 1, TO_HALVES);
            else multiply(a, w, bias, (float *)to + from * outputs, sums, count, inputs, outputs, 2, TO_FLOATS);
        }
        end_tiles();
    }
}

/* to[rows, outputs] = x w^T + bias; `to` is bf16 for one part, else float32 */
void project(const float *x, const char *w, const float *bias, void *to, long rows, long inputs, long outputs,
             char *scratch, long each, int parts) {
    if (parts == 1) project_as(x, w, bias, to, rows, inputs, outputs, scratch, each, 1);
    else project_as(x, w, bias, to, rows, inputs, outputs, scratch, each, 2);
}

struct product {
    const char *weight;
    const float *bias;
};
struct norm {
    const float *weight, *bias;
    float eps;
};
/* What follows a layer's attention. */
struct rest {
    struct product out, up, down;
    struct norm attention_norm, norm;
    long attended, hidden, wide;
};

static void normalise_rows(float *x, long rows, long width, struct norm norm) {
    for (long r = 0; r < rows; r++) normalise(x + r * width, norm.weight, norm.bias, width, norm.eps);
}

ALWAYS void finish_as(float *x, const void *context, const struct rest *rest, long rows, char *scratch, long each,
                      const int parts) {
    const long hidden = rest->hidden, attended = rest->attended;
    const long wide = rest->wide, widest = attended > wide ? attended : wide;
    const struct chunks chunks = chunks_of(rows, most_rows(widest, parts));
#pragma omp parallel
    {
        float *sums = (float *)(scratch + omp_get_thread_num() * each);
        char *a = (char *)(sums + MOST_ROWS * 32), *inner = a + rows_bytes(MOST_ROWS, hidden, parts);
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (long c = 0; c < chunks.count; c++) {
            const long from = c * chunks.rows, count = rows - from < chunks.rows ? rows - from : chunks.rows;
            float *to = x + from * hidden;
            if (parts == 1) pack_halves((const uint16_t *)context + from * attended, count, attended, inner);
            else pack_rows((const float *)context + from * attended, count, attended, inner, parts);
            multiply(inner, rest->out.weight, rest->out.bias, to, sums, count, attended, hidden, parts, ADDED);
            normalise_rows(to, count, hidden, rest->attention_norm);
            pack_rows(to, count, hidden, a, parts);
            multiply(a, rest->up.weight, rest->up.bias, inner, sums, count, hidden, wide, parts, TO_PACKED_GELU);
            multiply(inner, rest->down.weight, rest->down.bias, to, sums, count, wide, hidden, parts, ADDED);
            normalise_rows(to, count, hidden, rest->norm);
        }
        end_tiles();
    }
}

/* x[rows, hidden] = the layer's output, from its input x and context[rows, attended], which is bf16 for one part */
void finish(float *x, const void *context, const struct rest *rest, long rows, char *scratch, long each, int parts) {
    if (parts == 1) finish_as(x, context, rest, rows, scratch, each, 1);
    else finish_as(x, context, rest, rows, scratch, each, 2);
}
