/* Keyed draws on cpu: Philox4x32-10 words, and the floats made of them.
 *
 * Bit for bit what philox.py and numbers.py compute with torch ops, which stay the definition: each
 * statement is one IEEE operation or an integer one, and the build forbids contraction to fused
 * multiply-adds. The constants (M0, .., NORMAL32_P, ..) are written above this text by native.py,
 * from the same Python values. The loops are plain so that a compiler vectorises them.
 */

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "floats are computed in a wider format here"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "64-bit integers are not two words, low one first"
#endif

/* BATCH: blocks at a time, of which the 4 KB of words stay in the first cache. SHORT: the blocks or elements
 * of a run up to which it is cheaper to copy that many than to count. */
enum { BATCH = 256, SHORT = 16 };

#define COUNT(array) ((int)(sizeof(array) / sizeof(*(array))))
#define EACH(i, n) for (int i = 0; i < (n); i++)

/* words[4 i ..] := the block of counter (number i low, high, 0, 0). */
static void engine(const uint64_t *restrict number, int n, uint32_t k0, uint32_t k1, uint32_t *restrict words) {
    EACH(i, n) {
        uint32_t c0 = (uint32_t)number[i], c1 = (uint32_t)(number[i] >> 32), c2 = 0, c3 = 0;
        uint32_t a = k0, b = k1;
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)M0 * c0, p1 = (uint64_t)M1 * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ a;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ b;
            c1 = (uint32_t)p1;
            c3 = (uint32_t)p0;
            a += W0;
            b += W1;
        }
        words[4 * i] = c0;
        words[4 * i + 1] = c1;
        words[4 * i + 2] = c2;
        words[4 * i + 3] = c3;
    }
}

static void bits32(const uint32_t *restrict words, int n, int64_t *restrict out) {
    EACH(i, n) out[i] = words[i];
}

static void bits64(const uint32_t *restrict words, int n, int64_t *restrict out) {
    EACH(i, n) out[i] = (int64_t)((uint64_t)words[2 * i + 1] << 32 | words[2 * i]);
}

static void uniform32(const uint32_t *restrict words, int n, float *restrict out) {
    EACH(i, n) out[i] = (float)(int32_t)(words[i] >> 8) * 0x1p-24f;
}

static void uniform64(const uint32_t *restrict words, int n, double *restrict out) {
    EACH(i, n) {
        uint64_t word = (uint64_t)words[2 * i + 1] << 32 | words[2 * i];
        out[i] = (double)(int64_t)(word >> 11) * 0x1p-53;
    }
}

/* The inversions of inversion.py and logarithm.py, once for each float format. */
#define INVERSIONS(size, real, word_t, int_t, VALUE)                                                    \
    static inline real horner##size(real x, const real *c, int n) {                                     \
        real total = x * c[n - 1];                                                                      \
        total = total + c[n - 2];                                                                       \
        for (int i = n - 3; i >= 0; i--) {                                                              \
            total = total * x;                                                                          \
            total = total + c[i];                                                                       \
        }                                                                                               \
        return total;                                                                                   \
    }                                                                                                   \
    /* y = 2^exponent m with m in [sqrt(1/2), sqrt(2)) */                                               \
    static inline int_t parts##size(real y, real *m) {                                                  \
        int_t pattern, exponent;                                                                        \
        memcpy(&pattern, &y, sizeof y);                                                                 \
        exponent = (pattern - ROOT_HALF##size) >> MANTISSA##size;                                       \
        pattern = (int_t)((word_t)pattern - ((word_t)exponent << MANTISSA##size));                      \
        memcpy(m, &pattern, sizeof y);                                                                  \
        return exponent;                                                                                \
    }                                                                                                   \
    static void normal##size(const uint32_t *restrict words, int n, real *restrict out) {               \
        EACH(i, n) {                                                                                    \
            int_t v = VALUE(i);                                                                         \
            int_t from_end = (v ^ (v >> (size - 1))) ^ INT##size##_MAX;                                 \
            real q = (real)from_end;                                                                    \
            q = q + (real)0.5;                                                                          \
            q = q * NORMAL_SCALE##size;                                                                 \
            real y = 2 - q, m;                                                                          \
            y = y * q;                                                                                  \
            int_t exponent = parts##size(y, &m);                                                        \
            real below = m - 1, above = m + 1, s = below / above, square = s * s;                       \
            real length = horner##size(square, LOG2##size, COUNT(LOG2##size));                          \
            length = length * s;                                                                        \
            length = length - (real)exponent;                                                           \
            real x = (real)v;                                                                           \
            x = x + (real)0.5;                                                                          \
            x = x * NORMAL_SCALE##size;                                                                 \
            real p = horner##size(length, NORMAL_P##size, COUNT(NORMAL_P##size));                       \
            p = p / horner##size(length, NORMAL_Q##size, COUNT(NORMAL_Q##size));                        \
            out[i] = p * x;                                                                             \
        }                                                                                               \
    }                                                                                                   \
    static inline real minus_ln##size(real numerator, real m, int_t exponent) {                         \
        real above = m + 1, s = numerator / above, square = s * s;                                      \
        real series = horner##size(square, LN##size, COUNT(LN##size)), whole = (real)exponent;          \
        series = series * s;                                                                            \
        whole = whole * LN_TWO##size;                                                                   \
        return series - whole;                                                                          \
    }                                                                                                   \
    static inline real exponential_of##size(int_t v) {                                                  \
        int_t sign = v >> (size - 1);                                                                   \
        real p = (real)(v ^ sign), m;                                                                   \
        p = p + (real)0.5;                                                                              \
        p = p * UNIT_SCALE##size;                                                                       \
        real rest = 1 - p, y = sign ? rest : p;                                                         \
        int_t exponent = parts##size(y, &m);                                                            \
        real below = m - 1, minus = -p;                                                                 \
        return minus_ln##size((sign != 0) & (exponent == 0) ? minus : below, m, exponent);              \
    }                                                                                                   \
    static void exponential##size(const uint32_t *restrict words, int n, real *restrict out) {          \
        EACH(i, n) out[i] = exponential_of##size(VALUE(i));                                             \
    }                                                                                                   \
    static void gumbel##size(const uint32_t *restrict words, int n, real *restrict out) {               \
        EACH(i, n) {                                                                                    \
            real m;                                                                                     \
            int_t exponent = parts##size(exponential_of##size(VALUE(i)), &m);                           \
            real below = m - 1;                                                                         \
            out[i] = minus_ln##size(below, m, exponent);                                                \
        }                                                                                               \
    }

#define VALUE32(i) ((int32_t)words[i])
#define VALUE64(i) ((int64_t)((uint64_t)words[2 * (i) + 1] << 32 | words[2 * (i)]))
INVERSIONS(32, float, uint32_t, int32_t, VALUE32)
INVERSIONS(64, double, uint64_t, int64_t, VALUE64)

typedef void (*convert_t)(const uint32_t *, int, void *);

/* In the order of numbers.py: elements in a block, bytes of an element. */
static const struct {
    convert_t convert;
    int per, size;
} KINDS[] = {
    {(convert_t)bits32, 4, 8},        {(convert_t)bits64, 2, 8},   {(convert_t)uniform32, 4, 4},
    {(convert_t)uniform64, 2, 8},     {(convert_t)normal32, 4, 4}, {(convert_t)normal64, 2, 8},
    {(convert_t)exponential32, 4, 4}, {(convert_t)exponential64, 2, 8},
    {(convert_t)gumbel32, 4, 4},      {(convert_t)gumbel64, 2, 8},
};

/* out := the elements of `kind` whose indices are the runs start + r stride + [0, length), r < count,
 * one after the other; runs holds n rows (start, length, stride, count). */
void vescale_draw(int kind, const int64_t *key, const int64_t *runs, int64_t n, char *out) {
    uint64_t number[BATCH + SHORT];
    uint32_t words[4 * BATCH];
    int64_t values[4 * BATCH + SHORT];
    int skip[BATCH], taken[BATCH]; /* pieces of the batch that go to out: a block is in one at least */
    const int per = KINDS[kind].per, size = KINDS[kind].size;
    const int shift = per >> 1; /* log2 of 4 or 2: a division would take as long as the draw of a short run */
    int blocks = 0, pieces = 0;
    int64_t left = 0; /* elements that are still to be written */
    for (int64_t row = 0; row < n; row++) left += runs[4 * row + 1] * runs[4 * row + 3];
    for (int64_t row = 0; row <= n; row++) {
        const int64_t *run = runs + 4 * row;
        const int last = row == n; /* one more turn empties the batch */
        for (int64_t r = 0; r < (last ? 1 : run[3]); r++) {
            int64_t start = last ? 0 : run[0] + r * run[2], stop = last ? 0 : start + run[1];
            while (start < stop || (last && blocks)) {
                if (!last) {
                    int64_t first = start >> shift, room = BATCH - blocks, need = ((stop - 1) >> shift) - first + 1;
                    int64_t take = need < room ? need : room, end = (first + take) << shift;
                    end = end < stop ? end : stop;
                    skip[pieces] = blocks * per + (int)(start & (per - 1));
                    taken[pieces++] = (int)(end - start);
                    if (take <= SHORT) { /* of fixed length: what is too much is overwritten */
                        EACH(i, SHORT) number[blocks + i] = (uint64_t)(first + i);
                    } else {
                        EACH(i, (int)take) number[blocks + i] = (uint64_t)(first + i);
                    }
                    blocks += (int)take;
                    start = end;
                    if (blocks < BATCH) continue;
                }
                engine(number, blocks, (uint32_t)key[0], (uint32_t)key[1], words);
                if (pieces == 1 && !skip[0] && taken[0] == blocks * per) {
                    KINDS[kind].convert(words, taken[0], out);
                    out += (int64_t)taken[0] * size;
                    left -= taken[0];
                } else {
                    KINDS[kind].convert(words, blocks * per, values);
                    EACH(i, pieces) {
                        const char *from = (const char *)values + (int64_t)skip[i] * size;
                        if (taken[i] > SHORT || left < SHORT) {
                            memcpy(out, from, (size_t)taken[i] * size);
                        } else if (size == 4) { /* of fixed length, as above: a call costs more than the copy */
                            memcpy(out, from, SHORT * 4);
                        } else {
                            memcpy(out, from, SHORT * 8);
                        }
                        out += (int64_t)taken[i] * size;
                        left -= taken[i];
                    }
                }
                blocks = pieces = 0;
            }
        }
    }
}

/* out := the normals of n 64-bit integers. */
void vescale_normal64(const int64_t *bits, int64_t n, double *out) {
    for (int64_t at = 0; at < n; at += 1 << 20) {
        normal64((const uint32_t *)(bits + at), (int)(n - at < 1 << 20 ? n - at : 1 << 20), out + at);
    }
}

/* out := low + floor(bits (last + 1) / 2^64), or with more of 128 bits; see ranges.py. */
void vescale_scale(const uint64_t *bits, const uint64_t *more, int64_t n, uint64_t low, uint64_t last, uint64_t *out) {
    const uint64_t count = last + 1;
    if (!count) {
        for (int64_t i = 0; i < n; i++) out[i] = low + bits[i];
    } else if (more) {
        for (int64_t i = 0; i < n; i++) {
            unsigned __int128 rest = ((unsigned __int128)more[i] * count) >> 64;
            out[i] = low + (uint64_t)(((unsigned __int128)bits[i] * count + rest) >> 64);
        }
    } else {
        for (int64_t i = 0; i < n; i++) out[i] = low + (uint64_t)(((unsigned __int128)bits[i] * count) >> 64);
    }
}
