// Shared by the fused kernels: elements of either kind as fp32, sums over a block, exp and log.
//
// exp and log are written here because clang for AMD has them only in a library of ROCm, and so that both vendors get
// the same bits.

struct Bf16 {
    typedef u16 Stored;
    typedef Eight16 Pack;
    enum { LANES = 8 };
    static DEVICE float value(u16 bits) { return from_bf16(bits); }
    static DEVICE u16 stored(float x) { return to_bf16(x); }
};

struct Fp32 {
    typedef float Stored;
    typedef FourF32 Pack;
    enum { LANES = 4 };
    static DEVICE float value(float x) { return x; }
    static DEVICE float stored(float x) { return x; }
};

// Each kernel exists for both kinds, with 16-byte accesses, and with single elements for sizes and addresses that do
// not allow those.
#define FOR_EACH_VARIANT(DEFINE) \
    DEFINE(Bf16, 8, bf16_wide)   \
    DEFINE(Bf16, 1, bf16_each)   \
    DEFINE(Fp32, 4, fp32_wide)   \
    DEFINE(Fp32, 1, fp32_each)

template <class Type>
DEVICE float rounded(float x) {
    return Type::value(Type::stored(x));
}

template <class Type, int N>
DEVICE void load(const typename Type::Stored *from, float (&to)[N]) {
    if constexpr (N == Type::LANES) {
        typename Type::Pack pack = *(const typename Type::Pack *)from;
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = Type::value(pack.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = Type::value(from[i]);
    }
}

template <class Type, int N>
DEVICE void store(typename Type::Stored *to, const float (&from)[N]) {
    if constexpr (N == Type::LANES) {
        typename Type::Pack pack;
#pragma unroll
        for (int i = 0; i < N; i++) pack.at[i] = Type::stored(from[i]);
        *(typename Type::Pack *)to = pack;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = Type::stored(from[i]);
    }
}

// The sum over the block, for every thread, in a fixed order. The block has whole warps, at most 32; `scratch` has an
// element for each warp and may be reused at once.
DEVICE float block_sum(float x, float *scratch) {
    for (u32 mask = WARP_LANES / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    u32 warps = block_threads_x() / WARP_LANES;
    if (warps == 1) return x;
    if (thread_x() % WARP_LANES == 0) scratch[thread_x() / WARP_LANES] = x;
    block_barrier();
    float sum = 0.0f;
    for (u32 warp = 0; warp < warps; warp++) sum += scratch[warp];
    block_barrier();
    return sum;
}

// The maximum over the block; a NaN counts as smallest.
DEVICE float block_largest(float x, float *scratch) {
    for (u32 mask = WARP_LANES / 2; mask > 0; mask /= 2) {
        float other = shuffle_xor(x, mask);
        x = other > x ? other : x;
    }
    u32 warps = block_threads_x() / WARP_LANES;
    if (warps == 1) return x;
    if (thread_x() % WARP_LANES == 0) scratch[thread_x() / WARP_LANES] = x;
    block_barrier();
    float largest = scratch[0];
    for (u32 warp = 1; warp < warps; warp++) largest = scratch[warp] > largest ? scratch[warp] : largest;
    block_barrier();
    return largest;
}

// 2^n for n from -126 to 127.
DEVICE float power_of_two(int n) { return float_of((u32)(n + 127) << 23); }

// e^x within 2 units in the last place. x = n ln 2 + r, |r| at most ln 2 / 2; the polynomial is Taylor's.
DEVICE float exp_f32(float x) {
    if (!(x > -104.0f)) return x != x ? x : 0.0f;
    if (x > 88.8f) return float_of(0x7F800000u);
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    float shifted = fma_f32(x, 1.44269504f, 12582912.0f);
    float whole = shifted - 12582912.0f;
    float r = fma_f32(whole, -0.693145752f, x);
    r = fma_f32(whole, -1.42860677e-6f, r);
    float p = 1.0f / 5040.0f;
    p = fma_f32(p, r, 1.0f / 720.0f);
    p = fma_f32(p, r, 1.0f / 120.0f);
    p = fma_f32(p, r, 1.0f / 24.0f);
    p = fma_f32(p, r, 1.0f / 6.0f);
    p = fma_f32(p, r, 0.5f);
    p = fma_f32(p, r, 1.0f);
    p = fma_f32(p, r, 1.0f);
    // In two steps: n goes from -150 to 128, a float's exponent does not.
    int n = (int)whole, half = n / 2;
    return p * power_of_two(half) * power_of_two(n - half);
}

// ln x of a normal, positive x within 2 units in the last place. x = m 2^n, m around 1; ln m = 2 artanh((m - 1) / (m + 1)).
DEVICE float log_f32(float x) {
    if (!(x > 0.0f)) return float_of(0x7FC00000u);
    if (x > 3.4e38f) return x;
    u32 bits = bits_of(x);
    // Relative to the square root of a half, so that m lies between it and the square root of two.
    int n = (int)(bits - 0x3F3504F3u) >> 23;
    float m = float_of(bits - ((u32)n << 23));
    float s = div_f32(m - 1.0f, m + 1.0f), z = s * s;
    float p = 2.0f / 9.0f;
    p = fma_f32(p, z, 2.0f / 7.0f);
    p = fma_f32(p, z, 2.0f / 5.0f);
    p = fma_f32(p, z, 2.0f / 3.0f);
    p = fma_f32(p * z, s, 2.0f * s);
    float whole = (float)n;
    return fma_f32(whole, 0.693145752f, fma_f32(whole, 1.42860677e-6f, p));
}
