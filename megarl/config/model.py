"""`model` and `optim`: shared by the actor, the reference and supervised training."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from megarl.config.base import Section, key


def _yaml_on_off(value: Any) -> Any:
    """YAML reads on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


FusedLinearLoss = Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_on_off)]
FUSED_LINEAR_LOSS = (
    "Output layer, log-probs and loss in one op that holds the logits of a chunk of tokens only, or all logits at once "
    "(off). A kernel that fails the self-test at the start is replaced by torch operations (auto) or ends the run (on)."
)


class ModelConfig(Section):
    path: str = key(..., "Folder (or hub name) of a Hugging Face checkpoint: config.json, safetensors, tokenizer.")
    dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "Parameter and activation type; bfloat16 keeps fp32 master weights in the optimizer."
    )
    transformer_impl: Literal["auto", "local", "te"] = key(
        "auto", "Megatron layers: TransformerEngine's (te), Megatron-core's own (local), or te where it is installed."
    )
    enable_gradient_checkpointing: bool = key(False, "Recompute each layer in the backward pass: less memory, slower.")


class OptimConfig(Section):
    lr: float = key(1e-6, "Peak learning rate of Adam(W).", gt=0)
    betas: tuple[float, float] = key((0.9, 0.999), "Adam's decay rates.")
    eps: float = key(1e-8, "Adam's epsilon.", gt=0)
    weight_decay: float = key(0.0, "Decoupled weight decay on matrices (none on norms and biases).", ge=0)
    clip_grad: float = key(1.0, "Largest global gradient norm; 0 does not clip.", ge=0)
    lr_warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("constant", "Decay after the warm-up.")
    min_lr_ratio: float = key(0.0, "The learning rate decays to this fraction of its peak.", ge=0, le=1)

    @model_validator(mode="after")
    def _betas_are_rates(self):
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas {self.betas} must both lie in [0, 1)")
        return self
