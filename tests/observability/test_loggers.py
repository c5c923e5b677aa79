import io
import json
import time

import numpy as np
import pytest
from rich.console import Console

from megarl.errors import MegarlError
from megarl.observability import loggers
from megarl.observability.loggers import Loggers, ProgressBar, step_numbers, step_phases

STEP = {
    "objective/scores": 0.4123,
    "response_length/mean": 5.04,
    "policy/entropy_avg": 0.31,
    "policy/approxkl_avg": 0.0012,
    "objective/kl": 0.5,
    "throughput/tokens_per_second": 2950.4,
    "time/generate": 0.3,
    "time/update": 0.41,
    "time/total": 0.71,
}
SHOWN = "reward 0.412  length 5.0  entropy 0.310  kl 5.00e-01  approx kl 1.20e-03  tokens/s 2,950"


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_on_disk_after_every_step_and_valid_json(tmp_path):
    logs = Loggers(["console", "jsonl"], tmp_path, {}, "project")
    logs.log(0, {"heldout/sampled_accuracy": 0.25})
    assert lines_of(tmp_path) == [{"step": 0, "heldout/sampled_accuracy": 0.25}]
    logs.log(1, {"a": np.float32(0.5), "b": float("nan"), "c": float("-inf"), "n": 3})
    line = lines_of(tmp_path)[1]
    assert line == {"step": 1, "a": 0.5, "b": None, "c": None, "n": 3, "not_finite": ["b", "c"]}
    logs.close()


def test_console_alone_writes_no_file(tmp_path):
    Loggers(["console"], tmp_path, {}, "project").close()
    assert list(tmp_path.iterdir()) == []


def test_unknown_logger_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'mlflow'.*known: console, jsonl, tensorboard, wandb"):
        Loggers(["jsonl", "mlflow"], tmp_path, {}, "project")


def test_tensorboard_events_hold_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = Loggers(["tensorboard"], tmp_path, {}, "project")
    for step in (1, 2):
        logs.log(step, {"objective/scores": step / 4})
    logs.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("objective/scores")
    assert [(event.step, event.value) for event in events] == [(1, 0.25), (2, 0.5)]


def test_tables_go_to_every_logger(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = Loggers(["jsonl", "tensorboard"], tmp_path, {}, "project")
    logs.table(3, [{"prompt": "1+1=", "score": 0.5}, {"prompt": "a|b", "score": 1.0}])
    logs.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows == [{"step": 3, "prompt": "1+1=", "score": 0.5}, {"step": 3, "prompt": "a|b", "score": 1.0}]
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3 and text.splitlines() == [
        "| prompt | score |",
        "| --- | --- |",
        "| 1+1= | 0.5 |",
        "| a\\|b | 1.0 |",
    ]


def test_wandb_without_a_key_runs_offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    logs = Loggers(["wandb"], tmp_path, {"trainer": {"seed": 3}}, "project")
    logs.table(1, [{"prompt": "1+1=", "score": 0.5}])
    logs.log(1, {"objective/scores": 0.5})
    logs.close()
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    deadline = time.monotonic() + 60  # wandb's own process writes it
    while b"objective/scores" not in runs[0].read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_wandb_key_is_found_in_the_environment_and_in_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    assert not loggers._has_wandb_key()
    netrc.write_text("machine example.com login user password x\n")
    assert not loggers._has_wandb_key()
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert loggers._has_wandb_key()
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert loggers._has_wandb_key()


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "no_such_logger").mkdir()  # a folder of that name, as wandb leaves one, is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("no_such_logger", "nor_this_one"):
        with pytest.raises(MegarlError, match=f"pip install {package}"):
            loggers._require(package)


def test_step_text():
    assert step_numbers(STEP) == SHOWN
    assert step_phases(STEP) == "0.71 s (generate 0.30, update 0.41)"
    assert step_numbers({"lr": 1.0}) == step_phases({"lr": 1.0}) == ""


def plain_console():
    return Console(file=io.StringIO(), width=40, force_terminal=False)


def test_without_a_terminal_each_step_is_one_unwrapped_line():
    console = plain_console()
    bar = ProgressBar(120, quiet=False, console=console, seconds_between_lines=0)
    bar.note("engine 0: loading (12 s) [bold]")
    bar.update(7, STEP)
    bar.close()
    assert console.file.getvalue().splitlines() == [
        "engine 0: loading (12 s) [bold]",
        f"step   7/120  {SHOWN}  0.71 s (generate 0.30, update 0.41)",
    ]


def test_without_a_terminal_quick_steps_share_a_line_but_the_last_has_its_own():
    console = plain_console()
    bar = ProgressBar(100, quiet=False, console=console, seconds_between_lines=1000)
    for step in range(1, 101):
        bar.update(step, {})
    assert console.file.getvalue().splitlines() == ["step   1/100", "step 100/100"]


def test_on_a_terminal_the_bar_counts_and_notes_stand_above():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None, legacy_windows=False)
    bar = ProgressBar(120, quiet=False, console=console)
    bar.update(7, STEP)
    bar.note("step 7: held-out sampled 0.500")
    bar.close()
    bar.close()
    shown = console.file.getvalue()
    assert "step 7: held-out sampled 0.500" in shown
    last = shown[shown.rindex("7/120") :]
    assert SHOWN in last and "0.71 s (generate 0.30, update 0.41)" in last


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_nothing(terminal, capsys):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    bar = ProgressBar(3, quiet=True, console=console)
    bar.note("loading")
    bar.update(3, STEP)
    bar.console.print("a table")
    bar.close()
    assert console.file.getvalue() == "" and capsys.readouterr().out == ""
