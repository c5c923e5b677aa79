import json

import numpy as np
import pytest

from megarl.config.data import DataConfig, DataFile
from megarl.data.prompts import PromptOrder, load_prompts

USER = [{"role": "user", "content": "07+45="}]


def files(tmp_path, *rows_per_file, weights=None):
    made = []
    for number, rows in enumerate(rows_per_file):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(DataFile(path=str(path), weight=(weights or [1.0] * len(rows_per_file))[number]))
    return made


def config(**keys):
    return DataConfig(train_files="unused.jsonl", train_batch_size=1, **keys)


def test_the_layout_people_have(tmp_path, tokenizer):
    rows = [
        {"prompt": USER, "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "052"}, "level": 2},
        {"prompt": "07+45=", "ground_truth": 52, "hint": "carry"},
    ]
    first, second = load_prompts(files(tmp_path, rows), config(), tokenizer)
    assert (first.id, first.messages, first.ground_truth, first.data_source) == (0, USER, "052", "sums")
    assert first.columns == {"reward_model": rows[0]["reward_model"], "level": 2, "hint": None}
    assert tokenizer.decode(first.token_ids) == "<|user|>07+45=<|end|><|assistant|>"
    assert first.token_ids.dtype == np.int32
    assert (second.id, second.messages, second.ground_truth, second.data_source) == (1, "07+45=", 52, "")
    assert second.columns == {"reward_model": None, "level": None, "hint": "carry"}
    assert second.token_ids.tolist() == first.token_ids.tolist()


def test_files_keep_weights_and_ids_run_on(tmp_path, tokenizer):
    prompts = load_prompts(
        files(tmp_path, [{"prompt": "a"}] * 2, [{"prompt": "b"}], weights=[1.0, 3.0]), config(), tokenizer
    )
    assert prompts.weights == [1.0, 3.0]
    assert [[p.id for p in file] for file in prompts.files] == [[0, 1], [2]]
    drawn = PromptOrder(prompts, seed=0, shuffle=True).take(8)
    assert sum(p.messages == "b" for p in drawn) == 6


def test_prompt_key(tmp_path, tokenizer):
    (prompt,) = load_prompts(
        files(tmp_path, [{"question": "a", "prompt": "b"}]), config(prompt_key="question"), tokenizer
    )
    assert prompt.messages == "a"
    assert prompt.columns == {"prompt": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "answer": "b"}, "has no prompt column; its columns are question, answer"),
        ({"prompt": 3}, "must be a text or a list of messages, not 3"),
        ({"prompt": []}, "must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "needs role and content"),
        ({"prompt": "a", "completions": ["b"]}, "the column completions has the name of an argument"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(files(tmp_path, [{"prompt": "a"}, row]), config(), tokenizer)
    assert "0.jsonl line 2" in str(error.value)


def test_messages_without_a_chat_template_name_the_row(tmp_path, plain_tokenizer):
    with pytest.raises(ValueError, match="line 1: .*no chat template"):
        load_prompts(files(tmp_path, [{"prompt": USER}]), config(), plain_tokenizer)


LONG = [{"prompt": "a"}, {"prompt": "abcdefgh"}, {"prompt": "ab"}, {"prompt": "abcdefghi"}]


def test_overlong_prompts_are_refused_by_default(tmp_path, plain_tokenizer):
    with pytest.raises(ValueError) as error:
        load_prompts(files(tmp_path, LONG), config(max_prompt_length=4), plain_tokenizer)
    for part in (
        "2 of 4 prompts",
        "data.max_prompt_length=4",
        "0.jsonl line 2 with 8 tokens",
        "data.filter_overlong_prompts",
    ):
        assert part in str(error.value)


def test_overlong_prompts_are_dropped_and_counted(tmp_path, plain_tokenizer):
    prompts = load_prompts(
        files(tmp_path, LONG), config(max_prompt_length=4, filter_overlong_prompts=True), plain_tokenizer
    )
    assert [(p.id, p.messages) for p in prompts] == [(0, "a"), (2, "ab")]
    assert len(prompts.report) == 1 and prompts.report[0].startswith("dropped 2 of 4 prompts")


@pytest.mark.parametrize(("side", "kept"), [("left", "fghi"), ("right", "abcd")])
def test_overlong_prompts_are_cut(tmp_path, plain_tokenizer, side, kept):
    prompts = load_prompts(files(tmp_path, LONG), config(max_prompt_length=4, truncation=side), plain_tokenizer)
    assert [len(p.token_ids) for p in prompts] == [1, 4, 2, 4]
    assert plain_tokenizer.decode(prompts.files[0][3].token_ids) == kept
    assert prompts.report[0].startswith("cut 2 of 4 prompts")


def test_dropping_every_prompt_is_refused(tmp_path, plain_tokenizer):
    with pytest.raises(ValueError, match="every prompt"):
        load_prompts(
            files(tmp_path, LONG[1:2]), config(max_prompt_length=4, filter_overlong_prompts=True), plain_tokenizer
        )
