"""Sample completions as a table a person can read."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.types import Prompt, Rollout

MAX_CHARACTERS = 240


def sample_table(
    rollouts: list[Rollout], count: int, console: Console | None = None, title: str = "sample completions"
) -> list[dict[str, Any]]:
    """Print up to `count` completions, of prompts spread over `rollouts`, and return what was printed.

    Each chosen prompt shows its first completion; where there are fewer prompts than `count`, further ones follow.

    Returns:
        one dict per row, ready for JSON: prompt, completion, expected (text), score (float), finish_reason.
    """
    rows = [_row(rollout, k) for rollout, k in _spread(rollouts, count)]
    table = Table(title=title, title_justify="left", show_lines=False)
    table.add_column("prompt", overflow="fold", ratio=3)
    table.add_column("completion", overflow="fold", ratio=4)
    table.add_column("expected", overflow="fold", ratio=2)
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows:
        cut = Text(" (cut at the length limit)", style="dim") if row["finish_reason"] == "length" else ""
        # Text, not str: a completion may well contain what rich takes for markup.
        completion = Text(row["completion"]).append(cut)
        table.add_row(Text(row["prompt"]), completion, Text(row["expected"]), f"{row['score']:.3f}")
    (console or Console()).print(table)
    return rows


def _spread(rollouts: list[Rollout], count: int) -> list[tuple[Rollout, int]]:
    """`count` pairs (rollout, which of its completions): first completions of evenly spaced rollouts come first."""
    if len(rollouts) > count:
        rollouts = [rollouts[i * len(rollouts) // count] for i in range(count)]
    most = max((len(rollout.completions) for rollout in rollouts), default=0)
    pairs = [(rollout, k) for k in range(most) for rollout in rollouts if k < len(rollout.completions)]
    return pairs[:count]


def _row(rollout: Rollout, k: int) -> dict[str, Any]:
    truth = rollout.prompt.ground_truth
    return {
        "prompt": readable(prompt_text(rollout.prompt)),
        "completion": readable(rollout.texts[k]),
        "expected": "" if truth is None else readable(str(truth)),
        "score": float(rollout.scores[k]),
        "finish_reason": rollout.completions[k].finish_reason,
    }


def prompt_text(prompt: Prompt) -> str:
    """A prompt as text: a single message without its role, a conversation as "role: content" lines."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    if len(prompt.messages) == 1:
        return str(prompt.messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def readable(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    r"""`text` on one line: control characters as escapes (\n, \x1b), and the middle of a long text cut out."""
    if len(text) > max_characters:
        head, tail = (max_characters - 3) * 2 // 3, (max_characters - 3) // 3
        text = f"{text[:head]} … {text[-tail:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
