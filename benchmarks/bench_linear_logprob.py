"""Log-prob and entropy from hidden states: ops/linear_logprob.py against TRL, verl, Liger, cut-cross-entropy,
Megatron-core and torch.

    python benchmarks/bench_linear_logprob.py [--quick] [--no-peers] [--out FILE]

From hidden states [T, H] and a weight [V, H] to a weighted sum of log-probs and entropies and the gradients of both.
Every arm finds its gradient buffers allocated and adds to them: hidden.grad and weight.grad, megarl main_grad in fp32.
"megarl, loss inside" is linear_loss (three products), "megarl" linear_logprob (four), "megarl, logits" the output layer
and then ops/logprob.py with the gradient over the logits (three, with all logits in memory). Arms that take logits get
them from the same product. Modes with the exact KL are given the reference's hidden states and weight: megarl makes
its logits a chunk at a time, log_softmax all of them. Liger's cross entropy and GRPO are losses of their own over
log-probs that they do not return: they are timed as such, without entropy and without errors. See logprob_measured.py
for the clocks.
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
    on_logits, missing = peers.imported(peers.on_logits(with_peers))
    on_hidden, also_missing = peers.imported(peers.ON_HIDDEN if with_peers else {})
    sizes = QUICK if quick else GPU if measured.device().type == "cuda" else CPU
    losses, not_there = peers.imported(peers.WHOLE_LOSSES if with_peers else {})
    missing |= also_missing | not_there
    results = []
    for size in sizes:
        results += measured.yardsticks(size)
        results += compare(size, on_logits, on_hidden, losses)
        measured.save(results, missing, load_before, out)  # a long run that is broken off leaves what it has
    measured.report("log-prob and entropy from hidden states", results, missing, load_before, out)


def compare(size: Size, on_logits: dict, on_hidden: dict, losses: dict) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    dtype, device = getattr(torch, size.dtype), measured.device()
    hidden = torch.randn(size.tokens, size.hidden, generator=generator).to(device, dtype).requires_grad_()
    scale = size.hidden**-0.5  # logits of standard deviation 1
    weight = (torch.randn(size.vocab, size.hidden, generator=generator) * scale).to(device, dtype).requires_grad_()
    targets = torch.randint(0, size.vocab, (size.tokens,), generator=generator).to(device)
    upstream = torch.randn(3, size.tokens, generator=generator).to(device)
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

    def from_logits(function, has_entropy: bool = True) -> Arm:
        return arm(lambda with_entropy: function(hidden @ weight.T, targets, with_entropy), has_entropy)

    def taken_inside(with_entropy: bool) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():  # without gradient it is linear_logprob
            return linear_loss(
                hidden, with_main_grad, targets, lambda *values: weighted(*values, with_entropy=with_entropy)
            )

    def loss_inside(with_entropy: bool) -> None:
        taken_inside(with_entropy)[0].backward()

    def megarl(_) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprob(hidden, with_main_grad, targets)

    def megarl_on_logits(logits: torch.Tensor, targets: torch.Tensor, _) -> tuple[torch.Tensor, torch.Tensor]:
        return logprob_and_entropy(logits, targets, inplace_backward=True)

    inside = Arm(lambda _: taken_inside(True)[1:], loss_inside, has_forward=False)
    arms = {"megarl, loss inside": inside, "megarl": arm(megarl)}
    arms["megarl, logits"] = from_logits(megarl_on_logits)
    for name, function in on_logits.items():
        arms[name] = from_logits(function, has_entropy=name not in peers.WITHOUT_ENTROPY)
    for name, function in on_hidden.items():
        arms[name] = arm(
            lambda with_entropy, function=function: function(hidden, weight, targets, with_entropy),
            has_entropy=name not in peers.WITHOUT_ENTROPY,
        )
    for name, function in losses.items():
        arms[name] = Arm(
            lambda _: (), lambda _, function=function: function(hidden, weight, targets).backward(), has_entropy=False
        )
    logits = measured.exact_logits(hidden, weight)

    def zero_gradients() -> None:
        for buffer in (hidden.grad, weight.grad, with_main_grad.main_grad):
            buffer.zero_()

    exact = measured.exact_values(logits, targets)
    rows = measured.measure(size, arms, exact, zero_gradients=zero_gradients)

    def near(x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * x.std() * torch.randn(x.shape, generator=generator).to(x)

    reference = (near(hidden.detach()), near(weight.detach()))

    def kl_taken_inside() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return linear_loss(hidden, with_main_grad, targets, weighted_with_kl, reference=reference)

    def weighted_with_kl(logprob: torch.Tensor, entropy: torch.Tensor, places, kl: torch.Tensor) -> torch.Tensor:
        return weighted(logprob, entropy, places, with_entropy=True) + upstream[2, places] * kl

    def kl_arm(function) -> Arm:
        def step(_) -> None:
            sum((slope * value).sum() for slope, value in zip(upstream, function(), strict=True)).backward()

        return Arm(lambda _: function(), step)

    def dense() -> tuple[torch.Tensor, ...]:
        return peers.log_softmax_and_kl(hidden @ weight.T, reference[0] @ reference[1].T, targets)

    megarl_kl = kl_arm(lambda: linear_logprob(hidden, with_main_grad, targets, reference=reference))
    inside_kl = Arm(lambda _: kl_taken_inside()[1:], lambda _: kl_taken_inside()[0].backward(), has_forward=False)
    arms = {"megarl, loss inside": inside_kl, "megarl": megarl_kl}
    arms["log_softmax"] = kl_arm(dense)
    exact = measured.exact_values(logits, targets, measured.exact_logits(*reference))
    modes = (measured.KL_FORWARD, measured.KL_BOTH)
    return rows + measured.measure(size, arms, exact, modes, zero_gradients)


if __name__ == "__main__":
    typer.run(main)
