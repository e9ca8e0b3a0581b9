// Declarations for every kernel source, for NVRTC, hipRTC and clang's `-x hip`, none of which gets a header.
//
//   KERNEL                        extern "C" __global__ void
//   DEVICE                        an inlined device function
//   thread_x() block_x() block_threads_x() grid_blocks_x()
//   fma_f32 div_f32 sqrt_f32      one rounding each, to nearest even, denormals kept
//   bits_of float_of canonical    fp32 and its bits; every NaN becomes the one that number.rs stores
//   from_bf16 to_bf16 from_fp16 to_fp16      stored as u16, to nearest even, as number.rs has them
//   nearest_bf16                  like to_bf16, with any NaN for a NaN
//   exp2_near inverse_near        2^x and 1 / x by the GPU's own instructions, within 2^-22 of the result, which may be flushed to 0
//   shuffle_xor(x, mask)          the value of the lane whose number differs by `mask`, within 32 lanes, all of which take part
//   block_barrier()
//   load_four store_four          four neighbours in one access
//
// A warp is 32 lanes here: half of a 64-lane wavefront on AMD's data centre GPUs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP_LANES 32

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define GPU_HIP 1
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif
#define LAUNCH_BOUNDS(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#else
#define GPU_HIP 0
#define LAUNCH_BOUNDS(threads) __launch_bounds__(threads)
#endif

#define KERNEL extern "C" __global__ void
#define DEVICE inline __device__ __attribute__((always_inline))

#if GPU_HIP

DEVICE u32 thread_x() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 block_threads_x() { return __builtin_amdgcn_workgroup_size_x(); }
DEVICE u32 grid_blocks_x() {
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}
DEVICE void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float div_f32(float a, float b) { return a / b; }
DEVICE float sqrt_f32(float x) { return __builtin_sqrtf(x); }
DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u64 bits_of_f64(double x) { return __builtin_bit_cast(u64, x); }
DEVICE double f64_of(u64 bits) { return __builtin_bit_cast(double, bits); }

DEVICE u32 shuffle_xor(u32 x, u32 mask) {
    u32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    return (u32)__builtin_amdgcn_ds_bpermute((int)((lane ^ mask) * 4), (int)x);
}

#else

DEVICE u32 thread_x() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_threads_x() { return blockDim.x; }
DEVICE u32 grid_blocks_x() { return gridDim.x; }
DEVICE void block_barrier() { __syncthreads(); }

DEVICE float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float div_f32(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_f32(float x) { return __fsqrt_rn(x); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u64 bits_of_f64(double x) { return (u64)__double_as_longlong(x); }
DEVICE double f64_of(u64 bits) { return __longlong_as_double((long long)bits); }

DEVICE u32 shuffle_xor(u32 x, u32 mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, (int)mask); }

#endif

#if defined(__CUDACC__)
DEVICE float exp2_near(float x) {
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
DEVICE float inverse_near(float x) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
DEVICE u16 fp16_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float fp16_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#else
DEVICE float exp2_near(float x) { return __builtin_exp2f(x); }
#if GPU_HIP
DEVICE float inverse_near(float x) { return __builtin_amdgcn_rcpf(x); }
#else
DEVICE float inverse_near(float x) { return 1.0f / x; }
#endif
DEVICE u16 fp16_bits(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
DEVICE float fp16_value(u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
#endif

DEVICE float shuffle_xor(float x, u32 mask) { return float_of(shuffle_xor(bits_of(x), mask)); }
DEVICE double shuffle_xor(double x, u32 mask) {
    u64 bits = bits_of_f64(x);
    u64 low = shuffle_xor((u32)bits, mask);
    u64 high = shuffle_xor((u32)(bits >> 32), mask);
    return f64_of(high << 32 | low);
}

DEVICE bool is_nan_bits(u32 bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

DEVICE float canonical(float x) {
    u32 bits = bits_of(x);
    return float_of(is_nan_bits(bits) ? 0x7FC00000u : bits);
}

DEVICE float from_bf16(u16 bits) { return float_of((u32)bits << 16); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE u16 nearest_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE u16 to_bf16(float x) { return is_nan_bits(bits_of(x)) ? (u16)0x7FC0 : nearest_bf16(x); }
#else
DEVICE u16 to_bf16(float x) {
    u32 bits = bits_of(canonical(x));
    return (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
DEVICE u16 nearest_bf16(float x) { return to_bf16(x); }
#endif

DEVICE float from_fp16(u16 bits) { return fp16_value(bits); }

// The NaN of the conversion differs between vendors.
DEVICE u16 to_fp16(float x) { return is_nan_bits(bits_of(x)) ? (u16)0x7E00 : fp16_bits(x); }

// Contiguous elements that are loaded and stored in one access.
struct alignas(8) Four16 {
    u16 at[4];
};
struct alignas(16) FourF32 {
    float at[4];
};

DEVICE Four16 load_four(const u16 *from) { return *(const Four16 *)from; }
DEVICE FourF32 load_four(const float *from) { return *(const FourF32 *)from; }
DEVICE void store_four(u16 *to, const Four16 &four) { *(Four16 *)to = four; }
DEVICE void store_four(float *to, const FourF32 &four) { *(FourF32 *)to = four; }
