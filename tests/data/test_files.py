import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from megarl.config.data import DataFile
from megarl.data.files import load_rows, read_rows


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_keeps_line_numbers_over_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2, "y": "é"}\n')
    rows = read_rows(str(tmp_path / "a.jsonl"))
    assert [row.columns for row in rows] == [{"x": 1}, {"x": 2, "y": "é"}]
    assert [row.where.split()[-2:] for row in rows] == [["line", "1"], ["line", "3"]]


def test_parquet_gives_plain_python(tmp_path):
    columns = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "4"}, "n": 3}]
    parquet.write_table(pyarrow.Table.from_pylist(columns * 2), tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert [row.columns for row in rows] == columns * 2
    assert rows[1].where.endswith("a.parquet row 1")


def test_one_list_per_file(tmp_path):
    files = [DataFile(path=write_jsonl(tmp_path / f"{n}.jsonl", [{"n": n}] * n)) for n in (1, 3)]
    assert [len(rows) for rows in load_rows(files)] == [1, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"a": 1}\n{"a": \n', "bad.jsonl line 2 is not valid JSON"),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "latin.jsonl line 2 is not valid JSON"),
        ("list.jsonl", b"[1, 2]\n", "line 1 holds a JSON list"),
        ("empty.jsonl", b"\n", "empty.jsonl is empty"),
        ("a.csv", b"x\n1\n", r"extension \.csv; allowed: \.jsonl"),
        ("noext", b"x", r"extension \(none\)"),
        ("bad.parquet", b"not parquet", "cannot be read as parquet"),
    ],
)
def test_unreadable_files_are_told_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/no/such/train.jsonl", "train.parquet", "./there", "a/b/c", "data.csv"])
def test_missing_files_do_not_go_to_the_hub(path):
    with pytest.raises(ValueError, match="does not exist"):
        read_rows(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        read_rows(str(tmp_path))


def test_hub_name_without_network_says_so(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a file here nor a hub dataset") as error:
        read_rows("someone/some-data-v1.1:test")
    assert "split test" in str(error.value) and "Without a network" in str(error.value)


def test_hub_split_defaults_to_train(monkeypatch):
    dataset = datasets.Dataset.from_list([{"prompt": "hi"}])
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_rows("someone/data")[0].columns == {"prompt": "hi"}
    read_rows("someone/data:test[:10]")
    assert asked == [("someone/data", "train"), ("someone/data", "test[:10]")]
