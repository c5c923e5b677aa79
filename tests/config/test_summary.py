from megarl.config.root import TrainConfig
from megarl.config.summary import batch_table, step_in_words

from .test_load import Toy


def config(**rollout):
    return TrainConfig.model_validate(
        {
            "trainer": {"output_dir": "x", "total_steps": 120, "nnodes": 2, "n_gpus_per_node": 4},
            "parallel": {"tensor_model_parallel_size": 2},
            "data": {
                "train_files": "a.jsonl",
                "train_batch_size": 64,
                "max_prompt_length": 16,
                "max_response_length": 8,
            },
            "actor": {
                "model": {"path": "m"},
                "ppo_mini_batch_size": 256,
                "ppo_epochs": 3,
                "ppo_max_token_len_per_gpu": 2400,
            },
            "rollout": {"n": 8, "num_engines": 2, "tensor_model_parallel_size": 4, **rollout},
            "reward": {"functions": "arithmetic"},
            "algorithm": Toy(),
        }
    )


def test_batch_arithmetic():
    table = dict(batch_table(config()))
    assert table["trainer ranks"] == "8 = 2 node(s) x 4"
    assert table["layout of the ranks"] == "tensor parallel 2 x data parallel 4"
    assert table["completions per step"] == "512 = 64 prompts x 8 (rollout.n)"
    assert table["mini-batches per step"].startswith("2 of 256 completions")
    assert table["mini-batch per data-parallel rank"].startswith("64 completions")
    assert table["optimizer steps per step"] == "6 = 3 pass(es) x 2 mini-batches"
    assert table["optimizer steps in total"] == "720 = 120 steps x 6"
    assert table["longest sequence"] == "24 tokens = 16 prompt + 8 completion"
    assert table["micro-batch of the update"].endswith(": 100 of the longest sequences")
    assert table["micro-batch of log-probs"].startswith("at most 4,800 tokens")
    assert table["would be started"] == "8 trainer rank(s), 1 rollout driver, 2 vLLM engine(s) x tensor parallel 4"


def test_replay_starts_no_engine():
    assert (
        "no engine: rollouts are read from runs/r" in dict(batch_table(config(replay_dir="runs/r")))["would be started"]
    )


def test_the_actor_waits_for_the_critic():
    given = config().model_dump() | {"algorithm": Toy(), "critic": {"ppo_epochs": 2, "ppo_mini_batch_size": 128}}
    warm = TrainConfig.model_validate(given | {"trainer": given["trainer"] | {"critic_warmup": 20}})
    table = dict(batch_table(warm, has_critic=True))
    assert table["optimizer steps in total"] == "600 = 100 steps x 6"
    assert table["completions in total"] == f"{120 * 512:,}"
    assert table["critic's mini-batches per step"] == "4 of 128 completions, 2 pass(es)"
    assert table["critic's optimizer steps in total"] == "960 = 120 steps x 8"
    assert not any("critic" in what for what in dict(batch_table(warm)))


def test_a_step_in_words():
    assert step_in_words(config()) == (
        "a step: 64 prompts x 8 (rollout.n) = 512 completions, in mini-batches of 256 completions "
        "(actor.ppo_mini_batch_size)"
    )
