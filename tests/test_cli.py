"""What a user meets who makes a mistake or ends a run: one clear line, an exit status, and nothing left running."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from megarl import cli, launcher
from megarl.data.arithmetic import make_arithmetic_task
from tests.rollout.processes import adopting_orphans, alive, descendants, naming, wait_until

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=3")
REWARD = """
def picky(completions, **columns):
    raise RuntimeError("no rule for this")
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = make_arithmetic_task(tmp_path_factory.mktemp("task"), seed=0)
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(rows[:64]))
    return folder


def arguments(task: Path, run_dir: Path) -> list[str]:
    """One rank, one engine, and as little as possible to do."""
    return [
        str(CONFIG),
        f"trainer.output_dir={run_dir}",
        "trainer.overwrite_output_dir=false",
        "trainer.total_steps=1",
        "parallel.tensor_model_parallel_size=1",
        "trainer.n_gpus_per_node=1",
        f"actor.model.path={task}/model",
        f"data.train_files={task}/few.jsonl",
        "data.val_files=[]",
        "trainer.test_freq=0",
        "rollout.kv_cache_memory_mib=32",
    ]


# Before any rank starts.


@pytest.fixture
def megarl(monkeypatch, capsys):
    """megarl("train", ...) -> (exit status, stdout, stderr), in this process; to start a rank fails the test."""
    for name, value in cli.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "launch", lambda *_: pytest.fail("ranks were started"))

    def run(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megarl", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(megarl, task, tmp_path):
    """refused("rollout.nn=3") -> the one line that `megarl train` says about it."""

    def run(*overrides, status: int = 2) -> str:
        found, out, err = megarl("train", *arguments(task, tmp_path / "run"), *overrides)
        assert (found, out) == (status, "")
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        assert not (tmp_path / "run").exists()
        return line

    return run


def out_of_memory_on_a_gpu():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def out_of_memory_on_a_cpu():
    import torch

    torch.empty(1 << 60)


@pytest.mark.parametrize(
    ("fail", "message"),
    [(out_of_memory_on_a_gpu, "CUDA out of memory"), (out_of_memory_on_a_cpu, "can't allocate memory")],
)
def test_out_of_memory_names_the_keys_that_need_less(megarl, monkeypatch, fail, message):
    monkeypatch.setattr(cli, "app", fail)
    status, out, err = megarl("train")
    assert (status, out, err.count("\n")) == (1, "", 1) and err.startswith("error: ") and message in err
    for key in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu", "tensor_model_parallel_size"):
        assert key in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.nn=3", r"rollout\.nn=3: there is no such key; did you mean rollout\.n\?"),
        ("algorithm.name=grpa", r"algorithm\.name='grpa' is not known; the known algorithms are .*grpo"),
        ("trainer.nnodes=2", r"trainer\.nnodes=2: start `megarl train` with torchrun on every node"),
        ("rollout.tensor_model_parallel_size=3", r"tensor_model_parallel_size=3 .* num_attention_heads=4"),
        ("data.max_prompt_length=600", r"max_response_length = 606 tokens, .* max_position_embeddings=256"),
        ("actor.model.path=/no/such/folder", "model folder /no/such/folder does not exist"),
    ],
)
def test_a_wrong_value(refused, override, message):
    assert re.search(message, refused(override))


def test_heads_not_divisible_by_the_tensor_parallel_size(refused):
    line = refused("parallel.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3")
    assert line.endswith("does not divide the model's num_attention_heads=4; sizes that fit this model: 1, 2")


def test_a_reference_model_is_checked_where_one_is_needed(refused):
    assert "/no/such/folder does not exist" in refused("ref.model_path=/no/such/folder", "algorithm.use_kl_loss=true")


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without_a_shard(folder: Path):
    os.rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def with_config(**changes):
    def change(folder: Path):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("model.safetensors", 1_000_000), r"model\.safetensors is not a whole safetensors file"),
        (cut("model.safetensors", 0), r"model\.safetensors is not a whole safetensors file"),
        (without_a_shard, r"index\.json names model-00002-of-00002\.safetensors, not there"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no model\.safetensors and no"),
        (cut("config.json", 200), r"config\.json of model folder .* cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (with_config(hidden_size="many"), r"'hidden_size' expected int, got str \(value: 'many'\)"),
        (with_config(model_type="mamba"), r"model_type 'mamba' is not supported; supported: llama, qwen2"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"model_type 'None' is not supported"),
    ],
    ids="cut-tensors no-tensors-in-file missing-shard no-tensors cut-config no-config type family empty-config".split(),
)
def test_a_half_written_or_foreign_model_folder(refused, task, tmp_path, damage, message):
    folder = shutil.copytree(task / "model", tmp_path / "model")
    damage(folder)
    assert re.search(message, refused(f"actor.model.path={folder}"))


@pytest.mark.parametrize(("name", "version"), [("megatron_core", "0.15.0"), ("vllm", "0.30.1")])
def test_an_unsupported_release(refused, monkeypatch, tmp_path, name, version):
    metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(status=1)
    assert re.search(rf"{name.replace('_', '-')} {version} is installed, supported is .*; pip install", line)


def test_output_dir_that_already_holds_a_run(megarl, task, tmp_path):
    (tmp_path / "config.yaml").write_text("kept: true\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    status, _, err = megarl("train", *arguments(task, tmp_path))
    assert status == 2
    assert err.count("\n") == 1 and "already holds a run" in err and "trainer.overwrite_output_dir=true" in err
    assert (tmp_path / "config.yaml").read_text() == "kept: true\n"


def test_debug_shows_the_traceback(monkeypatch, task, tmp_path):
    words = ["megarl", "train", *arguments(task, tmp_path), "rollout.nn=3", "--debug"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(ValueError, match=r"rollout\.nn=3: there is no such key"):
        cli.main()  # Python prints the traceback of what leaves `main`


def test_dry_run_shows_config_and_table_and_starts_nothing(megarl, task, tmp_path):
    status, out, err = megarl("train", *arguments(task, tmp_path / "run"), "learning_rate=0.5", "--dry-run")
    assert status == 0
    config, _, table = out.partition("This run")
    resolved = yaml.safe_load(config)
    assert resolved["actor"]["optim"]["lr"] == 0.5 and resolved["trainer"]["total_steps"] == 1
    assert "optimizer steps in total" in table and "1 trainer rank(s), 1 rollout driver, 1" in table
    notes = err.splitlines()
    assert notes[0] == "note: command line: learning_rate is read as actor.optim.lr"
    assert [line.split("=")[0] for line in notes[1:]] == ["note: data.max_response_length", "note: actor.optim.lr"]
    assert not (tmp_path / "run").exists()


def test_dry_run_checks_what_a_run_checks(refused):
    assert "/no/such/folder does not exist" in refused("actor.model.path=/no/such/folder", "--dry-run")
    assert "reward function 'arithmetics' is unknown; known: arithmetic" in refused(
        "reward.functions=arithmetics", "--dry-run"
    )


def test_a_reward_model_is_a_classifier(refused, task):
    said = refused(f"reward_model.path={task / 'model'}", "--dry-run")
    assert "has no score.weight: it is no sequence classifier. `megarl reward-model` makes one" in said


def test_a_critic_that_is_not_loaded_is_said(megarl, task, tmp_path):
    status, _, err = megarl("train", *arguments(task, tmp_path / "run"), "critic.ppo_epochs=2", "--dry-run")
    assert status == 0 and "note: critic.ppo_epochs: without effect, algorithm.name=grpo has no critic\n" in err


def test_explain(megarl):
    status, out, _ = megarl("explain", "rollout.n")
    assert status == 0 and out.startswith("rollout.n\n") and "type: " in out and "default: " in out
    status, out, _ = megarl("explain", "actor")
    assert status == 0 and out.startswith("actor: The trained policy.") and "\n  actor.optim: " in out
    status, out, _ = megarl("explain", "num_generations")
    assert status == 0 and out.startswith("num_generations is another spelling of rollout.n.\n")
    status, out, err = megarl("explain", "rollout.nn")
    assert (status, out, err) == (2, "", "error: there is no key rollout.nn; did you mean rollout.n?\n")


# With ranks.

LAUNCHES = {  # name -> (command, overrides, exit status, what the line says)
    "no-prompt-column": (
        (),
        ["data.train_files={folder}/questions.jsonl"],
        2,
        r"questions\.jsonl line 1 has no prompt column; its columns are question, .* data\.prompt_key",
    ),
    "prompt-too-long": (
        (),
        ["data.max_prompt_length=4"],
        2,
        r"64 of 64 prompts in .* are over data\.max_prompt_length=4; the first is .* line 1 with 9 tokens",
    ),
    "reward-raises": (
        (),
        ["reward.functions={folder}/rewards.py:picky"],
        2,
        r"reward function 'picky', on prompt \d+ of data source 'arithmetic' with completion '.*', raised "
        "RuntimeError: no rule for this",
    ),
    "engine-cannot-start": (
        (),
        ["rollout.max_num_seqs=100000"],
        1,
        r"engine 0 could not start \(exit status 1\): .*max_num_seqs",
    ),
    "socket-taken": (
        (),
        ["rollout.socket_dir={folder}"],
        1,
        r"the socket .*/engine_0\.sock is taken: another process listens on it; .* rollout\.socket_dir",
    ),
    "port-taken": ((), ["sync.port={port}"], 2, r"sync\.port=\d+ cannot be opened .*; choose another, or 0 for any"),
    "torchrun-of-another-size": (
        TORCHRUN,
        [],
        1,
        r"the launcher started 3 trainer processes, but the configuration needs 1 ",
    ),
}


@pytest.fixture(scope="module")
def nothing_left():
    """What runs below this process besides what ran before, orphans included."""
    before = descendants(os.getpid())
    with adopting_orphans():
        yield lambda: descendants(os.getpid()) - before


@pytest.fixture(scope="module")
def launched(task, nothing_left, tmp_path_factory) -> dict[str, Future]:
    """Every launch of the table, two at a time: each mostly waits for one process that imports."""
    folder = tmp_path_factory.mktemp("s")
    rows = [json.loads(line) for line in (task / "few.jsonl").read_text().splitlines()]
    questions = [{"question": row.pop("prompt")} | row for row in rows]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "rewards.py").write_text(REWARD)
    with (
        socket.socket(socket.AF_UNIX) as taken_socket,
        socket.create_server(("127.0.0.1", 0)) as taken_port,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        taken_socket.bind(str(folder / "engine_0.sock"))
        taken_socket.listen()
        places = dict(folder=folder, port=taken_port.getsockname()[1])

        def launch(name: str) -> subprocess.CompletedProcess:
            prefix, overrides, _, _ = LAUNCHES[name]
            words = [*arguments(task, folder / name), *(override.format(**places) for override in overrides)]
            command = [sys.executable, *prefix, "-m", "megarl", "train", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=280)

        yield {name: pool.submit(launch, name) for name in LAUNCHES}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_run_that_fails_says_why_in_one_line(launched, name):
    prefix, _, status, message = LAUNCHES[name]
    ended = launched[name].result()
    assert ended.returncode == status, ended.stderr
    if prefix:  # torchrun adds its own report, and every rank speaks
        said = [line for line in ended.stderr.splitlines() if re.match(r"\[rank \d\] error: ", line)]
        assert said and all(re.search(message, line) for line in said)
        return
    first, *more = ended.stderr.splitlines()
    assert first.startswith("error: ") and re.search(message, first)
    if name == "reward-raises":  # the user's own function: its traceback is the remedy
        assert more[0].startswith("Traceback") and more[-1] == "RuntimeError: no rule for this"
        assert not any("/megarl/rollout/" in line for line in more)
        return
    assert all(line.startswith(("  also: ", "the last lines of ", "  | ")) for line in more)
    assert not more or name == "engine-cannot-start"


def test_failed_runs_leave_nothing(launched, nothing_left):
    for future in launched.values():
        future.result()
    assert wait_until(lambda: not nothing_left(), 20), nothing_left()


def start(task: Path, run_dir: Path) -> tuple[subprocess.Popen, set]:
    """A run whose engine is starting, and its processes."""
    command = [sys.executable, "-m", "megarl", "train", *arguments(task, run_dir)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    server = "vllm.entrypoints.openai.api_server"
    is_starting = lambda: len(naming(server) & descendants(run.pid)) == 2  # noqa: E731 - the server and its supervisor
    assert wait_until(lambda: run.poll() is not None or is_starting(), 200) and run.poll() is None
    return run, descendants(run.pid)


def test_ctrl_c_while_the_engine_starts(task, nothing_left, tmp_path):
    run, tree = start(task, tmp_path / "run")
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err == "interrupted; every process of the run is being ended\n"
    assert wait_until(lambda: not alive(tree) and not nothing_left(), 20), alive(tree)


def test_launching_process_killed(task, nothing_left, tmp_path):
    run, tree = start(task, tmp_path / "run")
    assert len(tree) >= 5  # launcher, rank, rollout driver, supervisor, server
    run.kill()
    run.communicate(timeout=60)
    assert wait_until(lambda: not alive(tree) and not nothing_left(), 30), alive(tree)


@pytest.mark.slow
def test_rank_0_killed(task, nothing_left, tmp_path):
    run, tree = start(task, tmp_path / "run")
    (rank,) = (pid for pid, _ in tree if pid != run.pid and (pid, _) in naming("-m\0megarl\0train"))
    os.kill(rank, signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert err == "error: trainer rank 0 was ended by signal 9\n"
    assert wait_until(lambda: not alive(tree) and not nothing_left(), 30), alive(tree)


def test_evaluate_and_judge(task, nothing_left, tmp_path):
    """Both commands on a real engine, side by side: every figure with its interval, and a rate with its ties."""
    held_out = [
        f"data.val_files={task}/few.jsonl",
        "rollout.val_kwargs.n=3",
        "rollout.val_kwargs.max_prompts=12",
        "trainer.test_freq=1",
    ]
    layers, figures = [*arguments(task, tmp_path / "run"), *held_out], tmp_path / "figures.json"
    commands = [
        ["evaluate", *layers, "--answer", r"(\d+)", "--output", str(figures)],
        ["judge", *layers, "--rule", "arithmetic", "--num-examples", "10"],
    ]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = [subprocess.Popen([sys.executable, "-m", "megarl", *command], **pipes) for command in commands]
    (table, _), (rate, said) = (run.communicate(timeout=280) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], said
    results = json.loads(figures.read_text())["results"]
    assert list(results)[2:] == [f"{kind}@{k}" for k in (1, 2, 3) for kind in ("pass", "maj")]
    assert all(0 <= one["low"] <= one["mean"] <= one["high"] <= 1 for one in results.values())
    assert "greedy accuracy" in table and "maj@3" in table
    # The model is random and the references are right: it may tie by luck, and never wins.
    win_rate = float(re.search(r"^Model win rate: (\d+\.\d\d)%$", rate, re.MULTILINE)[1])
    assert win_rate <= 50 and "10 prompts" in rate
    assert wait_until(lambda: not nothing_left(), 20), nothing_left()


def test_judge_needs_one_judge(megarl, task, tmp_path):
    wrong = [(), ("--judge-url", "http://localhost:1/v1"), ("--judge-model", "m")]
    wrong += [("--rule", "arithmetic", *words) for words in (wrong[1], wrong[2], (*wrong[1], *wrong[2]))]
    for words in (*wrong, ("--rule", "arithmetic", "--judge-key-env", "KEY")):
        status, _, err = megarl("judge", *arguments(task, tmp_path / "run"), *words)
        assert (status, err) == (2, "error: name one judge: --rule, or --judge-url with --judge-model\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("judge", "--rule", "arithmetik"), "reward function 'arithmetik' is unknown; known: arithmetic, "),
        (
            ("judge", "--rule", "arithmetic", "--against", "m", "--reference-column", "c"),
            "--against and --reference-column both say",
        ),
        (("judge", "--rule", "arithmetic"), "there is nothing to judge: set data.val_files"),
        (("evaluate",), "there is nothing to evaluate on: set data.val_files"),
        (("evaluate", "data.val_files=few.jsonl", "--answer", "("), "--answer '(' is no regular expression"),
        (
            ("evaluate", "data.val_files=few.jsonl", "reward.functions=[]", "reward_model.path=m"),
            "nothing says which answers are right: set reward.functions",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_starts(megarl, task, tmp_path, words, message):
    status, _, err = megarl(words[0], *arguments(task, tmp_path / "run"), *words[1:])
    assert status == 2 and err.startswith(f"error: {message}"), err
