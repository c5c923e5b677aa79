"""The KL coefficient's course against verl's, saved and restored, and what is refused."""

import json

import pytest
from pydantic import ValidationError

from megarl.algorithms import kl_control
from tests.algorithms.batches import GOLDENS

GOLDEN = json.loads((GOLDENS / "kl_controller.json").read_text())


@pytest.mark.parametrize("trajectory", GOLDEN["trajectories"], ids=lambda t: f"target{t['target']:g}")
def test_golden_trajectories(trajectory):
    config = kl_control.KLControlConfig(
        type="adaptive", kl_coef=trajectory["init"], target_kl=trajectory["target"], horizon=trajectory["horizon"]
    )
    controller = kl_control.controller(config)
    assert controller.value == trajectory["init"]
    for step, (kl, expected) in enumerate(zip(trajectory["kls"], trajectory["values"], strict=True)):
        if step == 10:  # a new process takes over
            state = json.loads(json.dumps(controller.state()))
            controller = kl_control.controller(config)
            controller.restore(state)
        controller.update(kl, trajectory["n_steps"], epoch=0)
        assert controller.value == pytest.approx(expected, rel=1e-12)


def test_fixed_stays():
    controller = kl_control.controller(kl_control.KLControlConfig(kl_coef=GOLDEN["fixed"]["init"]))
    controller.update(100.0, 1000, epoch=3)
    assert controller.value == GOLDEN["fixed"]["after_update"]


def test_one_value_per_epoch():
    controller, values = kl_control.PerEpoch([0.5, 0.2, 0.1]), []
    for epoch in [0, 0, 1, 1, 2, 3, 9]:
        controller.update(1.0, 8, epoch)
        values.append(controller.value)
    assert values == [0.5, 0.5, 0.2, 0.2, 0.1, 0.1, 0.1]
    other = kl_control.PerEpoch([0.5, 0.2, 0.1])
    other.restore(controller.state())
    assert other.value == 0.1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_kl": 0}, "target_kl\n.*greater than 0"),
        ({"target_kl": -0.1}, "target_kl\n.*greater than 0"),
        ({"horizon": 0}, "horizon\n.*greater than 0"),
        ({"kl_coef": -1}, "kl_coef\n.*greater than or equal to 0"),
        ({"type": "adaptive", "kl_coef": 0}, "0 stays 0"),
        ({"type": "linear"}, "'fixed' or 'adaptive'"),
    ],
)
def test_wrong_keys_are_named(keys, message):
    with pytest.raises(ValidationError, match=message):
        kl_control.KLControlConfig(**keys)
