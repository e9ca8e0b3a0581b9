// Prepended to a kernel source to run it on the CPU: defines the CUDA keywords and functions that the sources use in C++.
//
// A thread of a block is a fiber (driver.cc). A barrier and a shuffle let all others of the block run up to the same point.
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct StandInIndex {
    unsigned x, y, z;
};
extern StandInIndex threadIdx, blockIdx, blockDim, gridDim;
extern void fake_rendezvous();
extern unsigned fake_exchange(unsigned value, unsigned from_thread);

static inline void __syncthreads() { fake_rendezvous(); }
static inline unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    return fake_exchange(value, threadIdx.x ^ (unsigned)mask);
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }

template <class To, class From> static inline To fake_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) { return fake_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned bits) { return fake_bits<float>(bits); }
static inline long long __double_as_longlong(double x) { return fake_bits<long long>(x); }
static inline double __longlong_as_double(long long bits) { return fake_bits<double>(bits); }

// Calls a kernel with arguments from a launch's list of places; the fake driver adds one such function per kernel.
template <class... Args, size_t... At>
static void fake_call(void (*kernel)(Args...), void **places, std::index_sequence<At...>) {
    kernel(*static_cast<Args *>(places[At])...);
}
template <class... Args> static void fake_call(void (*kernel)(Args...), void **places) {
    fake_call(kernel, places, std::index_sequence_for<Args...>{});
}
template <class... Args> static size_t fake_bytes(void (*)(Args...), size_t *bytes) {
    size_t all[] = {sizeof(Args)..., 0};
    std::memcpy(bytes, all, sizeof all);
    return sizeof...(Args);
}
#define FAKE_KERNEL(name)                                                                            \
    extern "C" void name##_fake(void **places) { fake_call(name, places); }                      \
    extern "C" size_t name##_fake_bytes(size_t *bytes) { return fake_bytes(name, bytes); }
