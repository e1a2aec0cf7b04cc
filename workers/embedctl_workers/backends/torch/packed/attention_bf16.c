/* Attention over packed texts, its products in bf16 on tiles, its softmax in float32.
 *
 * Rows of queries, keys and values, and of the result, are bf16 for products of one part, else float32.
 */
#include "tiles.h"
#include <omp.h>

static const float zeros[32];

/* 2^x for x <= 0; relative error below 2e-7, or 4e-6 where the result becomes one bf16 */
ALWAYS floats16 power_of_two(floats16 x, const int parts) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = choose16(x < -126.0f, (floats16){0} - 126.0f, x);
    const floats16 n = x + shift - shift, f = x - n;
    floats16 p;
    if (parts == 2) {
        p = f * 1.5353362e-4f + 1.3398874e-3f;
        p = p * f + 9.6184373e-3f;
        p = p * f + 5.5503324e-2f;
    } else p = f * 9.6760e-3f + 5.5861e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    return p * (floats16)((__builtin_convertvector(n, ints16) + 127) << 23);
}

static const ints16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

ALWAYS floats16 larger16(floats16 a, floats16 b) { return choose16(a > b, a, b); }
ALWAYS float sum16(floats16 v) {
    UNROLLED for (int h = 8; h; h /= 2) v += __builtin_shuffle(v, places ^ h);
    return v[0];
}
ALWAYS float largest16(floats16 v) {
    UNROLLED for (int h = 8; h; h /= 2) v = larger16(v, __builtin_shuffle(v, places ^ h));
    return v[0];
}

/* 32 values of a row, `column` from its begin, as one row of a tile; and of the next part's */
ALWAYS void take(const void *row, long column, char *to, long next_part, const int parts) {
    if (parts == 1) *(aligned32 *)to = load32((const uint16_t *)row + column);
    else split(load16((const float *)row + column), load16((const float *)row + column + 16), to, next_part, 2);
}

/* One tile, its rows becoming columns: 16 rows of 16 pairs. */
ALWAYS void transpose_pairs(char *tile) {
#if LANES == 16
    floats rows[16];
    UNROLLED for (int i = 0; i < 16; i++) rows[i] = load((const float *)(tile + i * 64));
    transpose(rows);
    UNROLLED for (int i = 0; i < 16; i++) store((float *)(tile + i * 64), rows[i]);
#else
    uint32_t from[16][16], to[16][16];
    memcpy(from, tile, TILE);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[i][j] = from[j][i];
    memcpy(tile, to, TILE);
#endif
}

/* Values a thread works on, for one head of one text. */
struct desk {
    char *keys, *values, *weights, *queries;
    float *scores, *sums;
};

static long desk_bytes(long longest, long head, int parts) {
    const long padded = up_to(longest, 32);
    return (padded / 16 * (head / 32) + padded / 32 * (head / 16) + padded / 32 * 2 + head / 32 * 2) * parts * TILE +
           32 * (padded + 16) * 4 + 32 * head * 4;
}

static struct desk desk_at(char *memory, long length, long head, int parts) {
    const long padded = up_to(length, 32), tile = TILE * parts;
    struct desk desk = {.keys = memory};
    desk.values = desk.keys + padded / 16 * (head / 32) * tile;
    desk.weights = desk.values + padded / 32 * (head / 16) * tile;
    desk.queries = desk.weights + padded / 32 * 2 * tile;
    desk.scores = (float *)(desk.queries + head / 32 * 2 * tile);
    desk.sums = desk.scores + 32 * (padded + 16);
    return desk;
}

/* Tiles of 32 places in a head x 16 keys, each a row of pairs; keys beyond the text are zero. */
ALWAYS void lay_out_keys(const char *from, long row, long length, long head, char *keys, const int parts) {
    const long deep = head / 32;
    for (long j = 0; j < up_to(length, 32) / 16; j++)
        for (long d = 0; d < deep; d++) {
            char *tile = keys + (j * deep + d) * parts * TILE;
            for (long i = 0; i < 16; i++) {
                if (j * 16 + i < length) take(from + (j * 16 + i) * row, d * 32, tile + i * 64, TILE, parts);
                else
                    for (int part = 0; part < parts; part++)
                        *(aligned32 *)(tile + part * TILE + i * 64) = (halves32){0};
            }
            for (int part = 0; part < parts; part++) transpose_pairs(tile + part * TILE);
        }
}

/* Tiles of 32 tokens x 16 places in a head; a row is two tokens' values in pairs. What is beyond the text is zero. */
ALWAYS void lay_out_values(const char *from, long row, long length, long head, char *values, const int parts) {
    const halves32 low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    for (long t = 0; t < up_to(length, 32); t += 2)
        for (long d = 0; d < head / 32; d++) {
            char rows[2][2 * 64] __attribute__((aligned(64))); /* of two tokens, two parts */
            memset(rows, 0, sizeof rows);
            for (int i = 0; i < 2 && t + i < length; i++) take(from + (t + i) * row, d * 32, rows[i], 64, parts);
            char *at = values + (t / 32 * (head / 16) + d * 2) * parts * TILE + t % 32 / 2 * 64;
            for (int part = 0; part < parts; part++) {
                const halves32 first = *(const aligned32 *)(rows[0] + part * 64);
                const halves32 second = *(const aligned32 *)(rows[1] + part * 64);
                *(aligned32 *)(at + part * TILE) = __builtin_shuffle(first, second, low);
                *(aligned32 *)(at + (parts + part) * TILE) = __builtin_shuffle(first, second, low + 16);
            }
        }
}

/* A row of scores becomes a row of weights, not yet divided by their sum, over packed rows from `to` on; returns the sum. */
ALWAYS float weigh(float *scores, long length, char *to, const int parts) {
    const float log2e = 1.44269504f;
    const long padded = up_to(length, 32);
    for (long j = padded - 32; j < padded; j += 16)
        store16(scores + j, choose16(places < (int)(length - j), load16(scores + j), (floats16){0} - INFINITY));
    floats16 most = load16(scores), most2 = load16(scores + 16);
    for (long j = 32; j < padded; j += 32)
        most = larger16(most, load16(scores + j)), most2 = larger16(most2, load16(scores + j + 16));
    const float top = largest16(larger16(most, most2)) * log2e;
    floats16 sum = {0}, sum2 = {0};
    /* 2^-126 of what is beyond the text meets values of zero, and is lost in a sum of at least 1 */
    for (long j = 0; j < padded; j += 32, to += 2 * TILE * parts) {
        const floats16 a = power_of_two(load16(scores + j) * log2e - top, parts);
        const floats16 b = power_of_two(load16(scores + j + 16) * log2e - top, parts);
        sum += a, sum2 += b;
        split(a, b, to, 2 * TILE, parts);
    }
    return sum16(sum + sum2);
}

/* one head of one text; `row` is the bytes of a row of queries, keys and values, `key` and `value` those up to them */
ALWAYS void attend(const char *from, long row, long key, long value, void *to, long to_row, long length, long head,
                   char *memory, const int parts) {
    const struct desk desk = desk_at(memory, length, head, parts);
    const long padded = up_to(length, 32), deep = head / 32, tile = TILE * parts, wide = padded + 16;
    lay_out_keys(from + key, row, length, head, desk.keys, parts);
    lay_out_values(from + value, row, length, head, desk.values, parts);
    for (long q = 0; q < length; q += 32) {
        const long rows = length - q < 32 ? length - q : 32;
        const int high = rows > 16 ? 2 : 1;
        for (long r = 0; r < rows; r++)
            for (long d = 0; d < deep; d++)
                take(from + (q + r) * row, d * 32, desk.queries + d * 2 * tile + r / 16 * TILE + r % 16 * 64, 2 * TILE,
                     parts);
        for (long j = 0; j < padded / 16; j += 2) {
            const struct side keys = {desk.keys + j * deep * tile, 64, deep * tile, TILE, tile};
            const int both = j * 16 + 16 < length ? 2 : 1;
            product_of(packed_side(desk.queries, parts), keys, zeros, 0, desk.scores + j * 16, wide * 4, deep, parts, high,
                       both, desk.keys, 0);
        }
        float scale[32];
        for (long r = 0; r < rows; r++)
            scale[r] = 1.0f / weigh(desk.scores + r * wide, length, desk.weights + r / 16 * TILE + r % 16 * 64, parts);
        for (long c = 0; c < head; c += 32) {
            const struct side values = {desk.values + c / 16 * tile, 64, tile, TILE, head / 16 * tile};
            product_of(packed_side(desk.weights, parts), values, zeros, 0, desk.sums + c, head * 4, padded / 32, parts,
                       high, 2, desk.values, 0);
        }
        for (long r = 0; r < rows; r++)
            for (long c = 0; c < head; c += 32) {
                const floats16 a = load16(desk.sums + r * head + c) * scale[r];
                const floats16 b = load16(desk.sums + r * head + c + 16) * scale[r];
                char *at = (char *)to + (q + r) * to_row;
                if (parts == 1) *(unaligned32 *)((uint16_t *)at + c) = halves_of(a, b);
                else store16((float *)at + c, a), store16((float *)at + c + 16, b);
            }
    }
}

int may_run(void) { return permitted(); }

/* Scratch of each thread (bytes). */
long scratch_bytes(long longest, long head, int parts) { return up_to(desk_bytes(longest, head, parts), 64); }

ALWAYS void attention_as(const void *qkv, void *context, const long long *offsets, const long long *order, long texts,
                         long heads, long head, char *scratch, long each, const int parts) {
    const long size = parts == 1 ? 2 : 4, wide = heads * head * size, row = 3 * wide;
#pragma omp parallel
    {
        char *memory = scratch + omp_get_thread_num() * each;
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (long work = 0; work < texts * heads; work++) {
            const long text = order[work / heads], first = offsets[text], column = work % heads * head * size;
            attend((const char *)qkv + first * row + column, row, wide, 2 * wide,
                   (char *)context + first * wide + column, wide, offsets[text + 1] - first, head, memory, parts);
        }
        end_tiles();
    }
}

/* context[tokens, heads * head] = softmax(q k^T) v for each head of the texts in `order`, from
 * qkv[tokens, 3 * heads * head]; texts begin at offsets; queries are scaled already; head is a multiple of 32. */
void attention(const void *qkv, void *context, const long long *offsets, const long long *order, long texts, long heads,
               long head, char *scratch, long each, int parts) {
    if (parts == 1) attention_as(qkv, context, offsets, order, texts, heads, head, scratch, each, 1);
    else attention_as(qkv, context, offsets, order, texts, heads, head, scratch, each, 2);
}
