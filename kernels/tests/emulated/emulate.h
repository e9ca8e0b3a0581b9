// Emulates a GPU's block on a processor: its threads are fibers that run one after another from barrier to barrier, and blocks run one after another.
// Kernel sources are compiled unchanged, with the CUDA keywords that they use (`prelude.h` included) defined here.
//
// A barrier or a shuffle that some threads of a block reach and others do not stops the program.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct Place {
    unsigned x, y;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

const unsigned THREADS_MAX = 1024;
const size_t STACK_BYTES = 64 << 10;

static std::vector<char> stacks(THREADS_MAX * STACK_BYTES);
static ucontext_t scheduler, fibers[THREADS_MAX];
static const std::function<void()> *body;
// The last stop of each thread: 0 is finished, 1 and up are kinds of stops.
static int stopped_at[THREADS_MAX];
static unsigned exchanged[THREADS_MAX];

inline void stop(int where) {
    unsigned thread = threadIdx.x;
    stopped_at[thread] = where;
    swapcontext(&fibers[thread], &scheduler);
}

inline void run_fiber() {
    (*body)();
    stopped_at[threadIdx.x] = 0;
}

// Runs `kernel` in `blocks` blocks of `threads` threads.
inline void launch(unsigned blocks, unsigned threads, const std::function<void()> &kernel) {
    body = &kernel;
    blockDim.x = threads;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned t = 0; t < threads; t++) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = &stacks[t * STACK_BYTES];
            fibers[t].uc_stack.ss_size = STACK_BYTES;
            fibers[t].uc_link = &scheduler;
            makecontext(&fibers[t], run_fiber, 0);
            stopped_at[t] = 1;
        }
        do {
            for (unsigned t = 0; t < threads; t++) {
                threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t]);
            }
            for (unsigned t = 1; t < threads; t++) {
                if (stopped_at[t] != stopped_at[0]) {
                    printf("thread %u of block %u is at stop %d, thread 0 at %d\n", t, blockIdx.x, stopped_at[t],
                           stopped_at[0]);
                    exit(1);
                }
            }
        } while (stopped_at[0] != 0);
    }
}

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

} // namespace emulation

// The CUDA keywords that the prelude uses.
#define __global__
#define __device__
// One block runs at a time, so shared memory may be static.
#define __shared__ static
#define __launch_bounds__(threads)
// The emulated kernels do not use the fp16 conversions.
#define asm(...) bits_or_value_left_as_it_is()
inline void bits_or_value_left_as_it_is() {}

inline void __syncthreads() { emulation::stop(2); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline unsigned __float_as_uint(float x) { return emulation::same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulation::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::same_bits<double>(x); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
    unsigned thread = threadIdx.x;
    emulation::exchanged[thread] = x;
    emulation::stop(3);
    unsigned other = emulation::exchanged[thread ^ (unsigned)mask];
    emulation::stop(4);
    return other;
}
