/* Kernels of ggml custom ops on the CPU, which replace slow ops of ggml. Every thread calls a kernel for a part. */

#include <stdint.h>
#include <string.h>

typedef float four __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

enum { TILE = 16 }; /* floats in a cache line; a tile of 16 lines stays in the cache while it is transposed */

struct transpose {
    const float *from[2]; /* pointer to all matrices and NULL, or pointers to the first half and the second half */
    float *to;
    int64_t matrices, rows, columns; /* of the input */
};

static four load(const float *from)
{
    four x;
    memcpy(&x, from, sizeof x);
    return x;
}

static void store(float *to, four x)
{
    memcpy(to, &x, sizeof x);
}

/* Transpose 4 x 4 numbers in registers. */
static void turn(const float *from, int64_t columns, float *to, int64_t rows)
{
    four a = load(from), b = load(from + columns), c = load(from + 2 * columns), d = load(from + 3 * columns);
    four ab = PICK(a, b, 0, 4, 1, 5), cd = PICK(c, d, 0, 4, 1, 5); /* a0 b0 a1 b1 */
    store(to, PICK(ab, cd, 0, 1, 4, 5));
    store(to + rows, PICK(ab, cd, 2, 3, 6, 7));
    ab = PICK(a, b, 2, 6, 3, 7), cd = PICK(c, d, 2, 6, 3, 7); /* a2 b2 a3 b3 */
    store(to + 2 * rows, PICK(ab, cd, 0, 1, 4, 5));
    store(to + 3 * rows, PICK(ab, cd, 2, 3, 6, 7));
}

/* to[m][c][r] = from[m][r][c]; each thread transposes strips of TILE columns. */
void transpose(void *result, int thread, int threads, const struct transpose *t)
{
    (void)result;
    int64_t strips = (t->columns + TILE - 1) / TILE, all = t->matrices * strips, size = t->rows * t->columns;
    int64_t half = t->from[1] ? t->matrices / 2 : t->matrices;
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; i++) {
        int64_t m = i / strips, first = i % strips * TILE, row = 0;
        int64_t last = first + TILE < t->columns ? first + TILE : t->columns;
        const float *from = m < half ? t->from[0] + m * size : t->from[1] + (m - half) * size;
        float *to = t->to + m * size;
        for (; last - first == TILE && row + TILE <= t->rows; row += TILE)
            for (int64_t c = first; c < last; c += 4)
                for (int64_t r = row; r < row + TILE; r += 4)
                    turn(from + r * t->columns + c, t->columns, to + c * t->rows + r, t->rows);
        for (; row < t->rows; row++)
            for (int64_t c = first; c < last; c++)
                to[c * t->rows + row] = from[row * t->columns + c];
    }
}

/* Products add up TALL rows of PANEL numbers in registers. DEEP: terms of a packed panel; CHUNK: rows that use it. */
#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 2, TALL = 12, FUSED = 1 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8, WIDE = 2, TALL = 6, FUSED = 1 };
#elif defined(__ARM_FEATURE_FMA)
enum { LANES = 4, WIDE = 4, TALL = 6, FUSED = 1 };
#else
enum { LANES = 4, WIDE = 2, TALL = 6, FUSED = 0 };
#endif
enum { PANEL = LANES * WIDE, DEEP = 256, CHUNK = TALL * 32 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct product { /* c[n][m] = a[n][k] b[k][m]; a and b may be stored transposed, as [k][n] and [m][k] */
    const float *a, *b;
    float *c;
    int64_t n, m, k, a_transposed, b_transposed;
};

/* Return the name of the instruction set, or "" without fused multiply-adds, where `product` is slow. */
const char *instruction_set(void)
{
    return LANES == 16 ? "AVX-512" : LANES == 8 ? "AVX2" : FUSED ? "NEON" : "";
}

/* c[rows][width] (+)= a[rows][depth] panel[depth][PANEL]; the strides of a are `down` and `right`, of c `next`. */
static inline __attribute__((always_inline)) void add_up(int rows, int wide, int64_t depth, const float *a,
    int64_t down, int64_t right, const float *panel, float *c, int64_t next, int width, int first)
{
    vec sum[TALL][WIDE] = {0}, b[WIDE];
    for (; depth > 0; depth--, a += right, panel += PANEL) {
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++)
            b[j] = ((const vec *)panel)[j];
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < wide; j++)
                sum[i][j] += a[i * down] * b[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++, c += next) {
        float row[PANEL];
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++)
            if (width < wide * LANES)
                memcpy(row + j * LANES, &sum[i][j], sizeof sum[i][j]);
            else if (first)
                ((unaligned_vec *)c)[j] = sum[i][j];
            else
                ((unaligned_vec *)c)[j] += sum[i][j];
        for (int j = 0; j < width && width < wide * LANES; j++)
            c[j] = first ? row[j] : c[j] + row[j];
    }
}

/* The same for any number of rows. In a packed `a`, strips of TALL rows follow each other, each stored [depth][TALL]. */
static void add_up_rows(int64_t rows, int64_t depth, const float *a, int64_t down, const float *panel, float *c,
    int64_t next, int width, int first, int packed)
{
#define ADD_UP(R, W) (packed ? add_up(R, W, depth, a, 1, TALL, panel, c, next, width, first) \
                             : add_up(R, W, depth, a, down, 1, panel, c, next, width, first))
#define PIECE(R) \
    for (; rows >= R; rows -= R, a += packed ? (R < TALL ? R : R * depth) : R * down, c += R * next) \
        width > (WIDE - 1) * LANES ? ADD_UP(R, WIDE) : ADD_UP(R, WIDE - 1)
    PIECE(TALL);
    PIECE(TALL * 2 / 3);
    PIECE(TALL / 3);
    PIECE(1);
}

/* to[depth][size] = from[depth][width], filled up with zeros; `from` has the stride `next` and may be transposed. */
static inline __attribute__((always_inline)) void pack(float *to, int size, const float *from, int64_t next,
    int64_t depth, int64_t width, int transposed)
{
    int j = 0;
    if (!transposed)
        for (int64_t p = 0; p < depth; p++, from += next, to += size)
            if (width >= size)
                memcpy(to, from, size * sizeof *to);
            else
                for (j = 0; j < size; j++)
                    to[j] = j < width ? from[j] : 0;
    else {
        for (; j + 4 <= width && j < size; j += 4) {
            int64_t p = 0;
            for (; p + 4 <= depth; p += 4)
                turn(from + j * next + p, next, to + p * size + j, size);
            for (; p < depth; p++)
                for (int i = j; i < j + 4; i++)
                    to[p * size + i] = from[i * next + p];
        }
        for (; j < size; j++)
            for (int64_t p = 0; p < depth; p++)
                to[p * size + j] = j < width ? from[j * next + p] : 0;
    }
}

/* Each thread computes some panels of some rows. A number's sum does not depend on the number of threads. */
static void multiply(int thread, int threads, const struct product *t, float *panel, float *strips)
{
    int64_t panels = (t->m + PANEL - 1) / PANEL, blocks = (t->n + TALL - 1) / TALL, across = panels, rest = threads;
    while (rest) { /* across: the greatest common divisor of panels and threads */
        int64_t remainder = across % rest;
        across = rest, rest = remainder;
    }
    int64_t down = threads / across, end = blocks * (thread / across + 1) / down * TALL, first = thread % across;
    end = end < t->n ? end : t->n;
    for (int64_t row = blocks * (thread / across) / down * TALL; row < end; row += CHUNK)
        for (int64_t p = 0; p < t->k; p += DEEP) {
            int64_t rows = end - row < CHUNK ? end - row : CHUNK, depth = t->k - p < DEEP ? t->k - p : DEEP;
            const float *a = t->a + row * t->k + p;
            if (t->a_transposed) {
                a = strips;
                for (int64_t i = 0; i < rows; i += TALL)
                    pack(strips + i * depth, TALL, t->a + p * t->n + row + i, t->n, depth, rows - i, 0);
            }
            for (int64_t j = first * (panels / across); j < (first + 1) * (panels / across); j++) {
                int64_t column = j * PANEL, width = t->m - column < PANEL ? t->m - column : PANEL;
                const float *b = t->b + (t->b_transposed ? column * t->k + p : p * t->m + column);
                pack(panel, PANEL, b, t->b_transposed ? t->k : t->m, depth, width, t->b_transposed);
                add_up_rows(rows, depth, a, t->k, panel, t->c + row * t->m + column, t->m, width, !p, t->a_transposed);
            }
        }
}

void product(void *result, int thread, int threads, const struct product *t)
{
    (void)result;
    static _Thread_local float panel[DEEP * PANEL] __attribute__((aligned(64)));
    static _Thread_local float strips[CHUNK * DEEP] __attribute__((aligned(64)));
    multiply(thread, threads, t, panel, strips);
}
