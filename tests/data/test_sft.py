import json

import numpy as np
import pytest

from megarl.config.data import SFTDataConfig
from megarl.data.sft import ExampleOrder, load_examples


def config(tmp_path, rows, **keys):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTDataConfig(train_files=str(path), train_batch_size=2, **keys)


def test_prompt_and_answer_with_its_end(tmp_path, tokenizer):
    rows = [{"prompt": "1+2=", "response": "3"}, {"prompt": [{"role": "user", "content": "a"}], "response": "bc"}]
    examples = list(load_examples(config(tmp_path, rows), tokenizer))
    assert [tokenizer.decode(np.concatenate(example)) for example in examples] == [
        "<|user|>1+2=<|end|><|assistant|>3<|end|>",
        "<|user|>a<|end|><|assistant|>bc<|end|>",
    ]
    assert all(ids.dtype == np.int32 for example in examples for ids in example)
    assert examples[0][1].tolist()[-1] == tokenizer.eos_token_id


def test_batches_repeat_from_the_seed(tmp_path, tokenizer):
    examples = load_examples(config(tmp_path, [{"prompt": str(n), "response": "x"} for n in range(9)]), tokenizer)

    def batches(seed):
        order = ExampleOrder(examples, seed)
        return [[prompt.tolist() for prompt, _ in order.take(2)] for _ in range(9)]

    assert batches(1) == batches(1) != batches(2)


def test_val_split(tmp_path, tokenizer):
    train = config(tmp_path, [{"prompt": "a", "response": "b"}])
    assert len(load_examples(train, tokenizer, split="val")) == 0
    both = SFTDataConfig(
        train_files=train.train_files, val_files=[f.path for f in train.train_files] * 2, train_batch_size=1
    )
    assert len(load_examples(both, tokenizer, split="val")) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "line 1 has no response column; its columns are prompt"),
        ({"prompt": "a", "response": 3}, "response must be a text, not a int"),
        ({"response": "a"}, "line 1 has no prompt column"),
        ({"prompt": "aaaa", "response": "bbbb"}, "data.max_length=10; the first is .*line 1 with 12 tokens"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        load_examples(config(tmp_path, [row], max_length=10), tokenizer)


def test_overlong_examples_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "aaaa", "response": "bbbb"}, {"prompt": "a", "response": "b"}]
    examples = load_examples(config(tmp_path, rows, max_length=10, filter_overlong=True), tokenizer)
    assert len(examples) == 1
    assert examples.report[0].startswith("dropped 1 of 2 examples")
