// Shared by the fused kernels: elements of either kind as fp32, sums over a block, exp and log.
//
// exp and log in fp32 are written here because clang for AMD has them only in a library of ROCm, and so that both vendors
// get the same bits. Results in bf16 come from each vendor's own instructions.

DEVICE float exp_f32(float x);

// `exp` and `sigmoid` are for results that are rounded to the kind: in bf16, the GPU's own instructions are exact enough and much shorter.
struct Bf16 {
    typedef u16 Stored;
    static DEVICE float value(u16 bits) { return from_bf16(bits); }
    static DEVICE u16 stored(float x) { return nearest_bf16(x); }
    static DEVICE float exp(float x) { return exp2_near(x * 1.44269504f); }
    static DEVICE float sigmoid(float x) { return inverse_near(1.0f + exp(-x)); }
    static DEVICE float silu(float x) { return x * sigmoid(x); }
};

struct Fp32 {
    typedef float Stored;
    static DEVICE float value(float x) { return x; }
    static DEVICE float stored(float x) { return x; }
    static DEVICE float exp(float x) { return exp_f32(x); }
    static DEVICE float sigmoid(float x) { return div_f32(1.0f, 1.0f + exp_f32(-x)); }
    static DEVICE float silu(float x) { return div_f32(x, 1.0f + exp_f32(-x)); }
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

// N neighbours as they are stored, which are loaded and stored in one access.
template <class Type, int N>
struct alignas(N * sizeof(typename Type::Stored)) Chunk {
    typename Type::Stored at[N];
    DEVICE float operator[](int i) const { return Type::value(at[i]); }
};

template <class Type, int N>
DEVICE Chunk<Type, N> chunk_at(const typename Type::Stored *from) {
    return *(const Chunk<Type, N> *)from;
}

template <class Type, int N>
DEVICE void load(const typename Type::Stored *from, float (&to)[N]) {
    Chunk<Type, N> chunk = chunk_at<Type, N>(from);
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = chunk[i];
}

template <class Type, int N>
DEVICE void store(typename Type::Stored *to, const float (&from)[N]) {
    Chunk<Type, N> chunk;
#pragma unroll
    for (int i = 0; i < N; i++) chunk.at[i] = Type::stored(from[i]);
    *(Chunk<Type, N> *)to = chunk;
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
    // The bits of `shifted` count up from those of 1.5 * 2^23; a conversion to an integer takes a GPU eight times as long.
    int n = (int)(bits_of(shifted) - 0x4B400000u), half = n / 2;
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
