"""Inputs for the kernels of csrc/logprob_kl.py, shared by the interpreter, the GPU and the reference.

`python -m tests.csrc.logprob_kl_cases FILE` runs the kernels on the CPU and writes their outputs; it needs
TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

import itertools
import sys

import torch
from safetensors.torch import save_file

from tests.csrc.logprob_cases import DTYPES, IGNORED, NUM_TOKENS, SOFT_CAPS
from tests.csrc.logprob_cases import inputs as policy_inputs

# (columns, those that are not padding): the widest is read in several blocks.
SHAPES = ("1", "5 padded", "123", "1000", "9001")
NAMES = [f"{shape} {dtype}{cap}" for shape, dtype, cap in itertools.product(SHAPES, DTYPES, SOFT_CAPS)]


def inputs(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple]:
    """(logits, ref_logits, targets, columns) of one shard; the reference masks nothing that the policy does not."""
    shape, dtype, cap = next(
        case for case in itertools.product(SHAPES, DTYPES, SOFT_CAPS) if name == f"{case[0]} {case[1]}{case[2]}"
    )
    arguments = policy_inputs(shape, dtype, cap)
    logits, targets = arguments.pop("logits"), arguments.pop("targets")
    draw = torch.Generator().manual_seed(3)
    noise = torch.randn(logits.shape, generator=draw)
    ref_logits = (logits.float().nan_to_num(neginf=-torch.inf, posinf=torch.inf) + noise).to(logits.dtype)
    ref_logits[IGNORED] = torch.nan
    if logits.shape[1] > 5:
        ref_logits[5, 2], ref_logits[3, 0] = 1e4, 2.0  # much above the rest; one that the policy masks
    return logits, ref_logits, targets, tuple(arguments.values())


def merged_and_upstream() -> tuple[torch.Tensor, torch.Tensor]:
    """Such as other shards might bring about; the backward takes them as given."""
    spread = torch.rand(6, NUM_TOKENS, generator=torch.Generator().manual_seed(8))
    offsets = torch.tensor([15.0, 1.0, 0.5, 15.0, 1.0, 0.1])[:, None]
    merged = spread + offsets
    merged[0, 1] = merged[3, 1] = merged[3, 5] = 1e4
    return merged, torch.randn(3, NUM_TOKENS, generator=torch.Generator().manual_seed(7))


def outputs(local_statistics, backward_into, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Everything that the two functions compute on all cases, on the CPU."""
    results = {}
    merged, upstream = (x.to(device) for x in merged_and_upstream())
    for name in NAMES:
        *tensors, columns = inputs(name)
        logits, ref_logits, targets = (x.to(device) for x in tensors)
        results[f"{name} statistics"] = local_statistics(logits, ref_logits, targets, *columns)
        out = torch.full_like(logits, torch.nan)
        backward_into(out, logits, ref_logits, targets, merged, upstream, *columns)
        backward_into(logits, logits, ref_logits, targets, merged, upstream, *columns)
        results[f"{name} gradient"], results[f"{name} in place"] = out, logits
    return {name: value.cpu() for name, value in results.items()}


if __name__ == "__main__":
    from megarl.csrc import logprob_kl as kernels

    save_file(outputs(kernels.local_statistics, kernels.backward_into), sys.argv[1])
