"""One question, one answer: the prompt goes to an engine and what it samples is the completion."""

from megarl.rollout.client import Sampling
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, Prompt


async def run(prompt: Prompt, client: EnginePool, sampling: Sampling) -> list[Completion]:
    """`sampling.n` completions of one prompt. Raises what the engines raise."""
    return await client.complete(prompt.token_ids, sampling)
