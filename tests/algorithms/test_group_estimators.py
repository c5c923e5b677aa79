"""The estimators on scores alone: golden vectors, definitions, and their corner cases."""

import json

import numpy as np
import pytest
import torch

from megarl.algorithms import dapo, dr_grpo, groups, grpo, reinforce_plus_plus_baseline, remax, rloo
from tests.algorithms.batches import GOLDENS, golden, pack, responses

GOLDEN = golden("outcome_advantages")
EXAMPLES = json.loads((GOLDENS / "worked_examples.json").read_text())
NAMES = ["c0", "c2", "c4"]  # c2 has holes in its masks, c4 groups of 1, 3, 2 and 1
DR_GRPO = dr_grpo.Config(loss_scale_factor=8)


def estimate(algorithm, config, name, **fields):
    mask = GOLDEN[f"{name}_mask"]
    batch, place = pack(mask, GOLDEN[f"{name}_group"], GOLDEN[f"{name}_scores"])
    fields = {key: torch.from_numpy(values) for key, values in fields.items()}
    return mask, responses(algorithm.advantages(batch.with_(**fields), config).advantages, place, mask.shape)


def cases(*peers):
    """Those of the peers' arrays that exist: not every system takes ragged groups."""
    return [(name, peer) for name in NAMES for peer in peers if f"{name}_{peer}" in GOLDEN]


@pytest.mark.parametrize(("name", "peer"), cases("grpo_nostd", "trl_grpo_none", "slime_grpo_nostd", "openrlhf_dr_grpo"))
def test_dr_grpo(name, peer):
    mask, found = estimate(dr_grpo, DR_GRPO, name)
    expected = GOLDEN[f"{name}_{peer}"]
    expected = expected if expected.ndim == 2 else expected[:, None]
    np.testing.assert_allclose(found, expected * mask, atol=1e-6)


@pytest.mark.parametrize("algorithm", [grpo, dapo])
@pytest.mark.parametrize("name", NAMES)
def test_grpo_and_dapo(name, algorithm):
    """DAPO leaves groups of equal scores out, among them groups of one."""
    mask, found = estimate(algorithm, algorithm.Config(), name)
    alone = np.bincount(GOLDEN[f"{name}_group"].astype(int))[GOLDEN[f"{name}_group"].astype(int)] == 1
    kept = mask * (~alone[:, None] if algorithm is dapo else 1)
    np.testing.assert_allclose(found, GOLDEN[f"{name}_grpo_std"] * kept, atol=2e-6)
    if algorithm is grpo and name != "c4":
        np.testing.assert_allclose(found, GOLDEN[f"{name}_slime_grpo_std"][:, None] * mask, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "peer"), cases("rloo", "rloo_vec", "trl_rloo", "openrlhf_rloo", "nemo_grpo_loo1_norm0")
)
def test_rloo(name, peer):
    """verl's loop keeps the reward of a completion without siblings; here and in its vectorised form it has 0."""
    mask, found = estimate(rloo, rloo.Config(), name)
    expected = GOLDEN[f"{name}_{peer}"]
    expected = (expected if expected.ndim == 2 else expected[:, None]) * mask
    groups = GOLDEN[f"{name}_group"].astype(int)
    compared = (np.bincount(groups)[groups] > 1) if peer == "rloo" else np.ones(len(mask), bool)
    np.testing.assert_allclose(found[compared], expected[compared], atol=1e-6 if peer.startswith("nemo") else 1e-9)
    assert not found[~compared].any()


@pytest.mark.parametrize("name", NAMES)
def test_reinforce_plus_plus_baseline(name):
    mask, found = estimate(reinforce_plus_plus_baseline, reinforce_plus_plus_baseline.Config(), name)
    np.testing.assert_allclose(found, GOLDEN[f"{name}_rfpp_baseline"] * mask, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_remax(name):
    """verl's token rewards: their sum is the score's place, so the last token's reward is what is left of it."""
    mask, tokens = GOLDEN[f"{name}_mask"], GOLDEN[f"{name}_tok_rewards"]
    last = np.array([np.flatnonzero(row)[-1] for row in mask])
    scores = tokens[np.arange(len(mask)), last]
    charged = tokens.copy()
    charged[np.arange(len(mask)), last] = 0.0
    batch, place = pack(mask, GOLDEN[f"{name}_group"], scores, logprobs=-charged * mask)
    batch = batch.with_(
        ref_logprobs=torch.zeros_like(batch.logprobs),
        baseline_scores=torch.from_numpy(GOLDEN[f"{name}_remax_baseline"]),
    )
    config = remax.Config(use_kl_in_reward=True)
    found = responses(remax.advantages(batch, config, kl_coef=1.0).advantages, place, mask.shape)
    np.testing.assert_allclose(found, GOLDEN[f"{name}_remax_adv"] * mask, atol=1e-9)
    to_go = found + GOLDEN[f"{name}_remax_baseline"][:, None] * mask
    np.testing.assert_allclose(to_go, GOLDEN[f"{name}_remax_ret"] * mask, atol=1e-9)
    assert remax.needs(config).greedy_baseline


def advantages(algorithm, config, scores, groups):
    batch, place = pack(np.ones((len(scores), 1)), groups, np.float64(scores))
    return algorithm.advantages(batch, config).advantages[place >= 0].numpy()


def test_the_worked_example_of_rloo():
    """Rewards 1..3, 2..4, 5..7, 8..10 in [k, prompt]: element i belongs to prompt i % 3."""
    example = EXAMPLES["rloo_doc"]
    rewards, prompts = np.array(example["rewards"]), np.arange(12) % 3
    found = advantages(rloo, rloo.Config(), rewards, prompts)
    assert found[0] == pytest.approx(-4, abs=1e-12) and found[7] == pytest.approx(4 / 3, abs=1e-12)
    np.testing.assert_allclose(found, example["advantages"], atol=1e-12)
    for i in range(12):
        others = rewards[(prompts == i % 3) & (np.arange(12) != i)]
        assert found[i] == pytest.approx(rewards[i] - others.mean(), abs=1e-12)


def test_the_worked_example_of_grpo():
    scores, groups = EXAMPLES["grpo_doc"]["scores"], [0, 0, 0]
    assert advantages(dr_grpo, DR_GRPO, scores, groups).tolist() == [0.0, -1.0, 1.0]
    np.testing.assert_allclose(advantages(grpo, grpo.Config(), scores, groups), [0, -0.999999, 0.999999], atol=1e-9)


def test_all_equal_groups_and_groups_of_one():
    scores, groups = [0.1] * 7 + [5.0, 3.0, 3.0], [0] * 7 + [1, 2, 2]
    for algorithm, config, alone in [(dr_grpo, DR_GRPO, 5.0), (rloo, rloo.Config(), 0.0), (dapo, dapo.Config(), 0.0)]:
        found = advantages(algorithm, config, scores, groups)
        np.testing.assert_allclose(found, [0.0] * 7 + [alone, 0.0, 0.0], atol=1e-9)


def test_dapo_leaves_out_what_teaches_nothing():
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]])
    batch, place = pack(mask, [0, 0, 1, 1], np.array([0.1, 0.1, 0.0, 1.0]))
    batch = dapo.advantages(batch, dapo.Config())
    np.testing.assert_array_equal(responses(batch.loss_mask, place, mask.shape), mask * [[0], [0], [1], [1]])
    weights = responses(dapo.weights(batch, dapo.Config()), place, mask.shape)
    np.testing.assert_allclose(weights, mask * [[0], [0], [0.2], [0.2]])


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1e-7, 1e-7], [-7.3] * 3, [0.1, 0.1, 0.1, 0.1 + 1e-6], [-1.0, 1.0]])
def test_all_equal(scores):
    batch, _ = pack(np.ones((len(scores), 1)), [0] * len(scores))
    assert groups.all_equal(torch.tensor(scores).double(), batch).tolist() == [len(set(scores)) == 1] * len(scores)


def test_the_kl_is_charged_before_the_baseline():
    """k1 0.1 and 0.2 a token; scores 1 and 2; coefficient 10."""
    mask = np.array([[1, 1], [1, 0]])
    batch, place = pack(mask, [0, 0], np.array([1.0, 2.0]), logprobs=np.array([[0.1, 0.1], [0.2, 0]]))
    batch = batch.with_(ref_logprobs=torch.zeros_like(batch.logprobs))
    for algorithm, config in [(rloo, rloo.Config), (dr_grpo, lambda **k: dr_grpo.Config(loss_scale_factor=8, **k))]:
        filled = algorithm.advantages(batch, config(use_kl_in_reward=True), kl_coef=10.0)
        rewards = [1.0 - 10 * 0.2, 2.0 - 10 * 0.2]
        scale = 1.0 if algorithm is rloo else 0.5
        expected = scale * (rewards[0] - rewards[1])
        np.testing.assert_allclose(responses(filled.advantages, place, mask.shape), [[expected] * 2, [-expected, 0]])
        np.testing.assert_allclose(responses(filled.reward_kl, place, mask.shape), [[0.1, 0.1], [0.2, 0]])
