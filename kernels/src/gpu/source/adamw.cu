// One step of AdamW, Lion or SGD over the elements [start, end) of a tile: the operations of adamw/scalar.rs in their order,
// each with its own rounding.
//
// A thread takes four elements that start at a multiple of four: 8 bytes of a 16-bit plane and 16 of an fp32 plane, so
// that a warp accesses whole lines. Planes start at multiples of 64 bytes. Groups at the ends of the range are
// processed element by element.
//
// Moments and masters in bf16 are rounded with the random bits of adamw/rounding.rs.
//
// Moments in 8 bits have a largest magnitude for each 256 elements, which a warp takes; see adamw/eight_bit.rs.

struct Scalars {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root_correction, eps, minus_decay, minus_step_size;
};

#define SCALARS                                                                                      \
    float grad_scale, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,        \
        float root_correction, float eps, float minus_decay, float minus_step_size, u32 key,         \
        u32 master_key, u32 first_elem
#define TAKE_SCALARS                                                                                 \
    Scalars s = {grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps,   \
                 minus_decay, minus_step_size};                                                      \
    Random random = {key, master_key, first_elem}

// What the random bits of a tile's elements come from.
struct Random {
    u32 key, master_key, first_elem;
};

DEVICE u32 random_bits(u32 key, u32 elem) {
    u32 x = elem ^ key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// One of the two bf16 around x, by the lower half of the random bits.
DEVICE u16 to_bf16_by_chance(float x, u32 random) { return (u16)((bits_of(x) + (random & 0xFFFFu)) >> 16); }

struct AdamW {
    static DEVICE void update(const Scalars &s, float &master, float &momentum, float &variance, float grad) {
        grad = grad * s.grad_scale;
        float m = fma_f32(s.beta1, momentum, s.one_minus_beta1 * grad);
        float v = fma_f32(s.one_minus_beta2 * grad, grad, s.beta2 * variance);
        float denominator = fma_f32(sqrt_f32(v), s.root_correction, s.eps);
        float decayed = fma_f32(s.minus_decay, master, master);
        master = canonical(fma_f32(s.minus_step_size, div_f32(m, denominator), decayed));
        momentum = canonical(m);
        variance = canonical(v);
    }
};

struct Lion {
    static DEVICE void update(const Scalars &s, float &master, float &momentum, float &, float grad) {
        grad = grad * s.grad_scale;
        float d = fma_f32(s.beta1, momentum, s.one_minus_beta1 * grad);
        float direction = d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : d;
        float m = fma_f32(s.beta2, momentum, s.one_minus_beta2 * grad);
        float decayed = fma_f32(s.minus_decay, master, master);
        master = canonical(fma_f32(s.minus_step_size, direction, decayed));
        momentum = canonical(m);
    }
};

struct Sgd {
    static DEVICE void update(const Scalars &s, float &master, float &, float &, float grad) {
        grad = grad * s.grad_scale;
        grad = fma_f32(s.minus_decay, master, grad);
        master = canonical(fma_f32(s.minus_step_size, grad, master));
    }
};

// A plane without bytes.
struct Nothing {};
struct FourNothing {
    Nothing at[4];
};
DEVICE FourNothing load_four(const Nothing *) { return FourNothing(); }
DEVICE void store_four(Nothing *, const FourNothing &) {}

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
    static DEVICE void split(float master, u16 &param, u16 &residual, const Random &, u32) {
        u32 bits = bits_of(master);
        param = (u16)((bits + 0x8000u) >> 16);
        residual = (u16)bits;
    }
};

// The bf16 parameter is rounded by chance, and there is no first plane.
struct Bf16Master {
    typedef u16 Param;
    typedef Nothing First;
    typedef Four16 FourParam;
    typedef FourNothing FourFirst;
    static DEVICE float join(u16 param, Nothing) { return from_bf16(param); }
    static DEVICE void split(float master, u16 &param, Nothing &, const Random &random, u32 elem) {
        param = to_bf16_by_chance(master, random_bits(random.master_key, elem));
    }
};

struct Fp16WholeMaster {
    typedef u16 Param;
    typedef float First;
    typedef Four16 FourParam;
    typedef FourF32 FourFirst;
    static DEVICE float join(u16, float whole) { return whole; }
    static DEVICE void split(float master, u16 &param, float &whole, const Random &, u32) {
        param = to_fp16(master);
        whole = master;
    }
};

// The parameter is the master: there is no first plane.
struct Fp32Master {
    typedef float Param;
    typedef Nothing First;
    typedef FourF32 FourParam;
    typedef FourNothing FourFirst;
    static DEVICE float join(float param, Nothing) { return param; }
    static DEVICE void split(float master, float &param, Nothing &, const Random &, u32) { param = master; }
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

struct Fp32Moment {
    typedef float Stored;
    typedef FourF32 Four;
    static DEVICE float value(float x) { return x; }
    static DEVICE float stored(float x, u32) { return x; }
};
struct Bf16Moment {
    typedef u16 Stored;
    typedef Four16 Four;
    static DEVICE float value(u16 bits) { return from_bf16(bits); }
    static DEVICE u16 stored(float x, u32 random) { return to_bf16_by_chance(x, random); }
};

// A moment that the rule does not have.
struct NoMoment {
    typedef Nothing Stored;
    typedef FourNothing Four;
    static DEVICE float value(Nothing) { return 0.0f; }
    static DEVICE Nothing stored(float, u32) { return Nothing(); }
};

// Steps the element `at` of the tile.
template <class Rule, class Master, class Grad, class Momentum, class Variance>
DEVICE void step_one(const Scalars &s, const Random &random, u64 at, typename Master::Param &param,
                     typename Master::First &first, typename Momentum::Stored &momentum,
                     typename Variance::Stored &variance, typename Grad::Stored grad) {
    float master = Master::join(param, first), m = Momentum::value(momentum), v = Variance::value(variance);
    Rule::update(s, master, m, v, Grad::value(grad));
    u32 elem = random.first_elem + (u32)at, bits = random_bits(random.key, elem);
    Master::split(master, param, first, random, elem);
    momentum = Momentum::stored(m, bits);
    variance = Variance::stored(v, bits >> 16);
}

template <class Rule, class Master, class Grad, class Momentum, class Variance>
DEVICE void step(const Scalars &s, const Random &random, typename Master::Param *param,
                 typename Master::First *first, typename Momentum::Stored *momentum,
                 typename Variance::Stored *variance, const typename Grad::Stored *grad, u64 start, u64 end) {
    u64 at = (start / 4 + (u64)block_x() * 256 + thread_x()) * 4;
    if (at >= end) return;
    if (at >= start && at + 4 <= end) {
        typename Master::FourParam p = load_four(param + at);
        typename Master::FourFirst f = load_four(first + at);
        typename Momentum::Four m = load_four(momentum + at);
        typename Variance::Four v = load_four(variance + at);
        typename Grad::Four g = load_four(grad + at);
        for (int i = 0; i < 4; i++) {
            step_one<Rule, Master, Grad, Momentum, Variance>(s, random, at + i, p.at[i], f.at[i], m.at[i], v.at[i], g.at[i]);
        }
        store_four(param + at, p);
        store_four(first + at, f);
        store_four(momentum + at, m);
        store_four(variance + at, v);
        return;
    }
    for (u64 i = at; i < at + 4; i++) {
        if (i < start || i >= end) continue;
        step_one<Rule, Master, Grad, Momentum, Variance>(s, random, i, param[i], first[i], momentum[i],
                                                         variance[i], grad[i]);
    }
}

// Elements of a block of moments, and blocks that 256 threads take.
#define BLOCK_ELEMS 256
#define GROUP_BLOCKS 16
#define LANE_ELEMS (BLOCK_ELEMS / WARP_LANES)

// The start of a part of 0.1 to 1.
DEVICE float border(u32 part, u32 parts) {
    float width = div_f32(1.0f - 0.1f, (float)parts);
    if (part < (parts + 1) / 2) return fma_f32(width, (float)part, 0.1f);
    return fma_f32(-width, (float)(parts - part), 1.0f);
}

// The value of a code: of a momentum if it is signed, else of a variance.
DEVICE float code_value(u32 code, bool is_signed) {
    const float decades[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    u32 zero = is_signed ? 127 : 0;
    if (code == zero) return 0.0f;
    if (code == 255) return 1.0f;
    u32 number = is_signed ? (code < zero ? zero - code : code - zero) : code + 1;
    u32 decade = 0, parts = is_signed ? 1 : 2;
    while (parts * 2 <= number) {
        parts *= 2;
        decade++;
    }
    u32 part = number - parts;
    float magnitude = decades[decade] * (0.5f * (border(part, parts) + border(part + 1, parts)));
    return code < zero ? -magnitude : magnitude;
}

// The codes' values, and the middle between each and the next one.
struct Codes {
    float values[256], middles[256];
    // Each thread of the 256 makes one entry; before the middles, all values are there.
    DEVICE void make_value(u32 code, bool is_signed) { values[code] = code_value(code, is_signed); }
    DEVICE void make_middle(u32 code) {
        if (code < 255) middles[code] = (values[code] + values[code + 1]) * 0.5f;
    }
    // How many middles are below x.
    DEVICE u8 nearest(float x) const {
        u32 code = 0;
        for (u32 step = 128; step > 0; step /= 2) {
            if (x > middles[code + step - 1]) code += step;
        }
        return (u8)code;
    }
};

// The largest magnitude of a warp's elements; NaN if one is infinite or NaN.
DEVICE float largest_of(const float *x) {
    u32 largest = 0;
    for (u32 i = 0; i < LANE_ELEMS; i++) {
        u32 bits = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    for (u32 mask = WARP_LANES / 2; mask > 0; mask /= 2) {
        u32 bits = shuffle_xor(largest, mask);
        largest = bits > largest ? bits : largest;
    }
    return canonical(float_of(largest >= 0x7F800000u ? 0x7FFFFFFFu : largest));
}

// A plane of codes with what its blocks share.
struct CodePlane {
    u8 *codes;
    float *largest;
    DEVICE float read(const Codes &map, u64 at) const { return map.values[codes[at]] * largest[at / BLOCK_ELEMS]; }
    // Stores the block that starts at `start`; the lane has every 32nd element, from `lane` on.
    // No number above 0 has a code below the least one.
    DEVICE void store(const Codes &map, u64 start, u32 lane, u64 elems, const float *x, u8 least) const {
        float whole = largest_of(x);
        float inverse = div_f32(1.0f, whole > 1e-38f ? whole : 1e-38f);
        for (u32 i = 0; i < LANE_ELEMS; i++) {
            u64 at = start + lane + i * WARP_LANES;
            u8 code = map.nearest(x[i] * inverse);
            if (at < elems) codes[at] = x[i] > 0.0f && code < least ? least : code;
        }
        if (lane == 0) largest[start / BLOCK_ELEMS] = whole;
    }
};

// Steps the elements [start, end) of a tile of `elems` elements, and stores the blocks of moments around them.
template <class Rule, class Master, class Grad, bool HAS_VARIANCE>
DEVICE void step_blocks(const Scalars &s, const Random &random, typename Master::Param *param,
                        typename Master::First *first, CodePlane momentum, CodePlane variance,
                        const typename Grad::Stored *grad, u64 elems, u64 start, u64 end) {
    __shared__ Codes momentum_map, variance_map;
    momentum_map.make_value(thread_x(), true);
    variance_map.make_value(thread_x(), false);
    block_barrier();
    momentum_map.make_middle(thread_x());
    variance_map.make_middle(thread_x());
    block_barrier();
    u32 lane = thread_x() % WARP_LANES;
    u64 group = start / BLOCK_ELEMS + (u64)block_x() * GROUP_BLOCKS;
    for (u32 block = thread_x() / WARP_LANES; block < GROUP_BLOCKS; block += 256 / WARP_LANES) {
        u64 block_start = (group + block) * BLOCK_ELEMS;
        // Whole warps return or stay.
        if (block_start >= end) return;
        float m[LANE_ELEMS], v[LANE_ELEMS];
        for (u32 i = 0; i < LANE_ELEMS; i++) {
            u64 at = block_start + lane + i * WARP_LANES;
            m[i] = v[i] = 0.0f;
            if (at >= elems) continue;
            m[i] = momentum.read(momentum_map, at);
            if (HAS_VARIANCE) v[i] = variance.read(variance_map, at);
            if (at < start || at >= end) continue;
            float master = Master::join(param[at], first[at]);
            Rule::update(s, master, m[i], v[i], Grad::value(grad[at]));
            Master::split(master, param[at], first[at], random, random.first_elem + (u32)at);
        }
        momentum.store(momentum_map, block_start, lane, elems, m, 0);
        if (HAS_VARIANCE) variance.store(variance_map, block_start, lane, elems, v, 1);
    }
}

#define STEP_BLOCKS(name, Rule, Master, Grad, HAS_VARIANCE)                                          \
    KERNEL LAUNCH_BOUNDS(256)                                                                        \
    name(Master::Param *param, Master::First *first, u8 *momentum, u8 *variance,                     \
         const Grad::Stored *grad, u64 start, u64 end, SCALARS, float *momentum_largest,             \
         float *variance_largest, u64 elems) {                                                       \
        TAKE_SCALARS;                                                                                \
        CodePlane m = {momentum, momentum_largest}, v = {variance, variance_largest};                \
        step_blocks<Rule, Master, Grad, HAS_VARIANCE>(s, random, param, first, m, v, grad, elems,    \
                                                      start, end);                                   \
    }
#define STEP(name, Rule, Master, Grad, Momentum, Variance)                                           \
    KERNEL LAUNCH_BOUNDS(256)                                                                        \
    name(Master::Param *param, Master::First *first, Momentum::Stored *momentum,                     \
         Variance::Stored *variance, const Grad::Stored *grad, u64 start, u64 end, SCALARS) {        \
        TAKE_SCALARS;                                                                                \
        step<Rule, Master, Grad, Momentum, Variance>(s, random, param, first, momentum, variance,    \
                                                     grad, start, end);                              \
    }
#define STEPS(name, Master, Grad)                                                                    \
    STEP(adamw_##name, AdamW, Master, Grad, Fp32Moment, Fp32Moment)                                  \
    STEP(adamw_##name##_bf16_moments, AdamW, Master, Grad, Bf16Moment, Bf16Moment)                   \
    STEP_BLOCKS(adamw_##name##_8bit_moments, AdamW, Master, Grad, true)                              \
    STEP(lion_##name, Lion, Master, Grad, Fp32Moment, NoMoment)                                      \
    STEP(lion_##name##_bf16_moments, Lion, Master, Grad, Bf16Moment, NoMoment)                       \
    STEP_BLOCKS(lion_##name##_8bit_moments, Lion, Master, Grad, false)                               \
    STEP(sgd_##name, Sgd, Master, Grad, NoMoment, NoMoment)                                          \
    STEP(sgd_##name##_bf16_moments, Sgd, Master, Grad, NoMoment, NoMoment)                           \
    STEP(sgd_##name##_8bit_moments, Sgd, Master, Grad, NoMoment, NoMoment)

STEPS(split_bf16, SplitBf16, Bf16Grad)
STEPS(split_bf16_fp32_grad, SplitBf16, Fp32Grad)
STEPS(bf16_master, Bf16Master, Bf16Grad)
STEPS(bf16_master_fp32_grad, Bf16Master, Fp32Grad)
STEPS(fp16_whole_master, Fp16WholeMaster, Fp16Grad)
STEPS(fp16_whole_master_fp32_grad, Fp16WholeMaster, Fp32Grad)
STEPS(fp32, Fp32Master, Fp32Grad)
