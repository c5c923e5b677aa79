"""What is unusual in a configuration without being wrong: `megarl train --dry-run` says it, nothing refuses it."""

from __future__ import annotations

from megarl.config.root import TrainConfig

# (lowest, highest) of what guides to online RL advise.
GROUP_SIZE = (2, 16)
RESPONSE_TOKENS = (64, 256)
LEARNING_RATE = (1e-5, 1e-4)


def hints(config: TrainConfig) -> list[str]:
    """One line for each key whose value is outside the usual range."""
    n, tokens, lr = config.rollout.n, config.data.max_response_length, config.actor.optim.lr
    found = []
    if n > 1 and not _within(n, GROUP_SIZE):  # an algorithm that cannot do with one completion has refused it
        found.append(f"rollout.n={n} is outside the usual: groups of 2 to 8 completions, for reasoning 8 to 16")
    if not _within(tokens, RESPONSE_TOKENS):
        found.append(
            f"data.max_response_length={tokens} is outside the usual 64 to 256 tokens of chat and summaries; long "
            "reasoning takes thousands, and they most of a step's time"
        )
    if not _within(lr, LEARNING_RATE):
        found.append(
            f"actor.optim.lr={lr:g} is outside 1e-5 to 1e-4, usual up to about 1B parameters; all weights of 7B models "
            "and larger are trained at 5e-7 to 5e-6, toy models at 1e-3"
        )
    return found


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]
