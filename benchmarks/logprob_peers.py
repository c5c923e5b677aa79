"""Other people's log-probs, by their public entry points, and the environment that they live in.

Megatron-core is installed with megarl. The others are installed without their dependencies into runs/peers, which sees
the packages of this interpreter's environment first: all arms then run on the same torch and Megatron-core. What a
peer's import wants beyond those is listed with it.
"""

import importlib
import os
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "runs" / "peers"
PACKAGES = [
    "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1",
    "trl==1.16.0", "accelerate==1.15.0",
    "verl==0.9.1", "ray==2.60.0", "tensordict==0.15.3", "codetiming==1.4.0", "omegaconf==2.4.0", "hydra-core==1.3.8",
    "antlr4-python3-runtime==4.9.3", "peft==0.21.2", "orjson==3.13.0", "pyvers==0.2.3", "cloudpickle==3.1.2",
    "dill==0.4.1", "msgpack==1.2.4",
]  # fmt: skip

Values = tuple[torch.Tensor | None, ...]


def enter() -> None:
    """Go on in the peers' environment, made first if need be: this script starts again there."""
    if Path(sys.prefix) == ENVIRONMENT:
        return
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "packages.txt"
    if not done.exists() or done.read_text().split() != PACKAGES:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", ENVIRONMENT], check=True)
        folder = ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        folder.joinpath("this.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *PACKAGES], check=True)
        done.write_text("\n".join(PACKAGES))
    os.execv(python, [str(python), *sys.argv])


def imported(arms: dict[str, Callable[[], Callable]]) -> tuple[dict[str, Callable], dict[str, str]]:
    """(what could be imported, why the others could not), by name."""
    found, missing = {}, {}
    for name, bring in arms.items():
        try:
            found[name] = bring()
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def _trl():
    utils = importlib.import_module("trl.trainer.utils")

    def values(logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        logprob = utils.selective_log_softmax(logits, targets)
        return logprob, utils.entropy_from_logits(logits) if with_entropy else None

    return values


def _verl():
    functional = importlib.import_module("verl.utils.torch_functional")

    def values(logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        logprob = functional.logprobs_from_logits_v2(logits, targets)
        return logprob, functional.entropy_from_logits(logits) if with_entropy else None

    return values


def _megatron():
    """Its groups are global, so that this process becomes the one rank of all of them."""
    backend, device = ("nccl", torch.device("cuda", 0)) if torch.cuda.is_available() else ("gloo", None)
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()

    def values(logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        if logits.is_leaf and logits.dtype == torch.float32:
            logits = logits.clone()  # fp32 logits are overwritten in the forward, and the other arms need them
        return -tensor_parallel.vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0], None

    return values


def log_softmax(logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
    """What one writes without an op: an fp32 log_softmax of everything, and autograd."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1) if with_entropy else None
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def log_softmax_and_kl(logits: torch.Tensor, ref_logits: torch.Tensor, targets: torch.Tensor) -> Values:
    """(log-prob, entropy, exact KL) written out likewise."""
    log_p, log_q = (torch.log_softmax(x.float(), dim=-1) for x in (logits, ref_logits))
    p = log_p.exp()
    return log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(dim=-1), (p * (log_p - log_q)).sum(dim=-1)


# (logits [T, V], targets [T], with_entropy) -> (log-prob [T], entropy [T])
ON_LOGITS = {
    "log_softmax": lambda: log_softmax,
    "torch.compile": lambda: torch.compile(log_softmax, dynamic=False),
    "TRL": _trl,
    "verl v2": _verl,
    "Megatron": _megatron,
}


def on_logits(with_peers: bool) -> dict[str, Callable[[], Callable]]:
    """ON_LOGITS, or of it what needs neither an installation nor a compiler."""
    return {name: bring for name, bring in ON_LOGITS.items() if with_peers or name in ("log_softmax", "Megatron")}


def _verl_linear():
    fused = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def values(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        return fused(hidden, weight, targets)

    return values


def _verl_triton():
    if not torch.cuda.is_available():
        raise ImportError("needs a GPU")
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def values(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        return kernel(hidden, weight, targets, 1.0, "none")

    return values


def _liger():
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def values(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        found = function.apply(hidden, weight, targets, 1.0, -100, 1, with_entropy)
        return (-found[0], found[1]) if with_entropy else (-found, None)

    return values


def _cut_cross_entropy():
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    implementation = "cce" if torch.cuda.is_available() else "torch_compile"

    def values(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> Values:
        return -function(hidden, weight, targets, reduction="none", impl=implementation), None

    return values


def _liger_cross_entropy():
    if not torch.cuda.is_available():
        raise ImportError("needs a GPU")
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy


def _liger_grpo():
    module = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    grpo = module.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sequences = 8 if len(targets) % 8 == 0 else 1
        targets = targets.view(sequences, -1)
        hidden = hidden.view(*targets.shape, -1)
        advantages = torch.linspace(-1, 1, sequences, device=targets.device)
        return grpo(hidden, weight, targets, torch.ones_like(targets), advantages)[0]

    return loss


# (hidden [T, H], weight [V, H], targets [T]) -> their own scalar loss of log-probs, which they do not give
WHOLE_LOSSES = {"Liger cross entropy": _liger_cross_entropy, "Liger GRPO": _liger_grpo}

# (hidden [T, H], weight [V, H], targets [T], with_entropy) -> (log-prob [T], entropy [T])
ON_HIDDEN = {
    "verl FusedLinearForPPO": _verl_linear,
    "verl Triton": _verl_triton,
    "Liger": _liger,
    "cut-cross-entropy": _cut_cross_entropy,
}
WITHOUT_ENTROPY = {"cut-cross-entropy", "Megatron"}
