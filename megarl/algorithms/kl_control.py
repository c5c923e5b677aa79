"""The course of the KL coefficient over a run: fixed, adaptive, or one value per epoch.

A controller has `value`, the present coefficient; `update(current_kl, num_sequences, epoch)`, called once per step
after the step's rewards were charged with the old value; `state()` and `restore(state)`, saved with the run.

Adaptive (Ziegler et al., arXiv 1909.08593, section 2.2):

    value <- value * (1 + clip(kl / target_kl - 1, -0.2, 0.2) * n / horizon)

n is the number of sequences of the step (verl); kl their mean of the per-token mean of the charged KL, in nats per
token (verl, metric "objective/kl_per_token"). TRL and the paper take the per-sequence *sum*: their targets are larger.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import model_validator

from megarl.config.base import Section, key


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "How the coefficient moves: not at all, or towards target_kl.")
    kl_coef: float = key(0.001, "The coefficient, at first; 0 charges nothing and loads no reference.", ge=0)
    horizon: float = key(10000, "Adaptive: sequences over which the coefficient moves by at most 20 %.", gt=0)
    target_kl: float = key(0.1, "Adaptive: the KL to keep, in nats per token.", gt=0)

    @model_validator(mode="after")
    def _adaptive_can_move(self):
        if self.type == "adaptive" and self.kl_coef == 0:
            raise ValueError("kl_ctrl.type=adaptive multiplies kl_coef, and kl_coef=0 stays 0; start it above 0")
        return self


class KLController(Protocol):
    value: float

    def update(self, current_kl: float, num_sequences: int, epoch: int) -> None:
        """current_kl: of the step, in nats per token; epoch: passes over the prompts before the next step, from 0."""

    def state(self) -> dict[str, float]: ...

    def restore(self, state: dict[str, float]) -> None: ...


@dataclass
class Fixed:
    value: float

    def update(self, current_kl: float, num_sequences: int, epoch: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def restore(self, state: dict[str, float]) -> None:
        self.value = state["value"]


@dataclass
class Adaptive(Fixed):
    target: float
    horizon: float

    def update(self, current_kl: float, num_sequences: int, epoch: int) -> None:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_sequences / self.horizon


class PerEpoch(Fixed):
    """values[epoch]; the last of them for all later epochs."""

    def __init__(self, values: list[float]):
        super().__init__(values[0])
        self.values = values

    def update(self, current_kl: float, num_sequences: int, epoch: int) -> None:
        self.value = self.values[min(epoch, len(self.values) - 1)]


def controller(config: KLControlConfig) -> KLController:
    """A new controller at its first value."""
    if config.type == "adaptive":
        return Adaptive(config.kl_coef, config.target_kl, config.horizon)
    return Fixed(config.kl_coef)
