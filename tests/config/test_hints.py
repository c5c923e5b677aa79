import pytest

from megarl.config.hints import hints

USUAL = {
    "rollout": {"n": 8},
    "data": {"max_prompt_length": 64, "max_response_length": 128},
    "actor": {"optim": {"lr": 5e-5}},
}


def test_usual_values_are_passed_over(tiny_config):
    assert hints(tiny_config(USUAL)) == []
    alone = {"rollout": {"n": 1}, "actor": {"optim": {"lr": 5e-5}, "ppo_mini_batch_size": 1}}
    assert hints(tiny_config(USUAL | alone)) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout": {"n": 32}}, "rollout.n=32 is outside the usual: groups of 2 to 8"),
        ({"data": {"max_prompt_length": 64, "max_response_length": 63}}, "data.max_response_length=63 is outside"),
        ({"data": {"max_prompt_length": 64, "max_response_length": 8192}}, "data.max_response_length=8192 is outside"),
        ({"actor": {"optim": {"lr": 9e-6}}}, "actor.optim.lr=9e-06 is outside 1e-5 to 1e-4"),
        ({"actor": {"optim": {"lr": 2e-4}}}, "actor.optim.lr=0.0002 is outside 1e-5 to 1e-4"),
    ],
)
def test_an_unusual_value_gets_a_line(tiny_config, changes, told):
    (line,) = hints(tiny_config(USUAL | changes))
    assert line.startswith(told)
