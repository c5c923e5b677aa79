"""The training loop: one step of online reinforcement learning, as a table of contents."""

from pathlib import Path

from megarl import algorithms
from megarl.config.root import TrainConfig
from megarl.evaluation import heldout_metrics
from megarl.observability.metrics import Phases
from megarl.observability.report import Reporter
from megarl.parallel import device
from megarl.parallel import layout as layouts
from megarl.resharding.bridge import Bridge
from megarl.resharding.parity import Parity
from megarl.rollout.start import start_driver
from megarl.training import distribute as distribution
from megarl.training.policy import Policy
from megarl.training.steps import update, with_logprobs


def train(config: TrainConfig, quiet: bool = False) -> None:
    """Train `actor` from its checkpoint; leaves metrics, plots, summary.json and `model/` in trainer.output_dir.

    Collective: every rank that torchrun (or `megarl train`) started calls it with the same config.

    Raises:
        ValueError: the configuration, a model, a dataset or a reward function is wrong.
        MegarlError: an engine or the rollout driver died, or the training diverged.
    """
    layout = layouts.initialize(config.parallel, config.trainer.seed)
    run_dir = Path(config.trainer.output_dir)
    report = Reporter(config, run_dir, speaks=layout.is_first, quiet=quiet)
    with report, start_driver(config, run_dir, on_rank_0=layout.is_first) as driver:
        algorithm = algorithms.get(config.algorithm.name)
        actor = Policy(
            config.actor.model, layout, config.rollout.temperature, config.actor.optim, config.optimizer_steps
        )
        reference = load_reference(config, algorithm, layout)
        bridge = open_bridge(config, layout, actor, driver)
        driver.wait_until_ready(report.note)
        bridge.connect()
        bridge.sync(version=0)  # the engines then hold the trainer's bytes, whatever dtype the files had
        phases = Phases(device.now)

        if config.trainer.val_before_train:
            validate(0, driver, report)
        for step in range(1, config.trainer.total_steps + 1):
            phases.reset()
            with phases("generate"):
                rollouts = driver.collect(config.data.train_batch_size, step)
                driver.sleep()
            with phases("distribute"):
                batch = distribution.distribute(
                    rollouts, layout, config.actor.ppo_mini_batch_size, config.trainer.seed, step
                )
            with phases("logprobs"):
                batch, agreement = with_logprobs(batch, actor, reference, config, step)
            with phases("advantages"):
                batch = algorithm.advantages(batch, config.algorithm, actor.sum_over_dp)
            with phases("update"):
                metrics = update(batch, actor, algorithm, config, step)
            with phases("sync"):
                driver.wake_up()
                delivery = bridge.sync(version=step)
            report.step(step, rollouts, metrics | agreement | delivery, phases.seconds())
            last = step == config.trainer.total_steps
            if due(step, config.trainer.test_freq) or (last and config.trainer.test_freq):
                validate(step, driver, report)
            if due(step, config.trainer.save_freq) and not last:
                actor.export(run_dir / "checkpoints" / f"step_{step:06d}", report.note)
        actor.export(run_dir / "model", report.note)
    layouts.shutdown()


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def load_reference(config: TrainConfig, algorithm, layout) -> Policy | None:
    """The frozen reference, where the algorithm asks for one."""
    if not algorithm.needs(config.algorithm).reference:
        return None
    model = config.actor.model.model_copy(update={"path": config.ref.model_path or config.actor.model.path})
    return Policy(model, layout, config.rollout.temperature)


def open_bridge(config: TrainConfig, layout, actor: Policy, driver) -> Bridge:
    """The way of the actor's weights into the engines, with the check that both sides compute the same."""

    def logprobs(batch):
        return actor.logprobs(batch, config.log_prob_max_token_len_per_gpu, temperature=1.0)[0]

    parity = Parity(config, actor.hf.vocab_size, logprobs, driver)
    return Bridge(actor.sharded, layout, config.sync, driver, parity)


def validate(step: int, driver, report: Reporter) -> None:
    """Greedy and sampled completions of the held-out prompts."""
    validated = driver.validate(step)
    if validated:
        report.heldout(step, heldout_metrics(validated))
