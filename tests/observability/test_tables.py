import io
import json

from rich.console import Console

from megarl.observability.tables import MAX_CHARACTERS, prompt_text, readable, sample_table
from tests.observability.rollouts import rollout


def printed(rollouts, count):
    console = Console(file=io.StringIO(), width=120)
    return sample_table(rollouts, count, console, title="step 20"), console.file.getvalue()


def test_rows_show_prompt_completion_expected_and_score():
    rows, text = printed([rollout([0.1, 0.9], [2, 9], ["[red]4[/red]\n", "3\x1b[31m"])], 2)
    assert rows == [
        {"prompt": "1+1=", "completion": "[red]4[/red]\\n", "expected": "2", "score": 0.1, "finish_reason": "stop"},
        {"prompt": "1+1=", "completion": "3\\x1b[31m", "expected": "2", "score": 0.9, "finish_reason": "length"},
    ]
    assert "[red]4[/red]\\n" in text and "\x1b" not in text and "step 20" in text and "0.900" in text
    assert text.count("cut at the length limit") == 1
    json.dumps(rows)


def test_samples_are_spread_over_the_prompts():
    rollouts = [rollout([0.0, 1.0], [1, 1], [f"{i}a", f"{i}b"], id=i) for i in range(8)]
    assert [row["completion"] for row in printed(rollouts, 4)[0]] == ["0a", "2a", "4a", "6a"]
    assert [row["completion"] for row in printed(rollouts[:2], 3)[0]] == ["0a", "1a", "0b"]
    assert len(printed(rollouts[:1], 99)[0]) == 2


def test_no_ground_truth_is_an_empty_cell():
    assert printed([rollout([0.0], [1], truth=None)], 1)[0][0]["expected"] == ""


def test_prompts_of_every_form():
    assert prompt_text(rollout([0.0], [1], messages="plain").prompt) == "plain"
    one = [{"role": "user", "content": "hi"}]
    assert prompt_text(rollout([0.0], [1], messages=one).prompt) == "hi"
    two = [{"role": "system", "content": "be brief"}, *one]
    assert prompt_text(rollout([0.0], [1], messages=two).prompt) == "system: be brief\nuser: hi"


def test_long_text_keeps_its_ends():
    text = readable("a" * 500 + "b" * 500)
    assert len(text) == MAX_CHARACTERS and text.startswith("aaa") and text.endswith("bbb") and " … " in text
    assert readable("short") == "short"
    assert readable("tab\t zero\0 é 語 \ud800") == "tab\\t zero\\x00 é 語 \\ud800"
