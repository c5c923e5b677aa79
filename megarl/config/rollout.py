"""`rollout.*`: engines and how they sample. `reward.*`: what a completion is worth. `sync.*`: weights into engines."""

from typing import Literal

from pydantic import field_validator

from megarl.config.base import Section, key


class ValidationSamplingConfig(Section):
    n: int = key(1, "Sampled completions per held-out prompt (a greedy one is always taken as well).", gt=0)
    temperature: float = key(1.0, "Temperature of the sampled completions.", gt=0)
    max_prompts: int | None = key(None, "Use only the first so many held-out prompts. Default: all.", gt=0)


class RolloutConfig(Section):
    n: int = key(8, "Completions per prompt (the group size of GRPO).", gt=0)
    temperature: float = key(1.0, "Sampling temperature; the trainer's log-probs use the same.", gt=0)
    num_engines: int = key(1, "vLLM servers; requests are spread over them.", gt=0)
    tensor_model_parallel_size: int = key(1, "Ranks of each engine.", gt=0)
    dtype: Literal["float32", "bfloat16"] | None = key(None, "The engine's type. Default: actor.model.dtype.")
    gpu_memory_utilization: float = key(0.5, "Share of a GPU's memory that an engine may take (CUDA only).", gt=0, le=1)
    kv_cache_memory_mib: int = key(256, "Memory for the key-value cache of an engine on the CPU (CPU only).", gt=0)
    max_num_seqs: int = key(256, "Completions that an engine works on at once.", gt=0)
    enforce_eager: bool = key(
        True, "Run the engine without CUDA graphs or torch.compile: starts faster, decodes slower."
    )
    free_cache_engine: bool = key(False, "Put engines to sleep (level 1) while the trainer works: colocated GPUs.")
    start_timeout_seconds: float = key(600.0, "Longest wait for an engine to answer after its start.", gt=0)
    request_timeout_seconds: float = key(600.0, "Longest wait for one prompt's completions before it is retried.", gt=0)
    max_retries: int = key(2, "Times a failed request is sent again, to another engine where there is one.", ge=0)
    socket_dir: str | None = key(
        None, "Folder for the engines' Unix sockets (mode 0700). Default: a new private one in the temporary folder."
    )
    record_dir: str | None = key(None, "Write every step's rollouts here, one file each, to be replayed later.")
    replay_dir: str | None = key(
        None, "Read every step's rollouts from here (a former record_dir) instead of starting engines."
    )
    val_kwargs: ValidationSamplingConfig = key(ValidationSamplingConfig(), "Sampling on held-out prompts.")


class RewardFunction(Section):
    name: str = key(..., "A file of megarl/rewards by its name, or path/to/file.py:function.")
    weight: float = key(1.0, "The score is the weighted sum over the functions.")


class RewardConfig(Section):
    functions: list[RewardFunction] = key(
        ..., "Reward functions: a name, a list of names, or a list of {name, weight}.", min_length=1
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _as_functions(cls, value):
        if isinstance(value, (str, dict, RewardFunction)):
            value = [value]
        return [{"name": item} if isinstance(item, str) else item for item in value]


class SyncConfig(Section):
    mode: Literal["gathered"] = key("gathered", "gathered: whole tensors, through rank 0, in buckets.")
    bucket_size_mib: int = key(256, "Largest transfer at once; bounds the extra memory of a sync.", gt=0)
    port: int = key(0, "TCP port on which rank 0 meets the engine workers; 0 takes a free one.", ge=0, le=65535)
