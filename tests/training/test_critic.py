"""Critic and reward model equal transformers' classifiers; their gradients and the actor's do not see the layout."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from megarl import algorithms, models
from megarl.config.model import ModelConfig, OptimConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import from_rollouts, select
from megarl.errors import MegarlError
from megarl.models import heads
from megarl.ops import dispatch, linear_logprob
from megarl.parallel import layout as layouts
from megarl.sft import share_of_pairs
from megarl.training.critic import Critic
from megarl.training.distribute import distribute
from megarl.training.policy import Policy
from megarl.training.reward_model import RewardModel, pair_loss, pairs
from tests import tiny_models
from tests.ops.test_self_test import forget_the_last_column, install
from tests.parallel_utils import run_ranks
from tests.training.test_policy import _whole_gradients, make_rollouts

VF_COEF, CLIPRANGE = 0.5, 0.2
BUDGETS = (48, 400)
# Every aggregation mode by an algorithm that has it, and the algorithms whose loss is not the policy gradient's.
ACTORS = {
    "token-mean": ("ppo", {"normalize_advantage": False, "loss_agg_mode": "token-mean"}),
    "seq-mean-token-sum": ("grpo", {"loss_agg_mode": "seq-mean-token-sum"}),
    "seq-mean-token-mean": ("grpo", {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True}),
    "seq-mean-token-sum-norm": ("dr_grpo", {"loss_scale_factor": 7.0}),
    "exact KL": ("grpo", {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3}),
    "sequence ratio": ("gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
    "completions": ("rloo", {}),
    "pairs": ("online_dpo", {"beta": 0.3}),
}
# Tokens of a micro-batch, order of the sequences, fused or not, tokens of a fused chunk.
ACTOR_WAYS = [(48, False, False, 1000), (400, False, True, 1000), (400, True, True, 5), (48, False, True, 5)]
PREFERENCES = [(np.arange(5, 5 + n, dtype=np.int32), np.arange(90, 90 + m, dtype=np.int32)) for n, m in
               [(3, 9), (1, 4), (12, 2), (6, 6)]]  # fmt: skip
LAYOUTS = [(1, 1, False), (2, 2, False), (2, 2, True), (2, 1, False)]


def settings(path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32", transformer_impl="local")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Checkpoints of transformers' sequence classifiers with one label: an untied and a tied family."""
    folders = []
    for name in ("llama-untied-llama3", "qwen2-tied"):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(5)
        config = tiny_models.CONFIGS[name]()
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return str(tiny_models.make("qwen2-tied", tmp_path_factory.mktemp("causal")))


def _batch(layout, num_groups=4, n=2, shuffled=False):
    whole = from_rollouts(make_rollouts(num_groups, n))
    batch = distribute(whole if layout.is_first else None, layout, num_groups * n, seed=0, step=1, together=n)
    return select(batch, torch.arange(len(batch.index)).flip(0)) if shuffled else batch


def _critic(folder, layout) -> list:
    critic = Critic(settings(folder), layout, OptimConfig(), 10, CLIPRANGE, VF_COEF)
    found = []
    for budget, shuffled in [(BUDGETS[0], False), (BUDGETS[1], False), (BUDGETS[1], True)]:
        batch = _batch(layout, shuffled=shuffled)
        values = critic.values(batch, budget)
        target = batch.with_(values=values - 0.1, returns=torch.sin(batch.tokens.float()) * batch.loss_mask)
        metrics = critic.gradients(target, budget)
        found.append((metrics, _whole_gradients(critic), batch.index, batch.lengths, values))
    return found


def _actor(causal, layout) -> dict:
    policy = Policy(settings(causal), layout, 0.7, OptimConfig(), 10)
    found = {}
    for label, (name, keys) in ACTORS.items():
        algorithm, config = algorithms.get(name), algorithms.get(name).Config(**keys)
        needs = algorithm.needs(config)
        exact = policy if needs.full_kl_in_loss else None  # itself, with other hidden states, as the reference
        found[label] = []
        for budget, shuffled, fused, chunk_tokens in ACTOR_WAYS:
            policy.fused, linear_logprob.CHUNK_BYTES["cpu"] = fused, chunk_tokens * policy.output_weight[:, 0].nbytes
            batch = _batch(layout, shuffled=shuffled)
            logprobs, hidden = policy.logprobs_and_hidden(batch, budget)
            batch = batch.with_(logprobs=0.95 * logprobs, ref_logprobs=0.9 * logprobs, values=0.1 * logprobs)
            batch = batch.with_(ref_hidden=0.8 * hidden) if exact else batch
            batch = algorithm.advantages(batch, config, policy.sum_over_dp, 0.3 if name == "online_dpo" else 0.0)
            batch = batch.with_(token_weights=algorithm.weights(batch, config, policy.sum_over_dp))

            def token_loss(logprobs, entropy, micro, full_kl=None, algorithm=algorithm, config=config):
                return algorithm.token_loss(logprobs, entropy, micro, config, full_kl)

            metrics = policy.gradients(batch, token_loss, budget, exact, needs.whole_groups, needs.per_token_loss)
            found[label].append((metrics, _whole_gradients(policy)))
    return found


def _a2c(causal, layout) -> tuple:
    """PPO's gradient at the first mini-batch, and that of -advantage * logprob, through the model."""
    ppo, policy = algorithms.get("ppo"), Policy(settings(causal), layout, 0.7, OptimConfig(), 10)
    config, batch = ppo.Config(), _batch(layout)
    batch = batch.with_(logprobs=policy.logprobs(batch, 400)[0], values=torch.cos(batch.tokens.float()))
    batch = ppo.advantages(batch, config, policy.sum_over_dp)
    batch = batch.with_(token_weights=ppo.weights(batch, config, policy.sum_over_dp))
    policy.gradients(batch, lambda logprobs, entropy, micro: ppo.token_loss(logprobs, entropy, micro, config), 400)
    surrogate = _whole_gradients(policy)
    policy.gradients(batch, lambda logprobs, entropy, micro: (-micro.advantages * logprobs, {}), 400)
    return surrogate, _whole_gradients(policy)


def _self_tests(causal, layout) -> dict:
    """What a policy says of wrong kernels; the process computes with the reference from then on."""
    found = {}
    for fused in ("auto", "on", "off"):
        policy = Policy(settings(causal), layout, 0.7, fused_linear_loss=fused)
        dispatch._refused = False
        install(forget_the_last_column)
        try:
            report = policy.self_test(with_kl=True)
            found[fused] = (report.op, report.path, report.passed, report.given_up)
        except MegarlError as error:
            found[fused] = str(error)
        assert dispatch.is_refused()
    return found


def _rewards(folder, layout, out) -> tuple:
    model = RewardModel(settings(folder), layout, OptimConfig(lr=1e-2), 10)
    batch = share_of_pairs(PREFERENCES, layout)
    scores = model.scores(batch, 400)
    metrics = model.update(batch, 40)
    model.export(out, lambda line: None)
    return batch.index, scores, metrics


def _coefficients(causal, layout) -> dict:
    """The critic's head after three updates, for coefficients and clipping far from and near the gradient's norm."""
    found = {}
    for vf_coef, clip_grad in [(1.0, 1e6), (0.1, 1e6), (1.0, 0.5), (0.1, 0.5)]:
        critic = Critic(settings(causal), layout, OptimConfig(lr=1e-2, clip_grad=clip_grad), 10, 10.0, vf_coef)
        for step in range(3):
            batch = _batch(layout)
            returns = (1.0 + 5 * step) * batch.loss_mask
            critic.update(batch.with_(values=critic.values(batch, 400), returns=returns), 400)
        found[vf_coef, clip_grad] = dict(critic.sharded.tensors)["output_layer.weight"].detach().clone()
    return found


def _all(classifiers, causal, out) -> dict:
    found = {}
    for world, tp, sequence_parallel in LAYOUTS:
        if world != dist.get_world_size():
            continue
        parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
        layout = layouts.initialize(parallel, 0)
        folder = Path(out, f"{world} {tp} {sequence_parallel}")
        found[world, tp, sequence_parallel] = {
            "critic": [_critic(folder, layout) for folder in classifiers],
            "actor": _actor(causal, layout),
            "rewards": [_rewards(one, layout, folder / str(i)) for i, one in enumerate(classifiers)],
            "out": str(folder),
        }
        if world == 1:
            found[LAYOUTS[0]] |= {"a2c": _a2c(causal, layout), "coefficients": _coefficients(causal, layout)}
            found[LAYOUTS[0]]["self-tests"] = _self_tests(causal, layout)
    return found


@pytest.fixture(scope="module")
def layouts_found(classifiers, causal, tmp_path_factory):
    """layout -> what each of its ranks found."""
    out = str(tmp_path_factory.mktemp("exported"))
    by_world = {world: run_ranks(_all, world, classifiers, causal, out) for world in (1, 2)}
    return {where: [rank[where] for rank in by_world[where[0]]] for where in LAYOUTS}


def _classifier_values(folder, sequences) -> list[torch.Tensor]:
    """transformers' score head at every position of each sequence, without gradient."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model.score(model.model(input_ids=torch.tensor(ids)[None]).last_hidden_state)[0, :, 0] for ids in sequences
        ]


def _same(found: dict, expected: dict, rtol: float, label) -> None:
    norm_of_all = torch.stack([g.norm() for g in expected.values()]).norm()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= rtol * gradient.norm() + 1e-6 * norm_of_all, (label, name)


@pytest.mark.parametrize("where", LAYOUTS, ids=str)
def test_values_are_transformers_own_and_stand_on_the_token_they_speak_of(layouts_found, classifiers, where):
    rollouts = make_rollouts(4, 2)
    sequences = [np.concatenate([r.prompt.token_ids, c.token_ids]).tolist() for r in rollouts for c in r.completions]
    starts = [len(r.prompt.token_ids) for r in rollouts for _ in r.completions]
    for place, folder in enumerate(classifiers):
        expected = _classifier_values(folder, sequences)
        seen = set()
        for rank in layouts_found[where]:
            _, _, index, lengths, values = rank["critic"][place][0]
            for i, own in zip(index.tolist(), values.split(lengths.tolist()), strict=True):
                assert torch.allclose(own[starts[i] :], expected[i][starts[i] - 1 : -1], atol=2e-5)
                assert not own[: starts[i]].any()
                seen.add(i)
        assert seen == set(range(len(sequences)))


def test_the_critic_s_gradient_is_autograd_s(layouts_found, classifiers):
    rollouts = make_rollouts(4, 2)
    for place, folder in enumerate(classifiers):
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
        total, count = 0.0, sum(len(c.token_ids) for r in rollouts for c in r.completions)
        for rollout in rollouts:
            for completion in rollout.completions:
                ids = torch.tensor(np.concatenate([rollout.prompt.token_ids, completion.token_ids])).long()
                start = len(rollout.prompt.token_ids)
                values = model.score(model.model(input_ids=ids[None]).last_hidden_state)[0, start - 1 : -1, 0]
                old, returns = values.detach() - 0.1, torch.sin(ids[start:].double())
                clipped = torch.maximum(torch.minimum(values, old + CLIPRANGE), old - CLIPRANGE)
                losses = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
                total = total + losses.sum() / count
        (VF_COEF * total).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        metrics, found, *_ = layouts_found[LAYOUTS[0]][0]["critic"][place][0]
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        _same({n: g.double() for n, g in found.items()}, expected, 1e-4, folder)


@pytest.mark.parametrize("where", LAYOUTS, ids=str)
def test_gradients_of_actor_and_critic_do_not_see_micro_batches_packing_order_or_layout(layouts_found, where):
    one, here = layouts_found[LAYOUTS[0]][0], layouts_found[where][0]
    runs = {f"critic {i}": (here["critic"][i], one["critic"][i][0]) for i in range(2)}
    runs |= {label: (here["actor"][label], one["actor"][label][0]) for label in ACTORS}
    for label, (found, (expected_metrics, expected, *_)) in runs.items():
        for metrics, gradients, *_ in found:
            assert metrics.keys() == expected_metrics.keys()
            for name, value in expected_metrics.items():
                assert metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-6), (label, name)
            _same(gradients, expected, 1e-4, label)


def test_wrong_kernels_are_given_up_or_end_the_run(layouts_found):
    found = layouts_found[LAYOUTS[0]][0]["self-tests"]
    for fused, op in {"auto": "linear_loss", "off": "logprob_entropy_and_kl"}.items():
        *report, given_up = found[fused]
        assert report == [op, "torch", True] and "wrong by up to" in given_up
    assert re.search("fused_linear_loss=on, but .* wrong by up to .* fused_linear_loss=auto", found["on"])


def test_ppo_with_one_pass_and_one_mini_batch_has_a2c_s_gradient(layouts_found):
    surrogate, a2c = layouts_found[LAYOUTS[0]][0]["a2c"]
    _same(surrogate, a2c, 1e-5, "a2c")


@pytest.mark.parametrize("where", LAYOUTS, ids=str)
def test_scores_are_transformers_own_and_the_update_is_bradley_terry_s(layouts_found, classifiers, where):
    sequences = [ids.tolist() for pair in PREFERENCES for ids in pair]
    ranks = layouts_found[where]
    for place, folder in enumerate(classifiers):
        expected = torch.stack([values[-1] for values in _classifier_values(folder, sequences)])
        for rank in ranks:
            index, scores, metrics = rank["rewards"][place]
            assert torch.allclose(scores, expected[index], atol=1e-4)
            margins = expected[0::2] - expected[1::2]
            assert metrics["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), rel=1e-4)
            assert metrics["margin"] == pytest.approx(float(margins.mean()), rel=1e-3)
            assert metrics["accuracy"] == pytest.approx(float((margins > 0).float().mean()))
        after = torch.stack([values[-1] for values in _classifier_values(Path(ranks[0]["out"], str(place)), sequences)])
        assert (after[0::2] - after[1::2]).mean() > margins.mean()  # what was written is what has learnt


def test_a_constant_factor_of_the_critic_s_loss_acts_through_clipping_only(layouts_found):
    heads_after = layouts_found[LAYOUTS[0]][0]["coefficients"]
    far, near = (
        (heads_after[1.0, clip] - heads_after[0.1, clip]).norm() / heads_after[1.0, clip].norm() for clip in (1e6, 0.5)
    )
    assert far <= 1e-3  # Adam has divided it out
    assert near >= 1e-2


def test_pair_loss_by_hand():
    batch = pairs([(np.array([3, 4]), np.array([5])), (np.array([6]), np.array([7, 8, 9]))], [0, 1], 2)
    values = torch.tensor([9.0, 2.0, 0.5, 1.0, 9.0, 9.0, 3.0])[:, None]
    loss, metrics = pair_loss(values, batch)
    expected = [-torch.nn.functional.logsigmoid(torch.tensor(m)) for m in (1.5, -2.0)]
    torch.testing.assert_close(loss[[1, 2, 3, 6]], torch.stack(expected).repeat_interleave(2))
    assert not loss[[0, 4, 5]].any()
    assert metrics["accuracy"][[1, 6]].tolist() == [1.0, 0.0]


def test_the_value_head_is_one_more_entry_of_the_table():
    hf = tiny_models.CONFIGS["qwen2-tied"]()
    table = heads.value_table(models.get("qwen2").weight_table(hf))
    assert [entry.hf for entry in table.last] == ["model.norm.weight", "score.weight"] and table.tied_head is None
    assert heads.value_config(hf)["architectures"] == ["Qwen2ForSequenceClassification"]
