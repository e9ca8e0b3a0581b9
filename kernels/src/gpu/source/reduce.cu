// Gradients: norm, sum and cast, with the bits of reduce/scalar.rs.

#define CHUNK_ELEMS 4096
#define GROUP_CHUNKS 64

struct Bf16 {
    typedef u16 Stored;
    typedef Four16 Four;
    static DEVICE float value(u16 bits) { return from_bf16(bits); }
    static DEVICE u16 stored(float x) { return to_bf16(x); }
};
struct Fp16 {
    typedef u16 Stored;
    typedef Four16 Four;
    static DEVICE float value(u16 bits) { return from_fp16(bits); }
    static DEVICE u16 stored(float x) { return to_fp16(x); }
};
struct Fp32 {
    typedef float Stored;
    typedef FourF32 Four;
    static DEVICE float value(float x) { return x; }
    static DEVICE float stored(float x) { return canonical(x); }
};

// One warp per chunk: lane l adds the squares of elements l, l + 32, ... in order, then the lanes are folded in halves.
// The square of an fp32 is exact in f64. Eight warps per block.
template <class Type>
DEVICE void chunk_squares(const typename Type::Stored *grad, u64 elems, double *chunk_sums) {
    u64 chunk = (u64)block_x() * 8 + thread_x() / WARP_LANES;
    u64 start = chunk * CHUNK_ELEMS;
    // Whole warps return or stay, so the shuffles of those that stay have all lanes.
    if (start >= elems) return;
    u32 lane = thread_x() % WARP_LANES;
    u64 left = elems - start;
    u32 count = left < CHUNK_ELEMS ? (u32)left : CHUNK_ELEMS;
    const typename Type::Stored *chunk_grad = grad + start;
    double sum = 0.0;
    if (count == CHUNK_ELEMS) {
#pragma unroll 16
        for (u32 i = 0; i < CHUNK_ELEMS; i += WARP_LANES) {
            double x = (double)Type::value(chunk_grad[i + lane]);
            sum += x * x;
        }
    } else {
        for (u32 i = lane; i < count; i += WARP_LANES) {
            double x = (double)Type::value(chunk_grad[i]);
            sum += x * x;
        }
    }
    for (u32 width = WARP_LANES / 2; width > 0; width /= 2) sum += shuffle_xor(sum, width);
    if (lane == 0) chunk_sums[chunk] = sum;
}

KERNEL LAUNCH_BOUNDS(256) chunk_squares_bf16(const u16 *grad, u64 elems, double *chunk_sums) {
    chunk_squares<Bf16>(grad, elems, chunk_sums);
}
KERNEL LAUNCH_BOUNDS(256) chunk_squares_fp16(const u16 *grad, u64 elems, double *chunk_sums) {
    chunk_squares<Fp16>(grad, elems, chunk_sums);
}
KERNEL LAUNCH_BOUNDS(256) chunk_squares_fp32(const float *grad, u64 elems, double *chunk_sums) {
    chunk_squares<Fp32>(grad, elems, chunk_sums);
}

// Each thread adds a group of chunks' sums from first to last, and one thread the groups' sums. Every NaN becomes f64::NAN.
KERNEL LAUNCH_BOUNDS(256) add_chunks(const double *chunk_sums, u64 count, double *out) {
    __shared__ double group_sums[256];
    double sum = 0.0;
    for (u64 start = 0; start < count; start += 256 * GROUP_CHUNKS) {
        u64 first = start + thread_x() * GROUP_CHUNKS;
        u64 end = first + GROUP_CHUNKS < count ? first + GROUP_CHUNKS : count;
        double group_sum = 0.0;
#pragma unroll 8
        for (u64 i = first; i < end; i++) group_sum += chunk_sums[i];
        group_sums[thread_x()] = group_sum;
        block_barrier();
        if (thread_x() == 0) {
            u64 groups = (count - start + GROUP_CHUNKS - 1) / GROUP_CHUNKS;
            for (u32 i = 0; i < groups && i < 256; i++) sum += group_sums[i];
        }
        block_barrier();
    }
    if (thread_x() == 0) {
        bool is_nan = (bits_of_f64(sum) & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull;
        *out = f64_of(is_nan ? 0x7FF8000000000000ull : bits_of_f64(sum));
    }
}

// Four elements per thread. `whole_words` means that both sides are aligned to four elements.
template <class Type>
DEVICE void accumulate(float *sum, const typename Type::Stored *x, u64 elems, u32 whole_words) {
    u64 at = ((u64)block_x() * 256 + thread_x()) * 4;
    if (at >= elems) return;
    if (whole_words && at + 4 <= elems) {
        FourF32 sums = load_four(sum + at);
        typename Type::Four more = load_four(x + at);
        for (int i = 0; i < 4; i++) sums.at[i] = canonical(sums.at[i] + Type::value(more.at[i]));
        store_four(sum + at, sums);
        return;
    }
    for (u64 i = at; i < at + 4 && i < elems; i++) sum[i] = canonical(sum[i] + Type::value(x[i]));
}

KERNEL LAUNCH_BOUNDS(256) accumulate_bf16(float *sum, const u16 *x, u64 elems, u32 whole_words) {
    accumulate<Bf16>(sum, x, elems, whole_words);
}
KERNEL LAUNCH_BOUNDS(256) accumulate_fp16(float *sum, const u16 *x, u64 elems, u32 whole_words) {
    accumulate<Fp16>(sum, x, elems, whole_words);
}
KERNEL LAUNCH_BOUNDS(256) accumulate_fp32(float *sum, const float *x, u64 elems, u32 whole_words) {
    accumulate<Fp32>(sum, x, elems, whole_words);
}

template <class Type>
DEVICE void store(const float *from, typename Type::Stored *out, u64 elems, u32 whole_words) {
    u64 at = ((u64)block_x() * 256 + thread_x()) * 4;
    if (at >= elems) return;
    if (whole_words && at + 4 <= elems) {
        FourF32 x = load_four(from + at);
        typename Type::Four four;
        for (int i = 0; i < 4; i++) four.at[i] = Type::stored(x.at[i]);
        store_four(out + at, four);
        return;
    }
    for (u64 i = at; i < at + 4 && i < elems; i++) out[i] = Type::stored(from[i]);
}

KERNEL LAUNCH_BOUNDS(256) store_bf16(const float *from, u16 *out, u64 elems, u32 whole_words) {
    store<Bf16>(from, out, elems, whole_words);
}
KERNEL LAUNCH_BOUNDS(256) store_fp16(const float *from, u16 *out, u64 elems, u32 whole_words) {
    store<Fp16>(from, out, elems, whole_words);
}
KERNEL LAUNCH_BOUNDS(256) store_fp32(const float *from, float *out, u64 elems, u32 whole_words) {
    store<Fp32>(from, out, elems, whole_words);
}
