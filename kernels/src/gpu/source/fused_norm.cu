// RMSNorm, forward and backward. One block works on a row. A thread loads its first KEPT chunks of N columns at once, so that many accesses
// are under way, and keeps them between the two passes over a row. It reads the others again, which is rare: the block is wide enough for all
// columns up to 2,048 N forward and 1,024 N backward. Backward has twice as many operands: with one chunk of each a thread needs 64 registers
// instead of 123, twice as many threads run at once, and the kernel took 100 us instead of 128 on an H200 (16,384 x 2,048, bf16).

#define KEPT 4
#define KEPT_BACKWARD 1

// sum = x + added (where there is one), out = weight * round(sum / rms(sum)), scale = 1 / rms.
// Bytes an element (bf16): 4, with `added` 8.
template <class Type, int N>
DEVICE void rms_norm(const typename Type::Stored *x, const typename Type::Stored *added,
                     const typename Type::Stored *weight, typename Type::Stored *sum, typename Type::Stored *out,
                     float *scale, u32 columns, float eps) {
    __shared__ float scratch[32];
    u64 row = (u64)block_x() * columns;
    u32 first = thread_x() * N, stride = block_threads_x() * N;
    Chunk<Type, N> kept[KEPT], more[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 c = first + k * stride;
        if (c < columns) kept[k] = chunk_at<Type, N>(x + row + c);
        if (c < columns && added) more[k] = chunk_at<Type, N>(added + row + c);
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 c = first + k * stride;
        if (c >= columns) continue;
        if (added) {
#pragma unroll
            for (int i = 0; i < N; i++) kept[k].at[i] = Type::stored(kept[k][i] + more[k][i]);
            *(Chunk<Type, N> *)(sum + row + c) = kept[k];
        }
#pragma unroll
        for (int i = 0; i < N; i++) squares = fma_f32(kept[k][i], kept[k][i], squares);
    }
    for (u32 c = first + KEPT * stride; c < columns; c += stride) {
        float v[N];
        load<Type>(x + row + c, v);
        if (added) {
            float a[N];
            load<Type>(added + row + c, a);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = rounded<Type>(v[i] + a[i]);
            store<Type>(sum + row + c, v);
        }
#pragma unroll
        for (int i = 0; i < N; i++) squares = fma_f32(v[i], v[i], squares);
    }
    squares = block_sum(squares, scratch);
    float s = div_f32(1.0f, sqrt_f32(div_f32(squares, (float)columns) + eps));
    if (thread_x() == 0) scale[block_x()] = s;
    const typename Type::Stored *normed = added ? sum : x;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 c = first + k * stride;
        if (c >= columns) continue;
        float v[N], w[N];
        load<Type>(weight + c, w);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = rounded<Type>(kept[k][i] * s) * w[i];
        store<Type>(out + row + c, v);
    }
    for (u32 c = first + KEPT * stride; c < columns; c += stride) {
        float v[N], w[N];
        load<Type>(normed + row + c, v);
        load<Type>(weight + c, w);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = rounded<Type>(v[i] * s) * w[i];
        store<Type>(out + row + c, v);
    }
}

// For q = round(grad * weight): grad_x = round(q s - x s^3 sum(q x) / columns) (+ beside), and each block of rows
// writes its part of the weight's gradient, the sum of grad * round(x s). Bytes per element (bf16): 6, with `beside` 8.
template <class Type, int N>
DEVICE void rms_norm_backward(const typename Type::Stored *grad, const typename Type::Stored *x,
                              const typename Type::Stored *weight, const float *scale,
                              const typename Type::Stored *beside, typename Type::Stored *grad_x, float *parts,
                              u32 rows, u32 rows_each, u32 columns) {
    __shared__ float scratch[32];
    u32 first = thread_x() * N, stride = block_threads_x() * N;
    float *part = parts + (u64)block_x() * columns;
    Chunk<Type, N> weights[KEPT_BACKWARD];
    float sums[KEPT_BACKWARD][N];
#pragma unroll
    for (int k = 0; k < KEPT_BACKWARD; k++) {
        u32 c = first + k * stride;
        if (c < columns) weights[k] = chunk_at<Type, N>(weight + c);
#pragma unroll
        for (int i = 0; i < N; i++) sums[k][i] = 0.0f;
    }
    for (u32 c = first + KEPT_BACKWARD * stride; c < columns; c += stride) {
        for (int i = 0; i < N; i++) part[c + i] = 0.0f;
    }
    u32 start = block_x() * rows_each;
    u32 end = start + rows_each < rows ? start + rows_each : rows;
    for (u32 r = start; r < end; r++) {
        u64 row = (u64)r * columns;
        Chunk<Type, N> g[KEPT_BACKWARD], v[KEPT_BACKWARD], b[KEPT_BACKWARD];
#pragma unroll
        for (int k = 0; k < KEPT_BACKWARD; k++) {
            u32 c = first + k * stride;
            if (c >= columns) continue;
            g[k] = chunk_at<Type, N>(grad + row + c);
            v[k] = chunk_at<Type, N>(x + row + c);
            if (beside) b[k] = chunk_at<Type, N>(beside + row + c);
        }
        float s = scale[r];
        float along = 0.0f;
#pragma unroll
        for (int k = 0; k < KEPT_BACKWARD; k++) {
            if (first + k * stride >= columns) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                along = fma_f32(rounded<Type>(g[k][i] * weights[k][i]), v[k][i], along);
                sums[k][i] += g[k][i] * rounded<Type>(v[k][i] * s);
            }
        }
        for (u32 c = first + KEPT_BACKWARD * stride; c < columns; c += stride) {
            float g[N], v[N], w[N];
            load<Type>(grad + row + c, g);
            load<Type>(x + row + c, v);
            load<Type>(weight + c, w);
#pragma unroll
            for (int i = 0; i < N; i++) {
                along = fma_f32(rounded<Type>(g[i] * w[i]), v[i], along);
                part[c + i] += g[i] * rounded<Type>(v[i] * s);
            }
        }
        along = div_f32(block_sum(along, scratch) * s * s * s, (float)columns);
#pragma unroll
        for (int k = 0; k < KEPT_BACKWARD; k++) {
            u32 c = first + k * stride;
            if (c >= columns) continue;
            float out[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                float q = rounded<Type>(g[k][i] * weights[k][i]);
                out[i] = fma_f32(q, s, -(v[k][i] * along));
                if (beside) out[i] = rounded<Type>(out[i]) + b[k][i];
            }
            store<Type>(grad_x + row + c, out);
        }
        for (u32 c = first + KEPT_BACKWARD * stride; c < columns; c += stride) {
            float g[N], v[N], w[N];
            load<Type>(grad + row + c, g);
            load<Type>(x + row + c, v);
            load<Type>(weight + c, w);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = fma_f32(rounded<Type>(g[i] * w[i]), s, -(v[i] * along));
            if (beside) {
                float b[N];
                load<Type>(beside + row + c, b);
#pragma unroll
                for (int i = 0; i < N; i++) v[i] = rounded<Type>(v[i]) + b[i];
            }
            store<Type>(grad_x + row + c, v);
        }
    }
#pragma unroll
    for (int k = 0; k < KEPT_BACKWARD; k++) {
        u32 c = first + k * stride;
        if (c >= columns) continue;
        for (int i = 0; i < N; i++) part[c + i] = sums[k][i];
    }
}

// Adds the parts for 32 columns with a block of 1,024 threads: each warp adds every 32nd part in order, then the warps'
// sums are added.
template <class Type>
DEVICE void sum_parts(const float *parts, typename Type::Stored *out, u32 part_count, u32 columns) {
    __shared__ float sums[32][33];
    u32 lane = thread_x() % 32, warp = thread_x() / 32;
    u32 c = block_x() * 32 + lane;
    float sum = 0.0f;
    if (c < columns) {
#pragma unroll 8
        for (u32 p = warp; p < part_count; p += 32) sum += parts[(u64)p * columns + c];
    }
    sums[warp][lane] = sum;
    block_barrier();
    if (warp == 0 && c < columns) {
        float all = 0.0f;
        for (u32 w = 0; w < 32; w++) all += sums[w][lane];
        out[c] = Type::stored(all);
    }
}

#define DEFINE_NORM(Type, N, name)                                                                                     \
    KERNEL LAUNCH_BOUNDS(512)                                                                                          \
    rms_norm_##name(const Type::Stored *x, const Type::Stored *added, const Type::Stored *weight, Type::Stored *sum,   \
                    Type::Stored *out, float *scale, u32 columns, float eps) {                                         \
        rms_norm<Type, N>(x, added, weight, sum, out, scale, columns, eps);                                            \
    }                                                                                                                  \
    KERNEL LAUNCH_BOUNDS(1024)                                                                                         \
    rms_norm_backward_##name(const Type::Stored *grad, const Type::Stored *x, const Type::Stored *weight,              \
                             const float *scale, const Type::Stored *beside, Type::Stored *grad_x, float *parts,       \
                             u32 rows, u32 rows_each, u32 columns) {                                                   \
        rms_norm_backward<Type, N>(grad, x, weight, scale, beside, grad_x, parts, rows, rows_each, columns);           \
    }
FOR_EACH_VARIANT(DEFINE_NORM)

KERNEL LAUNCH_BOUNDS(1024) sum_parts_bf16(const float *parts, u16 *out, u32 part_count, u32 columns) {
    sum_parts<Bf16>(parts, out, part_count, columns);
}
KERNEL LAUNCH_BOUNDS(1024) sum_parts_fp32(const float *parts, float *out, u32 part_count, u32 columns) {
    sum_parts<Fp32>(parts, out, part_count, columns);
}
