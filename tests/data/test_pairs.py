"""Preferences from files."""

import json

import numpy as np
import pytest

from megarl.config.data import PairDataConfig
from megarl.data.pairs import load_pairs

PROMPT = [{"role": "user", "content": "1+1="}]


def encode(prompt, answer: str) -> np.ndarray:
    if answer == "refused":
        raise ValueError("too long")
    return np.array([len(prompt), *map(ord, answer)], np.int32)


def load(tmp_path, *rows: dict, **keys):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = PairDataConfig(train_files=str(file), val_files=str(file), train_batch_size=1, **keys)
    return list(load_pairs(config, encode, "val"))


def test_texts_and_single_messages_are_answers(tmp_path):
    message = [{"role": "assistant", "content": "b"}]
    pairs = load(
        tmp_path,
        {"prompt": PROMPT, "chosen": "a", "rejected": message},
        {"prompt": "xy", "chosen": "c", "rejected": "d"},
    )
    assert [[ids.tolist() for ids in pair] for pair in pairs] == [[[1, 97], [1, 98]], [[2, 99], [2, 100]]]
    assert all(ids.dtype == np.int32 for pair in pairs for ids in pair)


def test_columns_have_other_names_where_the_config_says_so(tmp_path):
    row = {"q": "x", "good": "a", "bad": "b"}
    (pair,) = load(tmp_path, row, prompt_key="q", chosen_key="good", rejected_key="bad")
    assert pair[0].tolist() == [1, 97]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "line 1: the column rejected must be a text .* columns are prompt, chosen"),
        ({"prompt": "x", "chosen": 3, "rejected": "b"}, "the column chosen must be a text"),
        ({"prompt": "x", "chosen": [*PROMPT, *PROMPT], "rejected": "b"}, "the column chosen must be a text"),
        ({"chosen": "a", "rejected": "b"}, "line 1 has no prompt column"),
        ({"prompt": "x", "chosen": "refused", "rejected": "b"}, "line 1: too long"),
    ],
)
def test_rows_that_are_no_preference_are_refused_with_their_place(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, row)
