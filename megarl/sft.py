"""Supervised training on the same machinery: the loss of an answer's tokens, averaged over the global mini-batch."""

from pathlib import Path

import torch

from megarl.config.root import SFTConfig
from megarl.data import batch as batches
from megarl.data.balancing import partition
from megarl.data.sft import Example, ExampleOrder, load_examples
from megarl.data.tokenizer import load_tokenizer
from megarl.observability.metrics import Phases
from megarl.observability.report import Reporter
from megarl.parallel import device
from megarl.parallel import layout as layouts
from megarl.training.policy import Policy
from megarl.types import Batch


def sft(config: SFTConfig, quiet: bool = False) -> None:
    """Train `model` on demonstrations; leaves metrics, summary.json and `model/` in trainer.output_dir.

    Loss of a step: the negative log-likelihood of all answer tokens of its `data.train_batch_size` examples, divided by
    their number over all ranks. Collective over the ranks.

    Raises:
        ValueError: the configuration, the model or a dataset is wrong.
        MegarlError: the training diverged.
    """
    layout = layouts.initialize(config.parallel, config.trainer.seed)
    run_dir = Path(config.trainer.output_dir)
    with Reporter(config, run_dir, speaks=layout.is_first, quiet=quiet) as report:
        tokenizer = load_tokenizer(config.model.path)
        train_set = load_examples(config.data, tokenizer, "train")
        heldout = list(load_examples(config.data, tokenizer, "val"))
        for line in train_set.report:
            report.note(line)
        policy = Policy(config.model, layout, optim=config.optim, optimizer_steps=config.trainer.total_steps)
        phases = Phases(device.now)
        order = ExampleOrder(train_set, config.trainer.seed)

        for step in range(1, config.trainer.total_steps + 1):
            phases.reset()
            with phases("data"):
                batch = share(order.take(config.data.train_batch_size), layout)
            with phases("update"):
                weights = batch.loss_mask / policy.sum_over_dp(batch.loss_mask.sum()).clamp(min=1)
                metrics = policy.update(
                    batch.with_(token_weights=weights), negative_log_likelihood, config.max_token_len_per_gpu
                )
                del metrics["tokens"]
            report.sft_step(step, metrics, phases.seconds())
            if heldout and config.trainer.test_freq and step % config.trainer.test_freq == 0:
                exact = exact_match(policy, heldout, layout, config.max_token_len_per_gpu)
                report.heldout(step, {"heldout/greedy_accuracy": exact})
                if config.stop_at_exact_match and exact >= config.stop_at_exact_match:
                    report.note(f"stopped at step {step}: exact match {exact:.3f} >= {config.stop_at_exact_match}")
                    break
            if config.trainer.save_freq and step % config.trainer.save_freq == 0:
                policy.export(run_dir / "checkpoints" / f"step_{step:06d}", report.note)
        policy.export(run_dir / "model", report.note)
    layouts.shutdown()


def negative_log_likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch):
    """-log p of each token [N], and the metrics of the step."""
    return -logprobs, {"policy/entropy_avg": entropy}


def share(examples: list[Example], layout: layouts.Layout) -> Batch:
    """This data-parallel rank's part of a global batch, balanced by tokens, packed."""
    lengths = [len(prompt) + len(answer) for prompt, answer in examples]
    mine = partition(lengths, layout.dp_size)[layout.dp_rank]
    if not mine:  # fewer examples than ranks
        return batches.placeholder(batches.from_examples(examples[:1], [0], len(examples)))
    return batches.from_examples([examples[i] for i in mine], mine, len(examples))


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
