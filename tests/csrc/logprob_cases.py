"""Inputs for the kernels of csrc/logprob.py, shared by the interpreter, the GPU and the reference.

`python -m tests.csrc.logprob_cases FILE` runs the kernels on the CPU and writes their outputs; it needs
TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

import itertools
import sys

import torch
from safetensors.torch import save_file

NUM_TOKENS = 6
FIRST = 40  # a shard in the middle of a vocabulary: some targets lie before, in and after its columns
SHAPES = {"1": (1, 1), "5": (5, 5), "5 padded": (5, 3), "123": (123, 123), "1000": (1000, 999), "9001": (9001, 8200)}
WIDE = "151936"  # a language model's, in one type only: it is large
IGNORED = 0  # the row whose token is ignored; its logits are NaN, and must not be read
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SOFT_CAPS = {"": None, " capped": 6.0}
CASES = [*itertools.product(SHAPES, DTYPES, SOFT_CAPS), (WIDE, "bf16", "")]
NAMES = [f"{shape} {dtype}{cap}" for shape, dtype, cap in CASES]
UPSTREAMS = ("both", "logprob", "entropy")


def inputs(shape: str, dtype: str, cap: str) -> dict:
    """Keyword arguments of local_statistics for one shard."""
    width, num_valid = SHAPES.get(shape, (int(WIDE), int(WIDE)))
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(NUM_TOKENS, width, generator=generator) * 4).to(DTYPES[dtype])
    targets = FIRST + torch.randint(0, num_valid, (NUM_TOKENS,), generator=generator)
    targets[1], targets[2] = FIRST + width, FIRST + width - 1
    targets[4 if width > 5 else 3] = FIRST - 1
    targets[IGNORED] = -100
    logits[IGNORED] = torch.nan
    if width > 5:
        logits[1, 3], logits[1, 4] = 1e4, -1e4
        logits[2] = -torch.inf
        logits[3, : width // 2] = -torch.inf
        logits[4, 1::2] = -torch.inf
    # The forward reads the widest shard in two blocks: one row is masked in the first, one's maximum is in the second.
    if num_valid > 8192:
        logits[3, :8192] = -torch.inf
        logits[5, num_valid - 1] = logits[5].max() + 1
    return {
        "logits": logits,
        "targets": targets,
        "temperature": 0.7,
        "soft_cap": SOFT_CAPS[cap],
        "first": FIRST,
        "num_valid": num_valid,
    }


def upstream(which: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Upstream gradients of log-prob and entropy."""
    grads = torch.randn(2, NUM_TOKENS, generator=torch.Generator().manual_seed(7))
    return (grads[0] if which != "entropy" else None, grads[1] if which != "logprob" else None)


def merged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, log_sum, entropy) such as other shards might bring about; the backward takes them as given."""
    spread = torch.rand(3, NUM_TOKENS, generator=torch.Generator().manual_seed(8))
    maximum = spread[0] + 15.0
    maximum[1] = 1e4
    return maximum, spread[1] + 1.0, spread[2] + 0.5


def outputs(statistics, backward_into, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Everything that the two functions compute on all cases, on the CPU."""
    results = {}

    def place(tensor):
        return None if tensor is None else tensor.to(device)

    for shape, dtype, cap in CASES:
        name = f"{shape} {dtype}{cap}"
        arguments = inputs(shape, dtype, cap)
        logits, targets = place(arguments.pop("logits")), place(arguments.pop("targets"))
        results[f"{name} statistics"] = statistics(logits, targets, **arguments)
        for which in UPSTREAMS:
            grads = map(place, (*merged(), *upstream(which)))
            out = torch.full_like(logits, torch.nan)
            backward_into(out, logits, targets, *grads, *arguments.values())
            results[f"{name} {which}"] = out
        over = logits.clone()
        backward_into(over, over, targets, *map(place, (*merged(), *upstream("both"))), *arguments.values())
        results[f"{name} in place"] = over
    return {name: value.cpu() for name, value in results.items()}


if __name__ == "__main__":
    from megarl.csrc import logprob as kernels

    save_file(outputs(kernels.local_statistics, kernels.backward_into), sys.argv[1])
