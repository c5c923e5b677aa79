"""Starting one vLLM server: its sockets, its command, and what is said when it cannot start."""

import asyncio
import json
import os
import shutil
import socket
import stat

import pytest

from megarl.errors import MegarlError
from megarl.rollout.engine import Engine, Placement, SocketFolder, log_excerpt, server_command, server_environment
from tests.rollout.processes import naming


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tiny_config, tiny_checkpoint, tmp_path):
    broken = shutil.copytree(tiny_checkpoint(), tmp_path / "broken")
    settings = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(settings | {"hidden_size": "many"}))
    config = tiny_config({"actor": {"model": {"path": str(broken), "dtype": "float32"}}})

    async def main():
        engine = Engine(0, config, tmp_path / "run", SocketFolder(str(tmp_path / "s")), Placement(None))
        await engine.start()
        with pytest.raises(MegarlError) as caught:
            try:
                await engine.wait_until_ready(lambda line: None)
            finally:
                await engine.close()
        return str(caught.value)

    message = asyncio.run(main())
    assert message.startswith("engine 0 could not start (exit status 1): ")
    assert "hidden_size" in message.splitlines()[0] + message.splitlines()[1]
    assert f"the last lines of {tmp_path / 'run' / 'logs' / 'engine_0.log'}:" in message
    assert not naming(str(tmp_path))


def test_sockets(tmp_path):
    folder = SocketFolder(str(tmp_path / "s"))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    path = folder.claim(0)
    assert path == tmp_path / "s" / "engine_0.sock"
    with pytest.raises(MegarlError, match=r"s belongs to another run that is still alive.*rollout.socket_dir"):
        SocketFolder(str(tmp_path / "s"))

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        with pytest.raises(MegarlError, match=r"the socket .*s/engine_0.sock is taken.*rollout.socket_dir"):
            folder.claim(0)
    assert path.exists()  # left over: nobody listens any more
    assert folder.claim(0) == path and not path.exists()

    long = SocketFolder(str(tmp_path / ("x" * 100)))
    with pytest.raises(ValueError, match=r"has \d+ bytes and the kernel takes 107; set rollout.socket_dir"):
        long.claim(0)


def test_private_folder_by_default():
    folder = SocketFolder(None)
    assert folder.is_temporary and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.path.rmdir()


def test_gpus_are_dealt_out_in_order(tiny_config, tmp_path):
    place = Placement(["4", "5", "6", "7"])
    assert [place.of_engine(index, 2) for index in range(2)] == [["4", "5"], ["6", "7"]]
    assert Placement(None).of_engine(3, 2) is None
    with pytest.raises(ValueError, match="engine 2 needs 2 GPU.* and this node shows 4; lower rollout.num_engines"):
        place.of_engine(2, 2)

    config = tiny_config({"rollout": {"gpu_memory_utilization": 0.4, "free_cache_engine": True}})
    command = " ".join(server_command(config, tmp_path / "x.sock", on_cuda=True))
    assert "--gpu-memory-utilization 0.4" in command and "--enable-sleep-mode" in command
    assert "kv-cache-memory-bytes" not in command and "chunked-prefill" not in command
    assert server_environment(config, ["6", "7"])["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_excerpts_name_the_cause(tmp_path):
    log = tmp_path / "engine.log"
    lines = ["noise"] * 50
    lines += ["(EngineCore pid=12) ERROR 11-21 01:44:34 [core.py:1512] ValueError: head size 16 is not supported"]
    lines += ["(APIServer pid=9) RuntimeError: Engine core initialization failed. See root cause above."]
    log.write_text("\n".join(lines))
    first, *tail = log_excerpt(log).splitlines()
    assert first == ": ValueError: head size 16 is not supported"
    assert tail[0] == f"the last lines of {log}:" and len(tail) == 16
    assert tail[-1] == "  | RuntimeError: Engine core initialization failed. See root cause above."

    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, too long",
    ]
    log.write_text("\n".join(lines))
    assert log_excerpt(log).splitlines()[0] == ": Value error, too long"
    assert "no log was written" in log_excerpt(tmp_path / "none.log")
