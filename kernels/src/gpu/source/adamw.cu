// One AdamW step over the elements [start, end) of a tile: the operations of adamw/scalar.rs in their order, each with
// its own rounding.
//
// A thread takes four elements that start at a multiple of four: 8 bytes of a 16-bit plane and 16 of an fp32 plane, so
// that a warp accesses whole lines. Planes start at multiples of 64 bytes. Groups at the ends of the range are
// processed element by element.

struct Scalars {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root_correction, eps, minus_decay, minus_step_size;
};

#define SCALARS                                                                                      \
    float grad_scale, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,        \
        float root_correction, float eps, float minus_decay, float minus_step_size
#define TAKE_SCALARS                                                                                 \
    Scalars s = {grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps,   \
                 minus_decay, minus_step_size}

DEVICE void update(const Scalars &s, float &master, float &momentum, float &variance, float grad) {
    grad = grad * s.grad_scale;
    float m = fma_f32(s.beta1, momentum, s.one_minus_beta1 * grad);
    float v = fma_f32(s.one_minus_beta2 * grad, grad, s.beta2 * variance);
    float denominator = fma_f32(sqrt_f32(v), s.root_correction, s.eps);
    float decayed = fma_f32(s.minus_decay, master, master);
    master = canonical(fma_f32(s.minus_step_size, div_f32(m, denominator), decayed));
    momentum = canonical(m);
    variance = canonical(v);
}

// The bf16 parameter is the upper half of the master, halves rounded away from zero; the residual is the lower half of
// its bits.
struct SplitBf16 {
    typedef u16 Param;
    typedef u16 First;
    typedef Four16 FourParam;
    typedef Four16 FourFirst;
    static DEVICE float join(u16 param, u16 residual) {
        return float_of(((u32)param << 16) + (u32)(int)(short)residual);
    }
    static DEVICE void split(float master, u16 &param, u16 &residual) {
        u32 bits = bits_of(master);
        param = (u16)((bits + 0x8000u) >> 16);
        residual = (u16)bits;
    }
};

struct Fp16WholeMaster {
    typedef u16 Param;
    typedef float First;
    typedef Four16 FourParam;
    typedef FourF32 FourFirst;
    static DEVICE float join(u16, float whole) { return whole; }
    static DEVICE void split(float master, u16 &param, float &whole) {
        param = to_fp16(master);
        whole = master;
    }
};

struct Bf16Grad {
    typedef u16 Stored;
    typedef Four16 Four;
    static DEVICE float value(u16 bits) { return from_bf16(bits); }
};
struct Fp16Grad {
    typedef u16 Stored;
    typedef Four16 Four;
    static DEVICE float value(u16 bits) { return from_fp16(bits); }
};
struct Fp32Grad {
    typedef float Stored;
    typedef FourF32 Four;
    static DEVICE float value(float x) { return x; }
};

template <class Master, class Grad>
DEVICE void step(const Scalars &s, typename Master::Param *param, typename Master::First *first, float *momentum,
                 float *variance, const typename Grad::Stored *grad, u64 start, u64 end) {
    u64 at = (start / 4 + (u64)block_x() * 256 + thread_x()) * 4;
    if (at >= end) return;
    if (at >= start && at + 4 <= end) {
        typename Master::FourParam p = load_four(param + at);
        typename Master::FourFirst f = load_four(first + at);
        FourF32 m = load_four(momentum + at), v = load_four(variance + at);
        typename Grad::Four g = load_four(grad + at);
        for (int i = 0; i < 4; i++) {
            float master = Master::join(p.at[i], f.at[i]);
            update(s, master, m.at[i], v.at[i], Grad::value(g.at[i]));
            Master::split(master, p.at[i], f.at[i]);
        }
        store_four(param + at, p);
        store_four(first + at, f);
        store_four(momentum + at, m);
        store_four(variance + at, v);
        return;
    }
    for (u64 i = at; i < at + 4; i++) {
        if (i < start || i >= end) continue;
        float master = Master::join(param[i], first[i]);
        update(s, master, momentum[i], variance[i], Grad::value(grad[i]));
        Master::split(master, param[i], first[i]);
    }
}

KERNEL LAUNCH_BOUNDS(256)
adamw_split_bf16(u16 *param, u16 *residual, float *momentum, float *variance, const u16 *grad, u64 start, u64 end,
                 SCALARS) {
    TAKE_SCALARS;
    step<SplitBf16, Bf16Grad>(s, param, residual, momentum, variance, grad, start, end);
}

KERNEL LAUNCH_BOUNDS(256)
adamw_split_bf16_fp32_grad(u16 *param, u16 *residual, float *momentum, float *variance, const float *grad, u64 start,
                           u64 end, SCALARS) {
    TAKE_SCALARS;
    step<SplitBf16, Fp32Grad>(s, param, residual, momentum, variance, grad, start, end);
}

KERNEL LAUNCH_BOUNDS(256)
adamw_fp16_whole_master(u16 *param, float *whole, float *momentum, float *variance, const u16 *grad, u64 start,
                        u64 end, SCALARS) {
    TAKE_SCALARS;
    step<Fp16WholeMaster, Fp16Grad>(s, param, whole, momentum, variance, grad, start, end);
}

KERNEL LAUNCH_BOUNDS(256)
adamw_fp16_whole_master_fp32_grad(u16 *param, float *whole, float *momentum, float *variance, const float *grad,
                                  u64 start, u64 end, SCALARS) {
    TAKE_SCALARS;
    step<Fp16WholeMaster, Fp32Grad>(s, param, whole, momentum, variance, grad, start, end);
}

// The parameter is the master: there is no first plane, and the second argument is unused.
KERNEL LAUNCH_BOUNDS(256)
adamw_fp32(float *param, void *, float *momentum, float *variance, const float *grad, u64 start, u64 end,
           SCALARS) {
    TAKE_SCALARS;
    u64 at = (start / 4 + (u64)block_x() * 256 + thread_x()) * 4;
    if (at >= end) return;
    if (at >= start && at + 4 <= end) {
        FourF32 p = load_four(param + at), m = load_four(momentum + at), v = load_four(variance + at);
        FourF32 g = load_four(grad + at);
        for (int i = 0; i < 4; i++) update(s, p.at[i], m.at[i], v.at[i], g.at[i]);
        store_four(param + at, p);
        store_four(momentum + at, m);
        store_four(variance + at, v);
        return;
    }
    for (u64 i = at; i < at + 4; i++) {
        if (i >= start && i < end) update(s, param[i], momentum[i], variance[i], grad[i]);
    }
}
