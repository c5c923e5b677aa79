"""Log-prob and entropy of given logits: ops/logprob.py against TRL, verl, Megatron-core, torch.compile and torch.

    python benchmarks/bench_logprob.py [--quick] [--no-peers] [--out FILE]

Each arm's backward returns the gradient of the logits, a tensor that its extra memory includes. See logprob_measured.py
for the clocks; the column "hidden" is 0, because there are no hidden states. Modes with the exact KL to a reference
have its logits given as well.
"""

import os
from pathlib import Path
from typing import Annotated

import logprob_measured as measured
import logprob_peers as peers
import torch
import typer
from logprob_measured import Arm, Size

from megarl.ops.logprob import logprob_and_entropy
from megarl.ops.logprob_kl import logprob_entropy_and_kl

CPU = [Size(1024, 0, 151_936, "bfloat16"), Size(1000, 0, 50_257, "float32"), Size(16_384, 0, 128, "float32")]
GPU = [Size(tokens, 0, 151_936, "bfloat16") for tokens in (1024, 8192, 32_768)] + [Size(8192, 0, 50_257, "bfloat16")]
QUICK = [Size(128, 0, 32_000, "bfloat16")]


def main(
    quick: Annotated[bool, typer.Option(help="One small size, within 50 s.")] = False,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Install the peers and run them too.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write results and conditions to this JSON file, a plot beside.")
    ] = None,
) -> None:
    if with_peers:
        peers.enter()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    others, missing = peers.imported(peers.on_logits(with_peers))
    sizes = QUICK if quick else GPU if measured.device().type == "cuda" else CPU
    results = []
    for size in sizes:
        results += measured.yardsticks(Size(size.tokens, 64, size.vocab, size.dtype))
        results += compare(size, others)
        measured.save(results, missing, load_before, out)
    measured.report("log-prob and entropy of logits", results, missing, load_before, out)


def compare(size: Size, others: dict) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(size.tokens, size.vocab, generator=generator)
    logits = logits.to(measured.device(), getattr(torch, size.dtype)).requires_grad_()
    targets = torch.randint(0, size.vocab, (size.tokens,), generator=generator).to(logits.device)
    upstream = torch.randn(3, size.tokens, generator=generator).to(logits.device)

    def arm(function, has_entropy: bool = True) -> Arm:
        def step(with_entropy: bool) -> None:
            logprob, entropy = function(logits, targets, with_entropy)
            loss = (upstream[0] * logprob).sum()
            if with_entropy:
                loss = loss + (upstream[1] * entropy).sum()
            torch.autograd.grad(loss, logits)

        return Arm(lambda with_entropy: function(logits, targets, with_entropy), step, has_entropy)

    def kl_arm(function) -> Arm:
        def step(_) -> None:
            loss = sum((weight * value).sum() for weight, value in zip(upstream, function(), strict=True))
            torch.autograd.grad(loss, logits)

        return Arm(lambda _: function(), step)

    arms = {"megarl": arm(lambda logits, targets, _: logprob_and_entropy(logits, targets))}
    arms |= {name: arm(function, name not in peers.WITHOUT_ENTROPY) for name, function in others.items()}
    rows = measured.measure(size, arms, measured.exact_values(logits, targets))
    ref_logits = logits.detach() + torch.randn(logits.shape, generator=generator).to(logits)
    arms = {"megarl": kl_arm(lambda: logprob_entropy_and_kl(logits, ref_logits, targets))}
    arms["log_softmax"] = kl_arm(lambda: peers.log_softmax_and_kl(logits, ref_logits, targets))
    exact = measured.exact_values(logits, targets, ref_logits)
    return rows + measured.measure(size, arms, exact, (measured.KL_FORWARD, measured.KL_BOTH))


if __name__ == "__main__":
    typer.run(main)
