"""PF-PPO's weights and draws against verl's, and completions drawn under their own prompts."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megarl.algorithms import pf_ppo
from megarl.types import Completion, Prompt, Rollout
from tests.algorithms.batches import golden

GOLDEN = golden("pf_ppo")
CASES = [("pow", 1.0), ("pow", 2.0), ("max_min", 2.0), ("max_random", 2.0)]


@pytest.mark.parametrize(("method", "power"), CASES)
def test_golden_vectors(method, power):
    config = pf_ppo.PFPPOConfig(reweight_method=method, weight_pow=power)
    scores = torch.from_numpy(GOLDEN["c0_scores"]).float()
    np.testing.assert_allclose(pf_ppo.weights(scores, config), GOLDEN[f"c0_{method}_p{power}_weights"], rtol=1e-6)
    for seed in (0, 7):
        rows = pf_ppo.draw(scores, config, torch.Generator().manual_seed(seed))
        np.testing.assert_array_equal(rows, GOLDEN[f"c0_{method}_p{power}_seed{seed}_rows"])


def rollouts():
    def completion(token):
        one = np.array([token])
        return Completion(one, np.zeros(1), "stop", np.ones(1, np.uint8), np.zeros(1, np.int32))

    return [
        Rollout(
            Prompt(id=i, token_ids=np.array([i]), messages=""),
            [completion(10 * i + j) for j in range(3)],
            scores=np.array(scores),
            rewards={"r": np.array(scores) * 2},
            texts=[f"{i}.{j}" for j in range(3)],
        )
        for i, scores in enumerate([[0.0, 1.0, -2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    ]


def test_completions_stay_with_their_prompts():
    before, config = rollouts(), pf_ppo.PFPPOConfig()
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    drawn = pf_ppo.resampled(before, config, generator)
    assert sum(len(r.completions) for r in drawn) == 9 and 1 not in [r.prompt.id for r in drawn]
    for rollout in drawn:
        tokens = [int(c.token_ids[0]) for c in rollout.completions]
        assert rollout.texts == [f"{token // 10}.{token % 10}" for token in tokens]
        assert {token // 10 for token in tokens} == {rollout.prompt.id}
        expected = before[rollout.prompt.id].scores[[token % 10 for token in tokens]]
        assert rollout.scores.tolist() == expected.tolist() and rollout.rewards["r"].tolist() == (2 * expected).tolist()
    generator.set_state(state)  # as after a resume
    again = pf_ppo.resampled(before, config, generator)
    assert [r.texts for r in again] == [r.texts for r in drawn]


def test_wrong_keys_are_named():
    with pytest.raises(ValidationError, match="'max_random'"):
        pf_ppo.PFPPOConfig(reweight_method="min")
