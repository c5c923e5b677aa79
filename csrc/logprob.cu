// Log-prob and entropy of vocabulary-parallel logits, and their gradient: the CUDA path of megarl/ops/logprob.py.
//
// Per row of logits [N, V_local], with x the (soft-capped) logits over the valid columns, z_v = (x_v - m) / temperature
// and y the target:
//
//     statistics:  m = max x        s = sum exp z_v        t = sum z_v exp z_v        x_y (or -inf)
//     backward:    d = p_v (-g_logprob - g_entropy (log p_v + entropy)) + g_logprob [v = y],   log p_v = z_v - log s
//                  dlogits = d / temperature (times the cap's slope 1 - tanh^2), and 0 in padded columns
//
// One block per row. Every thread reads 16 bytes at a time, LOADS of them before it uses the first, so that enough bytes
// are in flight to fill the memory's latency; rows of any width and alignment have a head and a tail of single elements.
// Forward: one read, each thread with a running (m, s, t) of its own that is rescaled when its maximum rises, merged
// over the block at the end. Backward: each element is read and written by one thread, so the gradient may lie over the
// logits. Bytes per token in bf16: 2 V_local forward, 4 V_local backward; an ignored token (negative target) reads
// nothing. FLOPs per element: one exponential and about 6 others forward, one and about 8 backward. Arithmetic is fp32,
// exponents in base 2, where they are one instruction (compile.py asks for -ftz=true, which makes exp2f that).
//
// Plain C functions on addresses, called through ctypes by logprob_cuda.py: the library needs no header of torch, so it
// compiles, and is tested to, on a machine with neither torch's CUDA build nor a GPU.

#include "rows.cuh"

namespace {

// (m, s, t) of some columns: t in base 2, m the lowest float while there are none.
struct Statistics {
    float maximum = LOWEST_FLOAT, sum = 0.0f, weighted = 0.0f;

    __device__ __forceinline__ void raise(float maximum_of_more, float scale) {
        const float next = larger(maximum_of_more, maximum);
        const float shift = at_least((maximum - next) * scale, LOWEST_SHIFT);
        const float factor = exp2f(shift);
        weighted = factor * (weighted + shift * sum);
        sum *= factor;
        maximum = next;
    }

    __device__ __forceinline__ void add(float x, float scale) {
        const float shift = at_least((x - maximum) * scale, LOWEST_SHIFT);
        const float exponential = exp2f(shift);
        sum += exponential;
        weighted = fmaf(exponential, shift, weighted);
    }

    __device__ __forceinline__ void merge(Statistics other, float scale) {
        const float next = larger(maximum, other.maximum);
        raise(next, scale);
        other.raise(next, scale);
        sum += other.sum;
        weighted += other.weighted;
    }
};

template <typename T, bool CAP>
__device__ __forceinline__ void add_one(Statistics& own, T element, Scales scales) {
    const float x = capped<CAP>(to_float(element), scales.soft_cap);
    if (!(x <= own.maximum)) own.raise(x, scales.scale);
    own.add(x, scales.scale);
}

template <typename T, bool CAP, int NUM>
__device__ __forceinline__ void add_packs(Statistics& own, const Pack<T>* packs, int first, Scales scales) {
    Pack<T> read[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) read[i] = load(packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        float x[Pack<T>::SIZE];
        float maximum = own.maximum;
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j) {
            x[j] = capped<CAP>(to_float(read[i].values[j]), scales.soft_cap);
            maximum = larger(x[j], maximum);
        }
        if (!(maximum <= own.maximum)) own.raise(maximum, scales.scale);
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j) own.add(x[j], scales.scale);
    }
}

__device__ __forceinline__ Statistics over_warp(Statistics own, float scale) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Statistics other;
        other.maximum = __shfl_xor_sync(0xffffffffu, own.maximum, distance);
        other.sum = __shfl_xor_sync(0xffffffffu, own.sum, distance);
        other.weighted = __shfl_xor_sync(0xffffffffu, own.weighted, distance);
        own.merge(other, scale);
    }
    return own;
}

template <typename T, bool CAP>
__global__ void __launch_bounds__(THREADS, 2)
    statistics_kernel(const T* logits, const int64_t* targets, float* statistics, int64_t num_tokens,
                      int64_t row_stride, int num_valid, int64_t first, Scales scales) {
    const int64_t row = blockIdx.x;
    const T* x = logits + row * row_stride;
    const int64_t target = targets[row];
    const int count = target < 0 ? 0 : num_valid;
    const int head = head_of(x, count);
    const int num_packs = (count - head) / Pack<T>::SIZE;
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x + head);

    Statistics own;
    int next = threadIdx.x;
    for (; next + (LOADS - 1) * THREADS < num_packs; next += LOADS * THREADS)
        add_packs<T, CAP, LOADS>(own, packs, next, scales);
    for (; next < num_packs; next += THREADS) add_packs<T, CAP, 1>(own, packs, next, scales);
    if (static_cast<int>(threadIdx.x) < head) add_one<T, CAP>(own, x[threadIdx.x], scales);
    const int in_tail = head + num_packs * Pack<T>::SIZE + threadIdx.x;
    if (in_tail < count) add_one<T, CAP>(own, x[in_tail], scales);

    __shared__ Statistics of_warps[WARPS];
    own = over_warp(own, scales.scale);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    own = over_warp(threadIdx.x < WARPS ? of_warps[threadIdx.x] : Statistics(), scales.scale);
    if (threadIdx.x > 0) return;
    const int64_t column = target - first;
    const bool owned = column >= 0 && column < count;
    statistics[row] = own.sum == 0.0f ? NOTHING : own.maximum;
    statistics[num_tokens + row] = own.sum;
    statistics[2 * num_tokens + row] = own.weighted * LN_2;
    statistics[3 * num_tokens + row] = owned ? capped<CAP>(to_float(x[column]), scales.soft_cap) : NOTHING;
}

// What a row's gradient is made of: p (offset + slope log2 p), and at_target more in one column.
struct Row {
    float maximum, log2_sum, offset, slope, at_target;
    int target_column;  // -1 where another rank owns it
};

template <bool CAP>
__device__ __forceinline__ float gradient(float logit, int column, const Row& row, Scales scales) {
    float tanh = 0.0f;
    if (CAP) {
        tanh = tanhf(logit / scales.soft_cap);
        logit = scales.soft_cap * tanh;
    }
    const float log2_p = at_least((logit - row.maximum) * scales.scale - row.log2_sum, LOWEST_SHIFT);
    float grad = exp2f(log2_p) * fmaf(row.slope, log2_p, row.offset);
    if (column == row.target_column) grad += row.at_target;
    return CAP ? grad * (1.0f - tanh * tanh) : grad;
}

template <typename T, bool CAP, int NUM>
__device__ __forceinline__ void write_packs(Pack<T>* out, const Pack<T>* packs, int first, int head, const Row& row,
                                            Scales scales) {
    Pack<T> read[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) read[i] = load(packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const int column = head + (first + i * THREADS) * Pack<T>::SIZE;
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j)
            read[i].values[j] =
                from_float<T>(gradient<CAP>(to_float(read[i].values[j]), column + j, row, scales));
        store(out + first + i * THREADS, read[i]);
    }
}

// out and logits are the same rows or apart from each other: no thread reads what another has written.
template <typename T, bool CAP>
__global__ void __launch_bounds__(THREADS, 2)
    backward_kernel(T* out, const T* logits, const int64_t* targets, const float* maximum, const float* log_sum,
                    const float* entropy, const float* grad_logprob, const float* grad_entropy, int64_t out_stride,
                    int64_t row_stride, int width, int num_valid, int64_t first, Scales scales) {
    const int64_t index = blockIdx.x;
    const int thread = threadIdx.x;
    const T* x = logits + index * row_stride;
    T* d = out + index * out_stride;
    const int64_t target = targets[index];
    const int count = target < 0 ? 0 : num_valid;
    for (int column = count + thread; column < width; column += THREADS) d[column] = from_float<T>(0.0f);
    if (count == 0) return;

    const float of_logprob = grad_logprob ? grad_logprob[index] * scales.inverse_temperature : 0.0f;
    const float of_entropy = grad_entropy ? grad_entropy[index] * scales.inverse_temperature : 0.0f;
    const int64_t column_of_target = target - first;
    const bool owned = column_of_target >= 0 && column_of_target < count;
    const Row row = {maximum[index],
                     log_sum[index] / LN_2,
                     -of_logprob - (grad_entropy ? of_entropy * entropy[index] : 0.0f),
                     -of_entropy * LN_2,
                     of_logprob,
                     owned ? static_cast<int>(column_of_target) : -1};
    const auto write_one = [&](int column) {
        d[column] = from_float<T>(gradient<CAP>(to_float(x[column]), column, row, scales));
    };

    const int head = head_of(x, count);
    if (head != head_of(d, count)) {  // no column is aligned in both
        for (int column = thread; column < count; column += THREADS) write_one(column);
        return;
    }
    const int num_packs = (count - head) / Pack<T>::SIZE;
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x + head);
    Pack<T>* out_packs = reinterpret_cast<Pack<T>*>(d + head);
    int next = thread;
    for (; next + (LOADS - 1) * THREADS < num_packs; next += LOADS * THREADS)
        write_packs<T, CAP, LOADS>(out_packs, packs, next, head, row, scales);
    for (; next < num_packs; next += THREADS) write_packs<T, CAP, 1>(out_packs, packs, next, head, row, scales);
    if (thread < head) write_one(thread);
    const int in_tail = head + num_packs * Pack<T>::SIZE + thread;
    if (in_tail < count) write_one(in_tail);
}

template <typename T>
int launch_statistics(const void* logits, const int64_t* targets, float* statistics, int64_t num_tokens,
                      int64_t row_stride, int num_valid, int64_t first, Scales scales, cudaStream_t stream) {
    return launch(scales.soft_cap > 0 ? statistics_kernel<T, true> : statistics_kernel<T, false>, num_tokens, stream,
                  static_cast<const T*>(logits), targets, statistics, num_tokens, row_stride, num_valid, first,
                  scales);
}

template <typename T>
int launch_backward(void* out, const void* logits, const int64_t* targets, const float* maximum,
                    const float* log_sum, const float* entropy, const float* grad_logprob, const float* grad_entropy,
                    int64_t num_tokens, int64_t out_stride, int64_t row_stride, int width, int num_valid,
                    int64_t first, Scales scales, cudaStream_t stream) {
    return launch(scales.soft_cap > 0 ? backward_kernel<T, true> : backward_kernel<T, false>, num_tokens, stream,
                  static_cast<T*>(out), static_cast<const T*>(logits), targets, maximum, log_sum, entropy,
                  grad_logprob, grad_entropy, out_stride, row_stride, width, num_valid, first, scales);
}

}  // namespace

// dtype: 0 fp32, 1 fp16, 2 bf16. soft_cap: 0 for none. num_tokens: 1 to 2^31 - 1. Strides in elements.
// Returns the cudaError_t of the launch, or cudaErrorInvalidValue for another dtype.
EXPORTED int megarl_logprob_statistics(const void* logits, int dtype, const int64_t* targets, float* statistics,
                                       int64_t num_tokens, int64_t row_stride, int num_valid, int64_t first,
                                       double temperature, double soft_cap, cudaStream_t stream) {
    const auto launch_of = dtype == 0   ? launch_statistics<float>
                           : dtype == 1 ? launch_statistics<__half>
                           : dtype == 2 ? launch_statistics<__nv_bfloat16>
                                        : nullptr;
    if (launch_of == nullptr) return cudaErrorInvalidValue;
    return launch_of(logits, targets, statistics, num_tokens, row_stride, num_valid, first,
                     scales_of(temperature, soft_cap), stream);
}

// As above; out and logits may be the same address. grad_logprob, grad_entropy: null for zero.
EXPORTED int megarl_logprob_backward(void* out, const void* logits, int dtype, const int64_t* targets,
                                     const float* maximum, const float* log_sum, const float* entropy,
                                     const float* grad_logprob, const float* grad_entropy, int64_t num_tokens,
                                     int64_t out_stride, int64_t row_stride, int width, int num_valid, int64_t first,
                                     double temperature, double soft_cap, cudaStream_t stream) {
    const auto launch_of = dtype == 0   ? launch_backward<float>
                           : dtype == 1 ? launch_backward<__half>
                           : dtype == 2 ? launch_backward<__nv_bfloat16>
                                        : nullptr;
    if (launch_of == nullptr) return cudaErrorInvalidValue;
    return launch_of(out, logits, targets, maximum, log_sum, entropy, grad_logprob, grad_entropy, num_tokens,
                     out_stride, row_stride, width, num_valid, first, scales_of(temperature, soft_cap), stream);
}
