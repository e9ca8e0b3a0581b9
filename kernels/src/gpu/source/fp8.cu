// Converts bf16 matrices to 8-bit numbers with one scale for each matrix: a power of two, so that scaling rounds nothing.
//
// Two passes: `largest_parts` finds the largest absolute value, in parts; `to_fp8` reads the parts, chooses the scale and converts.
// Bytes per element: 2, then 3 for one layout or 4 for both. Sizes are multiples of 16.

// Most parts of the largest value: one for each thread of a block of `to_fp8`.
#define LARGEST_PARTS 256
#define LARGEST_THREADS 512

// Rows and columns of the part of a matrix that a block converts, and words between its columns in shared memory, so that neither
// stores nor loads meet in a bank.
#define TILE 128
#define TILE_PITCH 34

// Largest numbers are 1.75 * 2^8 and 1.75 * 2^15.
struct E4m3 {
    enum { MANTISSA_BITS = 3, BIAS = 7, LARGEST_EXPONENT = 8 };
};
struct E5m2 {
    enum { MANTISSA_BITS = 2, BIAS = 15, LARGEST_EXPONENT = 15 };
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

DEVICE u32 fp8_pair(E4m3, float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE u32 fp8_pair(E5m2, float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

#else

// To nearest even; x is at most the format's largest number.
template <class Format>
DEVICE u32 fp8_bits(float x) {
    u32 bits = bits_of(x), sign = bits >> 24 & 0x80u, size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return sign | 0x7Fu;
    const int dropped = 23 - Format::MANTISSA_BITS;
    // Below the smallest normal number, numbers are multiples of 2^(1 - BIAS - MANTISSA_BITS): adding 1.5 * 2^23 rounds to an integer.
    if (size < (u32)(128 - Format::BIAS) << 23) {
        float steps = float_of(size) * power_of_two(Format::BIAS + Format::MANTISSA_BITS - 1) + 12582912.0f;
        return sign | (bits_of(steps) - 0x4B400000u);
    }
    size += (1u << (dropped - 1)) - 1u + (size >> dropped & 1u);
    return sign | ((size >> dropped) - ((u32)(127 - Format::BIAS) << Format::MANTISSA_BITS));
}
template <class Format>
DEVICE u32 fp8_pair(Format, float low, float high) {
    return fp8_bits<Format>(low) | fp8_bits<Format>(high) << 8;
}

#endif

struct alignas(8) TwoWords {
    u32 at[2];
};
struct alignas(16) FourWords {
    u32 at[4];
};

DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// The largest of the block's numbers, for every thread. The block has whole warps; `scratch` has an element for each.
DEVICE u32 block_largest_bits(u32 x, u32 *scratch) {
    for (u32 mask = WARP_LANES / 2; mask > 0; mask /= 2) x = larger(x, shuffle_xor(x, mask));
    if (thread_x() % WARP_LANES == 0) scratch[thread_x() / WARP_LANES] = x;
    block_barrier();
    u32 largest = 0;
    for (u32 warp = 0; warp < block_threads_x() / WARP_LANES; warp++) largest = larger(largest, scratch[warp]);
    return largest;
}

// Writes the largest absolute value of `chunks` times 8 elements, as bits of bf16, in parts: one for each block. A NaN is larger than
// infinity, and that larger than any number.
KERNEL LAUNCH_BOUNDS(LARGEST_THREADS) largest_parts(const u16 *x, u32 *parts, u32 chunks) {
    __shared__ u32 scratch[LARGEST_THREADS / WARP_LANES];
    // Of the even and of the odd elements, these shifted up.
    u32 low = 0, high = 0;
#pragma unroll 4
    for (u32 i = block_x() * LARGEST_THREADS + thread_x(); i < chunks; i += grid_blocks_x() * LARGEST_THREADS) {
        FourWords words = *(const FourWords *)(x + (u64)i * 8);
#pragma unroll
        for (int word = 0; word < 4; word++) {
            low = larger(low, words.at[word] & 0x7FFFu);
            high = larger(high, words.at[word] & 0x7FFF0000u);
        }
    }
    u32 largest = block_largest_bits(larger(low, high >> 16), scratch);
    if (thread_x() == 0) parts[block_x()] = largest;
}

// Exponent of the power of two by which a matrix is multiplied whose largest absolute value has these bits: the largest with which it
// stays in the format.
template <class Format>
DEVICE int scale_exponent(u32 largest_bf16) {
    if (largest_bf16 == 0) return 0;
    int exponent = (int)(largest_bf16 >> 7) - 127;
    if (exponent < -126) exponent = -126;
    int scale = Format::LARGEST_EXPONENT - exponent - ((largest_bf16 & 0x7Fu) > 0x60u ? 1 : 0);
    return scale > 126 ? 126 : scale;
}

// Converts x [rows, columns] to `straight`, in the same layout, and to `transposed` [columns, rows]; either may be null. Writes what the
// numbers are to be multiplied by to `inverse_scale`: NaN if the matrix has an element that is not finite, so that no product hides it.
template <class Format>
DEVICE void to_fp8(const u16 *x, u8 *straight, u8 *transposed, const u32 *parts, u32 part_count, float *inverse_scale,
                   u32 rows, u32 columns) {
    __shared__ u32 tile[TILE * TILE_PITCH];
    __shared__ u32 scratch[LARGEST_PARTS / WARP_LANES];
    u32 largest = block_largest_bits(thread_x() < part_count ? parts[thread_x()] : 0, scratch);
    bool finite = largest < 0x7F80u;
    int exponent = finite ? scale_exponent<Format>(largest) : 0;
    float scale = power_of_two(exponent);
    if (block_x() == 0 && thread_x() == 0) inverse_scale[0] = finite ? power_of_two(-exponent) : float_of(0x7FC00000u);

    u32 tiles_across = (columns + TILE - 1) / TILE;
    u32 first_row = block_x() / tiles_across * TILE, first_column = block_x() % tiles_across * TILE;
    // A thread converts 4 rows of 8 columns at a time.
    u32 group = thread_x() % 16, quad = thread_x() / 16;
    u32 column = first_column + group * 8;
#pragma unroll
    for (u32 half = 0; half < 2; half++, quad += 16) {
        u32 row = first_row + quad * 4;
        if (row >= rows || column >= columns) continue;
        u32 words[4][2];
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            float values[8];
            load<Bf16>(x + (u64)(row + r) * columns + column, values);
#pragma unroll
            for (u32 word = 0; word < 2; word++) {
                const float *v = values + word * 4;
                words[r][word] = fp8_pair(Format(), v[0] * scale, v[1] * scale) |
                                 fp8_pair(Format(), v[2] * scale, v[3] * scale) << 16;
            }
        }
        if (straight) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                *(TwoWords *)(straight + (u64)(row + r) * columns + column) = TwoWords{{words[r][0], words[r][1]}};
            }
        }
        if (!transposed) continue;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 shift = j % 4 * 8, four_rows = 0;
#pragma unroll
            for (u32 r = 0; r < 4; r++) four_rows |= (words[r][j / 4] >> shift & 0xFFu) << (r * 8);
            tile[(j * 16 + group) * TILE_PITCH + quad] = four_rows;
        }
    }
    if (!transposed) return;
    block_barrier();
    // A thread stores 16 rows of a column at a time.
    u32 row = first_row + thread_x() % 8 * 16;
    if (row >= rows) return;
    for (u32 c = thread_x() / 8; c < TILE && first_column + c < columns; c += 32) {
        const u32 *from = tile + (c % 8 * 16 + c / 8) * TILE_PITCH + thread_x() % 8 * 4;
        *(FourWords *)(transposed + (u64)(first_column + c) * rows + row) = FourWords{{from[0], from[1], from[2], from[3]}};
    }
}

#define DEFINE_TO_FP8(Format, name)                                                                                    \
    KERNEL LAUNCH_BOUNDS(LARGEST_PARTS)                                                                                \
    to_fp8_##name(const u16 *x, u8 *straight, u8 *transposed, const u32 *parts, u32 part_count, float *inverse_scale,  \
                  u32 rows, u32 columns) {                                                                             \
        to_fp8<Format>(x, straight, transposed, parts, part_count, inverse_scale, rows, columns);                      \
    }
DEFINE_TO_FP8(E4m3, e4m3)
DEFINE_TO_FP8(E5m2, e5m2)
