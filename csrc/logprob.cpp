// Log-prob and entropy of vocabulary-parallel logits, and their gradient: the CPU path of megarl/ops/logprob.py. The
// formulas are logprob.cu's; lanes.h has the ways through the logits.

#include "lanes.h"

namespace {

// (m, s, t): t in base 2.
struct Statistics {
    static constexpr int NUM = 1;

    struct Sums {
        Floats sum = {}, weighted = {};

        INLINE void add(const Floats* shifts) {
            const Floats shift = negative_exponent(shifts[0]);
            const Floats power = exp2_of(shift);
            sum += power;
            weighted += power * shift;
        }
    };

    float maximum[NUM] = {NOTHING};
    double sum = 0, weighted = 0;

    void raise(const float* next, float scale) {
        if (!(next[0] > maximum[0])) return;
        const double shift = std::max((double(maximum[0]) - next[0]) * scale, -1e4);
        const double factor = std::exp2(shift);
        weighted = factor * (weighted + shift * sum);
        sum *= factor;
        maximum[0] = next[0];
    }

    INLINE void add(const Sums& block, int64_t lane) {
        sum += block.sum[lane];
        weighted += block.weighted[lane];
    }

    void merge(Statistics other, float scale) {
        other.raise(maximum, scale);
        raise(other.maximum, scale);
        sum += other.sum;
        weighted += other.weighted;
    }
};

// p (offset + slope log2 p), and at_target more at the target.
struct Slopes {
    static constexpr int NUM = 1, CONSTANTS = 4;
    const float *maximum, *log_sum, *entropy, *of_logprob, *of_entropy;  // [N]; the last two may be null
    float inverse_temperature;

    float at_target(int64_t token) const { return of_logprob ? of_logprob[token] * inverse_temperature : 0.0f; }

    void constants(int64_t token, float* to) const {
        const float slope = of_entropy ? -of_entropy[token] * inverse_temperature : 0.0f;
        to[0] = std::max(maximum[token], LOWEST_FLOAT);
        to[1] = log_sum[token] / float(LN_2);
        to[2] = (of_entropy ? slope * entropy[token] : 0.0f) - at_target(token);
        to[3] = slope * float(LN_2);
    }

    static INLINE Floats of(const Floats* x, const Floats* constants, float scale) {
        const Floats log2_p = exponent((x[0] - constants[0]) * scale - constants[1]);
        return exp2_of(log2_p) * (constants[3] * log2_p + constants[2]);
    }
};

template <bool CAP, typename T>
void statistics(const Logits<T>& logits, float* out, const Call& call) {
    const std::vector<Statistics> found = statistics_of<CAP, Statistics>(&logits, call);
    for (int64_t token = 0; token < call.num_tokens; ++token) {
        const float of_token[] = {found[token].maximum[0], float(found[token].sum), float(found[token].weighted * LN_2),
                                  target_of<CAP>(logits, token, call)};
        for (int i = 0; i < 4; ++i) out[i * call.num_tokens + token] = of_token[i];
    }
}

}  // namespace

// out: [4, N]. columns: is `stride` from one column to the next, each in one piece, or from one row to the next?
// soft_cap: 0 for none.
EXPORTED int megarl_logprob_statistics_cpu(const void* logits, int64_t stride, int dtype, int columns,
                                           const int64_t* targets, float* out, int64_t num_tokens, int64_t num_valid,
                                           int64_t first, double temperature, double soft_cap, int threads) {
    const Call call(num_tokens, num_valid, first, targets, columns, temperature, soft_cap, threads);
    return with_type(dtype, [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        const Logits<T> x = {static_cast<const T*>(logits), stride, call.columns};
        soft_cap > 0 ? statistics<true>(x, out, call) : statistics<false>(x, out, call);
    });
}

// out: [N, width] of the logits' type and layout, or the logits themselves. of_logprob, of_entropy: null for zeros.
EXPORTED int megarl_logprob_backward_cpu(void* out, int64_t out_stride, const void* logits, int64_t stride, int dtype,
                                         int columns, const int64_t* targets, const float* maximum,
                                         const float* log_sum, const float* entropy, const float* of_logprob,
                                         const float* of_entropy, int64_t num_tokens, int64_t width, int64_t num_valid,
                                         int64_t first, double temperature, double soft_cap, int threads) {
    const Call call(num_tokens, num_valid, first, targets, columns, temperature, soft_cap, threads);
    const Slopes slopes = {maximum, log_sum, entropy, of_logprob, of_entropy, call.inverse_temperature};
    return with_type(dtype, [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        const Logits<T> x = {static_cast<const T*>(logits), stride, call.columns};
        const Matrix<T> to = {static_cast<T*>(out), out_stride, call.columns};
        soft_cap > 0 ? backward<true>(to, &x, width, call, slopes) : backward<false>(to, &x, width, call, slopes);
    });
}
