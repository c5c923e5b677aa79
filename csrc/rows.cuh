// What the row kernels of logprob.cu and logprob_kl.cu share: types, loads of 16 bytes, arithmetic that masked columns
// keep finite, and the launch of one block per row. Everything is local to the file that includes it.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int LOADS = 4;  // 16-byte loads in flight per thread
constexpr float LN_2 = 0.693147180559945309f;
constexpr float LOWEST_FLOAT = -3.4028234663852886e38f;
constexpr float NOTHING = -__builtin_huge_valf();
// exp2(-1e4) is exactly 0, and 0 * -1e4 is 0 where 0 * -inf would be NaN: a masked column adds nothing.
constexpr float LOWEST_SHIFT = -1e4f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }

// 16 bytes of T, moved by one instruction.
template <typename T>
struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T values[SIZE];
};

template <typename T>
__device__ __forceinline__ Pack<T> load(const Pack<T>* address) {
    Pack<T> pack;
    *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(address);
    return pack;
}

template <typename T>
__device__ __forceinline__ void store(Pack<T>* address, const Pack<T>& pack) {
    *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&pack);
}

// Elements before the first 16-byte boundary of a row of `count`.
template <typename T>
__device__ __forceinline__ int head_of(const T* row, int count) {
    const int head = static_cast<int>((-reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T));
    return head < count ? head : count;
}

// A NaN stays one: unlike fmaxf, which takes the other operand.
__device__ __forceinline__ float at_least(float x, float lowest) { return x < lowest ? lowest : x; }
__device__ __forceinline__ float larger(float a, float b) { return (a > b || a != a) ? a : b; }

// scale = log2(e) / temperature: (x - m) * scale is a difference of exponents in base 2.
struct Scales {
    float scale, inverse_temperature, soft_cap;
};

template <bool CAP>
__device__ __forceinline__ float capped(float x, float soft_cap) {
    return CAP ? soft_cap * tanhf(x / soft_cap) : x;
}

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t num_tokens, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(num_tokens));
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

Scales scales_of(double temperature, double soft_cap) {
    return {static_cast<float>(1.4426950408889634 / temperature), static_cast<float>(1.0 / temperature),
            static_cast<float>(soft_cap)};
}

}  // namespace
