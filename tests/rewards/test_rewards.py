import pytest

from megarl import rewards
from megarl.config.rollout import RewardFunction


def get(name):
    return rewards.get(RewardFunction(name=name))


def test_by_name():
    assert get("exact_match")(completions=["a"], ground_truth=["a"]) == [1.0]
    assert {"arithmetic", "exact_match"} <= set(rewards.names())


def test_by_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def length(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    assert get(f"{tmp_path}/mine.py:length")(completions=["abc"]) == [3.0]
    assert rewards.label(RewardFunction(name=f"{tmp_path}/mine.py:length")) == "length"
    assert rewards.label(RewardFunction(name="exact_match")) == "exact_match"


def test_unknown_name_lists_the_known():
    with pytest.raises(
        ValueError, match="'exactmatch' is unknown; known: arithmetic, .*exact_match, .*or your own as path"
    ):
        get("exactmatch")


def test_bad_files_are_told(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        get(f"{tmp_path}/no.py:f")
    (tmp_path / "mine.py").write_text("def length(completions, **columns):\n    return []\n")
    with pytest.raises(ValueError, match="has no function width; it has length"):
        get(f"{tmp_path}/mine.py:width")
    for name in (f"{tmp_path}/mine.py", f"{tmp_path}/mine.py:", ":f"):
        with pytest.raises(ValueError, match="names no function"):
            get(name)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ValueError, match="broken.py fails on import: ModuleNotFoundError"):
        get(f"{tmp_path}/broken.py:f")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="not a Python file"):
        get(f"{tmp_path}/notes.txt:f")
