// Log-prob, entropy and exact KL of two vocabulary-parallel logits, and their gradient: the CUDA path of
// megarl/ops/logprob_kl.py.
//
// Per row of logits and ref_logits [N, V_local], with x and w the (soft-capped) logits over the valid columns, z_v =
// (x_v - m) / temperature, u_v = (w_v - n) / temperature and y the target:
//
//     statistics:  m = max x        s = sum exp z        t = sum z exp z              x_y (or -inf)
//                  n = max w        r = sum exp u        c = sum exp z (z - u)
//     backward:    d = p_v (g_kl (log p_v - log q_v - kl) - g_entropy (log p_v + entropy) - g_logprob)
//                      + g_logprob [v = y]
//                  dlogits = d / temperature (times the cap's slope 1 - tanh^2), and 0 in padded columns
//
// One block per row, as in logprob.cu: 16-byte loads, LOADS_OF_EACH of the logits and as many of the reference's before
// the first is used; where the two rows are not aligned alike, single elements. Forward: one read of each, running
// statistics per thread, merged over the block. Backward: each element is read and written by one thread, so the
// gradient may lie over the logits. Bytes per token in bf16: 4 V_local forward, 6 V_local backward; an ignored token
// reads nothing. FLOPs per element: two exponentials and about 12 others forward, one and about 12 backward. Arithmetic
// is fp32, exponents are taken in base 2.

#include "rows.cuh"

namespace {

constexpr int LOADS_OF_EACH = LOADS / 2;
// The reference's exponents are multiplied by p and must keep their size; finite, so that 0 times them is 0.
constexpr float LOWEST_REF_SHIFT = -1e30f;

// (m, s, t, n, r, c) of some columns: t and c in base 2, the maxima the lowest float while there are none.
struct Statistics {
    float maximum = LOWEST_FLOAT, sum = 0.0f, weighted = 0.0f;
    float ref_maximum = LOWEST_FLOAT, ref_sum = 0.0f, difference = 0.0f;

    __device__ __forceinline__ void raise(float maximum_of_more, float ref_maximum_of_more, float scale) {
        const float next = larger(maximum_of_more, maximum);
        const float ref_next = larger(ref_maximum_of_more, ref_maximum);
        const float shift = at_least((maximum - next) * scale, LOWEST_SHIFT);
        const float ref_shift = at_least((ref_maximum - ref_next) * scale, LOWEST_REF_SHIFT);
        const float factor = exp2f(shift);
        difference = factor * (difference + (shift - ref_shift) * sum);
        weighted = factor * (weighted + shift * sum);
        sum *= factor;
        ref_sum *= exp2f(ref_shift);
        maximum = next;
        ref_maximum = ref_next;
    }

    __device__ __forceinline__ void add(float x, float w, float scale) {
        const float shift = at_least((x - maximum) * scale, LOWEST_SHIFT);
        const float ref_shift = at_least((w - ref_maximum) * scale, LOWEST_REF_SHIFT);
        const float exponential = exp2f(shift);
        sum += exponential;
        weighted = fmaf(exponential, shift, weighted);
        ref_sum += exp2f(ref_shift);
        difference = fmaf(exponential, shift - ref_shift, difference);
    }

    __device__ __forceinline__ void merge(Statistics other, float scale) {
        const float next = larger(maximum, other.maximum);
        const float ref_next = larger(ref_maximum, other.ref_maximum);
        raise(next, ref_next, scale);
        other.raise(next, ref_next, scale);
        sum += other.sum;
        weighted += other.weighted;
        ref_sum += other.ref_sum;
        difference += other.difference;
    }
};

template <typename T, bool CAP>
__device__ __forceinline__ void add_one(Statistics& own, T element, T ref_element, Scales scales) {
    const float x = capped<CAP>(to_float(element), scales.soft_cap);
    const float w = capped<CAP>(to_float(ref_element), scales.soft_cap);
    if (!(x <= own.maximum && w <= own.ref_maximum)) own.raise(x, w, scales.scale);
    own.add(x, w, scales.scale);
}

template <typename T, bool CAP, int NUM>
__device__ __forceinline__ void add_packs(Statistics& own, const Pack<T>* packs, const Pack<T>* ref_packs, int first,
                                          Scales scales) {
    Pack<T> read[NUM], ref_read[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) read[i] = load(packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) ref_read[i] = load(ref_packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        float x[Pack<T>::SIZE], w[Pack<T>::SIZE];
        float maximum = own.maximum, ref_maximum = own.ref_maximum;
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j) {
            x[j] = capped<CAP>(to_float(read[i].values[j]), scales.soft_cap);
            w[j] = capped<CAP>(to_float(ref_read[i].values[j]), scales.soft_cap);
            maximum = larger(x[j], maximum);
            ref_maximum = larger(w[j], ref_maximum);
        }
        if (!(maximum <= own.maximum && ref_maximum <= own.ref_maximum)) own.raise(maximum, ref_maximum, scales.scale);
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j) own.add(x[j], w[j], scales.scale);
    }
}

__device__ __forceinline__ Statistics over_warp(Statistics own, float scale) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Statistics other;
        other.maximum = __shfl_xor_sync(0xffffffffu, own.maximum, distance);
        other.sum = __shfl_xor_sync(0xffffffffu, own.sum, distance);
        other.weighted = __shfl_xor_sync(0xffffffffu, own.weighted, distance);
        other.ref_maximum = __shfl_xor_sync(0xffffffffu, own.ref_maximum, distance);
        other.ref_sum = __shfl_xor_sync(0xffffffffu, own.ref_sum, distance);
        other.difference = __shfl_xor_sync(0xffffffffu, own.difference, distance);
        own.merge(other, scale);
    }
    return own;
}

template <typename T, bool CAP>
__global__ void __launch_bounds__(THREADS, 2)
    statistics_kernel(const T* logits, const T* ref_logits, const int64_t* targets, float* statistics,
                      int64_t num_tokens, int64_t row_stride, int64_t ref_stride, int num_valid, int64_t first,
                      Scales scales) {
    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x;
    const T* x = logits + row * row_stride;
    const T* w = ref_logits + row * ref_stride;
    const int64_t target = targets[row];
    const int count = target < 0 ? 0 : num_valid;

    Statistics own;
    const int head = head_of(x, count);
    if (head != head_of(w, count)) {  // no column is aligned in both
        for (int column = thread; column < count; column += THREADS) add_one<T, CAP>(own, x[column], w[column], scales);
    } else {
        const int num_packs = (count - head) / Pack<T>::SIZE;
        const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x + head);
        const Pack<T>* ref_packs = reinterpret_cast<const Pack<T>*>(w + head);
        int next = thread;
        for (; next + (LOADS_OF_EACH - 1) * THREADS < num_packs; next += LOADS_OF_EACH * THREADS)
            add_packs<T, CAP, LOADS_OF_EACH>(own, packs, ref_packs, next, scales);
        for (; next < num_packs; next += THREADS) add_packs<T, CAP, 1>(own, packs, ref_packs, next, scales);
        if (thread < head) add_one<T, CAP>(own, x[thread], w[thread], scales);
        const int in_tail = head + num_packs * Pack<T>::SIZE + thread;
        if (in_tail < count) add_one<T, CAP>(own, x[in_tail], w[in_tail], scales);
    }

    __shared__ Statistics of_warps[WARPS];
    own = over_warp(own, scales.scale);
    if (thread % 32 == 0) of_warps[thread / 32] = own;
    __syncthreads();
    if (thread >= 32) return;
    own = over_warp(thread < WARPS ? of_warps[thread] : Statistics(), scales.scale);
    if (thread > 0) return;
    const int64_t column = target - first;
    const bool owned = column >= 0 && column < count;
    float* out = statistics + row;
    out[0] = own.sum == 0.0f ? NOTHING : own.maximum;
    out[num_tokens] = own.sum;
    out[2 * num_tokens] = own.weighted * LN_2;
    out[3 * num_tokens] = owned ? capped<CAP>(to_float(x[column]), scales.soft_cap) : NOTHING;
    out[4 * num_tokens] = own.ref_sum == 0.0f ? NOTHING : own.ref_maximum;
    out[5 * num_tokens] = own.ref_sum;
    out[6 * num_tokens] = own.difference * LN_2;
}

// What a row's gradient is made of: p (offset + slope log2 p + kl_slope (log2 p - log2 q)), and at_target more in one
// column.
struct Row {
    float maximum, log2_sum, ref_maximum, ref_log2_sum, offset, slope, kl_slope, at_target;
    int target_column;  // -1 where another rank owns it
};

template <bool CAP>
__device__ __forceinline__ float gradient(float logit, float ref_logit, int column, const Row& row, Scales scales) {
    float tanh = 0.0f;
    if (CAP) {
        tanh = tanhf(logit / scales.soft_cap);
        logit = scales.soft_cap * tanh;
        ref_logit = capped<CAP>(ref_logit, scales.soft_cap);
    }
    const float log2_p = at_least((logit - row.maximum) * scales.scale - row.log2_sum, LOWEST_SHIFT);
    const float log2_q = at_least((ref_logit - row.ref_maximum) * scales.scale - row.ref_log2_sum, LOWEST_REF_SHIFT);
    float grad = exp2f(log2_p) * fmaf(row.kl_slope, log2_p - log2_q, fmaf(row.slope, log2_p, row.offset));
    if (column == row.target_column) grad += row.at_target;
    return CAP ? grad * (1.0f - tanh * tanh) : grad;
}

template <typename T, bool CAP, int NUM>
__device__ __forceinline__ void write_packs(Pack<T>* out, const Pack<T>* packs, const Pack<T>* ref_packs, int first,
                                            int head, const Row& row, Scales scales) {
    Pack<T> read[NUM], ref_read[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) read[i] = load(packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) ref_read[i] = load(ref_packs + first + i * THREADS);
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const int column = head + (first + i * THREADS) * Pack<T>::SIZE;
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j)
            read[i].values[j] = from_float<T>(gradient<CAP>(
                to_float(read[i].values[j]), to_float(ref_read[i].values[j]), column + j, row, scales));
        store(out + first + i * THREADS, read[i]);
    }
}

// merged: [6, N] m, log s, entropy, n, log r, kl. upstream: [3, N] of log-prob, entropy and kl.
// out and logits are the same rows or apart from each other: no thread reads what another has written.
template <typename T, bool CAP>
__global__ void __launch_bounds__(THREADS, 2)
    backward_kernel(T* out, const T* logits, const T* ref_logits, const int64_t* targets, const float* merged,
                    const float* upstream, int64_t num_tokens, int64_t out_stride, int64_t row_stride,
                    int64_t ref_stride, int width, int num_valid, int64_t first, Scales scales) {
    const int64_t index = blockIdx.x;
    const int thread = threadIdx.x;
    const T* x = logits + index * row_stride;
    const T* w = ref_logits + index * ref_stride;
    T* d = out + index * out_stride;
    const int64_t target = targets[index];
    const int count = target < 0 ? 0 : num_valid;
    for (int column = count + thread; column < width; column += THREADS) d[column] = from_float<T>(0.0f);
    if (count == 0) return;

    const float* of_row = merged + index;
    const float of_logprob = upstream[index] * scales.inverse_temperature;
    const float of_entropy = upstream[num_tokens + index] * scales.inverse_temperature;
    const float of_kl = upstream[2 * num_tokens + index] * scales.inverse_temperature;
    const int64_t column_of_target = target - first;
    const bool owned = column_of_target >= 0 && column_of_target < count;
    // A maximum of -inf, where every column is masked, counts as the lowest finite number.
    const Row row = {at_least(of_row[0], LOWEST_FLOAT),
                     of_row[num_tokens] / LN_2,
                     at_least(of_row[3 * num_tokens], LOWEST_FLOAT),
                     of_row[4 * num_tokens] / LN_2,
                     -of_logprob - of_entropy * of_row[2 * num_tokens] - of_kl * of_row[5 * num_tokens],
                     -of_entropy * LN_2,
                     of_kl * LN_2,
                     of_logprob,
                     owned ? static_cast<int>(column_of_target) : -1};
    const auto write_one = [&](int column) {
        d[column] = from_float<T>(gradient<CAP>(to_float(x[column]), to_float(w[column]), column, row, scales));
    };

    const int head = head_of(x, count);
    if (head != head_of(d, count) || head != head_of(w, count)) {  // no column is aligned in all
        for (int column = thread; column < count; column += THREADS) write_one(column);
        return;
    }
    const int num_packs = (count - head) / Pack<T>::SIZE;
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x + head);
    const Pack<T>* ref_packs = reinterpret_cast<const Pack<T>*>(w + head);
    Pack<T>* out_packs = reinterpret_cast<Pack<T>*>(d + head);
    int next = thread;
    for (; next + (LOADS_OF_EACH - 1) * THREADS < num_packs; next += LOADS_OF_EACH * THREADS)
        write_packs<T, CAP, LOADS_OF_EACH>(out_packs, packs, ref_packs, next, head, row, scales);
    for (; next < num_packs; next += THREADS)
        write_packs<T, CAP, 1>(out_packs, packs, ref_packs, next, head, row, scales);
    if (thread < head) write_one(thread);
    const int in_tail = head + num_packs * Pack<T>::SIZE + thread;
    if (in_tail < count) write_one(in_tail);
}

template <typename T>
int launch_statistics(const void* logits, const void* ref_logits, const int64_t* targets, float* statistics,
                      int64_t num_tokens, int64_t row_stride, int64_t ref_stride, int num_valid, int64_t first,
                      Scales scales, cudaStream_t stream) {
    return launch(scales.soft_cap > 0 ? statistics_kernel<T, true> : statistics_kernel<T, false>, num_tokens, stream,
                  static_cast<const T*>(logits), static_cast<const T*>(ref_logits), targets, statistics, num_tokens,
                  row_stride, ref_stride, num_valid, first, scales);
}

template <typename T>
int launch_backward(void* out, const void* logits, const void* ref_logits, const int64_t* targets, const float* merged,
                    const float* upstream, int64_t num_tokens, int64_t out_stride, int64_t row_stride,
                    int64_t ref_stride, int width, int num_valid, int64_t first, Scales scales, cudaStream_t stream) {
    return launch(scales.soft_cap > 0 ? backward_kernel<T, true> : backward_kernel<T, false>, num_tokens, stream,
                  static_cast<T*>(out), static_cast<const T*>(logits), static_cast<const T*>(ref_logits), targets,
                  merged, upstream, num_tokens, out_stride, row_stride, ref_stride, width, num_valid, first, scales);
}

}  // namespace

// dtype, of all logits: 0 fp32, 1 fp16, 2 bf16. soft_cap: 0 for none. num_tokens: 1 to 2^31 - 1. Strides in elements.
// Returns the cudaError_t of the launch, or cudaErrorInvalidValue for another dtype.
EXPORTED int megarl_logprob_kl_statistics(const void* logits, const void* ref_logits, int dtype, const int64_t* targets,
                                          float* statistics, int64_t num_tokens, int64_t row_stride, int64_t ref_stride,
                                          int num_valid, int64_t first, double temperature, double soft_cap,
                                          cudaStream_t stream) {
    const auto launch_of = dtype == 0   ? launch_statistics<float>
                           : dtype == 1 ? launch_statistics<__half>
                           : dtype == 2 ? launch_statistics<__nv_bfloat16>
                                        : nullptr;
    if (launch_of == nullptr) return cudaErrorInvalidValue;
    return launch_of(logits, ref_logits, targets, statistics, num_tokens, row_stride, ref_stride, num_valid, first,
                     scales_of(temperature, soft_cap), stream);
}

// As above; out and logits may be the same address.
EXPORTED int megarl_logprob_kl_backward(void* out, const void* logits, const void* ref_logits, int dtype,
                                        const int64_t* targets, const float* merged, const float* upstream,
                                        int64_t num_tokens, int64_t out_stride, int64_t row_stride, int64_t ref_stride,
                                        int width, int num_valid, int64_t first, double temperature, double soft_cap,
                                        cudaStream_t stream) {
    const auto launch_of = dtype == 0   ? launch_backward<float>
                           : dtype == 1 ? launch_backward<__half>
                           : dtype == 2 ? launch_backward<__nv_bfloat16>
                                        : nullptr;
    if (launch_of == nullptr) return cudaErrorInvalidValue;
    return launch_of(out, logits, ref_logits, targets, merged, upstream, num_tokens, out_stride, row_stride, ref_stride,
                     width, num_valid, first, scales_of(temperature, soft_cap), stream);
}
