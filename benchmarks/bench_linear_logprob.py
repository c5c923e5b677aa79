"""Log-prob and entropy from hidden states: ops/linear_logprob.py against TRL, verl, Liger, cut-cross-entropy and torch.

    python benchmarks/bench_linear_logprob.py [--quick] [--no-peers] [--out FILE]

From hidden states [T, H] and a weight [V, H] to a weighted sum of log-probs and entropies and the gradients of both.
Every arm finds its gradient buffers allocated and adds to them: hidden.grad and weight.grad, megarl main_grad in fp32.
"megarl, loss inside" is linear_loss (three products), "megarl" linear_logprob (four), "megarl, logits" the output layer
and then ops/logprob.py with the gradient over the logits (three, with all logits in memory). Arms that take logits get
them from the same product. See logprob_measured.py for the clocks.
"""

import os
from pathlib import Path
from typing import Annotated

import logprob_measured as measured
import logprob_peers as peers
import torch
import typer
from logprob_measured import Arm, Size

from megarl.ops.linear_logprob import linear_logprob, linear_loss
from megarl.ops.logprob import logprob_and_entropy

CPU = [Size(1024, 896, 151_936, "bfloat16"), Size(1000, 512, 50_257, "float32")]
GPU = [Size(tokens, hidden, 151_936, "bfloat16") for tokens in (1024, 8192, 65_536) for hidden in (896, 3584, 5120)]
GPU.append(Size(8192, 3584, 50_257, "bfloat16"))
QUICK = [Size(256, 128, 32_000, "bfloat16")]


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
    on_logits = peers.ON_LOGITS if with_peers else {"log_softmax": peers.ON_LOGITS["log_softmax"]}
    on_logits, missing = peers.imported(on_logits)
    on_hidden, also_missing = peers.imported(peers.ON_HIDDEN if with_peers else {})
    sizes = QUICK if quick else GPU if measured.device().type == "cuda" else CPU
    results = []
    for size in sizes:
        results += measured.yardsticks(size)
        results += compare(size, on_logits, on_hidden, rounds=3 if quick else 5)
    measured.report("log-prob and entropy from hidden states", results, missing | also_missing, load_before, out)


def compare(size: Size, on_logits: dict, on_hidden: dict, rounds: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    dtype, device = getattr(torch, size.dtype), measured.device()
    hidden = torch.randn(size.tokens, size.hidden, generator=generator).to(device, dtype).requires_grad_()
    scale = size.hidden**-0.5  # logits of standard deviation 1
    weight = (torch.randn(size.vocab, size.hidden, generator=generator) * scale).to(device, dtype).requires_grad_()
    targets = torch.randint(0, size.vocab, (size.tokens,), generator=generator).to(device)
    upstream = torch.randn(2, size.tokens, generator=generator).to(device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    with_main_grad = torch.nn.Parameter(weight.detach())
    with_main_grad.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def weighted(logprob: torch.Tensor, entropy: torch.Tensor | None, places, with_entropy: bool) -> torch.Tensor:
        losses = upstream[0, places] * logprob.flatten()
        return losses + upstream[1, places] * entropy.flatten() if with_entropy else losses

    def arm(values, has_entropy: bool = True) -> Arm:
        def step(with_entropy: bool) -> None:
            weighted(*values(with_entropy), slice(None), with_entropy).sum().backward()

        return Arm(values, step, has_entropy)

    def from_logits(function) -> Arm:
        return arm(lambda with_entropy: function(hidden @ weight.T, targets, with_entropy))

    def loss_inside(with_entropy: bool) -> None:
        loss, _, _ = linear_loss(
            hidden, with_main_grad, targets, lambda *values: weighted(*values, with_entropy=with_entropy)
        )
        loss.backward()

    def megarl(_) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprob(hidden, with_main_grad, targets)

    def megarl_on_logits(logits: torch.Tensor, targets: torch.Tensor, _) -> tuple[torch.Tensor, torch.Tensor]:
        return logprob_and_entropy(logits, targets, inplace_backward=True)

    arms = {"megarl, loss inside": Arm(megarl, loss_inside, has_forward=False), "megarl": arm(megarl)}
    arms["megarl, logits"] = from_logits(megarl_on_logits)
    arms |= {name: from_logits(function) for name, function in on_logits.items()}
    for name, function in on_hidden.items():
        arms[name] = arm(
            lambda with_entropy, function=function: function(hidden, weight, targets, with_entropy),
            has_entropy=name not in peers.WITHOUT_ENTROPY,
        )
    return measured.measure(size, arms, measured.exact_values(hidden, weight, targets), rounds)


if __name__ == "__main__":
    typer.run(main)
