"""A conversation in the words of a reward model, which has its own tokenizer and chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_model_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    completion: str,
    max_length: int,
    truncation: str = "error",
) -> np.ndarray:
    """Token ids of prompt and completion for the reward model, [T] int32.

    With a chat template, the conversation is the prompt's messages (plain text: one user message) and the completion as
    the assistant's; special tokens are those that the template writes, none is added (no second BOS). Without one, a
    plain-text prompt and the completion are joined and tokenised with the tokenizer's own special tokens.

    Args:
        tokenizer: the reward model's.
        prompt: messages or text, as the dataset has them.
        completion: decoded without the policy's special tokens (`Rollout.texts`).
        max_length: tokens that the reward model takes.
        truncation: "error", or "left": keep the last `max_length` tokens.

    Raises:
        ValueError: messages without a chat template, a chat template that refuses them, too many tokens, or another
            `truncation`.
    """
    if truncation not in ("error", "left"):
        raise ValueError(f"the reward model's truncation is {truncation!r}; allowed: error, left")
    ids = _ids(tokenizer, prompt, completion)
    if len(ids) > max_length and truncation == "error":
        raise ValueError(
            f"a prompt and its completion are {len(ids)} tokens for the reward model {tokenizer.name_or_path}, which "
            f"takes {max_length}; shorten them (data.max_prompt_length, data.max_response_length), or cut them on "
            "the left"
        )
    return np.array(ids[-max_length:], np.int32)


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], completion: str) -> list[int]:
    if not tokenizer.chat_template:
        if not isinstance(prompt, str):
            raise ValueError(
                f"the reward model's tokenizer ({tokenizer.name_or_path}) has no chat template, and prompts are lists "
                "of messages; give it a chat_template, or use plain-text prompts"
            )
        return tokenizer(prompt + completion)["input_ids"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = [*messages, {"role": "assistant", "content": completion}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception as error:  # a chat template raises what it likes (roles must alternate, no system message, ...)
        raise ValueError(
            f"the chat template of the reward model's tokenizer ({tokenizer.name_or_path}) refuses a conversation with "
            f"the roles {[message.get('role') for message in conversation]}: {error}"
        ) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]
