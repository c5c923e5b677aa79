import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.problem_reward import problem_reward


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("so <answer>12</answer>", "12", 1.0),
        ("so \\boxed{12.0}", "12", 1.0),
        ("first 3 then\n#### 1,200", 1200, 1.0),
        ("It costs $12.50.", "12.5", 1.0),
        ("3 and then 4", "3", 0.0),
        ("<answer>Paris</answer>", " Paris ", 1.0),
        ("<answer>paris</answer>", "Paris", 0.0),
        ("no idea", "12", 0.0),
        ("<answer>twelve</answer>", "12", 0.0),
        ("", "", 0.0),
    ],
)
def test_one_for_the_right_final_answer(text, answer, score):
    assert problem_reward(completions=[text], answers=[answer]) == [score]
    assert problem_reward([[{"content": text}]], ground_truth=[answer]) == [score]


@given(st.text(alphabet="<>/answer{}\\boxd#-$.,0123456789 \n\u0665"), st.text(max_size=5))
def test_it_never_raises(text, answer):
    assert problem_reward([text], [answer]) in ([0.0], [1.0])
