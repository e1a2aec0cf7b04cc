/* Sums of products, of bytes, numbers of 16 bits, or float32: the instruction, and tiles of a matrix product made of it.
 *
 * A step of a tile takes four bytes, two numbers of 16 bits, or one float, of each of ROWS rows, and multiplies them by
 * those of the columns: one register holds LANES columns. Sums of integers are exact.
 */
#ifndef SUMS_H
#define SUMS_H

#include "vectors.h"
#include <omp.h>
#include <stdint.h>
#if defined(__AVX__) && !defined(FLOATS)
#include <immintrin.h>
#endif

#if defined(FLOATS) && LANES == 16
#define ROWS 12 /* with two registers of columns: a step loads little beside its 24 products */
#else
#define ROWS 6
#endif
#define INLINE static inline __attribute__((always_inline))

typedef int unaligned_ints __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

INLINE ints load_ints(const void *at) { return *(const unaligned_ints *)at; }
INLINE void store_ints(void *at, ints value) { *(unaligned_ints *)at = value; }
INLINE ints repeat(const void *at) {
    int value;
    memcpy(&value, at, 4);
    return value - (ints){0};
}

/* sums += x . w in each lane: DOT8 of four bytes, those of x unsigned, those of w -MOST_BYTE…MOST_BYTE; DOT16 of two numbers
 * of 16 bits; DOT32 of floats. The instructions are written out, because GCC 12 moves the sums to memory and back around
 * its own names for them. Without VNNI, DOT8 adds two products in 16 bits first, which 7 bits of w keep exact. */
#define MOST_BYTE 127
#if defined(INT8_EMULATED)
INLINE ints dot8(ints sums, ints x, ints w) {
    uint8_t from[4 * LANES];
    int8_t by[4 * LANES];
    memcpy(from, &x, sizeof from);
    memcpy(by, &w, sizeof by);
    for (int i = 0; i < 4 * LANES; i++) sums[i / 4] += from[i] * by[i];
    return sums;
}
INLINE ints dot16(ints sums, ints x, ints w) {
    int16_t from[2 * LANES], by[2 * LANES];
    memcpy(from, &x, sizeof from);
    memcpy(by, &w, sizeof by);
    for (int i = 0; i < 2 * LANES; i++) sums[i / 2] += from[i] * by[i];
    return sums;
}
#define DOT8(sums, x, w) sums = dot8(sums, x, w);
#define DOT16(sums, x, w) sums = dot16(sums, x, w);
#elif defined(__AVX512VNNI__) && LANES == 16
#define DOT8(sums, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
#define DOT16(sums, x, w) __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
#elif defined(__AVXVNNI__) && LANES == 8
#define DOT8(sums, x, w) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(x), "x"(w));
#define DOT16(sums, x, w) __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(x), "x"(w));
#elif defined(__AVX2__) && (LANES == 8 || defined(__AVX512BW__))
#undef MOST_BYTE
#define MOST_BYTE 63
static const int16_t ones[2 * LANES] __attribute__((aligned(64))) = {[0 ... 2 * LANES - 1] = 1};
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
#define ADD_PAIRS(sums, instruction, x, w, ...)                                                                        \
    {                                                                                                                  \
        ints pairs;                                                                                                    \
        __asm__(instruction " %2, %1, %0" __VA_ARGS__ : "=v"(pairs) : "v"(x), "v"(w), "m"(*(const shorts *)ones));     \
        sums += pairs;                                                                                                 \
    }
#define DOT8(sums, x, w) ADD_PAIRS(sums, "vpmaddubsw", x, w, "; vpmaddwd %3, %0, %0")
#define DOT16(sums, x, w) ADD_PAIRS(sums, "vpmaddwd", x, w)
#elif !defined(FLOATS)
#error "this CPU has no instruction for products of bytes"
#endif
#define DOT32(sums, x, w) sums = (ints)((floats)sums + (floats)x * (floats)w);

#if ROWS == 12
#define EACH_ROW(F, ...) EACH6(F, 0, 1, 2, 3, 4, 5, __VA_ARGS__) EACH6(F, 6, 7, 8, 9, 10, 11, __VA_ARGS__)
#else
#define EACH_ROW(F, ...) EACH6(F, 0, 1, 2, 3, 4, 5, __VA_ARGS__)
#endif
#define EACH6(F, a, b, c, d, e, f, ...)                                                                                \
    F(a, __VA_ARGS__) F(b, __VA_ARGS__) F(c, __VA_ARGS__) F(d, __VA_ARGS__) F(e, __VA_ARGS__) F(f, __VA_ARGS__)
#define EACH1(F, ...) F(0, __VA_ARGS__)
#define EACH2(F, ...) F(0, __VA_ARGS__) F(1, __VA_ARGS__)
#define EACH4(F, ...) F(0, __VA_ARGS__) F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__)

#define BEGIN(v, i) ints s##i##v = first ? load_ints(first + i * apart + v * LANES) : (ints){0};
#define BEGIN_ROW(i, COLUMNS) COLUMNS(BEGIN, i)
#define COLUMN(v, _) const ints w##v = load_ints(w + v * sizeof(ints));
#define STEP(v, i, DOT) DOT(s##i##v, x##i, w##v)
#define STEP_ROW(i, COLUMNS, DOT)                                                                                      \
    const ints x##i = repeat((i < 6 ? x : half) + i % 6 * stride);                                                       \
    COLUMNS(STEP, i, DOT)
#define END(v, i) store_ints(sums + i * width + v * LANES, s##i##v);
#define END_ROW(i, COLUMNS) COLUMNS(END, i)

/* sums[ROWS, columns] = first[ROWS, columns] + x . w, over `steps` steps.
 *   x: rows of `stride` bytes; w: steps of `step` bytes, the columns side by side; first: may be null, for zeros;
 *   apart, width: columns from one row of `first` and of the sums to the next.
 * Not inline: among what a caller holds in registers, GCC 12 finds no room for all sums. */
#define TILE(name, COLUMNS, DOT)                                                                                       \
    static __attribute__((noinline)) void name(const char *x, long stride, const char *w, long step, long steps,       \
                                               const int *first, long apart, int *sums, long width) {                  \
        const char *half = x + 6 * stride; /* for want of registers for 11 multiples of the stride */                    \
        EACH_ROW(BEGIN_ROW, COLUMNS)                                                                                   \
        for (; steps > 0; steps--, x += 4, half += 4, w += step) {                                                       \
            COLUMNS(COLUMN, )                                                                                          \
            EACH_ROW(STEP_ROW, COLUMNS, DOT)                                                                           \
        }                                                                                                              \
        EACH_ROW(END_ROW, COLUMNS)                                                                                     \
    }

INLINE floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }

/* The low bytes, or the low halves, of each lane. GCC 12 makes single moves of __builtin_convertvector. */
#if defined(FLOATS) /* has none */
#elif defined(__AVX512F__)
INLINE void store_bytes_of(void *at, ints x) { _mm_storeu_si128(at, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE void store_shorts_of(void *at, ints x) { _mm256_storeu_si256(at, _mm512_cvtepi32_epi16((__m512i)x)); }
#elif defined(__AVX2__)
INLINE void store_bytes_of(void *at, ints x) {
    const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
    _mm_storel_epi64(at, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(low, _mm256_set_epi32(0, 0, 0, 0, 0, 0, 4, 0))));
}
INLINE void store_shorts_of(void *at, ints x) {
    const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi64x(0x0d0c090805040100));
    _mm_storeu_si128(at, _mm256_castsi256_si128(_mm256_permute4x64_epi64(low, 0x08)));
}
#else
typedef int8_t unaligned_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t unaligned_shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
INLINE void store_bytes_of(void *at, ints x) { *(unaligned_bytes *)at = __builtin_convertvector(x, unaligned_bytes); }
INLINE void store_shorts_of(void *at, ints x) { *(unaligned_shorts *)at = __builtin_convertvector(x, unaligned_shorts); }
#endif

/* 1.5 * 2^23: after adding it to a number of less than 2^22, the lowest bits of the sum are that number, rounded. */
#define WHOLE 12582912.0f

#endif
