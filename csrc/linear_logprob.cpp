// What the weight gradient of megarl/ops/linear_logprob.py adds up on a CPU: a product in bf16 to sums in fp32. Bytes per
// element: 2 read, 4 read, 4 written.

#include "lanes.h"

// sums[i] += product[i]. Returns what logprob.cpp's functions do.
EXPORTED int megarl_linear_logprob_add_cpu(float* sums, const void* product, int dtype, int64_t size) {
    return with_type(dtype, [&](auto* typed) {
        const auto* from = static_cast<const std::remove_pointer_t<decltype(typed)>*>(product);
        for (int64_t i = 0; i < size; i += LANES)
            store(sums + i, load(sums + i, size - i) + load(from + i, size - i), size - i);
    });
}
