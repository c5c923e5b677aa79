// What logprob.cpp and logprob_kl.cpp share: vectors, their arithmetic, and the ways through logits and out again.
//
// Logits are bf16 or fp32; all else is fp32, in vectors of a cache line with AVX-512 and of half a line without, which
// the compiler cuts to what the processor has. Exponents are in base 2: a power of two is a polynomial, and an integer
// added to the exponent. There are two layouts:
//
//     rows      logits [N, V_local] with rows in one piece: vectors along the vocabulary.
//     columns   logits [N, V_local] with columns in one piece, as ops/linear_logprob.py lays out its chunks, because
//               matrix products write and read them faster so: vectors along the tokens.
//
// Forward: one read, in blocks whose maxima are taken first; a block's sums are fp32, those over blocks fp64. Backward:
// one read and one write of each element, so the gradient may lie over the logits. A NaN stays one.
//
// Plain C functions on addresses, called through ctypes: nothing of torch is needed to compile them. Everything here is
// local to the file that includes it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

// Tells libraries.py whether a library was made of the sources that it lies beside.
EXPORTED const char* megarl_digest() { return MEGARL_DIGEST; }

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

constexpr float LOWEST_FLOAT = -3.4028234663852886e38f;
constexpr float NOTHING = -__builtin_huge_valf();
constexpr double LN_2 = 0.69314718055994530942;
constexpr int64_t COLUMNS_OF_A_BLOCK = 2048;       // of one row: 4 to 8 KiB
constexpr int64_t TOKENS_OF_A_TILE = 512;          // of the layout "columns", and
constexpr int64_t COLUMNS_OF_A_TILE = 32;          // so many of its columns: 32 to 64 KiB
constexpr int64_t ELEMENTS_OF_A_THREAD = 1 << 16;  // below, starting a thread costs more than it saves

struct Bf16 {
    uint16_t bits;
};

INLINE Floats all(float x) { return x - Floats{}; }
// In this order a NaN of x stays one.
INLINE Floats at_least(Floats x, float lowest) { return x < lowest ? all(lowest) : x; }
INLINE Floats at_most(Floats x, float highest) { return x > highest ? all(highest) : x; }
INLINE Floats larger(Floats known, Floats x) { return x > known ? x : known; }  // a NaN of x is left to the sums

INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE Floats load(const Bf16* from) {
    Shorts bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// To the nearest, ties to even, as torch rounds.
INLINE void store(Bf16* to, Floats x) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Shorts result = __builtin_convertvector(x == x ? rounded : rounded * 0u + 0x7fc0u, Shorts);
    std::memcpy(to, &result, sizeof result);
}

// Where there may be fewer than LANES elements; the other lanes are 0.
template <typename T>
INLINE Floats load(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <typename T>
INLINE void store(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

// 2^x for x in [-127, 127], with a relative error of 1e-7; 0 below 2^-126. The polynomial is exact at 0 and within 6e-9
// in [-1/2, 1/2]: (2^r - 1) / r interpolated at the Chebyshev nodes. Adding MAGIC, whose last digit is 1, rounds to an
// integer and leaves it in the lowest bits, with an exponent's bias.
INLINE Floats exp2_of(Floats x) {
    constexpr float MAGIC = 12582912.0f + 127.0f;
    const Floats shifted = x + MAGIC;
    const Floats r = x - (shifted - MAGIC);
    Floats p = r * 0.00015453163359779865f + 0.0013390863314270973f;
    p = p * r + 0.009618083015084267f;
    p = p * r + 0.055503569543361664f;
    p = p * r + 0.24022650718688965f;
    p = p * r + 0.6931471824645996f;
    p = p * r + 1.0f;
    return p * (Floats)((Words)shifted << 23);
}

// An exponent, kept where exp2_of knows its power; one that is no more than 0 by its nature.
INLINE Floats exponent(Floats x) { return at_most(at_least(x, -127.0f), 127.0f); }
INLINE Floats negative_exponent(Floats x) { return at_least(x, -127.0f); }

// Relative error 2e-7: a polynomial near 0, where 1 - 2 / (e^2|x| + 1) would lose digits.
INLINE Floats tanh_of(Floats x) {
    const Floats magnitude = x < 0.0f ? -x : x;
    const Floats z = x * x;
    Floats p = z * -0.006096714176237583f + 0.020997179672122f;
    p = p * z + -0.05385090783238411f;
    p = p * z + 0.1333276927471161f;
    p = p * z + -0.333333283662796f;
    const Floats far = 1.0f - 2.0f / (exp2_of(exponent(magnitude * 2.8853900817779268f)) + 1.0f);
    return magnitude < 0.625f ? x + x * z * p : (x < 0.0f ? -far : far);
}

template <bool CAP>
INLINE Floats capped(Floats x, float soft_cap) {
    return CAP ? soft_cap * tanh_of(x / soft_cap) : x;
}

// On how many threads so many elements are computed.
inline int64_t num_parts(int64_t elements, int threads) {
    return std::max<int64_t>(1, std::min<int64_t>(threads, elements / ELEMENTS_OF_A_THREAD + 1));
}

// work(part, begin, end) on even parts of `total`, each on a thread of its own.
template <typename Work>
void in_parts(int64_t total, int64_t parts, Work work) {
    const int64_t size = (total + parts - 1) / parts;
    std::vector<std::thread> others;
    others.reserve(parts);
    int64_t part = 0;
    for (; (part + 1) * size < total; ++part) {
        try {
            others.emplace_back(work, part, part * size, (part + 1) * size);
        } catch (const std::exception&) {  // no more threads are to be had: this one does the rest
            break;
        }
    }
    work(part, part * size, total);
    for (std::thread& other : others) other.join();
}

// What a call is about, as ops/logprob.py has it.
struct Call {
    int64_t num_tokens, num_valid, first;
    const int64_t* targets;
    bool columns;
    int threads;
    float scale, inverse_temperature, soft_cap;  // scale = log2(e) / temperature

    Call(int64_t num_tokens, int64_t num_valid, int64_t first, const int64_t* targets, bool columns, double temperature,
         double soft_cap, int threads)
        : num_tokens(num_tokens), num_valid(num_valid), first(first), targets(targets), columns(columns),
          threads(threads), scale(float(1.4426950408889634 / temperature)),
          inverse_temperature(float(1.0 / temperature)), soft_cap(float(soft_cap)) {}

    // The target's column, or -1: another rank's, padding, or none.
    int64_t own_column(int64_t token) const {
        const int64_t column = targets[token] - first;
        return targets[token] >= 0 && column >= 0 && column < num_valid ? column : -1;
    }

    int64_t parts() const { return num_parts(num_tokens * num_valid, threads); }
};

// [N, V_local] in one of the layouts; `stride` is from one row, or one column, to the next.
template <typename T>
struct Matrix {
    T* data;
    int64_t stride;
    bool columns;

    INLINE T* at(int64_t token, int64_t column) const {
        return data + (columns ? token + column * stride : token * stride + column);
    }
};

template <typename T>
using Logits = Matrix<const T>;

// Statistics of a token, `Statistics`, are kept of NUM logits (the policy's, and perhaps a reference's) and have
//
//     Sums                    what a block adds up in fp32, lane by lane, of NUM vectors (x - maximum) * scale
//     maximum[NUM]            -inf while there are none
//     raise(next[], scale)    to these maxima, where they are higher
//     add(sums, lane)         a lane of a block's sums, taken about the present maxima
//     merge(other, scale)

template <typename Statistics>
INLINE void raise_to(Statistics& own, const Floats* maxima, int lane, float scale) {
    float next[Statistics::NUM];
    for (int i = 0; i < Statistics::NUM; ++i) next[i] = maxima[i][lane];
    own.raise(next, scale);
}

template <bool CAP, typename Statistics, typename T>
void statistics_of_row(const Logits<T>* logits, int64_t token, const Call& call, Statistics& own) {
    constexpr int NUM = Statistics::NUM;
    for (int64_t start = 0; start < call.num_valid; start += COLUMNS_OF_A_BLOCK) {
        const int64_t stop = std::min(start + COLUMNS_OF_A_BLOCK, call.num_valid);
        const int64_t whole = start + (stop - start) / LANES * LANES;
        Floats last[NUM], maxima[NUM], origins[NUM], shifts[NUM];
        for (int i = 0; i < NUM; ++i) {
            const T* x = logits[i].at(token, 0);
            last[i] = maxima[i] = all(NOTHING);
            if (whole < stop) {
                const Floats read = capped<CAP>(load(x + whole, stop - whole), call.soft_cap);
                for (int64_t lane = 0; lane < stop - whole; ++lane) last[i][lane] = read[lane];
                maxima[i] = larger(maxima[i], last[i]);
            }
            for (int64_t column = start; column < whole; column += LANES)
                maxima[i] = larger(maxima[i], capped<CAP>(load(x + column), call.soft_cap));
        }
        for (int lane = 0; lane < LANES; ++lane) raise_to(own, maxima, lane, call.scale);
        for (int i = 0; i < NUM; ++i) origins[i] = all(std::max(own.maximum[i], LOWEST_FLOAT));
        typename Statistics::Sums sums;
        for (int64_t column = start; column < whole; column += LANES) {
            for (int i = 0; i < NUM; ++i) {
                const Floats x = capped<CAP>(load(logits[i].at(token, 0) + column), call.soft_cap);
                shifts[i] = (x - origins[i]) * call.scale;
            }
            sums.add(shifts);
        }
        if (whole < stop) {
            for (int i = 0; i < NUM; ++i) shifts[i] = (last[i] - origins[i]) * call.scale;
            typename Statistics::Sums of_last;
            of_last.add(shifts);
            for (int lane = 0; lane < stop - whole; ++lane) own.add(of_last, lane);
        }
        for (int lane = 0; lane < LANES; ++lane) own.add(sums, lane);
    }
}

// Of the columns [start, stop) of the layout "columns", all tokens.
template <bool CAP, typename Statistics, typename T>
void statistics_of_columns(const Logits<T>* logits, int64_t start, int64_t stop, const Call& call, Statistics* found) {
    constexpr int NUM = Statistics::NUM;
    const auto in = [&](int i, int64_t token, int64_t column) __attribute__((always_inline)) {
        const T* x = logits[i].data + column * logits[i].stride + token;
        return capped<CAP>(load(x, call.num_tokens - token), call.soft_cap);
    };
    Floats maxima[TOKENS_OF_A_TILE / LANES][NUM];
    for (int64_t begin = 0; begin < call.num_tokens; begin += TOKENS_OF_A_TILE) {
        const int64_t end = std::min(begin + TOKENS_OF_A_TILE, call.num_tokens);
        for (int64_t first = start; first < stop; first += COLUMNS_OF_A_TILE) {
            const int64_t last = std::min(first + COLUMNS_OF_A_TILE, stop);
            for (auto& of_tokens : maxima) std::fill(std::begin(of_tokens), std::end(of_tokens), all(NOTHING));
            for (int64_t column = first; column < last; ++column)
                for (int64_t token = begin; token < end; token += LANES)
                    for (int i = 0; i < NUM; ++i) {
                        Floats& maximum = maxima[(token - begin) / LANES][i];
                        maximum = larger(maximum, in(i, token, column));
                    }
            for (int64_t token = begin; token < end; token += LANES) {
                const int count = static_cast<int>(std::min<int64_t>(LANES, end - token));
                Floats origins[NUM] = {}, shifts[NUM];
                for (int lane = 0; lane < count; ++lane) {
                    Statistics& own = found[token + lane];
                    raise_to(own, maxima[(token - begin) / LANES], lane, call.scale);
                    for (int i = 0; i < NUM; ++i) origins[i][lane] = std::max(own.maximum[i], LOWEST_FLOAT);
                }
                typename Statistics::Sums sums;
                for (int64_t column = first; column < last; ++column) {
                    for (int i = 0; i < NUM; ++i) shifts[i] = (in(i, token, column) - origins[i]) * call.scale;
                    sums.add(shifts);
                }
                for (int lane = 0; lane < count; ++lane) found[token + lane].add(sums, lane);
            }
        }
    }
}

// [N] statistics of the tokens, as if nothing was found for those that are ignored.
template <bool CAP, typename Statistics, typename T>
std::vector<Statistics> statistics_of(const Logits<T>* logits, const Call& call) {
    std::vector<Statistics> found((call.columns ? call.parts() : 1) * call.num_tokens);
    if (call.columns)
        in_parts(call.num_valid, call.parts(), [&](int64_t part, int64_t begin, int64_t end) {
            statistics_of_columns<CAP>(logits, begin, end, call, found.data() + part * call.num_tokens);
        });
    else
        in_parts(call.num_tokens, call.parts(), [&](int64_t, int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token)
                if (call.targets[token] >= 0) statistics_of_row<CAP>(logits, token, call, found[token]);
        });
    for (size_t more = call.num_tokens; more < found.size(); ++more)
        found[more % call.num_tokens].merge(found[more], call.scale);
    found.resize(call.num_tokens);
    for (int64_t token = 0; token < call.num_tokens; ++token)
        if (call.targets[token] < 0) found[token] = Statistics();
    return found;
}

// The target's (capped) logit, or -inf.
template <bool CAP, typename T>
float target_of(const Logits<T>& logits, int64_t token, const Call& call) {
    const int64_t column = call.own_column(token);
    return column < 0 ? NOTHING : capped<CAP>(load(logits.at(token, column), 1), call.soft_cap)[0];
}

// The gradient of a token's values in its capped logits is, but for the target's, a function of the logits' elements
// and of some constants of the token. `Slopes` has
//
//     NUM, CONSTANTS                 how many logits, how many constants
//     constants(token, to[])         those of a token
//     at_target(token)               what the target's gradient has more
//     of(x[], constants[], scale)    the function

template <bool CAP, typename Slopes>
INLINE Floats gradient(const Floats* logits, const Floats* constants, const Call& call, float at_target = 0.0f) {
    Floats x[Slopes::NUM];
    for (int i = 0; i < Slopes::NUM; ++i) x[i] = capped<CAP>(logits[i], call.soft_cap);
    const Floats of_capped = Slopes::of(x, constants, call.scale) + at_target;
    if (!CAP) return of_capped;
    const Floats tanh = x[0] / call.soft_cap;
    return of_capped * (1.0f - tanh * tanh);
}

// Tokens whose constants are the lanes of vectors; `kept` is 0 for an ignored one, whose gradient may be a NaN.
template <typename Slopes>
struct Group {
    Floats constants[Slopes::CONSTANTS] = {}, kept = {};

    void set(int64_t lane, const Slopes& slopes, int64_t token, const Call& call) {
        float of_token[Slopes::CONSTANTS];
        slopes.constants(token, of_token);
        for (int i = 0; i < Slopes::CONSTANTS; ++i) constants[i][lane] = of_token[i];
        kept[lane] = call.targets[token] >= 0;
    }
};

template <bool CAP, typename Slopes, typename T>
void backward_of_row(const Matrix<T>& out, const Logits<T>* logits, int64_t token, const Call& call,
                     const Slopes& slopes) {
    T* to = out.at(token, 0);
    if (call.targets[token] < 0) {
        std::memset(to, 0, call.num_valid * sizeof(T));
        return;
    }
    float of_token[Slopes::CONSTANTS];
    slopes.constants(token, of_token);
    Floats constants[Slopes::CONSTANTS], x[Slopes::NUM];
    for (int i = 0; i < Slopes::CONSTANTS; ++i) constants[i] = all(of_token[i]);
    for (int64_t column = 0; column < call.num_valid; column += LANES) {
        const int64_t count = call.num_valid - column;
        for (int i = 0; i < Slopes::NUM; ++i) x[i] = load(logits[i].at(token, 0) + column, count);
        store(to + column, gradient<CAP, Slopes>(x, constants, call), count);
    }
}

// Of the columns [start, stop) of the layout "columns", all tokens.
template <bool CAP, typename Slopes, typename T>
void backward_of_columns(const Matrix<T>& out, const Logits<T>* logits, int64_t start, int64_t stop, const Call& call,
                         const Slopes& slopes) {
    Group<Slopes> groups[TOKENS_OF_A_TILE / LANES];
    for (int64_t begin = 0; begin < call.num_tokens; begin += TOKENS_OF_A_TILE) {
        const int64_t end = std::min(begin + TOKENS_OF_A_TILE, call.num_tokens);
        for (int64_t token = begin; token < end; ++token)
            groups[(token - begin) / LANES].set((token - begin) % LANES, slopes, token, call);
        for (int64_t column = start; column < stop; ++column)
            for (int64_t token = begin; token < end; token += LANES) {
                const Group<Slopes>& own = groups[(token - begin) / LANES];
                const int64_t count = end - token;
                Floats x[Slopes::NUM];
                for (int i = 0; i < Slopes::NUM; ++i)
                    x[i] = load(logits[i].data + column * logits[i].stride + token, count);
                const Floats of_all = gradient<CAP, Slopes>(x, own.constants, call);
                store(out.data + column * out.stride + token, own.kept > 0.0f ? of_all : all(0.0f), count);
            }
    }
}

// The whole gradient [N, width], padded columns included.
template <bool CAP, typename Slopes, typename T>
void backward(const Matrix<T>& out, const Logits<T>* logits, int64_t width, const Call& call, const Slopes& slopes) {
    std::vector<float> at_targets(call.num_tokens);  // taken before the logits are written over
    for (int64_t token = 0; token < call.num_tokens; ++token) {
        const int64_t column = call.own_column(token);
        if (column < 0) continue;
        Group<Slopes> own;
        own.set(0, slopes, token, call);
        Floats x[Slopes::NUM];
        for (int i = 0; i < Slopes::NUM; ++i) x[i] = load(logits[i].at(token, column), 1);
        at_targets[token] = gradient<CAP, Slopes>(x, own.constants, call, slopes.at_target(token))[0];
    }
    if (call.columns)
        in_parts(call.num_valid, call.parts(), [&](int64_t, int64_t begin, int64_t end) {
            backward_of_columns<CAP>(out, logits, begin, end, call, slopes);
        });
    else
        in_parts(call.num_tokens, call.parts(), [&](int64_t, int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token) backward_of_row<CAP>(out, logits, token, call, slopes);
        });
    for (int64_t token = 0; token < call.num_tokens; ++token) {
        const int64_t column = call.own_column(token);
        if (column >= 0) store(out.at(token, column), all(at_targets[token]), 1);
        if (!call.columns) std::memset(out.at(token, call.num_valid), 0, (width - call.num_valid) * sizeof(T));
    }
    for (int64_t padded = call.num_valid; call.columns && padded < width; ++padded)
        std::memset(out.at(0, padded), 0, call.num_tokens * sizeof(T));
}

// run(a null T*) for libraries.py's number of a type. Returns what the exported functions return: 0; 1 for a type that
// they do not know; 2 where memory is wanting.
template <typename Run>
int with_type(int dtype, Run run) {
    try {
        if (dtype == 0)
            run(static_cast<float*>(nullptr));
        else if (dtype == 2)
            run(static_cast<Bf16*>(nullptr));
        else
            return 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
    return 0;
}

}  // namespace
