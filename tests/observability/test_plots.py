import json

import numpy as np
import pytest
from matplotlib.image import imread

from megarl.errors import MegarlError
from megarl.observability.plots import plot_run, read_metrics, running_mean, series


def write(run_dir, lines):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def colours(path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[..., :3].reshape(-1, 3) * 255).round().astype(int)
    packed = np.unique(pixels @ [1 << 16, 1 << 8, 1])
    return {(int(p) >> 16, int(p) >> 8 & 255, int(p) & 255) for p in packed}


ORANGE, BLUE = (0xD9, 0x73, 0x0D), (0x2F, 0x6F, 0xB0)


def test_reward_and_heldout_accuracy_are_drawn(tmp_path):
    steps = [{"step": s, "objective/scores": s / 40} for s in range(1, 31)]
    write(tmp_path, steps)
    path = plot_run(tmp_path)
    assert path == tmp_path / "reward.png"
    assert BLUE in colours(path) and ORANGE not in colours(path)
    write(tmp_path, steps + [{"step": step, "heldout/sampled_accuracy": 0.3} for step in (0, 30)])
    assert {BLUE, ORANGE} <= colours(plot_run(tmp_path))


def test_a_supervised_run_gets_its_loss(tmp_path):
    write(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "heldout/greedy_accuracy": 0.5}])
    assert plot_run(tmp_path) == tmp_path / "loss.png"


def test_one_step_and_values_outside_zero_to_one_are_drawn(tmp_path):
    write(tmp_path, [{"step": 1, "objective/scores": -7.5}])
    assert plot_run(tmp_path).stat().st_size > 5000


def test_nothing_to_plot_is_an_error(tmp_path):
    with pytest.raises(MegarlError, match="does not exist"):
        plot_run(tmp_path)
    write(tmp_path, [{"step": 1, "lr": 0.1}])
    with pytest.raises(MegarlError, match="nothing to plot"):
        plot_run(tmp_path)


def test_series_skips_lines_without_a_finite_value(tmp_path):
    skipped = [{"step": 2, "a": None, "not_finite": ["a"]}, {"step": 3, "b": 1}]
    write(tmp_path, [{"step": 1, "a": 0.5}, *skipped, {"step": 4, "a": 2}])
    steps, values = series(read_metrics(tmp_path), "a")
    assert steps.tolist() == [1, 4] and values.tolist() == [0.5, 2]


@pytest.mark.parametrize("reach", [0, 1, 3, 50])
def test_running_mean_is_centred(reach):
    values = np.random.default_rng(0).normal(size=20)
    wanted = []
    for i in range(20):
        r = min(reach, i, 19 - i)
        wanted.append(values[i - r : i + r + 1].mean())
    np.testing.assert_allclose(running_mean(values, reach), wanted, atol=1e-12)
    np.testing.assert_allclose(running_mean(np.arange(9.0), reach), np.arange(9.0))
