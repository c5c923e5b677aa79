"""The benchmark runs, and its two arms compute the same thing."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_run_writes_every_arm(tmp_path):
    out = tmp_path / "results" / "logprob.json"
    command = [sys.executable, "benchmarks/bench_logprob.py", "--quick", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["conditions"]["threads"] == 1 and len(result["rows"]) == 4
    assert len({row["arm"] for row in result["rows"]}) == 2
    for row in result["rows"]:
        assert row["cpu_seconds_min"] > 0 and row["peak_extra_mib"] > 0
        assert row["max_error_logprob"] < 1e-5 and row["max_error_entropy"] < 1e-5
