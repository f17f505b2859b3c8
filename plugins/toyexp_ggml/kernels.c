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
