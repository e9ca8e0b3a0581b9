// Cross entropy of rows of logits with one target each, and its gradient in place of the logits. One block works on a
// row: the maximum and the sum of exponentials in one pass, the gradient in a second one, which finds the row in the L2
// cache.

// loss = ln(sum of e^(x - largest)) - (x[target] - largest); gradient = (softmax(x) - [at target]) * weight. A row whose target is
// negative has loss 0 and gradient 0. Bytes an element (bf16): 2 without gradient, 4 with it.
template <class Type, int N>
DEVICE void cross_entropy(typename Type::Stored *logits, const long long *targets, float *losses, u32 columns,
                          u32 with_gradient, float weight) {
    __shared__ float scratch[32];
    typename Type::Stored *row = logits + (u64)block_x() * columns;
    u32 first = thread_x() * N, stride = block_threads_x() * N;
    long long target = targets[block_x()];
    if (target < 0) {
        if (thread_x() == 0) losses[block_x()] = 0.0f;
        if (!with_gradient) return;
        float zeros[N];
#pragma unroll
        for (int i = 0; i < N; i++) zeros[i] = 0.0f;
        for (u32 c = first; c < columns; c += stride) store<Type>(row + c, zeros);
        return;
    }
    // Every thread reads it before any thread writes: barriers lie between.
    float at_target = Type::value(row[target]);
    const float below_all = float_of(0xFF800000u);
    float largest = below_all, sum = 0.0f;
#pragma unroll 4
    for (u32 c = first; c < columns; c += stride) {
        float x[N];
        load<Type>(row + c, x);
        float most = largest;
#pragma unroll
        for (int i = 0; i < N; i++) most = x[i] > most ? x[i] : most;
        if (most > largest) {
            sum *= exp_f32(largest - most);
            largest = most;
        }
        // All values so far are -infinity: their exponential is 0, not e^(-infinity + infinity).
        float base = largest == below_all ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < N; i++) sum += exp_f32(x[i] - base);
    }
    float most = block_largest(largest, scratch);
    if (largest != most) sum *= exp_f32(largest - most);
    sum = block_sum(sum, scratch);
    if (thread_x() == 0) losses[block_x()] = log_f32(sum) - (at_target - most);
    if (!with_gradient) return;
    float inverse = div_f32(1.0f, sum);
    for (u32 c = first; c < columns; c += stride) {
        float x[N];
        load<Type>(row + c, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float share = Type::exp(x[i] - most) * inverse;
            if ((long long)(c + i) == target) share -= 1.0f;
            x[i] = share * weight;
        }
        store<Type>(row + c, x);
    }
}

#define DEFINE_LOSS(Type, N, name)                                                                                     \
    KERNEL LAUNCH_BOUNDS(1024)                                                                                         \
    cross_entropy_##name(Type::Stored *logits, const long long *targets, float *losses, u32 columns,                   \
                         u32 with_gradient, float weight) {                                                            \
        cross_entropy<Type, N>(logits, targets, losses, columns, with_gradient, weight);                               \
    }
FOR_EACH_VARIANT(DEFINE_LOSS)
