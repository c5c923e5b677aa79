"""Supervised warm start and reward-model training on the machinery of the policy."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.config.root import RewardModelTrainConfig, SFTConfig
from megarl.data import batch as batches
from megarl.data.balancing import partition
from megarl.data.pairs import Pair, PairOrder, load_pairs
from megarl.data.sft import Example, ExampleOrder, load_examples
from megarl.data.tokenizer import load_tokenizer
from megarl.observability.metrics import Phases
from megarl.observability.report import Reporter
from megarl.parallel import device
from megarl.parallel import layout as layouts
from megarl.rewards.templates import reward_model_ids
from megarl.training.megatron_model import MegatronModel
from megarl.training.policy import Policy
from megarl.training.reward_model import RewardModel, pairs
from megarl.types import Batch


def sft(config: SFTConfig, quiet: bool = False) -> None:
    """Train `model` on demonstrations; leaves metrics, summary.json and `model/` in trainer.output_dir.

    Loss of a step: the negative log-likelihood of all answer tokens of its `data.train_batch_size` examples, divided by
    their number over all ranks. Collective over the ranks.

    Raises:
        ValueError: the configuration, the model or a dataset is wrong.
        MegarlError: the training diverged.
    """
    with _run(config, quiet) as (layout, report):
        tokenizer, max_tokens = load_tokenizer(config.model.path), config.max_token_len_per_gpu
        train_set = load_examples(config.data, tokenizer, "train")
        heldout = list(load_examples(config.data, tokenizer, "val"))
        for line in train_set.report:
            report.note(line)
        policy = Policy(
            config.model,
            layout,
            optim=config.optim,
            optimizer_steps=config.trainer.total_steps,
            fused_linear_loss=config.fused_linear_loss,
        )
        report.note(str(policy.self_test()))
        order = ExampleOrder(train_set, config.trainer.seed)

        def learn(batch: Batch) -> dict[str, float]:
            weights = batch.loss_mask / policy.sum_over_dp(batch.loss_mask.sum()).clamp(min=1)
            return policy.update(
                batch.with_(token_weights=weights), negative_log_likelihood, max_tokens, per_token=True
            )

        def validate(step: int) -> bool:
            exact = exact_match(policy, heldout, layout, max_tokens)
            report.heldout(step, {"heldout/greedy_accuracy": exact})
            if not config.stop_at_exact_match or exact < config.stop_at_exact_match:
                return False
            report.note(f"stopped at step {step}: exact match {exact:.3f} >= {config.stop_at_exact_match}")
            return True

        def take() -> Batch:
            return share(order.take(config.data.train_batch_size), layout)

        _learn(config, policy, report, take, learn, validate if heldout else None)


def reward_model(config: RewardModelTrainConfig, quiet: bool = False) -> None:
    """Train `model` to score chosen answers above rejected ones; leaves metrics, summary.json and `model/`, a sequence
    classifier, in trainer.output_dir. Collective over the ranks.

    Raises:
        ValueError: the configuration, the model or a dataset is wrong.
        MegarlError: the training diverged.
    """
    with _run(config, quiet) as (layout, report):
        tokenizer, data, max_tokens = load_tokenizer(config.model.path), config.data, config.max_token_len_per_gpu

        def encode(prompt, answer: str):
            return reward_model_ids(tokenizer, prompt, answer, data.max_length, data.truncation)

        order = PairOrder(load_pairs(data, encode, "train"), config.trainer.seed)
        heldout = list(load_pairs(data, encode, "val"))
        model = RewardModel(config.model, layout, config.optim, config.trainer.total_steps)

        def take() -> Batch:
            return share_of_pairs(order.take(data.train_batch_size), layout)

        def learn(batch: Batch) -> dict[str, float]:
            return model.update(batch, max_tokens)

        def validate(step: int) -> bool:
            report.heldout(step, {"heldout/pair_accuracy": pair_accuracy(model, heldout, layout, max_tokens)})
            return False

        _learn(config, model, report, take, learn, validate if heldout else None)


@contextmanager
def _run(config: SFTConfig | RewardModelTrainConfig, quiet: bool):
    layout = layouts.initialize(config.parallel, config.trainer.seed)
    with Reporter(config, Path(config.trainer.output_dir), speaks=layout.is_first, quiet=quiet) as report:
        yield layout, report
    layouts.shutdown()


def _learn(
    config: SFTConfig | RewardModelTrainConfig,
    model: MegatronModel,
    report: Reporter,
    take: Callable[[], Batch],
    learn: Callable[[Batch], dict[str, float]],
    validate: Callable[[int], bool] | None,
) -> None:
    """The loop of both: until the last step, or until `validate` says that it is enough."""
    run_dir, trainer = Path(config.trainer.output_dir), config.trainer
    phases = Phases(device.now)
    for step in range(1, trainer.total_steps + 1):
        phases.reset()
        with phases("data"):
            batch = take()
        with phases("update"):
            metrics = learn(batch)
        report.sft_step(step, metrics, phases.seconds())
        if validate and trainer.test_freq and step % trainer.test_freq == 0 and validate(step):
            break
        if trainer.save_freq and step % trainer.save_freq == 0:
            model.export(run_dir / "checkpoints" / f"step_{step:06d}", report.note)
    model.export(run_dir / "model", report.note)


def negative_log_likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch):
    """-log p of each token [N], and the metrics of the step."""
    return -logprobs, {"policy/entropy_avg": entropy}


def share(examples: list[Example], layout: layouts.Layout) -> Batch:
    """This data-parallel rank's part of a global batch, balanced by tokens, packed."""
    mine = _mine(examples, layout)
    if not mine:  # fewer examples than ranks
        return batches.placeholder(batches.from_examples(examples[:1], [0], len(examples)))
    return batches.from_examples([examples[i] for i in mine], mine, len(examples))


def share_of_pairs(preferences: list[Pair], layout: layouts.Layout) -> Batch:
    """The same of preferences, whose two answers stay together."""
    mine = _mine(preferences, layout)
    if not mine:
        return batches.placeholder(pairs(preferences[:1], [0], len(preferences)))
    return pairs([preferences[i] for i in mine], mine, len(preferences))


def _mine(examples: list[tuple], layout: layouts.Layout) -> list[int]:
    lengths = [len(first) + len(second) for first, second in examples]
    return partition(lengths, layout.dp_size)[layout.dp_rank]


def exact_match(policy: Policy, examples: list[Example], layout: layouts.Layout, max_tokens: int) -> float:
    """The share of examples that greedy decoding would answer exactly, without decoding.

    By induction: greedy decoding writes the true answer if and only if, after the prompt and each true prefix, the true
    next token is the most likely one. So one forward pass over the true answers tells.
    """
    batch = share(examples, layout)
    wrong = (1.0 - policy.greedy_matches(batch, max_tokens)) * batch.loss_mask
    per_sequence = torch.zeros(len(batch.index))
    wrong_tokens = per_sequence.index_add(0, batch.sequence_ids, wrong)
    answer_tokens = per_sequence.index_add(0, batch.sequence_ids, batch.loss_mask)
    exact = (wrong_tokens == 0) & (answer_tokens > 0)
    return float(policy.sum_over_dp(exact.sum())) / len(examples)


def pair_accuracy(model: RewardModel, preferences: list[Pair], layout: layouts.Layout, max_tokens: int) -> float:
    """The share of pairs whose chosen answer scores higher than the rejected one."""
    batch = share_of_pairs(preferences, layout)
    scores = model.scores(batch, max_tokens)
    right = (scores[0::2] > scores[1::2]).sum() if batch.loss_mask.any() else torch.zeros((), dtype=torch.int64)
    return float(model.sum_over_dp(right)) / len(preferences)
