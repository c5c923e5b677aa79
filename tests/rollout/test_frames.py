"""What goes into a frame comes out of it."""

import socket
import threading

import numpy as np
import pytest

from megarl.rollout.frames import decode, encode, frame, receive
from megarl.types import Completion, Prompt, Rollout


def a_rollout(version: int = 3, tokens: int = 5, n: int = 2) -> Rollout:
    rng = np.random.default_rng(tokens)
    completions = [
        Completion(
            token_ids=rng.integers(0, 100, tokens).astype(np.int32),
            logprobs=rng.normal(size=tokens).astype(np.float32),
            finish_reason="stop",
            loss_mask=np.ones(tokens, np.uint8),
            weight_version=np.full(tokens, version, np.int32),
        )
        for _ in range(n)
    ]
    prompt = Prompt(
        7, np.array([1, 2], np.int32), [{"role": "user", "content": "é"}], "052", "sums", {"level": None, "x": [1]}
    )
    return Rollout(prompt, completions, rng.normal(size=n), {"acc": np.zeros(n)}, ["a", "b"])


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (Prompt, Completion, Rollout)):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rollouts_come_back_as_they_were(tokens):
    rollouts = [a_rollout(tokens=tokens), a_rollout(version=0)]
    assert same(decode(encode(rollouts), list[Rollout]), rollouts)


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", "uint8", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_inside_plain_values(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    value = {"nested": [array, array.T, {"k": 1.5}], "none": None}
    assert same(decode(encode(value)), {"nested": [array, array.T.copy(), {"k": 1.5}], "none": None})
    assert decode(encode(array)).flags.writeable


def test_objects_are_refused():
    with pytest.raises(ValueError, match="cannot be sent between processes: Lock"):
        encode({"column": [type("Lock", (), {})()]})
    with pytest.raises(ValueError, match="ndarray is not plain data"):
        encode(np.array([object()]))


def test_frames_on_a_socket_keep_their_bounds():
    payloads = [b"", b"x", np.random.default_rng(0).bytes(3_000_000), b"last"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: [theirs.sendall(frame(payload)) for payload in payloads])
        writer.start()
        assert [receive(ours) for _ in payloads] == payloads
        writer.join()
        theirs.sendall(frame(b"cut off")[:-1])
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours)
