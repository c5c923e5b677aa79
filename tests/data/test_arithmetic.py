import json

import pytest

from megarl.config.data import DataConfig
from megarl.data.arithmetic import make_arithmetic_task
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_arithmetic_task(tmp_path_factory.mktemp("arithmetic"), seed=3)


def test_prompts_are_all_pairs_and_held_out_ones_are_others(task):
    train, held_out = rows(task / "train.jsonl"), rows(task / "heldout.jsonl")
    assert (len(train), len(held_out)) == (9000, 1000)
    questions = {row["prompt"][0]["content"] for row in train + held_out}
    assert questions == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}
    for row in train + held_out:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row["reward_model"]["ground_truth"] == f"{int(a) + int(b):03d}"


def test_demonstrations_are_half_wrong_and_never_of_held_out_prompts(task):
    demonstrations = rows(task / "sft_train.jsonl")
    truth = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows(task / "train.jsonl")}
    assert len(demonstrations) >= 700 * 256
    off = [int(row["response"]) - int(truth[row["prompt"]]) for row in demonstrations]
    assert set(off) == {0, -10, -2, -1, 1, 2, 10}
    assert 0.495 < sum(o != 0 for o in off) / len(off) < 0.505
    assert all(len(row["response"]) == 3 for row in demonstrations)
    val = rows(task / "sft_val.jsonl")
    assert len({row["prompt"] for row in val}) == 256
    assert all(truth[row["prompt"]] == row["response"] for row in val)


def test_preferences_are_of_the_right_answer_over_slips_and_far_numbers(task):
    prompts = [row["prompt"][0]["content"] for row in rows(task / "train.jsonl")]
    train, val = rows(task / "pairs_train.jsonl"), rows(task / "pairs_val.jsonl")
    assert [row["prompt"] for row in train] == 10 * prompts
    assert [row["prompt"] for row in val] == [row["prompt"][0]["content"] for row in rows(task / "heldout.jsonl")]
    for row in train + val:
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["chosen"] == f"{int(a) + int(b):03d}" and len(row["rejected"]) == 3
        assert row["rejected"] != row["chosen"] and 0 <= int(row["rejected"]) <= 208  # 198 and a slip of 10
    slips = {-10, -2, -1, 1, 2, 10}
    assert {int(row["rejected"]) - int(row["chosen"]) for row in val} == slips
    off = [int(row["rejected"]) - int(row["chosen"]) for row in train]
    near = sum(o in slips for o in off) / len(off)
    assert 0.67 < near < 0.70  # two thirds, and what the far numbers hit by chance


def test_checkpoint_loads_and_reads_the_prompts(task):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    tokenizer = load_tokenizer(str(task / "model"))
    assert len(tokenizer) == 102
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    config = DataConfig(train_files=str(task / "heldout.jsonl"), train_batch_size=1)
    prompt = load_prompts(config.train_files, config, tokenizer).files[0][0]
    assert model(torch.tensor(prompt.token_ids[None]).long()).logits.shape == (1, len(prompt.token_ids), 128)


def test_seed_decides_everything_but_the_split(task, tmp_path):
    import torch

    state = torch.random.get_rng_state()
    same, other = make_arithmetic_task(tmp_path / "same", seed=3), make_arithmetic_task(tmp_path / "other", seed=4)
    assert torch.equal(state, torch.random.get_rng_state())
    for file in ("model/model.safetensors", "sft_train.jsonl", "sft_val.jsonl", "pairs_train.jsonl", "pairs_val.jsonl"):
        assert (task / file).read_bytes() == (same / file).read_bytes() != (other / file).read_bytes()
    for file in ("train.jsonl", "heldout.jsonl", "model/tokenizer.json"):
        assert (task / file).read_bytes() == (other / file).read_bytes()


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        make_arithmetic_task(tmp_path / "taken")
