"""The benchmarks of log-probs run, every arm of megarl is in the results, and no arm is far from fp64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIELDS = set("peer tokens hidden vocab dtype mode seconds clock extra_mib error_logprob error_entropy error_kl".split())
ARMS = {
    "bench_logprob.py": {"megarl", "log_softmax", "Megatron"},
    "bench_linear_logprob.py": {"megarl, loss inside", "megarl", "megarl, logits", "log_softmax", "Megatron"},
}


@pytest.mark.parametrize("script", ARMS)
def test_quick_run_writes_every_arm(tmp_path, script):
    out = tmp_path / "results" / "logprob.json"
    command = [sys.executable, f"benchmarks/{script}", "--quick", "--no-peers", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    written = json.loads(out.read_text())
    assert written["conditions"]["threads"] == 1 and out.with_suffix(".png").stat().st_size > 0
    rows = [row for row in written["results"] if row["mode"] != "yardstick"]
    modes = ("forward", "forward+backward", "log-prob only, both")
    with_kl = ("forward, exact KL", "forward+backward, exact KL")
    expected = {(arm, mode) for arm in ARMS[script] for mode in modes}
    expected |= {(arm, mode) for arm in ARMS[script] - {"megarl, logits", "Megatron"} for mode in with_kl}
    expected -= {("megarl, loss inside", "forward"), ("megarl, loss inside", "forward, exact KL")}
    expected -= {("Megatron", "forward"), ("Megatron", "forward+backward")}  # log-prob only
    assert {(row["peer"], row["mode"]) for row in rows} == expected
    for row in rows:
        assert set(row) >= FIELDS and row["seconds"] > 0
        if row["peer"] == "Megatron":
            assert row["error_logprob"] < (1e-5 if script == "bench_logprob.py" else 4e-2)
            assert row["error_entropy"] is row["error_kl"] is None
        if row["peer"].startswith("megarl"):
            # Logits given: fp32 statistics. From hidden states: logits of about 4 are themselves rounded to bf16.
            allowed = (1e-5, 1e-5) if script == "bench_logprob.py" else (2e-2, 2e-3)
            assert row["error_logprob"] < allowed[0] and row["error_entropy"] < allowed[1]
        if "exact KL" in row["mode"]:
            assert row["error_kl"] < (1e-5 if script == "bench_logprob.py" else 2e-3)
