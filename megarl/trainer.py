"""The training loop: one step of online reinforcement learning, as a table of contents."""

import json
from pathlib import Path

import torch

from megarl import algorithms
from megarl.config.root import TrainConfig
from megarl.config.summary import step_in_words
from megarl.evaluation import heldout_metrics
from megarl.observability.metrics import Phases
from megarl.observability.report import Reporter
from megarl.parallel import device
from megarl.parallel import layout as layouts
from megarl.parallel.collectives import broadcast_from_first
from megarl.resharding.bridge import Bridge
from megarl.resharding.parity import Parity
from megarl.rollout.start import start_driver
from megarl.training.check import check
from megarl.training.course import Course
from megarl.training.memory import measured
from megarl.training.policy import Policy
from megarl.training.roles import Roles, load_roles
from megarl.training.steps import distribute, score, update, with_statistics


def train(config: TrainConfig, quiet: bool = False) -> None:
    """Train `actor` from its checkpoint; leaves metrics, plots, summary.json and `model/` in trainer.output_dir.

    Collective: every rank that torchrun (or `megarl train`) started calls it with the same config.

    Raises:
        ValueError: the configuration, a model, a dataset or a reward function is wrong.
        MegarlError: an engine or the rollout driver died, or the training diverged.
    """
    algorithm = algorithms.get(config.algorithm.name)
    needs = algorithm.needs(config.algorithm)
    check(config, needs)
    layout = layouts.initialize(config.parallel, config.trainer.seed)
    run_dir = Path(config.trainer.output_dir)
    report = Reporter(config, run_dir, speaks=layout.is_first, quiet=quiet)
    with report, start_driver(config, run_dir, on_rank_0=layout.is_first) as driver:
        report.note(step_in_words(config))
        roles = load_roles(config, needs, layout)
        actor = roles.actor
        report.note(str(actor.self_test(needs.full_kl_in_reward or needs.full_kl_in_loss)))
        bridge = open_bridge(config, layout, actor, driver)
        driver.wait_until_ready(report.note)
        bridge.connect()
        bridge.sync(version=0)  # the engines then hold the trainer's bytes, whatever dtype the files had
        course = Course(algorithm, config, num_prompts(driver, layout))
        phases = Phases(device.now)
        first_full_update = config.trainer.critic_warmup + 1

        if config.trainer.val_before_train:
            validate(0, driver, roles, report, config)
        for step in range(1, config.trainer.total_steps + 1):
            phases.reset()
            with phases("generate"):
                rollouts = driver.collect(config.data.train_batch_size, step, needs.greedy_baseline)
                driver.sleep()
            with phases("score"):
                rollouts = score(rollouts, roles)
            with phases("distribute"):
                batch = distribute(course.chosen(rollouts), layout, needs, config, step)
            with phases("logprobs"):
                batch, agreement = with_statistics(batch, roles, needs, config, step)
            with phases("advantages"):
                batch, objective = course.advantages(batch, actor.sum_over_dp, step)
            with phases("update"), measured(roles.models, report.model_state_mib, step == first_full_update):
                metrics = update(batch, roles, algorithm, needs, config, step)
            with phases("sync"):
                driver.wake_up()
                delivery = bridge.sync(version=step)
            report.step(step, rollouts, objective | metrics | agreement | delivery, phases.seconds())
            last = step == config.trainer.total_steps
            if due(step, config.trainer.test_freq) or (last and config.trainer.test_freq):
                validate(step, driver, roles, report, config)
            if due(step, config.trainer.save_freq) and not last:
                save(roles, course, run_dir / "checkpoints" / f"step_{step:06d}", report)
        save(roles, course, run_dir / "model", report)
    layouts.shutdown()


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def num_prompts(driver, layout) -> int:
    """Training prompts, as rank 0's driver has counted them. Collective."""
    known = torch.tensor([driver.dataset_sizes["train"]]) if layout.is_first else None
    return int(broadcast_from_first(known, torch.int64))


def open_bridge(config: TrainConfig, layout, actor: Policy, driver) -> Bridge:
    """The way of the actor's weights into the engines, with the check that both sides compute the same."""

    def logprobs(batch):
        return actor.logprobs(batch, config.log_prob_max_token_len_per_gpu, temperature=1.0)[0]

    parity = Parity(config, actor.hf.vocab_size, logprobs, driver)
    return Bridge(actor.sharded, layout, config.sync, driver, parity)


def validate(step: int, driver, roles: Roles, report: Reporter, config: TrainConfig) -> None:
    """Greedy and sampled completions of the held-out prompts."""
    validated = driver.validate(step)
    if roles.reward_model is not None and config.data.val_files and not config.rollout.replay_dir:
        validated = {kind: score(validated.get(kind), roles) for kind in ("sampled", "greedy")}
    if validated.get("sampled"):
        report.heldout(step, heldout_metrics(validated))


def save(roles: Roles, course: Course, folder: Path, report: Reporter) -> None:
    """The policy as a Hugging Face checkpoint; beside it the critic, and where the algorithm's course stands."""
    roles.actor.export(folder, report.note)
    if roles.critic is not None:
        roles.critic.export(folder.with_name(f"{folder.name}_critic"), report.note)
    if report.speaks:
        folder.with_name(f"{folder.name}_course.json").write_text(json.dumps(course.state()) + "\n")
