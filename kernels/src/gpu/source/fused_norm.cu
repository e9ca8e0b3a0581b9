// RMSNorm, forward and backward. One block works on a row. A thread keeps its first N columns in registers between the
// two passes over a row and reads the others again, which is rare: the block is wide enough for all columns up to 1,024
// N.

// sum = x + added (where there is one), out = weight * round(sum / rms(sum)), scale = 1 / rms.
// Bytes an element (bf16): 4, with `added` 8.
template <class Type, int N>
DEVICE void rms_norm(const typename Type::Stored *x, const typename Type::Stored *added,
                     const typename Type::Stored *weight, typename Type::Stored *sum, typename Type::Stored *out,
                     float *scale, u32 columns, float eps) {
    __shared__ float scratch[32];
    u64 row = (u64)block_x() * columns;
    u32 first = thread_x() * N, stride = block_threads_x() * N;
    float kept[N];
    float squares = 0.0f;
    for (u32 c = first; c < columns; c += stride) {
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
        if (c == first) {
#pragma unroll
            for (int i = 0; i < N; i++) kept[i] = v[i];
        }
    }
    squares = block_sum(squares, scratch);
    float s = div_f32(1.0f, sqrt_f32(div_f32(squares, (float)columns) + eps));
    if (thread_x() == 0) scale[block_x()] = s;
    const typename Type::Stored *normed = added ? sum : x;
    for (u32 c = first; c < columns; c += stride) {
        float v[N], w[N];
        if (c == first) {
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = kept[i];
        } else {
            load<Type>(normed + row + c, v);
        }
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
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = 0.0f;
    for (u32 c = first + stride; c < columns; c += stride) {
        for (int i = 0; i < N; i++) part[c + i] = 0.0f;
    }
    u32 start = block_x() * rows_each;
    u32 end = start + rows_each < rows ? start + rows_each : rows;
    for (u32 r = start; r < end; r++) {
        u64 row = (u64)r * columns;
        float s = scale[r];
        float kept_q[N], kept_v[N];
        float along = 0.0f;
        for (u32 c = first; c < columns; c += stride) {
            float g[N], v[N], w[N];
            load<Type>(grad + row + c, g);
            load<Type>(x + row + c, v);
            load<Type>(weight + c, w);
#pragma unroll
            for (int i = 0; i < N; i++) {
                float q = rounded<Type>(g[i] * w[i]);
                float more = g[i] * rounded<Type>(v[i] * s);
                along = fma_f32(q, v[i], along);
                if (c == first) {
                    kept_q[i] = q;
                    kept_v[i] = v[i];
                    sums[i] += more;
                } else {
                    part[c + i] += more;
                }
            }
        }
        along = div_f32(block_sum(along, scratch) * s * s * s, (float)columns);
        for (u32 c = first; c < columns; c += stride) {
            float q[N], v[N];
            if (c == first) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    q[i] = kept_q[i];
                    v[i] = kept_v[i];
                }
            } else {
                float w[N];
                load<Type>(grad + row + c, q);
                load<Type>(x + row + c, v);
                load<Type>(weight + c, w);
#pragma unroll
                for (int i = 0; i < N; i++) q[i] = rounded<Type>(q[i] * w[i]);
            }
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = fma_f32(q[i], s, -(v[i] * along));
            if (beside) {
                float b[N];
                load<Type>(beside + row + c, b);
#pragma unroll
                for (int i = 0; i < N; i++) v[i] = rounded<Type>(v[i]) + b[i];
            }
            store<Type>(grad_x + row + c, v);
        }
    }
    if (first < columns) {
        for (int i = 0; i < N; i++) part[first + i] = sums[i];
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
    KERNEL LAUNCH_BOUNDS(1024)                                                                                         \
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
