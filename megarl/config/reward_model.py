"""`reward_model.*`: a learned reward, beside the functions of `reward.*`."""

from typing import Literal

from pydantic import model_validator

from megarl.config.base import Section, key


class RewardModelConfig(Section):
    path: str | None = key(
        None,
        "A checkpoint of a sequence classifier with one label and its tokenizer, such as `megarl reward-model` leaves. "
        "Default: no reward model.",
    )
    weight: float = key(1.0, "Its score is added to those of reward.functions times this.")
    dtype: Literal["float32", "bfloat16"] | None = key(None, "Parameter type. Default: actor.model.dtype.")
    max_length: int = key(1024, "Longest prompt and completion together, in tokens of the reward model.", gt=0)
    truncation: Literal["error", "left"] = key(
        "error", "What to do with a longer one: stop, or keep its last max_length tokens."
    )
    max_token_len_per_gpu: int = key(16384, "Tokens per micro-batch. Changes memory and speed only.", gt=0)

    @model_validator(mode="after")
    def _micro_batches_hold_a_sequence(self):
        if self.max_token_len_per_gpu < self.max_length:
            raise ValueError(
                f"reward_model.max_token_len_per_gpu={self.max_token_len_per_gpu} is less than one sequence can hold "
                f"(reward_model.max_length={self.max_length}); raise it"
            )
        return self
