/* Kernels of ggml custom ops on the CPU, which replace slow ops of ggml. Every thread calls a kernel for a part. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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
static inline __attribute__((always_inline)) void turn(const float *from, int64_t columns, float *to, int64_t rows)
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

/* Products add up TALL rows of PANEL numbers in registers. DEEP: terms of a packed panel; CHUNK: rows that use it at most. */
#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 2, TALL = 12, FUSED = 1 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8, WIDE = 2, TALL = 6, FUSED = 1 };
#elif defined(__ARM_FEATURE_FMA)
enum { LANES = 4, WIDE = 4, TALL = 6, FUSED = 1 };
#else
enum { LANES = 4, WIDE = 2, TALL = 6, FUSED = 0 };
#endif
enum { PANEL = LANES * WIDE, DEEP = 256, CHUNK = TALL * 64 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct product { /* c[n][m] = a[n][k] b[k][m]; a and b may be stored transposed, as [k][n] and [m][k] */
    const float *a, *b;
    float *c;
    int64_t n, m, k, a_transposed, b_transposed;
    void (*to_float)(const void *row, float *numbers, int64_t count); /* ggml's, if b is [m][k] in another type */
    int64_t row_bytes;
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

/* to[blocks][depth][size] = from[depth][width] in blocks of `size` columns, of which the last is filled up with zeros.
   `from` has the stride `next` and may be transposed. */
static inline __attribute__((always_inline)) void pack(float *to, int size, const float *from, int64_t next,
    int64_t depth, int64_t width, int transposed)
{
    for (int64_t p = 0; p < depth && !transposed; p++, from += next, to += size)
        for (int64_t i = 0; i < width; i += size)
            if (width - i >= size)
                memcpy(to + i * depth, from + i, size * sizeof *to);
            else
                for (int64_t j = 0; j < size; j++)
                    to[i * depth + j] = i + j < width ? from[i + j] : 0;
    for (; width > 0 && transposed; width -= size, from += size * next, to += size * depth) {
        int64_t j = 0;
        for (; j + 4 <= width && j < size; j += 4) {
            int64_t p = 0;
            for (; p + 4 <= depth; p += 4)
                turn(from + j * next + p, next, to + p * size + j, size);
            for (; p < depth; p++)
                for (int64_t i = j; i < j + 4; i++)
                    to[p * size + i] = from[i * next + p];
        }
        for (; j < size; j++)
            for (int64_t p = 0; p < depth; p++)
                to[p * size + j] = j < width ? from[j * next + p] : 0;
    }
}

/* Load [rows][columns] into the cache. */
static void prefetch(const float *from, int64_t next, int64_t rows, int64_t columns)
{
    for (; rows > 0; rows--, from += next)
        for (int64_t j = 0; j < columns; j += 16)
            __builtin_prefetch(from + j, 0, 2);
}

/* c[n][m] (+)= a[n][k] b[k][m] on one thread. The strides are a_next, b_next, c_next; see struct product. */
static void multiply(int64_t n, int64_t m, int64_t k, const float *a, int64_t a_next, int a_transposed, const float *b,
    int64_t b_next, int b_transposed, float *c, int64_t c_next, int add)
{
    static _Thread_local float buffer[DEEP * (PANEL + CHUNK)] __attribute__((aligned(64)));
    /* Rows at a distance of a multiple of 4 KiB would evict each other from the cache, so they are packed too. */
    int packed = a_transposed || a_next % 1024 == 0;
    int64_t chunks = (n + CHUNK - 1) / CHUNK, most = chunks ? (n + chunks * TALL - 1) / (chunks * TALL) * TALL : 1;
    for (int64_t row = 0; row < n; row += most)
        for (int64_t p = 0; p < k; p += DEEP) {
            int64_t rows = n - row < most ? n - row : most, depth = k - p < DEEP ? k - p : DEEP, group = 4 * TALL;
            float *panel = buffer, *strips = buffer + DEEP * PANEL;
            const float *from = a + (a_transposed ? p * a_next + row : row * a_next + p);
            for (int64_t i = 0; packed && i < rows; i += group)
                pack(strips + i * depth, TALL, from + (a_transposed ? i : i * a_next), a_next, depth,
                    rows - i < group ? rows - i : group, !a_transposed);
            for (int64_t j = 0; j < m; j += PANEL) {
                int64_t width = m - j < PANEL ? m - j : PANEL;
                pack(panel, PANEL, b + (b_transposed ? j * b_next + p : p * b_next + j), b_next, depth, width, b_transposed);
                if (j + PANEL < m)
                    prefetch(b + (b_transposed ? (j + PANEL) * b_next + p : p * b_next + j + PANEL), b_next,
                        b_transposed ? width : depth, b_transposed ? depth : width);
                add_up_rows(rows, depth, packed ? strips : from, a_next, panel, c + row * c_next + j, c_next, width, !add && !p, packed);
            }
        }
}

/* Each thread computes some panels of some rows. A number's sum does not depend on the number of threads. */
void product(void *result, int thread, int threads, const struct product *t)
{
    (void)result;
    int64_t panels = (t->m + PANEL - 1) / PANEL, blocks = (t->n + TALL - 1) / TALL, across = panels, rest = threads;
    while (rest) { /* across: the greatest common divisor of panels and threads */
        int64_t remainder = across % rest;
        across = rest, rest = remainder;
    }
    int64_t down = threads / across, row = blocks * (thread / across) / down * TALL;
    int64_t end = blocks * (thread / across + 1) / down * TALL, column = panels / across * (thread % across) * PANEL;
    int64_t rows = (end < t->n ? end : t->n) - row, last = column + panels / across * PANEL;
    int64_t a_next = t->a_transposed ? t->n : t->k;
    const float *a = t->a + (t->a_transposed ? row : row * t->k);
    float *c = t->c + row * t->m, *numbers = t->to_float ? malloc(PANEL * t->k * sizeof *numbers) : NULL;
    last = last < t->m ? last : t->m;
    if (!t->to_float)
        multiply(rows, last - column, t->k, a, a_next, t->a_transposed, t->b + (t->b_transposed ? column * t->k : column),
            t->b_transposed ? t->k : t->m, t->b_transposed, c + column, t->m, 0);
    else
        for (; column < last && rows > 0; column += PANEL) {
            int64_t width = last - column < PANEL ? last - column : PANEL;
            for (int64_t j = 0; j < width; j++)
                t->to_float((const char *)t->b + (column + j) * t->row_bytes, numbers + j * t->k, t->k);
            multiply(rows, width, t->k, a, a_next, t->a_transposed, numbers, t->k, 1, c + column, t->m, 0);
        }
    free(numbers);
}

struct attention { /* q, dy and the result [rows][length][heads][size]; k and v [rows][length][shared][size] */
    const float *q, *k, *v, *dy;
    float *to; /* the result, or the gradients of q, k and v one after another */
    int64_t rows, length, heads, shared, size, causal;
    float scale;
};
enum { QUERIES = 64 }; /* queries whose scores are in memory at a time */
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* exp(x) for x <= 0, with the polynomial of Cephes; 0 below -87. */
static inline vec exponential(vec x)
{
    ints low = x < (vec){0} - 87.0f;
    vec n = x * 1.44269504f + 12582912.0f - 12582912.0f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = ((y * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
    y = (y * r + 5.0000001201e-1f) * r * r + r + 1.0f;
    return (vec)(~low & (ints)(y * (vec)((__builtin_convertvector(n, ints) + 127) << 23)));
}

/* Replace s[visible] by softmax(s * scale), and the rest of s[size] by zeros; `size` is a multiple of LANES. */
static void softmax(float *s, int64_t visible, int64_t size, float scale)
{
    unaligned_vec *x = (unaligned_vec *)s;
    float most = s[0], total = 0;
    for (int64_t j = visible; j < size; j++)
        s[j] = -INFINITY;
    for (int64_t j = 0; j < visible; j++)
        most = s[j] > most ? s[j] : most;
    vec sum = {0};
    for (int64_t j = 0; j < size / LANES; j++)
        sum += x[j] = exponential((x[j] - most) * scale);
    for (int j = 0; j < LANES; j++)
        total += sum[j];
    for (int64_t j = 0; j < size / LANES; j++)
        x[j] *= 1 / total;
}

/* Compute the weights [n][padded] of the queries from `start` on for the first `seen` keys. Return `padded`. */
static int64_t attend(const struct attention *t, int64_t start, int64_t n, int64_t seen, const float *q, const float *k,
    float *weights)
{
    int64_t padded = (seen + LANES - 1) / LANES * LANES;
    multiply(n, seen, t->size, q, t->heads * t->size, 0, k, t->shared * t->size, 1, weights, padded, 0);
    for (int64_t i = 0; i < n; i++)
        softmax(weights + i * padded, t->causal ? start + i + 1 : seen, padded, t->scale);
    return padded;
}

void attention(void *result, int thread, int threads, const struct attention *t)
{
    (void)result;
    int64_t blocks = (t->length + QUERIES - 1) / QUERIES, all = t->rows * t->heads * blocks;
    float *weights = malloc(sizeof *weights * QUERIES * (t->length + LANES));
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; i++) {
        int64_t start = i % blocks * QUERIES, head = i / blocks % t->heads, row = i / blocks / t->heads * t->length;
        int64_t n = t->length - start < QUERIES ? t->length - start : QUERIES, seen = t->causal ? start + n : t->length;
        int64_t other = (row * t->shared + head * t->shared / t->heads) * t->size;
        int64_t own = ((row + start) * t->heads + head) * t->size;
        int64_t padded = attend(t, start, n, seen, t->q + own, t->k + other, weights);
        multiply(n, t->size, seen, weights, padded, 0, t->v + other, t->shared * t->size, 0, t->to + own,
            t->heads * t->size, 0);
    }
    free(weights);
}

void attention_back(void *result, int thread, int threads, const struct attention *t)
{
    (void)result;
    int64_t group = t->heads / t->shared, all = t->rows * t->shared, next = t->shared * t->size, wide = group * next;
    float *weights = malloc(sizeof *weights * QUERIES * (t->length + LANES) * 2);
    float *d = weights + QUERIES * (t->length + LANES), *dq = t->to, *dk = dq + t->rows * t->length * wide;
    float *dv = dk + t->rows * t->length * next;
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; i++)
        for (int64_t step = 0, blocks = (t->length + QUERIES - 1) / QUERIES; step < group * blocks; step++) {
            /* The last queries see all keys, so they come first and overwrite dk and dv; the others add to them. */
            int64_t start = (blocks - 1 - step % blocks) * QUERIES, row = i / t->shared * t->length;
            int64_t n = t->length - start < QUERIES ? t->length - start : QUERIES;
            int64_t seen = t->causal ? start + n : t->length, other = (row * t->shared + i % t->shared) * t->size;
            int64_t own = ((row + start) * t->heads + i % t->shared * group + step / blocks) * t->size;
            int64_t padded = attend(t, start, n, seen, t->q + own, t->k + other, weights);
            multiply(seen, t->size, n, weights, padded, 1, t->dy + own, wide, 0, dv + other, next, step > 0);
            multiply(n, seen, t->size, t->dy + own, wide, 0, t->v + other, next, 1, d, padded, 0);
            for (int64_t j = 0; j < n; j++) { /* d = scale weights (d - sum(weights d)) */
                unaligned_vec *p = (unaligned_vec *)(weights + j * padded), *x = (unaligned_vec *)(d + j * padded);
                float dot = 0;
                vec sum = {0};
                memset(d + j * padded + seen, 0, sizeof *d * (padded - seen));
                for (int64_t c = 0; c < padded / LANES; c++)
                    sum += p[c] * x[c];
                for (int c = 0; c < LANES; c++)
                    dot += sum[c];
                for (int64_t c = 0; c < padded / LANES; c++)
                    x[c] = p[c] * (x[c] - dot) * t->scale;
            }
            multiply(n, t->size, seen, d, padded, 0, t->k + other, next, 0, dq + own, wide, 0);
            multiply(seen, t->size, n, d, padded, 1, t->q + own, wide, 0, dk + other, next, step > 0);
        }
    free(weights);
}

struct elements { /* x, y and z as `gelu` and `swiglu_back` read them */
    const float *x, *y, *z;
    float *to;
    int64_t size;
};

/* Load up to LANES of the numbers that are left, and zeros behind them. */
static inline vec fetch(const float *from, int64_t left)
{
    vec x = {0};
    if (left < LANES)
        memcpy(&x, from, left * sizeof *from);
    else
        memcpy(&x, from, sizeof x);
    return x;
}

static inline void put(float *to, vec x, int64_t left)
{
    memcpy(to, &x, left < LANES ? left * sizeof *to : sizeof x);
}

/* 1 / (1 + exp(-x)) */
static inline vec logistic(vec x)
{
    ints below = x < (vec){0};
    vec e = exponential((vec)((ints)x | INT32_MIN)), above = 1.0f / (1.0f + e);
    return (vec)((below & (ints)(e * above)) | (~below & (ints)above));
}

#define FOR_EACH_VECTOR \
    int64_t all = (t->size + LANES - 1) / LANES, first = all * thread / threads * LANES; \
    (void)result; \
    for (int64_t i = first, left = t->size - i; i < all * (thread + 1) / threads * LANES; i += LANES, left -= LANES)

/* to = x s with s = logistic(x (a + b x^2)) or, if y is not NULL, y times the derivative of this. */
void gelu(void *result, int thread, int threads, const struct elements *t)
{
    const float a = 1.5957691216f, b = 0.0713548162f; /* 2 sqrt(2 / pi), and 0.044715 times this */
    FOR_EACH_VECTOR
    {
        vec x = fetch(t->x + i, left), s = logistic(x * (a + b * x * x));
        if (t->y)
            put(t->to + i, fetch(t->y + i, left) * (s + x * s * (1.0f - s) * (a + 3 * b * x * x)), left);
        else
            put(t->to + i, x * s, left);
    }
}

/* The gradients of x (first half of `to`) and y in silu(x) y, given that of the result, z. */
void swiglu_back(void *result, int thread, int threads, const struct elements *t)
{
    FOR_EACH_VECTOR
    {
        vec x = fetch(t->x + i, left), z = fetch(t->z + i, left), s = logistic(x);
        put(t->to + i, z * fetch(t->y + i, left) * s * (1.0f + x * (1.0f - s)), left);
        put(t->to + t->size + i, z * x * s, left);
    }
}

struct adamw { /* numbers: learning rate, beta1, beta2, eps, weight decay, and the factors of m and v in the update */
    float *w;
    const float *g;
    float *m, *v;
    const float *numbers;
    float *to; /* the same as w */
    int64_t size;
};

static inline vec root(vec x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = sqrtf(x[i]);
    return x;
}

/* Update w, m and v by the formulas of ggml's OPT_STEP_ADAMW, which computes one number at a time. */
void adamw(void *result, int thread, int threads, const struct adamw *t)
{
    const float rate = t->numbers[0], beta1 = t->numbers[1], beta2 = t->numbers[2], eps = t->numbers[3];
    const float keep = 1.0f - rate * t->numbers[4], m_factor = t->numbers[5], v_factor = t->numbers[6];
    FOR_EACH_VECTOR
    {
        vec g = fetch(t->g + i, left), m = fetch(t->m + i, left) * beta1 + g * (1.0f - beta1);
        vec v = fetch(t->v + i, left) * beta2 + g * g * (1.0f - beta2);
        put(t->m + i, m, left);
        put(t->v + i, v, left);
        put(t->w + i, fetch(t->w + i, left) * keep - rate * (m * m_factor) / (root(v * v_factor) + eps), left);
    }
}
