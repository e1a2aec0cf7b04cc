/* Products of bf16 matrices, summed in float32, on tiles of 16 rows x 64 bytes.
 *
 * One of three units computes them, chosen when a file is compiled:
 *   TILES_AMX       the tile registers of Intel's AMX;
 *   TILES_AVX512    VDPBF16PS, on AVX512_BF16 without AMX;
 *   TILES_EMULATED  AMX's code on tile registers in plain C. It is slow, and for tests alone.
 *
 * A matrix has one part, its values rounded to bf16, or two, the second being bf16 of what the first one lost. Products of
 * two parts are x = xh + xl, w = wh + wl, x w = xl wh + xh wh + xh wl: 16 bits of each factor.
 *
 * Packed rows: panels of 32 rows; in each, blocks of 32 inputs; in each, for either part, two tiles of 16 rows x 32 inputs.
 * Packed weights: panels of 32 outputs; in each, blocks of 32 inputs; in each, for either part, two tiles of 16 outputs. A
 * row of such a tile is a pair of inputs for each of the outputs. Rows of a tile that a matrix does not fill hold
 * anything: no row of a product depends on another row of its left side.
 */
#ifndef TILES_H
#define TILES_H

#include "vectors.h"
#include <stdint.h>

#if !defined(TILES_EMULATED)
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define TILE 1024 /* bytes */

typedef float floats16 __attribute__((vector_size(64)));
typedef int ints16 __attribute__((vector_size(64)));
typedef uint16_t halves32 __attribute__((vector_size(64)));
typedef float unaligned16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t unaligned32 __attribute__((vector_size(64), aligned(2), may_alias));
typedef halves32 aligned32 __attribute__((may_alias));

ALWAYS floats16 load16(const float *at) { return *(const unaligned16 *)at; }
ALWAYS void store16(float *at, floats16 value) { *(unaligned16 *)at = value; }
ALWAYS halves32 load32(const uint16_t *at) { return *(const unaligned32 *)at; }
ALWAYS floats16 choose16(ints16 mask, floats16 yes, floats16 no) {
    return (floats16)(((ints16)yes & mask) | ((ints16)no & ~mask));
}

/* ---- float32 to bf16 ---- */

ALWAYS float float_of(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* rounded to nearest, ties to even; a NaN stays one */
ALWAYS uint16_t half_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* 32 float32 in a and b, as bf16 */
ALWAYS halves32 halves_of(floats16 a, floats16 b) {
#if defined(TILES_EMULATED)
    halves32 result = {0};
    for (int i = 0; i < 16; i++) result[i] = half_of(a[i]), result[i + 16] = half_of(b[i]);
    return result;
#else
    return (halves32)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#endif
}

/* the same, into one row of a tile; and of what is lost, into the same row of the next part's */
ALWAYS void split(floats16 a, floats16 b, char *to, long next_part, const int parts) {
    const halves32 high = halves_of(a, b);
    *(aligned32 *)to = high;
    if (parts == 2) {
#if defined(TILES_EMULATED)
        for (int i = 0; i < 16; i++) a[i] -= float_of(high[i]), b[i] -= float_of(high[i + 16]);
#else
        a -= (floats16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256((__m512i)high)), 16);
        b -= (floats16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64((__m512i)high, 1)), 16);
#endif
        *(aligned32 *)(to + next_part) = halves_of(a, b);
    }
}

/* ---- the units ---- */

/* Tiles of one side of a product. The first block's first tile begins at `at`; the others lie so many bytes further. */
struct side {
    const char *at;
    long row, second, part, block;
};

/* packed rows or weights, from one block of a panel on */
ALWAYS struct side packed_side(const char *at, const int parts) {
    return (struct side){at, 64, TILE, 2 * TILE, 2 * TILE * parts};
}

#if defined(TILES_AMX)

#include <sys/syscall.h>
#include <unistd.h>

/* Whether the kernel lets this process use tiles. Asked once, it holds for all threads. */
static int permitted(void) {
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

static void begin_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}
static void end_tiles(void) { _tile_release(); }

/* Macros, because the number of a tile is part of the instruction. */
#define load_tile(tile, at, row) _tile_loadd(tile, at, row)
#define store_tile(tile, at, row) _tile_stored(tile, at, row)
#define multiply_tiles(sums, a, w) _tile_dpbf16ps(sums, a, w)

#elif defined(TILES_EMULATED)

/* The tile registers of a thread. Between end_tiles() and begin_tiles(), they are not to be used. */
static _Thread_local struct {
    int ready;
    char rows[8][16][64];
} tiles;

static int permitted(void) { return 1; }
static void begin_tiles(void) { tiles.ready = 1; }
static void end_tiles(void) { tiles.ready = 0; }

static void load_tile(int tile, const void *at, long row) {
    if (!tiles.ready) __builtin_trap();
    for (int r = 0; r < 16; r++) memcpy(tiles.rows[tile][r], (const char *)at + r * row, 64);
}

static void store_tile(int tile, void *at, long row) {
    if (!tiles.ready) __builtin_trap();
    for (int r = 0; r < 16; r++) memcpy((char *)at + r * row, tiles.rows[tile][r], 64);
}

static float flushed(float value) { return fabsf(value) < 1.17549435e-38f ? 0.0f * value : value; }

/* TDPBF16PS: denormals count as zero, and the sums of even and of odd inputs are kept apart until the end. */
static void multiply_tiles(int sums, int a, int w) {
    if (!tiles.ready) __builtin_trap();
    uint16_t x[16][32], y[16][32];
    float sum[16][16];
    memcpy(x, tiles.rows[a], TILE), memcpy(y, tiles.rows[w], TILE), memcpy(sum, tiles.rows[sums], TILE);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < 16; k++) {
                even = flushed(fmaf(flushed(float_of(x[m][2 * k])), flushed(float_of(y[k][2 * n])), even));
                odd = flushed(fmaf(flushed(float_of(x[m][2 * k + 1])), flushed(float_of(y[k][2 * n + 1])), odd));
            }
            sum[m][n] = flushed(flushed(sum[m][n]) + flushed(even + odd));
        }
    memcpy(tiles.rows[sums], sum, TILE);
}

#endif

#if defined(TILES_AMX) || defined(TILES_EMULATED)

/* Loads one part of the rows, which stays in tiles 4 and 5, and multiplies it by the weights in tiles 6 and 7. */
#define TIMES_WEIGHTS(rows)                                                                                            \
    {                                                                                                                  \
        load_tile(4, rows, a.row);                                                                                     \
        multiply_tiles(0, 4, 6);                                                                                       \
        if (wide == 2) multiply_tiles(1, 4, 7);                                                                        \
        if (high == 2) {                                                                                               \
            load_tile(5, rows + a.second, a.row);                                                                      \
            multiply_tiles(2, 5, 6);                                                                                   \
            if (wide == 2) multiply_tiles(3, 5, 7);                                                                    \
        }                                                                                                              \
    }

/* out[16 high, 16 wide] = in + a w, high and wide 1 or 2; an `in_row` of 0 bytes repeats one row. While at it, fetches
 * `lines` lines a block of `next` into L2. */
ALWAYS void product(struct side a, struct side w, const float *in, long in_row, float *out, long out_row, long blocks,
                    const int parts, const int high, const int wide, const char *next, long lines) {
    const long below = 4 * in_row; /* floats of 16 rows: in_row is bytes */
    load_tile(0, in, in_row);
    if (wide == 2) load_tile(1, in + 16, in_row);
    if (high == 2) load_tile(2, in + below, in_row);
    if (high == 2 && wide == 2) load_tile(3, in + below + 16, in_row);
    for (long k = 0; k < blocks; k++, a.at += a.block, w.at += w.block) {
        for (long line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
        /* Loads in an order in which 8 of them serve the 12 products of two parts. */
        load_tile(6, w.at, w.row);
        if (wide == 2) load_tile(7, w.at + w.second, w.row);
        if (parts == 2) TIMES_WEIGHTS(a.at + a.part)
        TIMES_WEIGHTS(a.at)
        if (parts == 2) {
            load_tile(6, w.at + w.part, w.row);
            multiply_tiles(0, 4, 6);
            if (high == 2) multiply_tiles(2, 5, 6);
            if (wide == 2) {
                load_tile(7, w.at + w.part + w.second, w.row);
                multiply_tiles(1, 4, 7);
                if (high == 2) multiply_tiles(3, 5, 7);
            }
        }
    }
    store_tile(0, out, out_row);
    if (wide == 2) store_tile(1, out + 16, out_row);
    if (high == 2) store_tile(2, out + 4 * out_row, out_row);
    if (high == 2 && wide == 2) store_tile(3, out + 4 * out_row + 16, out_row);
}

#else

static int permitted(void) { return 1; }
static void begin_tiles(void) {}
static void end_tiles(void) {}

/* Rows at a time: 16 accumulators, the weights' two vectors, and one pair of inputs in all lanes. */
#define ROWS 8

ALWAYS void eight_rows(struct side a, struct side w, const float *in, long in_row, float *out, long out_row,
                       long blocks, const int parts, const int wide) {
    __m512 sums[ROWS][2];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int c = 0; c < wide; c++) sums[r][c] = _mm512_loadu_ps((const char *)in + r * in_row + c * 64);
    for (long k = 0; k < blocks; k++, a.at += a.block, w.at += w.block)
        for (int term = 0; term < (parts == 2 ? 3 : 1); term++) {
            const char *x = a.at + (parts == 2 && term == 0 ? a.part : 0), *y = w.at + (term == 2 ? w.part : 0);
            for (int pair = 0; pair < 16; pair++) {
                __m512bh weights[2];
                UNROLLED for (int c = 0; c < wide; c++)
                    weights[c] = (__m512bh)_mm512_load_si512(y + c * w.second + pair * w.row);
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    const __m512bh inputs = (__m512bh)_mm512_set1_epi32(*(const int *)(x + r * a.row + pair * 4));
                    UNROLLED for (int c = 0; c < wide; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], inputs, weights[c]);
                }
            }
        }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int c = 0; c < wide; c++) _mm512_storeu_ps((char *)out + r * out_row + c * 64, sums[r][c]);
}

/* Not inlined: in the midst of other code, GCC keeps the sums in memory. */
#define EIGHT_ROWS(name, parts, wide)                                                                                  \
    static __attribute__((noinline, unused)) void name(struct side a, struct side w, const float *in, long in_row,     \
                                                       float *out, long out_row, long blocks) {                        \
        eight_rows(a, w, in, in_row, out, out_row, blocks, parts, wide);                                               \
    }
EIGHT_ROWS(one_part_narrow, 1, 1)
EIGHT_ROWS(one_part_wide, 1, 2)
EIGHT_ROWS(two_parts_narrow, 2, 1)
EIGHT_ROWS(two_parts_wide, 2, 2)

ALWAYS void product(struct side a, struct side w, const float *in, long in_row, float *out, long out_row, long blocks,
                    const int parts, const int high, const int wide, const char *next, long lines) {
    (void)next, (void)lines;
    for (int r = 0; r < 16 * high; r += ROWS) {
        struct side rows = a;
        rows.at += r / 16 * a.second + r % 16 * a.row;
        (parts == 1 ? wide == 1 ? one_part_narrow : one_part_wide : wide == 1 ? two_parts_narrow : two_parts_wide)(
            rows, w, in + r * in_row / 4, in_row, out + r * out_row / 4, out_row, blocks);
    }
}

#endif

/* product() with sizes that are known only at run time; a call of each kind, so that each is compiled for its own */
ALWAYS void product_of(struct side a, struct side w, const float *in, long in_row, float *out, long out_row,
                       long blocks, const int parts, int high, int wide, const char *next, long lines) {
    if (high == 2 && wide == 2) product(a, w, in, in_row, out, out_row, blocks, parts, 2, 2, next, lines);
    else if (high == 2) product(a, w, in, in_row, out, out_row, blocks, parts, 2, 1, next, lines);
    else if (wide == 2) product(a, w, in, in_row, out, out_row, blocks, parts, 1, 2, next, lines);
    else product(a, w, in, in_row, out, out_row, blocks, parts, 1, 1, next, lines);
}

#endif
