// Log-prob, entropy and exact KL of two vocabulary-parallel logits, and their gradient: the CPU path of
// megarl/ops/logprob_kl.py. The formulas are logprob_kl.cu's; lanes.h has the ways through the logits.

#include "lanes.h"

namespace {

// The reference's exponents are multiplied by p and must keep their size; finite, so that 0 times them is 0.
constexpr float LOWEST_REF_SHIFT = -1e30f;

// (m, s, t, n, r, c): t and c in base 2.
struct Statistics {
    static constexpr int NUM = 2;

    struct Sums {
        Floats sum = {}, weighted = {}, ref_sum = {}, difference = {};

        INLINE void add(const Floats* shifts) {
            const Floats shift = negative_exponent(shifts[0]), ref_shift = at_least(shifts[1], LOWEST_REF_SHIFT);
            const Floats power = exp2_of(shift);
            sum += power;
            weighted += power * shift;
            ref_sum += exp2_of(negative_exponent(ref_shift));
            difference += power * (shift - ref_shift);
        }
    };

    float maximum[NUM] = {NOTHING, NOTHING};
    double sum = 0, weighted = 0, ref_sum = 0, difference = 0;

    void raise(const float* next, float scale) {
        if (next[0] > maximum[0]) {
            const double shift = std::max((double(maximum[0]) - next[0]) * scale, -1e4);
            const double factor = std::exp2(shift);
            difference = factor * (difference + shift * sum);
            weighted = factor * (weighted + shift * sum);
            sum *= factor;
            maximum[0] = next[0];
        }
        if (next[1] > maximum[1]) {
            const double shift = std::max((double(maximum[1]) - next[1]) * scale, double(LOWEST_REF_SHIFT));
            difference -= shift * sum;
            ref_sum *= std::exp2(shift);
            maximum[1] = next[1];
        }
    }

    INLINE void add(const Sums& block, int64_t lane) {
        sum += block.sum[lane];
        weighted += block.weighted[lane];
        ref_sum += block.ref_sum[lane];
        difference += block.difference[lane];
    }

    void merge(Statistics other, float scale) {
        other.raise(maximum, scale);
        raise(other.maximum, scale);
        sum += other.sum;
        weighted += other.weighted;
        ref_sum += other.ref_sum;
        difference += other.difference;
    }
};

// p (offset + slope log2 p + of_difference (log2 p - log2 q)), and at_target more at the target.
struct Slopes {
    static constexpr int NUM = 2, CONSTANTS = 7;
    const float *merged, *upstream;  // [6, N] of ops/logprob_kl.py's merge, [3, N] of the values
    int64_t num_tokens;
    float inverse_temperature;

    float at_target(int64_t token) const { return upstream[token] * inverse_temperature; }

    void constants(int64_t token, float* to) const {
        const auto of = [&](const float* rows, int row) { return rows[row * num_tokens + token]; };
        const float of_entropy = of(upstream, 1) * inverse_temperature, of_kl = of(upstream, 2) * inverse_temperature;
        to[0] = std::max(of(merged, 0), LOWEST_FLOAT);
        to[1] = of(merged, 1) / float(LN_2);
        to[2] = std::max(of(merged, 3), LOWEST_FLOAT);
        to[3] = of(merged, 4) / float(LN_2);
        to[4] = -(at_target(token) + of_entropy * of(merged, 2) + of_kl * of(merged, 5));
        to[5] = -of_entropy * float(LN_2);
        to[6] = of_kl * float(LN_2);
    }

    static INLINE Floats of(const Floats* x, const Floats* constants, float scale) {
        const Floats log2_p = exponent((x[0] - constants[0]) * scale - constants[1]);
        const Floats log2_q = at_least((x[1] - constants[2]) * scale - constants[3], LOWEST_REF_SHIFT);
        return exp2_of(log2_p) * (constants[6] * (log2_p - log2_q) + constants[5] * log2_p + constants[4]);
    }
};

template <bool CAP, typename T>
void statistics(const Logits<T>* logits, float* out, const Call& call) {
    const std::vector<Statistics> found = statistics_of<CAP, Statistics>(logits, call);
    for (int64_t token = 0; token < call.num_tokens; ++token) {
        const Statistics& own = found[token];
        const float of_token[] = {own.maximum[0], float(own.sum), float(own.weighted * LN_2),
                                  target_of<CAP>(logits[0], token, call), own.maximum[1], float(own.ref_sum),
                                  float(own.difference * LN_2)};
        for (int i = 0; i < 7; ++i) out[i * call.num_tokens + token] = of_token[i];
    }
}

}  // namespace

// out: [7, N]. ref_logits: of the logits' type and layout. The others as in logprob.cpp.
EXPORTED int megarl_logprob_kl_statistics_cpu(const void* logits, int64_t stride, const void* ref_logits,
                                              int64_t ref_stride, int dtype, int columns, const int64_t* targets,
                                              float* out, int64_t num_tokens, int64_t num_valid, int64_t first,
                                              double temperature, double soft_cap, int threads) {
    const Call call(num_tokens, num_valid, first, targets, columns, temperature, soft_cap, threads);
    return with_type(dtype, [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        const Logits<T> both[] = {{static_cast<const T*>(logits), stride, call.columns},
                                  {static_cast<const T*>(ref_logits), ref_stride, call.columns}};
        soft_cap > 0 ? statistics<true>(both, out, call) : statistics<false>(both, out, call);
    });
}

EXPORTED int megarl_logprob_kl_backward_cpu(void* out, int64_t out_stride, const void* logits, int64_t stride,
                                            const void* ref_logits, int64_t ref_stride, int dtype, int columns,
                                            const int64_t* targets, const float* merged, const float* upstream,
                                            int64_t num_tokens, int64_t width, int64_t num_valid, int64_t first,
                                            double temperature, double soft_cap, int threads) {
    const Call call(num_tokens, num_valid, first, targets, columns, temperature, soft_cap, threads);
    const Slopes slopes = {merged, upstream, num_tokens, call.inverse_temperature};
    return with_type(dtype, [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        const Logits<T> both[] = {{static_cast<const T*>(logits), stride, call.columns},
                                  {static_cast<const T*>(ref_logits), ref_stride, call.columns}};
        const Matrix<T> to = {static_cast<T*>(out), out_stride, call.columns};
        soft_cap > 0 ? backward<true>(to, both, width, call, slopes) : backward<false>(to, both, width, call, slopes);
    });
}
