/* The two passes of Pillow's resize (its libImaging/Resample.c), bit for bit: integer weights of 22 binary places, sums in
 * 32 bits, each pass rounded to uint8. resample.py makes the weights and says what the arguments mean.
 *
 * It is loaded by ctypes and includes nothing of Python, so that building it takes a C compiler alone. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

#define BITS 22
#define HALF (1 << (BITS - 1))
#define UNROLL _Pragma("GCC unroll 4")
#define AVX2 __attribute__((target("avx2")))
#define INLINE AVX2 __attribute__((always_inline)) static inline

/* Eight bytes as 32-bit integers. */
INLINE __m256i widen(const uint8_t *eight) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)eight)); }

/* A sum as the level that it is rounded to. */
INLINE uint8_t level(int32_t sum) {
    sum >>= BITS;
    return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

/* The lower and the upper four sums, added. */
INLINE __m128i folded(__m256i sum) {
    return _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
}

/* Four sums as four levels. */
INLINE int32_t levels(__m128i sum) {
    sum = _mm_srai_epi32(sum, BITS);
    sum = _mm_packs_epi32(sum, sum);
    return _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
}

/* Up to four rows of four bytes a pixel become rows of three. The rows share the weights' loads. */
INLINE void colour(const uint8_t *src, int64_t src_stride, uint8_t *dst, int64_t dst_stride, const int rows,
                   int32_t size, int32_t taps, const int32_t *first, const int32_t *weights) {
    const __m256i half = _mm256_setr_epi32(HALF, HALF, HALF, HALF, 0, 0, 0, 0);
    const __m256i spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    for (int32_t x = 0; x < size; x++, weights += taps) {
        const uint8_t *from = src + 4 * (int64_t)first[x];
        __m256i sums[4] = {half, half, half, half};
        int32_t tap = 0;
        for (; tap + 1 < taps; tap += 2) {
            const __m256i pair = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(weights + tap)));
            const __m256i weight = _mm256_permutevar8x32_epi32(pair, spread);
            UNROLL
            for (int row = 0; row < rows; row++)
                sums[row] = _mm256_add_epi32(
                    sums[row], _mm256_mullo_epi32(weight, widen(from + 4 * (int64_t)tap + row * src_stride)));
        }
        UNROLL
        for (int row = 0; row < rows; row++) {
            __m128i sum = folded(sums[row]);
            if (tap < taps) {
                int32_t pixel;
                memcpy(&pixel, from + 4 * (int64_t)tap + row * src_stride, 4);
                sum = _mm_add_epi32(sum, _mm_mullo_epi32(_mm_set1_epi32(weights[tap]),
                                                         _mm_cvtepu8_epi32(_mm_cvtsi32_si128(pixel))));
            }
            const int32_t pixel = levels(sum);
            uint8_t *to = dst + row * dst_stride + 3 * (int64_t)x;
            memcpy(to, &pixel, x + 1 < size ? 4 : 3); /* the fourth byte is overwritten by the next pixel */
        }
    }
}

/* A row of one byte a pixel. */
INLINE void grey(const uint8_t *src, uint8_t *dst, int32_t size, int32_t taps, const int32_t *first,
                 const int32_t *weights) {
    for (int32_t x = 0; x < size; x++, weights += taps) {
        const uint8_t *from = src + first[x];
        __m256i sums = _mm256_setzero_si256();
        int32_t tap = 0;
        for (; tap + 7 < taps; tap += 8)
            sums = _mm256_add_epi32(
                sums, _mm256_mullo_epi32(widen(from + tap), _mm256_loadu_si256((const __m256i *)(weights + tap))));
        __m128i four = folded(sums);
        four = _mm_add_epi32(four, _mm_srli_si128(four, 8));
        int32_t sum = HALF + _mm_extract_epi32(four, 0) + _mm_extract_epi32(four, 1);
        for (; tap < taps; tap++)
            sum += from[tap] * weights[tap];
        dst[x] = level(sum);
    }
}

/* By the processor's own word: not every compiler's runtime fills in what __builtin_cpu_supports reads. */
int32_t resample_supported(void) {
    uint32_t a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    /* Whether the system keeps the registers of SSE and AVX for each thread. */
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    return (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}

AVX2 void resample_columns(const uint8_t *src, int64_t src_stride, uint8_t *dst, int64_t dst_stride, int32_t rows,
                           int32_t bands, int32_t size, int32_t taps, const int32_t *first,
                           const int32_t *weights) {
    int32_t y = 0;
    if (bands == 4)
        for (; y + 3 < rows; y += 4)
            colour(src + y * src_stride, src_stride, dst + y * dst_stride, dst_stride, 4, size, taps, first, weights);
    for (; y < rows; y++)
        if (bands == 4)
            colour(src + y * src_stride, src_stride, dst + y * dst_stride, dst_stride, 1, size, taps, first, weights);
        else
            grey(src + y * src_stride, dst + y * dst_stride, size, taps, first, weights);
}

AVX2 void resample_rows(const uint8_t *src, int64_t src_stride, uint8_t *dst, int64_t dst_stride, int64_t bytes,
                        int32_t size, int32_t taps, const int32_t *first, const int32_t *weights) {
    for (int32_t y = 0; y < size; y++, weights += taps) {
        const uint8_t *from = src + first[y] * src_stride;
        uint8_t *to = dst + y * dst_stride;
        int64_t x = 0;
        for (; x + 31 < bytes; x += 32) {
            __m256i sums[4];
            UNROLL
            for (int part = 0; part < 4; part++)
                sums[part] = _mm256_set1_epi32(HALF);
            for (int32_t tap = 0; tap < taps; tap++) {
                const __m256i weight = _mm256_set1_epi32(weights[tap]);
                const uint8_t *row = from + tap * src_stride + x;
                UNROLL
                for (int part = 0; part < 4; part++)
                    sums[part] = _mm256_add_epi32(sums[part], _mm256_mullo_epi32(weight, widen(row + 8 * part)));
            }
            UNROLL
            for (int part = 0; part < 4; part++) {
                const __m256i sum = _mm256_srai_epi32(sums[part], BITS);
                const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
                _mm_storel_epi64((__m128i *)(to + x + 8 * part), _mm_packus_epi16(words, words));
            }
        }
        for (; x < bytes; x++) {
            int32_t sum = HALF;
            for (int32_t tap = 0; tap < taps; tap++)
                sum += from[tap * src_stride + x] * weights[tap];
            to[x] = level(sum);
        }
    }
}

#else

int32_t resample_supported(void) {
    return 0;
}

#endif
