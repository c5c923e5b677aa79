"""Engine-to-trainer weights against verl's and TRL's, their metrics, and their place in the loss."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import grpo, importance
from tests.algorithms.batches import golden, on_ranks, pack, responses, run_loss, take

GOLDEN = golden("rollout_correction")
METRICS = json.loads(str(GOLDEN["_meta"]))["metrics"]
Config = importance.RolloutCorrectionConfig


def case(name):
    mask = GOLDEN[f"{name}_mask"]
    batch, place = pack(mask, logprobs=GOLDEN[f"{name}_train_logp"], rollout_logprobs=GOLDEN[f"{name}_rollout_logp"])
    return batch, place, mask


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "keys"),
    [
        ("1.2", {"rollout_is_threshold": 1.2}),
        ("2.0", {"rollout_is_threshold": 2.0}),
        ("0.5_5.0", {"rollout_is_mode": "mask", "rollout_is_threshold": 5.0, "rollout_is_lower": 0.5}),
        ("0.8_1.25", {"rollout_is_mode": "mask", "rollout_is_threshold": 1.25, "rollout_is_lower": 0.8}),
    ],
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_weights_of_verl(name, threshold, keys, level):
    batch, place, mask = case(name)
    config = Config(rollout_is=level, **keys)
    weights = importance.weights(batch, config)
    key = f"{name}_verl_{level}_th{threshold}_bn0"
    np.testing.assert_allclose(responses(weights, place, mask.shape), GOLDEN[key] * mask, rtol=1e-6, atol=1e-9)
    if level == "token":
        found = importance.metrics(batch, config)
        expected = METRICS[key]
        if "rollout_is_mode" not in keys:  # verl's metrics of a masked weight are of the unmasked one
            assert found["rollout_corr/is_mean"] == pytest.approx(expected["rollout_is_mean"], rel=1e-6)
            assert found["rollout_corr/is_eff_sample_size"] == pytest.approx(
                expected["rollout_is_eff_sample_size"], rel=1e-6
            )
            assert found["rollout_corr/is_bounded_frac"] == pytest.approx(
                expected["rollout_is_ratio_fraction_high"], rel=1e-6
            )


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("token_truncate_None_2.0", {"rollout_is": "token"}),
        ("token_mask_0.5_2.0", {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_lower": 0.5}),
        ("sequence_truncate_None_3.0", {"rollout_is": "sequence", "rollout_is_threshold": 3.0}),
        ("sequence_mask_None_3.0", {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_mode": "mask"}),
    ],
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_weights_of_trl(name, key, keys):
    batch, place, mask = case(name)
    weights = importance.weights(batch, Config(**keys))
    expected = GOLDEN[f"{name}_trl_{key}"] * mask  # per token, or per sequence [B, 1]
    np.testing.assert_allclose(responses(weights, place, mask.shape), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("peer", ["nemo", "openrlhf"])
@pytest.mark.parametrize(
    ("key", "keys"),
    [("tis_None_2.0", {}), ("icepop_0.5_2.0", {"rollout_is_mode": "mask", "rollout_is_lower": 0.5})],
)
@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_losses_of_nemo_and_openrlhf(name, key, keys, peer):
    """Their whole PPO loss with a correction: token mean, clips 0.2 and 0.28, no dual clip."""
    batch, place, mask = case(name)
    advantages = torch.from_numpy(np.broadcast_to(GOLDEN[f"{name}_adv"], mask.shape) * mask).flatten()
    batch = batch.with_(advantages=torch.where(place >= 0, advantages[place.clamp(min=0)], 0.0))
    logprobs = torch.from_numpy(GOLDEN[f"{name}_new"]).flatten()[place.clamp(min=0)]
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0} | keys
    config = grpo.Config(clip_ratio_high=0.28, clip_ratio_c=None, rollout_correction=correction)
    loss, _, _ = run_loss(grpo, batch, logprobs, config)
    np.testing.assert_allclose(loss, GOLDEN[f"{name}_{peer}_loss_{key}"], rtol=1e-7)


@pytest.mark.parametrize("name", ["c0", "c2"])
def test_golden_metrics_without_a_correction(name):
    batch, _, _ = case(name)
    found = importance.metrics(batch, Config())
    assert found.keys() == {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"}
    for metric, value in found.items():
        assert value == pytest.approx(METRICS[f"{name}_offpolicy"][metric.removeprefix("rollout_corr/")], abs=1e-7)


def test_metrics_do_not_see_the_ranks():
    batch, _, _ = case("c0")
    config = Config(rollout_is="sequence", rollout_is_threshold=1.05)
    whole = importance.metrics(batch, config)
    parts = [take(batch, rows)[0] for rows in ([3, 1], [], [0, 2])]
    for found in on_ranks(lambda part, total: importance.metrics(part, config, total), parts):
        assert found == pytest.approx(whole, abs=1e-12)


def test_the_weight_multiplies_the_policy_loss_and_has_no_gradient():
    """Ratio 1: the loss is -rho A, its gradient in the log-prob too; KL and entropy are not weighted."""
    batch, _ = pack(np.ones((1, 2)), logprobs=np.zeros((1, 2)), advantages=np.array([[1.0, -2.0]]))
    batch = batch.with_(rollout_logprobs=torch.tensor([0.0, np.log(2.0), -np.log(5.0)]), ref_logprobs=batch.logprobs)
    correction = {"rollout_is": "token", "rollout_is_threshold": 3.0}
    config = grpo.Config(rollout_correction=correction, entropy_coeff=1.0, use_kl_loss=True)
    loss, gradient, _ = run_loss(grpo, batch, batch.logprobs, config, entropy=torch.ones(3).double())
    assert loss == pytest.approx((-0.5 * 1 + 3.0 * 2) / 2 - 1.0)
    np.testing.assert_allclose(gradient, [0, -0.25, 3.0], atol=1e-12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_is_lower": 0.5}, "no meaning with rollout_is_mode=truncate"),
        ({"rollout_is_mode": "mask", "rollout_is_lower": 2.0}, "must be less than rollout_is_threshold=2"),
        ({"rollout_is_threshold": 0}, "greater than 0"),
    ],
)
def test_wrong_keys_are_named(keys, message):
    with pytest.raises(ValidationError, match=message):
        Config(**keys)
