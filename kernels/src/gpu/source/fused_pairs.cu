// Rotary embeddings and the gated activation: each thread works on N pairs of elements.

// Strides in elements of sequences, tokens and heads; a head's elements are contiguous.
struct Places {
    long long sequence, token, head;
};

// Rotates the pairs (i, i + half) of each head by their position's angle: `turn` is 1 forward, -1 backward, 0 for a
// copy. `from` and `to` may be the same. Bytes per element (bf16): 4.
template <class Type, int N>
DEVICE void rotary(const typename Type::Stored *from, typename Type::Stored *to, const typename Type::Stored *cosines,
                   const typename Type::Stored *sines, const Places &source, const Places &target, u32 seq_len,
                   u32 heads, u32 half, u32 count, float turn) {
    u32 index = block_x() * 256 + thread_x();
    if (index >= count) return;
    u32 chunks = half / N;
    u32 c = index % chunks * N;
    index /= chunks;
    u32 head = index % heads;
    index /= heads;
    u32 token = index % seq_len, sequence = index / seq_len;
    from += (long long)sequence * source.sequence + (long long)token * source.token + (long long)head * source.head + c;
    to += (long long)sequence * target.sequence + (long long)token * target.token + (long long)head * target.head + c;
    float a[N], b[N];
    load<Type>(from, a);
    load<Type>(from + half, b);
    if (turn != 0.0f) {
        float cosine[N], sine[N];
        // The tables contain each angle twice, once for each half.
        load<Type>(cosines + (u64)token * 2 * half + c, cosine);
        load<Type>(sines + (u64)token * 2 * half + c, sine);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = sine[i] * turn;
            float turned_a = rounded<Type>(a[i] * cosine[i]) - rounded<Type>(b[i] * s);
            float turned_b = rounded<Type>(b[i] * cosine[i]) + rounded<Type>(a[i] * s);
            a[i] = turned_a;
            b[i] = turned_b;
        }
    }
    store<Type>(to, a);
    store<Type>(to + half, b);
}

// out = round(silu(gate)) * up; a row of gate_up is gate, then up. Bytes per element of out (bf16): 6.
template <class Type, int N>
DEVICE void gated(const typename Type::Stored *gate_up, typename Type::Stored *out, u32 columns, u32 count) {
    u32 index = block_x() * 256 + thread_x();
    if (index >= count) return;
    u32 chunks = columns / N;
    u64 row = index / chunks;
    u32 c = index % chunks * N;
    const typename Type::Stored *place = gate_up + row * 2 * columns + c;
    float gate[N], up[N];
    load<Type>(place, gate);
    load<Type>(place + columns, up);
#pragma unroll
    for (int i = 0; i < N; i++) up[i] *= rounded<Type>(Type::silu(gate[i]));
    store<Type>(out + row * columns + c, up);
}

// In place: `grad` becomes the result of `gated` again, gate_up its gradient. Bytes per element of grad (bf16): 12.
template <class Type, int N>
DEVICE void gated_backward(typename Type::Stored *grad, typename Type::Stored *gate_up, u32 columns, u32 count) {
    u32 index = block_x() * 256 + thread_x();
    if (index >= count) return;
    u32 chunks = columns / N;
    u64 row = index / chunks;
    u32 c = index % chunks * N;
    typename Type::Stored *place = gate_up + row * 2 * columns + c;
    grad += row * columns + c;
    float g[N], gate[N], up[N];
    load<Type>(grad, g);
    load<Type>(place, gate);
    load<Type>(place + columns, up);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float s = Type::sigmoid(gate[i]);
        float silu = rounded<Type>(Type::silu(gate[i]));
        float grad_silu = rounded<Type>(g[i] * up[i]);
        float grad_up = g[i] * silu;
        g[i] = silu * up[i];
        up[i] = grad_up;
        // silu'(x) = s (1 + x (1 - s))
        gate[i] = grad_silu * s * fma_f32(gate[i], 1.0f - s, 1.0f);
    }
    store<Type>(grad, g);
    store<Type>(place, gate);
    store<Type>(place + columns, up);
}

#define DEFINE_PAIRS(Type, N, name)                                                                                    \
    KERNEL LAUNCH_BOUNDS(256)                                                                                          \
    rotary_##name(const Type::Stored *from, Type::Stored *to, const Type::Stored *cosines, const Type::Stored *sines,  \
                  long long from_sequence, long long from_token, long long from_head, long long to_sequence,           \
                  long long to_token, long long to_head, u32 seq_len, u32 heads, u32 half, u32 count, float turn) {    \
        Places source = {from_sequence, from_token, from_head}, target = {to_sequence, to_token, to_head};             \
        rotary<Type, N>(from, to, cosines, sines, source, target, seq_len, heads, half, count, turn);                  \
    }                                                                                                                  \
    KERNEL LAUNCH_BOUNDS(256)                                                                                          \
    gated_##name(const Type::Stored *gate_up, Type::Stored *out, u32 columns, u32 count) {                             \
        gated<Type, N>(gate_up, out, columns, count);                                                                  \
    }                                                                                                                  \
    KERNEL LAUNCH_BOUNDS(256)                                                                                          \
    gated_backward_##name(Type::Stored *grad, Type::Stored *gate_up, u32 columns, u32 count) {                         \
        gated_backward<Type, N>(grad, gate_up, columns, count);                                                        \
    }
FOR_EACH_VARIANT(DEFINE_PAIRS)
