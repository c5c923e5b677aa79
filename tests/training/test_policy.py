"""Loss and gradient of a mini-batch are transformers' own, in every layout and for every micro-batch budget."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.algorithms import grpo
from megarl.config.model import ModelConfig, OptimConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import from_rollouts
from megarl.ops import linear_logprob
from megarl.parallel import layout as layouts
from megarl.resharding.gathered import gather
from megarl.resharding.megatron_layout import ShardedModel
from megarl.resharding.pieces import unpack
from megarl.training import distribute as distribution
from megarl.training.policy import Policy
from megarl.types import Completion, Prompt, Rollout
from tests import tiny_models
from tests.parallel_utils import run_ranks

TEMPERATURE = 0.7
SETTINGS = grpo.Config(name="grpo", clip_ratio_high=0.28, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
MAX_TOKENS = 48


def make_rollouts(num_groups: int = 4, n: int = 3, seed: int = 0) -> list[Rollout]:
    """Random ids, lengths from 1 to 12, one completion empty of reward differences, sampling log-probs invented."""
    random = np.random.default_rng(seed)

    def completion() -> Completion:
        length = int(random.integers(1, 13))
        return Completion(
            token_ids=random.integers(2, 131, length).astype(np.int32),
            logprobs=-random.random(length).astype(np.float32),
            finish_reason="length",
            loss_mask=np.ones(length, np.uint8),
            weight_version=np.zeros(length, np.int32),
        )

    rollouts = []
    for group in range(num_groups):
        prompt = Prompt(group, random.integers(2, 131, int(random.integers(1, 10))).astype(np.int32), "")
        completions = [completion() for _ in range(n)]
        rollouts.append(Rollout(prompt, completions, random.random(n), {}, [""] * n))
    return rollouts


# How the head is run: fused or not, the loss per token, tokens of a fused chunk.
WAYS = [(True, True, 1000), (True, True, 7), (True, False, 7), (False, True, 1000)]


def token_loss(logprobs, entropy, micro):
    return grpo.token_loss(logprobs, entropy, micro, SETTINGS)


def _whole_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The reduced gradient in checkpoint coordinates, on rank 0; the distributed optimizer leaves each rank a part."""
    groups, module = policy.layout.groups, policy.module
    for buffers, copies in ((module.buffers, groups.dp), (module.expert_parallel_buffers, groups.expt_dp)):
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            parts = list(bucket.grad_data.chunk(copies.size()))
            dist.all_gather(parts, parts[copies.rank()].clone(), group=copies)
            bucket.grad_data.copy_(torch.cat(parts))
    sharded = policy.sharded
    gradients = {name: torch.nn.Parameter(p.main_grad) for name, p in sharded.tensors.items()}
    whole = ShardedModel(policy.layout, sharded.table, sharded.checkpoint_shapes, gradients)
    ((bucket, flat),) = gather(whole, [whole.metas])
    return {} if flat is None else unpack(bucket, flat)


def _gradients(folders: list[str], tp: int, sequence_parallel: bool, budgets: list[int]) -> list:
    layout = layouts.initialize(ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel), 0)
    return [_gradients_of(folder, layout, budgets) for folder in folders]


def _gradients_of(folder: str, layout, budgets: list[int]) -> list:
    policy = Policy(
        ModelConfig(path=folder, dtype="float32", transformer_impl="local"), layout, TEMPERATURE, OptimConfig(), 10
    )
    whole = from_rollouts(make_rollouts())
    batch = distribution.distribute(whole if layout.is_first else None, layout, 12, seed=0, step=1)
    found = []
    for place, max_tokens in enumerate(budgets):
        policy.fused, per_token, chunk_tokens = WAYS[place % len(WAYS)]
        linear_logprob.CHUNK_BYTES["cpu"] = chunk_tokens * policy.output_weight[:, 0].nbytes
        logprobs, entropy = policy.logprobs(batch, max_tokens)
        mine = batch.with_(logprobs=logprobs - 0.05 * batch.index[batch.sequence_ids], ref_logprobs=0.9 * logprobs)
        mine = grpo.advantages(mine, SETTINGS, policy.sum_over_dp)
        mine = mine.with_(token_weights=grpo.weights(mine, SETTINGS, policy.sum_over_dp))
        metrics = policy.gradients(mine, token_loss, max_tokens, per_token=per_token)
        found.append((metrics, _whole_gradients(policy), batch.index, batch.lengths, logprobs, entropy))
    return found


def _reference(folder) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """The same loss by transformers and autograd, sequence by sequence; it shares nothing with the trainer."""
    # "eager": the grouped kernel takes no float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    rollouts = make_rollouts()
    count = sum(len(c.token_ids) for r in rollouts for c in r.completions)
    total, index, logprobs_of = 0.0, 0, []
    for rollout in rollouts:
        advantages = (rollout.scores - rollout.scores.mean()) / (rollout.scores.std(ddof=1) + 1e-6)
        for completion, advantage in zip(rollout.completions, advantages, strict=True):
            ids = torch.tensor(np.concatenate([rollout.prompt.token_ids, completion.token_ids]), dtype=torch.long)
            start = len(rollout.prompt.token_ids)
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1] / TEMPERATURE
            log_probs = torch.log_softmax(logits, -1)
            chosen = log_probs.gather(1, ids[start:, None]).squeeze(1)
            logprobs_of.append(chosen.detach())
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            old, ref = chosen.detach() - 0.05 * index, 0.9 * chosen.detach()
            ratio = (chosen - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            k3 = ((ref - chosen).exp() - (ref - chosen) - 1).clamp(-10, 10)
            total = total + (-surrogate + 0.1 * k3 - 0.01 * entropy).sum() / count
            index += 1
    total.backward()
    return float(total), dict(_per_expert(model)), logprobs_of


def _per_expert(model) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients under the names of the files: transformers stacks the experts of a layer in memory."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            yield name, parameter.grad
            continue
        block, stacked = name.rsplit(".", 1)
        for e, whole in enumerate(parameter.grad):
            parts = {"down_proj": [("down_proj", whole)]}.get(stacked) or zip(("gate_proj", "up_proj"), whole.chunk(2))
            yield from ((f"{block}.{e}.{part}.weight", gradient) for part, gradient in parts)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("policy")
    return [
        tiny_models.make(name, root / name)
        for name in ("qwen2-tied", "llama-untied-llama3", "qwen3-tied", "qwen3_moe-mixed")
    ]


@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel"), [(1, 1, False), (2, 2, False), (2, 1, False), (4, 2, True)]
)
def test_gradient_is_transformers_in_every_layout_and_budget(checkpoints, world, tp, sequence_parallel):
    budgets = [MAX_TOKENS, 2 * MAX_TOKENS, 8 * MAX_TOKENS, 2 * MAX_TOKENS]
    if tp > 1 and not sequence_parallel:  # Megatron trains no experts so
        checkpoints = [folder for folder in checkpoints if "moe" not in folder.name]
    ranks = run_ranks(_gradients, world, [str(c) for c in checkpoints], tp, sequence_parallel, budgets)
    for place, checkpoint in enumerate(checkpoints):
        _compare(checkpoint, [found[place] for found in ranks])


def _compare(checkpoint, ranks: list) -> None:
    loss, gradients, logprobs_of = _reference(checkpoint)
    norm_of_all = torch.stack([g.norm() for g in gradients.values()]).norm()
    for metrics, found, *_ in ranks[0]:
        assert abs(metrics["loss"] - loss) <= 1e-6 * abs(loss)
        assert found.keys() == gradients.keys()
        for name, expected in gradients.items():
            distance = (found[name].double() - expected).norm()
            assert distance <= 1e-5 * expected.norm() + 1e-7 * norm_of_all, name
    for _, found, *_ in ranks[0][1:]:  # budgets against each other: closer than to fp64
        for name, expected in ranks[0][0][1].items():
            assert (found[name] - expected).norm() <= 1e-6 * expected.norm() + 1e-7 * norm_of_all, name
    seen = {}
    for found in ranks:
        _, _, index, lengths, logprobs, _ = found[0]
        for i, values in zip(index.tolist(), logprobs.split(lengths.tolist()), strict=True):
            seen[i] = values[-len(logprobs_of[i]) :]
    assert sorted(seen) == list(range(len(logprobs_of)))
    for i, values in seen.items():
        assert torch.allclose(values.double(), logprobs_of[i], atol=2e-6)
