"""GRPO against verl and TRL, on its corner cases, and over ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import grpo
from tests.algorithms.batches import on_ranks, pack, take

GOLDENS = Path(__file__).parents[1] / "goldens"
ADVANTAGES = np.load(GOLDENS / "outcome_advantages.npz")
LOSSES = np.load(GOLDENS / "policy_losses.npz")
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def config_for(mode, length, **keys):
    return grpo.Config(
        loss_agg_mode=mode, loss_scale_factor=length if mode == "seq-mean-token-sum-norm" else None, **keys
    )


def sequence_advantages(scores, groups, **keys):
    """[B] advantages of one-token completions."""
    batch, place = pack(np.ones((len(scores), 1)), groups, np.float32(scores))
    return grpo.advantages(batch, grpo.Config(**keys)).advantages[place >= 0].tolist()


@pytest.mark.parametrize("norm", [True, False], ids=["std", "nostd"])
@pytest.mark.parametrize("name", ["c0", "c2", "c4"])
def test_golden_advantages(name, norm):
    """c2 has holes in its masks; c4 has groups of 1, 3, 2 and 1."""
    mask, expected = ADVANTAGES[f"{name}_mask"], ADVANTAGES[f"{name}_grpo_{'std' if norm else 'nostd'}"]
    batch, place = pack(mask, ADVANTAGES[f"{name}_group"], ADVANTAGES[f"{name}_scores"])
    filled = grpo.advantages(batch, grpo.Config(norm_adv_by_std_in_grpo=norm))
    assert filled.advantages.dtype == torch.float32 and batch.advantages is None
    assert not filled.advantages[place < 0].any()
    np.testing.assert_allclose(filled.advantages[place >= 0], expected.ravel()[place[place >= 0]], atol=2e-6)


def test_worked_example():
    """Scores 1, 0, 2: mean 1, unbiased standard deviation 1."""
    example = json.loads((GOLDENS / "worked_examples.json").read_text())["grpo_doc"]
    groups = [0, 0, 0]
    assert sequence_advantages(example["scores"], groups, norm_adv_by_std_in_grpo=False) == [0.0, -1.0, 1.0]
    np.testing.assert_allclose(
        sequence_advantages(example["scores"], groups), example["advantages_verl_std"], atol=1e-7
    )


def test_a_group_of_one_keeps_its_score():
    np.testing.assert_allclose(sequence_advantages([3.0, 1.0, 0.0], [0, 1, 1]), [3.0, 0.7071058, -0.7071058], atol=3e-6)
    assert sequence_advantages([3.0, 1.0, 0.0], [0, 1, 1], norm_adv_by_std_in_grpo=False) == [3.0, 0.5, -0.5]


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -7.3])
def test_equal_scores_have_no_advantage(score):
    assert sequence_advantages([score] * 7 + [5.0, 6.0], [0] * 7 + [1] * 2)[:7] == [0.0] * 7


def test_an_empty_completion_counts_in_its_group():
    batch, place = pack(np.array([[1, 1], [0, 0], [1, 0]]), [0, 0, 0], np.float32([1.0, 0.0, 2.0]))
    advantages = grpo.advantages(batch, grpo.Config(norm_adv_by_std_in_grpo=False)).advantages
    assert advantages[place >= 0].tolist() == [0.0, 0.0, 1.0] and not advantages[place < 0].any()


def loss_case(name, which, new="new"):
    mask = LOSSES[f"{name}_mask"]
    advantages = LOSSES[f"{name}_adv_{which}"]
    if which == "seq":
        advantages = np.broadcast_to(advantages[:, None], mask.shape)
    batch, place = pack(mask, logprobs=LOSSES[f"{name}_old"], advantages=advantages * mask)
    logprobs = torch.from_numpy(LOSSES[f"{name}_{new}"]).flatten()[place.clamp(min=0)].requires_grad_()
    return batch, place, logprobs


def run_loss(batch, logprobs, config, entropy=None, **references):
    """(weighted loss, gradient [N], mean metrics) of a batch that is a whole mini-batch."""
    batch = batch.with_(token_weights=grpo.weights(batch, config), **references)
    loss, metrics = grpo.token_loss(logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, batch, config)
    total = (batch.token_weights * loss).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient, {name: (m.sum() / batch.loss_mask.sum()).item() for name, m in metrics.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["tok", "seq"])
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.28, 3.0), (0.1, 0.3, 10.0)])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_verl(name, low, high, dual, which, mode):
    """verl's also clips twice (negative advantages, ratio over `dual`): such tokens are put back, or left out."""
    batch, place, logprobs = loss_case(name, which)
    config = config_for(mode, LOSSES[f"{name}_mask"].shape[1], clip_ratio_low=low, clip_ratio_high=high)
    total, gradient, metrics = run_loss(batch, logprobs, config)
    key = f"{name}_vanilla_{mode}_lo{low}_hi{high}_c{dual}_{which}_is0"
    ratio = (logprobs.detach() - batch.logprobs).clamp(-20, 20).exp()
    twice = (batch.advantages < 0) & (ratio > dual) & (batch.loss_mask > 0)
    surplus = (grpo.weights(batch, config) * -batch.advantages * (ratio - dual))[twice].sum().item()
    np.testing.assert_allclose(total - surplus, LOSSES[key], rtol=2e-6, atol=1e-6 * abs(surplus))
    expected = LOSSES[key + "_grad"].ravel()[place.clamp(min=0)] * (place >= 0).numpy()
    np.testing.assert_allclose(gradient[~twice], expected[~twice], rtol=1e-5, atol=1e-9)
    clipfrac, negative_kl, _ = LOSSES[key + "_metrics"]
    assert metrics["policy/clipfrac_avg"] == pytest.approx(clipfrac, abs=1e-6)


def test_some_golden_loss_has_no_dual_clip():
    """So that the test above compares a whole loss too, without its correction."""
    batch, _, logprobs = loss_case("c2", "seq")
    assert not ((batch.advantages < 0) & ((logprobs - batch.logprobs) > np.log(10.0)) & (batch.loss_mask > 0)).any()


@pytest.mark.parametrize(
    ("loss", "mode"), [("bnpo", MODES[0]), ("grpo", "seq-mean-token-mean"), ("dr_grpo", "seq-mean-token-sum-norm")]
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_trl(name, loss, mode):
    batch, place, logprobs = loss_case(name, "seq", new="trl_new")
    config = config_for(mode, LOSSES[f"{name}_mask"].shape[1], clip_ratio_high=0.28)
    total, gradient, _ = run_loss(batch, logprobs, config)
    key = f"{name}_trl_{loss}_lo0.2_hi0.28"
    np.testing.assert_allclose(total, LOSSES[key], rtol=1e-5)
    expected = LOSSES[key + "_grad"].ravel()[place.clamp(min=0)] * (place >= 0).numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)


def test_kl_and_entropy_terms():
    """At ratio 1 the loss is -A + beta * k3 - c * entropy."""
    batch, place, logprobs = loss_case("c2", "tok")
    logprobs = batch.logprobs.clone().requires_grad_()
    reference = logprobs.detach() - 0.3
    entropy = torch.full_like(logprobs, 2.0, requires_grad=True)
    config = grpo.Config(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1)
    assert grpo.needs(config).reference and not grpo.needs(grpo.Config()).reference
    loss, metrics = grpo.token_loss(logprobs, entropy, batch.with_(ref_logprobs=reference), config)
    k3 = np.exp(-0.3) - 1 + 0.3
    written = batch.loss_mask > 0
    torch.testing.assert_close(loss[written], -batch.advantages[written] + 0.5 * k3 - 0.1 * 2.0)
    torch.testing.assert_close(metrics["objective/kl"][written], torch.full_like(loss[written], k3))
    gradients = torch.autograd.grad(loss.sum(), [logprobs, entropy])
    torch.testing.assert_close(gradients[0][written], -batch.advantages[written] + 0.5 * (1 - np.exp(-0.3)))
    torch.testing.assert_close(gradients[1], torch.where(written, -0.1, 0.0).double(), atol=1e-7, rtol=0)
    assert "objective/kl" not in grpo.token_loss(logprobs, entropy, batch, grpo.Config())[1]


def test_metrics_are_what_they_say():
    batch, _ = pack(np.array([[1, 1, 1, 0, 1]]), logprobs=np.zeros((1, 5)), advantages=np.array([[1.0, 1, -1, 5, -1]]))
    log_ratio = torch.tensor([9.0, 0.5, 0.1, 0.5, 9.0, -0.5])  # the prompt, two up, one up, a hole, one down
    _, metrics = grpo.token_loss(log_ratio, torch.arange(6.0), batch, grpo.Config())
    expected = {
        "policy/approxkl_avg": [0.0, 0.125, 0.005, 0.125, 0.0, 0.125],
        "policy/clipfrac_avg": [0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        "policy/entropy_avg": [0.0, 1.0, 2.0, 3.0, 0.0, 5.0],
        "val/ratio": [0.0, np.exp(0.5), np.exp(0.1), np.exp(0.5), 0.0, np.exp(-0.5)],
    }
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(metrics[name], values, rtol=1e-6, err_msg=name)


def test_what_is_masked_out_cannot_spoil_the_loss():
    batch, place, logprobs = loss_case("c2", "tok")
    out = batch.loss_mask == 0
    config = grpo.Config(use_kl_loss=True, kl_loss_type="mse", entropy_coeff=0.1)
    entropy = torch.ones_like(logprobs)
    clean = run_loss(batch, logprobs, config, entropy, ref_logprobs=batch.logprobs)
    spoiled = torch.where(out, -torch.inf, logprobs.detach()).requires_grad_()
    entropy = torch.where(out, torch.nan, 1.0).double()
    dirty = run_loss(batch, spoiled, config, entropy, ref_logprobs=torch.where(out, torch.nan, batch.logprobs))
    assert clean[0] == dirty[0] and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3, 4, 5]], [[5, 0, 3], [1, 2, 4]], [[4], [], [0, 1, 2, 3, 5]]])
def test_advantages_and_gradients_do_not_see_the_layout(mode, ranks):
    random = np.random.default_rng(0)
    mask = random.integers(0, 2, (6, 9))
    mask[2] = 0
    batch, _ = pack(mask, [0, 0, 1, 1, 1, 2], np.float32(random.normal(size=6)), logprobs=random.normal(size=(6, 9)))
    batch = batch.with_(ref_logprobs=batch.logprobs + 0.1)
    config = config_for(mode, 9, use_kl_loss=True, kl_loss_coef=0.1)
    current = batch.logprobs + torch.from_numpy(random.normal(size=len(batch.tokens)) * 0.3)

    def gradient(part, sum_over_ranks, logprobs):
        part = grpo.advantages(part, config, sum_over_ranks)
        part = part.with_(token_weights=grpo.weights(part, config, sum_over_ranks))
        logprobs = logprobs.clone().requires_grad_()
        loss, _ = grpo.token_loss(logprobs, torch.zeros_like(logprobs), part, config)
        return part.advantages, torch.autograd.grad((part.token_weights * loss).sum(), logprobs)[0]

    advantages, gradients = gradient(batch, lambda tensor: tensor, current)
    assert advantages.abs().sum() > 1 and gradients.abs().sum() > 0.1
    parts, tokens = zip(*(take(batch, rows) for rows in ranks), strict=True)
    own_tokens = {id(part): own for part, own in zip(parts, tokens, strict=True)}
    split = on_ranks(lambda part, total: gradient(part, total, current[own_tokens[id(part)]]), list(parts))
    for (own_advantages, own_gradients), own in zip(split, tokens, strict=True):
        torch.testing.assert_close(own_advantages, advantages[own], atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(own_gradients, gradients[own], atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
        ({"loss_scale_factor": 512}, "loss_scale_factor=512 has no meaning with loss_agg_mode=token-mean"),
        ({"clip_ratio_low": 1.5}, "less than or equal to 1"),
        ({"kl_loss_type": "full"}, "'low_var_kl'"),
        ({"clip_ratio": 0.2}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_keys_are_named(keys, message):
    with pytest.raises(ValidationError, match=message):
        grpo.Config(**keys)
