"""GRPO, and the clipped surrogate that others share, against verl and TRL and on its corner cases."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import grpo
from tests.algorithms.batches import GOLDENS, golden, pack, responses, run_loss

ADVANTAGES, LOSSES = golden("outcome_advantages"), golden("policy_losses")
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


VERL_RTOL = 1e-7  # verl adds 1e-8 to the length in seq-mean-token-mean
KL_0_04 = {"use_kl_loss": True, "kl_loss_coef": 0.04}


def config_for(mode, length, **keys):
    return grpo.Config(
        loss_agg_mode=mode, loss_scale_factor=length if mode == "seq-mean-token-sum-norm" else None, **keys
    )


def sequence_advantages(scores, groups, **keys):
    """[B] advantages of one-token completions."""
    batch, place = pack(np.ones((len(scores), 1)), groups, np.float32(scores))
    return grpo.advantages(batch, grpo.Config(**keys)).advantages[place >= 0].tolist()


@pytest.mark.parametrize("name", ["c0", "c2", "c4"])
def test_golden_advantages(name):
    """c2 has holes in its masks; c4 has groups of 1, 3, 2 and 1."""
    mask, expected = ADVANTAGES[f"{name}_mask"], ADVANTAGES[f"{name}_grpo_std"]
    batch, place = pack(mask, ADVANTAGES[f"{name}_group"], ADVANTAGES[f"{name}_scores"])
    filled = grpo.advantages(batch, grpo.Config())
    assert batch.advantages is None and not filled.advantages[place < 0].any()
    np.testing.assert_allclose(responses(filled.advantages, place, mask.shape), expected * mask, atol=2e-6)
    in_a_run = batch.with_(loss_mask=batch.loss_mask.float(), scores=batch.scores.float())
    assert grpo.advantages(in_a_run, grpo.Config()).advantages.dtype == torch.float32


def test_worked_example():
    """Scores 1, 0, 2: mean 1, unbiased standard deviation 1."""
    example = json.loads((GOLDENS / "worked_examples.json").read_text())["grpo_doc"]
    groups = [0, 0, 0]
    np.testing.assert_allclose(
        sequence_advantages(example["scores"], groups), example["advantages_verl_std"], atol=1e-7
    )


def test_a_group_of_one_keeps_its_score():
    np.testing.assert_allclose(sequence_advantages([3.0, 1.0, 0.0], [0, 1, 1]), [3.0, 0.7071058, -0.7071058], atol=3e-6)


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -7.3])
def test_equal_scores_have_no_advantage(score):
    assert sequence_advantages([score] * 7 + [5.0, 6.0], [0] * 7 + [1] * 2)[:7] == [0.0] * 7


def test_an_empty_completion_counts_in_its_group():
    batch, place = pack(np.array([[1, 1], [0, 0], [1, 0]]), [0, 0, 0], np.float32([1.0, 0.0, 2.0]))
    advantages = grpo.advantages(batch, grpo.Config()).advantages
    np.testing.assert_allclose(advantages[place >= 0], [0.0, 0.0, 1.0], atol=2e-6)
    assert not advantages[place < 0].any()


def loss_case(name, which, new="new"):
    mask = LOSSES[f"{name}_mask"]
    advantages = LOSSES[f"{name}_adv_{which}"]
    if which == "seq":
        advantages = np.broadcast_to(advantages[:, None], mask.shape)
    batch, place = pack(mask, logprobs=LOSSES[f"{name}_old"], advantages=advantages * mask)
    logprobs = torch.from_numpy(LOSSES[f"{name}_{new}"]).flatten()[place.clamp(min=0)].requires_grad_()
    return batch, place, logprobs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["tok", "seq"])
@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, 1.5), (0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.3, 10.0)]
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_verl(name, low, high, dual, which, mode):
    key = f"{name}_vanilla_{mode}_lo{low}_hi{high}_c{dual}_{which}_is0"
    batch, place, logprobs = loss_case(name, which)
    config = config_for(
        mode, LOSSES[f"{name}_mask"].shape[1], clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual
    )
    total, gradient, metrics = run_loss(grpo, batch, logprobs, config)
    np.testing.assert_allclose(total, LOSSES[key], rtol=VERL_RTOL)
    expected = LOSSES[key + "_grad"].ravel()[place.clamp(min=0)] * (place >= 0).numpy()
    np.testing.assert_allclose(gradient, expected, atol=1e-9)
    clipfrac, _, clipfrac_lower = LOSSES[key + "_metrics"]
    assert metrics["policy/clipfrac_avg"] == pytest.approx(clipfrac, abs=1e-6)
    assert metrics["policy/pg_clipfrac_lower"] == pytest.approx(clipfrac_lower, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["tok", "seq"])
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_verl_with_engine_weights(name, which, mode):
    """Their weights as those of an engine whose log-probs differ by just as much."""
    key = f"{name}_vanilla_{mode}_lo0.2_hi0.28_c3.0_{which}_is1"
    batch, place, logprobs = loss_case(name, which)
    wanted = torch.from_numpy(LOSSES[f"{name}_is_weights"]).flatten()[place.clamp(min=0)]
    batch = batch.with_(rollout_logprobs=batch.logprobs - wanted.log())
    correction = {"rollout_is": "token", "rollout_is_threshold": 1e9}
    config = config_for(mode, LOSSES[f"{name}_mask"].shape[1], clip_ratio_high=0.28, rollout_correction=correction)
    total, gradient, metrics = run_loss(grpo, batch, logprobs, config)
    np.testing.assert_allclose(total, LOSSES[key], rtol=VERL_RTOL)
    expected = LOSSES[key + "_grad"].ravel()[place.clamp(min=0)] * (place >= 0).numpy()
    np.testing.assert_allclose(gradient, expected, atol=1e-9)
    clipfrac, _, clipfrac_lower = LOSSES[key + "_metrics"]
    assert metrics["policy/clipfrac_avg"] == pytest.approx(clipfrac, abs=1e-6)
    assert metrics["policy/pg_clipfrac_lower"] == pytest.approx(clipfrac_lower, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "mode"),
    [("bnpo", MODES[0]), ("dapo", MODES[0]), ("grpo", MODES[2]), ("dr_grpo", MODES[3])],
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_trl(name, loss, mode):
    batch, place, logprobs = loss_case(name, "seq", new="trl_new")
    config = config_for(mode, LOSSES[f"{name}_mask"].shape[1], clip_ratio_high=0.28, clip_ratio_c=None)
    total, gradient, _ = run_loss(grpo, batch, logprobs, config)
    key = f"{name}_trl_{loss}_lo0.2_hi0.28"
    np.testing.assert_allclose(total, LOSSES[key], rtol=1e-5)
    expected = LOSSES[key + "_grad"].ravel()[place.clamp(min=0)] * (place >= 0).numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_trl_with_delta_and_with_kl(name):
    """TRL's delta is the dual clip; its beta weighs k3."""
    batch, _, logprobs = loss_case(name, "seq", new="trl_new")
    bnpo = run_loss(grpo, batch, logprobs, grpo.Config(clip_ratio_high=0.28, clip_ratio_c=1.8))[0]
    np.testing.assert_allclose(bnpo, LOSSES[f"{name}_trl_bnpo_delta1.8"], rtol=1e-5)
    config = config_for("seq-mean-token-mean", 0, clip_ratio_c=None, **KL_0_04)
    _, place, _ = loss_case(name, "seq")
    reference = torch.from_numpy(LOSSES[f"{name}_ref"]).flatten()[place.clamp(min=0)]
    total = run_loss(grpo, batch.with_(ref_logprobs=reference), logprobs, config)[0]
    np.testing.assert_allclose(total, LOSSES[f"{name}_trl_grpo_beta0.04"], rtol=1e-5)


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
    torch.testing.assert_close(metrics["policy/kl_avg"][written], torch.full_like(loss[written], k3))
    gradients = torch.autograd.grad(loss.sum(), [logprobs, entropy])
    torch.testing.assert_close(gradients[0][written], -batch.advantages[written] + 0.5 * (1 - np.exp(-0.3)))
    torch.testing.assert_close(gradients[1], torch.where(written, -0.1, 0.0).double(), atol=1e-7, rtol=0)
    assert "policy/kl_avg" not in grpo.token_loss(logprobs, entropy, batch, grpo.Config())[1]


def test_metrics_are_what_they_say():
    batch, _ = pack(np.array([[1, 1, 1, 0, 1]]), logprobs=np.zeros((1, 5)), advantages=np.array([[1.0, 1, -1, 5, -1]]))
    log_ratio = torch.tensor([9.0, 0.5, 0.1, 0.5, 9.0, -0.5])  # the prompt, two up, one up, a hole, one down
    _, metrics = grpo.token_loss(log_ratio, torch.arange(6.0), batch, grpo.Config())
    expected = {
        "policy/approxkl_avg": [0.0, 0.125, 0.005, 0.125, 0.0, 0.125],
        "policy/clipfrac_avg": [0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        "policy/entropy_avg": [0.0, 1.0, 2.0, 3.0, 0.0, 5.0],
        "policy/pg_clipfrac_lower": [0.0] * 6,
        "val/ratio": [0.0, np.exp(0.5), np.exp(0.1), np.exp(0.5), 0.0, np.exp(-0.5)],
        "val/ratio_spread": [0.0, *(np.exp([0.5, 0.1, 0.5]) - 1) ** 2, 0.0, (np.exp(-0.5) - 1) ** 2],
    }
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(metrics[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
        ({"loss_scale_factor": 512}, "loss_scale_factor=512 has no meaning with loss_agg_mode=token-mean"),
        ({"clip_ratio_low": 1.5}, "less than or equal to 1"),
        ({"kl_loss_type": "k4"}, "'low_var_kl'"),
        ({"norm_adv_by_std_in_grpo": False}, "set algorithm.name=dr_grpo"),
        ({"clip_ratio": 0.2}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_keys_are_named(keys, message):
    with pytest.raises(ValidationError, match=message):
        grpo.Config(**keys)
