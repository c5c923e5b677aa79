"""Every algorithm, under every aggregation mode: ranks, micro-batches and their order do not show in what is learnt."""

import itertools

import numpy as np
import pytest
import torch

from megarl import algorithms
from megarl.algorithms import interface
from tests.algorithms.batches import on_ranks, pack, take

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KL_IN_REWARD = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.3}}
KL_IN_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
TRICKS = {"normalize_reward": True, "whiten_rewards": True}
ENGINE = {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": 1.1}}
LAYOUTS = [[[0, 1, 2, 3, 4, 5, 6, 7]], [[7, 6, 2, 3], [5, 4, 0, 1]], [[6, 7, 3, 2], [], [1, 0], [4, 5]]]


def configurations():
    for name in algorithms.names():
        config = algorithms.get(name).Config
        extras = [KL_IN_REWARD | ENGINE, KL_IN_LOSS]
        if name == "online_dpo":
            extras = [{"loss_type": "sigmoid"}, {"loss_type": "ipo", "beta": 0.5}]
        if "normalize_reward" in config.model_fields:
            extras[0] = extras[0] | TRICKS
        if "token_level_kl" in config.model_fields:
            extras = [extra | {"token_level_kl": level} for extra, level in itertools.product(extras, [True, False])]
        for mode, extra in itertools.product(MODES if "loss_agg_mode" in config.model_fields else [None], extras):
            keys = dict(extra) if mode is None else extra | {"loss_agg_mode": mode}
            if mode == "seq-mean-token-sum-norm" or name == "dr_grpo":
                keys["loss_scale_factor"] = 9
            yield pytest.param(name, keys, id=f"{name}-{'-'.join(map(str, keys.values()))[:60]}")


def a_batch():
    """Four pairs, with holes in the masks, an empty completion, one of one token, a group of equal scores, float64."""
    random = np.random.default_rng(0)
    mask = random.integers(0, 2, (8, 9))
    mask[2], mask[5], mask[5, 0] = 0, 0, 1
    scores = random.normal(size=8)
    scores[7] = scores[6]
    draws = {name: random.normal(size=(8, 9)) * 0.5 - 1 for name in ("logprobs", "ref_logprobs", "rollout_logprobs")}
    batch, _ = pack(mask, [0, 0, 1, 1, 2, 2, 3, 3], scores, values=random.normal(size=(8, 9)), **draws)
    current = batch.logprobs + torch.from_numpy(random.normal(size=len(batch.tokens)) * 0.4)
    return batch.with_(baseline_scores=torch.from_numpy(random.normal(size=8))), current


def learnt(algorithm, config, part, current, sum_over_ranks, micro_batches):
    """(advantages, gradient [N], sum of the weighted loss, metric sums) of one rank; rows per micro-batch."""
    part = algorithm.advantages(part, config, sum_over_ranks, config.kl_controller().value)
    part = part.with_(token_weights=algorithm.weights(part, config, sum_over_ranks))
    gradient, loss_sum, sums = torch.zeros_like(current), 0.0, {}
    for rows in micro_batches:
        micro, at = take(part, rows)
        logprobs = current[at].clone().requires_grad_()
        loss, metrics = algorithm.token_loss(logprobs, torch.ones_like(logprobs), micro, config)
        total = (micro.token_weights * loss).sum()
        gradient[at] = torch.autograd.grad(total, logprobs)[0]
        loss_sum += total.item()
        for name, values in metrics.items():
            sums[name] = sums.get(name, 0.0) + values.sum().item()
    return part.advantages, gradient, loss_sum, sums


@pytest.mark.parametrize(("name", "keys"), list(configurations()))
def test_what_is_learnt_does_not_see_the_layout(name, keys):
    algorithm = algorithms.get(name)
    config = algorithm.Config(**keys)
    batch, current = a_batch()
    one_by_one = 2 if algorithm.needs(config).whole_groups else 1
    whole = learnt(algorithm, config, batch, current, interface.identity, [list(range(8))])
    assert whole[0].abs().sum() > 0.1 and whole[1].abs().sum() > 1e-3
    for ranks in LAYOUTS:
        parts, tokens = zip(*(take(batch, rows) for rows in ranks), strict=True)
        own = {id(part): current[at] for part, at in zip(parts, tokens, strict=True)}

        def on_rank(part, total, own=own):
            rows = list(range(len(part.index)))
            cuts = [rows[i : i + one_by_one] for i in range(0, len(rows), one_by_one)][::-1]
            return learnt(algorithm, config, part, own[id(part)], total, cuts)

        results = on_ranks(on_rank, list(parts))
        for (advantages, gradient, *_), at in zip(results, tokens, strict=True):
            torch.testing.assert_close(advantages, whole[0][at], atol=1e-12, rtol=0)
            torch.testing.assert_close(gradient, whole[1][at], atol=1e-12, rtol=0)
        assert sum(loss for _, _, loss, _ in results) == pytest.approx(whole[2], abs=1e-12)
        for metric, total in whole[3].items():
            assert sum(sums.get(metric, 0.0) for *_, sums in results) == pytest.approx(total, abs=1e-11), metric


@pytest.mark.parametrize(("name", "keys"), list(configurations()))
def test_a_loss_per_token_is_declared_by_those_that_have_one(name, keys):
    """The fused path takes such a loss chunk by chunk, with nothing of the other tokens."""
    algorithm = algorithms.get(name)
    config = algorithm.Config(**keys)
    batch, current = a_batch()
    batch = algorithm.advantages(batch, config, kl_coef=config.kl_controller().value)

    def found(chosen):
        """Losses and slopes of the chosen tokens, when nothing is known of the others."""
        inputs = [torch.where(chosen, v, 0).requires_grad_() for v in (current, current.sin(), current.exp())]
        loss, _ = algorithm.token_loss(*inputs[:2], batch, config, inputs[2])
        slopes = torch.autograd.grad(loss[chosen].sum(), inputs, allow_unused=True)
        return torch.stack([loss.detach(), *(slope for slope in slopes if slope is not None)])[:, chosen]

    everything = torch.ones(len(current), dtype=torch.bool)
    even = torch.arange(len(current)) % 2 == 0
    assert found(even).abs().sum() > 1e-3
    assert torch.equal(found(even), found(everything)[:, even]) == algorithm.needs(config).per_token_loss


@pytest.mark.parametrize("name", algorithms.names())
def test_what_is_masked_out_cannot_spoil_the_loss(name):
    algorithm = algorithms.get(name)
    keys = {"loss_scale_factor": 9} if name == "dr_grpo" else {}
    config = algorithm.Config(**keys | (KL_IN_LOSS if name != "online_dpo" else {}))
    batch, current = a_batch()
    batch = algorithm.advantages(batch, config, kl_coef=config.kl_controller().value)
    batch = batch.with_(token_weights=algorithm.weights(batch, config))
    out = batch.loss_mask == 0

    def found(poison):
        logprobs = torch.where(out, poison, current).requires_grad_()
        spoiled = batch.with_(**{n: torch.where(out, poison, getattr(batch, n)) for n in ("logprobs", "ref_logprobs")})
        loss, metrics = algorithm.token_loss(logprobs, torch.full_like(logprobs, 2.0), spoiled, config)
        return [loss, *torch.autograd.grad((batch.token_weights * loss).sum(), logprobs), *metrics.values()]

    for clean, infinite, nan in zip(found(0.0), found(-torch.inf), found(torch.nan), strict=True):
        assert torch.equal(clean, infinite) and torch.equal(clean, nan) and not clean[out].any()


@pytest.mark.parametrize("name", algorithms.names())
def test_a_masked_placeholder_learns_nothing(name):
    """What a rank without a share of a mini-batch runs."""
    algorithm = algorithms.get(name)
    config = algorithm.Config(**({"loss_scale_factor": 9} if name == "dr_grpo" else {}))
    batch, _ = pack(np.zeros((1, 1)), scores=np.zeros(1), logprobs=np.zeros((1, 1)), ref_logprobs=np.zeros((1, 1)))
    batch = batch.with_(advantages=torch.zeros(1, dtype=torch.float64))
    batch = batch.with_(token_weights=algorithm.weights(batch, config))
    logprobs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss, metrics = algorithm.token_loss(logprobs, torch.ones(1).double(), batch, config)
    (gradient,) = torch.autograd.grad((batch.token_weights * loss).sum(), logprobs)
    assert batch.token_weights.item() == loss.item() == gradient.item() == 0
    assert not any(values.any() for values in metrics.values())
