/* Vectors of float32 as wide as the CPU's registers, and functions of them: for every C file of the packed engine.
 *
 * Written with the vector extensions of GCC and clang, so that one source serves AVX-512, AVX2 and NEON. NaN comes out
 * wherever NaN went in.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define EACH(F, h)                                                                                                     \
    F(h, 0), F(h, 1), F(h, 2), F(h, 3), F(h, 4), F(h, 5), F(h, 6), F(h, 7), F(h, 8), F(h, 9), F(h, 10), F(h, 11),      \
        F(h, 12), F(h, 13), F(h, 14), F(h, 15)
#elif defined(__AVX__)
#define LANES 8
#define EACH(F, h) F(h, 0), F(h, 1), F(h, 2), F(h, 3), F(h, 4), F(h, 5), F(h, 6), F(h, 7)
#else
#define LANES 4
#define EACH(F, h) F(h, 0), F(h, 1), F(h, 2), F(h, 3)
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, F, h) __builtin_shufflevector(a, b, EACH(F, h))
#else
#define SHUFFLE(a, b, F, h) __builtin_shuffle(a, b, (ints){EACH(F, h)})
#endif

static inline floats load(const float *at) { return *(const unaligned *)at; }
static inline void store(float *at, floats value) { *(unaligned *)at = value; }
static inline floats all(float value) { return value - (floats){0}; }
static inline floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

/* The lesser or greater of each lane; b where one of them is NaN. The instruction is written out, because <immintrin.h>
 * alone takes a compiler 0.15 s. */
#if defined(__AVX__)
#define OF_TWO(name, instruction, sign)                                                                                \
    static inline floats name(floats a, floats b) {                                                                    \
        __asm__(instruction " %2, %1, %0" : "=v"(a) : "v"(a), "v"(b));                                                 \
        return a;                                                                                                      \
    }
#else
#define OF_TWO(name, instruction, sign)                                                                                \
    static inline floats name(floats a, floats b) { return choose(a sign b, a, b); }
#endif
OF_TWO(least_of_two, "vminps", <)
OF_TWO(most_of_two, "vmaxps", >)

#define SWAP(h, lane) ((lane) ^ (h))
static inline float sum_of(floats v) {
#if LANES > 8
    v += SHUFFLE(v, v, SWAP, 8);
#endif
#if LANES > 4
    v += SHUFFLE(v, v, SWAP, 4);
#endif
    v += SHUFFLE(v, v, SWAP, 2);
    v += SHUFFLE(v, v, SWAP, 1);
    return v[0];
}

static inline float largest_of(floats v) {
#if LANES > 8
    v = most_of_two(v, SHUFFLE(v, v, SWAP, 8));
#endif
#if LANES > 4
    v = most_of_two(v, SHUFFLE(v, v, SWAP, 4));
#endif
    v = most_of_two(v, SHUFFLE(v, v, SWAP, 2));
    v = most_of_two(v, SHUFFLE(v, v, SWAP, 1));
    return v[0];
}

/* Transposes LANES rows in place: blocks of h lanes change places, for h = 1, 2, 4, … */
#define LOWER(h, lane) (((lane) & (h)) ? LANES + (lane) - (h) : (lane))
#define UPPER(h, lane) (((lane) & (h)) ? LANES + (lane) : (lane) + (h))
#define UNROLLED _Pragma("GCC unroll 16") /* so that an array of registers is one */
#define STAGE(rows, h)                                                                                                 \
    UNROLLED for (int i = 0; i < LANES; i++)                                                                           \
        if (!(i & (h))) {                                                                                              \
            floats a = rows[i], b = rows[i + (h)];                                                                     \
            rows[i] = SHUFFLE(a, b, LOWER, h);                                                                         \
            rows[i + (h)] = SHUFFLE(a, b, UPPER, h);                                                                   \
        }
static inline void transpose(floats rows[LANES]) {
    STAGE(rows, 1)
    STAGE(rows, 2)
#if LANES > 4
    STAGE(rows, 4)
#endif
#if LANES > 8
    STAGE(rows, 8)
#endif
}

/* x * Phi(x), with an absolute error below 1e-6; erf by a rational function on -4…4, as Eigen and XLA have it. */
static inline floats gelu_of(floats x) {
    const floats z = least_of_two(all(4.0f), most_of_two(all(-4.0f), x * 0.70710678f));
    const floats t = z * z;
    floats p = all(-2.72614225801306e-10f), q = all(-1.45660718464996e-05f);
    p = p * t + 2.77068142495902e-08f;
    p = p * t - 2.10102402082508e-06f;
    p = p * t - 5.69250639462346e-05f;
    p = p * t - 7.34990630326855e-04f;
    p = p * t - 2.95459980854025e-03f;
    p = p * t - 1.60960333262415e-02f;
    q = q * t - 2.13374055278905e-04f;
    q = q * t - 1.68282697438203e-03f;
    q = q * t - 7.37332916720468e-03f;
    q = q * t - 1.42647390514189e-02f;
    return x * 0.5f + x * 0.5f * (z * p / q);
}

/* x[width] = LayerNorm(x) */
static inline void normalise(float *x, const float *weight, const float *bias, long width, float eps) {
    floats sums = {0};
    float sum = 0;
    long j = 0;
    for (; j + LANES <= width; j += LANES) sums += load(x + j);
    for (; j < width; j++) sum += x[j];
    float mean = (sum + sum_of(sums)) / width;
    floats squares = {0};
    float square = 0;
    for (j = 0; j + LANES <= width; j += LANES) {
        floats d = load(x + j) - mean;
        squares += d * d;
    }
    for (; j < width; j++) square += (x[j] - mean) * (x[j] - mean);
    float scale = 1.0f / sqrtf((square + sum_of(squares)) / width + eps);
    for (j = 0; j + LANES <= width; j += LANES)
        store(x + j, (load(x + j) - mean) * scale * load(weight + j) + load(bias + j));
    for (; j < width; j++) x[j] = (x[j] - mean) * scale * weight[j] + bias[j];
}

static inline long up_to(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

#endif
