"""`rollout.*`: engines and how they sample. `reward.*`: what a completion is worth. `sync.*`: weights into engines."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.config.base import Section, key


class ValidationSamplingConfig(Section):
    n: int = key(1, "Sampled completions per held-out prompt (a greedy one is always taken as well).", gt=0)
    temperature: float = key(1.0, "Temperature of the sampled completions.", gt=0)
    max_prompts: int | None = key(None, "Use only the first so many held-out prompts. Default: all.", gt=0)


class RolloutConfig(Section):
    n: int = key(8, "Completions per prompt (the group size of GRPO).", gt=0)
    temperature: float = key(1.0, "Sampling temperature; the trainer's log-probs use the same.", gt=0)
    top_p: float = key(
        1.0, "Only 1: completions are drawn from the whole distribution, as the trainer's log-probs are."
    )
    top_k: int = key(-1, "Only -1 or 0, which mean all tokens, for the same reason.")
    dynamic_sampling_rounds: int = key(
        0,
        "Rounds in which prompts whose completions all scored the same, which teach nothing to algorithms that compare "
        "them, are replaced by the next prompts (DAPO). Passes over the data are counted without the replaced ones.",
        ge=0,
    )
    num_engines: int = key(1, "vLLM servers; requests are spread over them.", gt=0)
    tensor_model_parallel_size: int = key(1, "Ranks of each engine.", gt=0)
    placement: Literal["colocated", "disaggregated"] = key(
        "colocated",
        "GPUs of the engines: colocated, those of the trainer ranks of the first node, in turns; disaggregated, the "
        "ones after them (CUDA only).",
    )
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

    @field_validator("top_p", "top_k")
    @classmethod
    def _the_whole_distribution(cls, value, field):
        if value not in {"top_p": (1.0,), "top_k": (-1, 0)}[field.field_name]:
            raise ValueError(
                "truncated sampling is not offered: the trainer's log-probs are those of the whole distribution, so "
                "every policy ratio would be wrong; remove this key, and sharpen with rollout.temperature"
            )
        return value


class RewardFunction(Section):
    name: str = key(..., "A file of megarl/rewards by its name, or path/to/file.py:function.")
    weight: float = key(1.0, "The score is the weighted sum over the functions.")
    kwargs: dict[str, Any] = key({}, "Further arguments that the function is called with, by name.")
    timeout_seconds: float | None = key(
        None, "Deadline of a call. Default: the function's own, or else reward.timeout_seconds.", gt=0
    )
    conversational: bool = key(
        False, "Give completions as TRL does, [{role: assistant, content: text}] each, instead of texts."
    )


class OverlongBufferConfig(Section):
    len: int = key(0, "Tokens below data.max_response_length over which the penalty grows; 0: no penalty.", ge=0)
    penalty_factor: float = key(1.0, "The penalty of a completion of data.max_response_length tokens.", ge=0)


class RewardConfig(Section):
    functions: list[RewardFunction] = key(
        [], "Reward functions: a name, a list of names, or a list of {name, weight}. None: only reward_model scores."
    )
    num_workers: int = key(2, "Processes that call reward functions; started when there is work for them.", gt=0)
    timeout_seconds: float = key(
        30.0, "Deadline of one call of a reward function; the worker that misses it is killed and replaced.", gt=0
    )
    on_error: Literal["default", "stop"] = key(
        "default",
        "When a function hangs, crashes, raises or returns no finite number: give that completion reward.default_score "
        "and count it, or stop the run.",
    )
    default_score: float = key(0.0, "A function's score of a completion on which it failed.", allow_inf_nan=False)
    max_consecutive_failures: int = key(
        64, "Stop when a function has failed on so many completions in a row: then it is the function that fails.", gt=0
    )
    missing_eos_penalty: float = key(
        0.0, "Subtracted from the score of a completion that no end-of-sequence (or stop) token ended.", ge=0
    )
    stop_token: Literal["eos"] | None = key(
        None, "eos: cut completions after their first end-of-sequence token (engines do so anyway)."
    )
    stop_token_id: int | None = key(
        None, "Cut completions after the first token with this id; it then ends them.", ge=0
    )
    overlong_buffer: OverlongBufferConfig = key(OverlongBufferConfig(), "DAPO's soft punishment of long completions.")

    @model_validator(mode="after")
    def _one_stop_token(self):
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError(
                f"reward.stop_token={self.stop_token} and reward.stop_token_id={self.stop_token_id} are both set; "
                "keep one"
            )
        return self

    @field_validator("functions", mode="before")
    @classmethod
    def _as_functions(cls, value):
        if isinstance(value, (str, dict, RewardFunction)):
            value = [value]
        return [{"name": item} if isinstance(item, str) else item for item in value]


class SyncConfig(Section):
    @field_validator("audit", mode="before")
    @classmethod
    def _yaml_off(cls, value):
        return {False: "off", True: "every"}[value] if isinstance(value, bool) else value  # YAML reads off as false

    @model_validator(mode="after")
    def _whole_tensors_go_over_the_network(self):
        if self.mode == "gathered" and self.transport in ("shared_memory", "cuda_ipc"):
            raise ValueError(
                f"mode=gathered sends over gloo or nccl, not transport={self.transport}; set transport=auto, or "
                "mode=planned"
            )
        return self

    mode: Literal["planned", "gathered"] = key(
        "planned",
        "planned: every engine worker gets its own boxes straight from the shards that hold them. gathered: whole "
        "tensors through rank 0, in buckets (what TRL calls ds3_gather_for_generation); leaves identical engines.",
    )
    transport: Literal["auto", "gloo", "nccl", "shared_memory", "cuda_ipc"] = key(
        "auto",
        "Way to the engines. shared_memory and cuda_ipc: in memory, through the trainer rank beside the worker; gloo "
        "and nccl: over the network. auto: gloo on the CPU, cuda_ipc on GPUs.",
    )
    fan_out: bool = key(
        True, "Engines laid out alike pass the weights on to each other; false: the trainer serves each."
    )
    bucket_size_mib: int = key(256, "Largest transfer at once; bounds the extra memory of a sync.", gt=0)
    port: int = key(0, "TCP port on which rank 0 meets the engine workers; 0 takes a free one.", ge=0, le=65535)
    audit: Literal["every", "off"] | Annotated[int, Field(strict=True, gt=0)] = key(
        "every", "Compare checksums of all weights on both sides at every sync, at every so many (a number), or off."
    )
    parity_interval: int = key(
        50, "Syncs between two parity checks: fixed prompts scored by trainer and engines; 0: only after starts.", ge=0
    )
    parity_budget: float | None = key(
        None,
        "Largest |difference of a token's log-prob| that a parity check lets pass. Default: 1e-3 in float32, 0.5 in "
        "bfloat16.",
        gt=0,
    )
