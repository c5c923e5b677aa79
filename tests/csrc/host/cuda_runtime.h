// Enough of CUDA's language to compile a kernel's own source as C++ and run it without a GPU, thread by thread.
//
// A block's threads are coroutines on one CPU thread. Each runs until it meets the others (__syncthreads, a shuffle),
// then the next one's turn comes; a round of turns is a barrier, because all threads meet in the same order. A thread
// that reads before a barrier what another writes after it is thus caught, a race within a round is not. A move of 16
// bytes to or from another address than a multiple of 16 is an error of the launch, as on a GPU.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMisalignedAddress = 716;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
namespace host {
inline bool misaligned = false;
}
struct uint4 {
    uint32_t x, y, z, w;

    uint4& operator=(const uint4& other) {
        if ((reinterpret_cast<uintptr_t>(this) | reinterpret_cast<uintptr_t>(&other)) & 15) host::misaligned = true;
        std::memcpy(static_cast<void*>(this), &other, 16);
        return *this;
    }
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
using __half = _Float16;
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return x; }

inline dim3 blockIdx, threadIdx;

namespace host {

constexpr size_t STACK = 64 << 10;
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done = false;
};
inline std::vector<Thread> threads;
inline ucontext_t turns;
inline float exchanged[1024];
inline void (*body)(void*);
inline void* body_of;

inline void meet() {
    const unsigned self = threadIdx.x;
    swapcontext(&threads[self].context, &turns);
    threadIdx.x = self;
}

inline void run_thread() {
    const unsigned self = threadIdx.x;
    body(body_of);
    threads[self].done = true;
}

template <typename Kernel>
void run_block(unsigned num_threads, Kernel& kernel) {
    threads.resize(num_threads);
    body = [](void* given) { (*static_cast<Kernel*>(given))(); };
    body_of = &kernel;
    for (Thread& thread : threads) {
        thread.done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = &turns;
        makecontext(&thread.context, run_thread, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (unsigned i = 0; i < num_threads; ++i) {
            if (threads[i].done) continue;
            threadIdx.x = i;
            swapcontext(&turns, &threads[i].context);
            any = any || !threads[i].done;
        }
    }
}

}  // namespace host

inline void __syncthreads() { host::meet(); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    host::exchanged[threadIdx.x] = value;
    host::meet();
    const float other = host::exchanged[threadIdx.x ^ distance];
    host::meet();
    return other;
}

inline int cudaGetLastError() { return cudaSuccess; }

template <typename... Parameters, typename... Arguments>
int cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
    host::misaligned = false;
    for (unsigned block = 0; block < config->gridDim.x; ++block) {
        blockIdx.x = block;
        auto call = [&] { kernel(arguments...); };
        host::run_block(config->blockDim.x, call);
    }
    return host::misaligned ? cudaErrorMisalignedAddress : cudaSuccess;
}
