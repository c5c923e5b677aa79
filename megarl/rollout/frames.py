"""Bytes between rank 0 and the rollout driver, and in recorded rollouts: msgpack, arrays as raw bytes, nothing pickled.

A frame is a little-endian uint64 length and that many bytes of msgpack. An array is extension type 1: dtype, shape and
its contiguous bytes. Dataclasses of megarl/types.py travel as maps and come back as themselves.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
import numpy as np

_LENGTH = struct.Struct("<Q")
_ARRAY = 1


class Request(msgspec.Struct):
    id: int
    method: str
    params: msgspec.Raw


class Reply(msgspec.Struct):
    id: int
    kind: str  # "result", "started" and "progress" (not the last of their id), or the name of an error class
    value: msgspec.Raw


def encode(value: Any) -> bytes:
    """msgpack of plain values, arrays, and dataclasses of them. ValueError for anything else."""
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a dataset column or value cannot be sent between processes: {error}") from None


def decode(data: bytes | msgspec.Raw, type: Any = Any) -> Any:
    """The value of `encode`, checked against `type`."""
    return msgspec.msgpack.decode(data, type=type, ext_hook=_ext_hook, dec_hook=_dec_hook)


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def receive(channel: socket.socket) -> bytes:
    """The next frame's payload from a blocking socket. EOFError when the other side is gone."""
    return _receive_exactly(channel, _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size))[0])


async def receive_async(reader: asyncio.StreamReader) -> bytes:
    """The next frame's payload. EOFError (IncompleteReadError) when the other side is gone."""
    return await reader.readexactly(_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0])


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        header = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(_ARRAY, len(header).to_bytes(2, "little") + header + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data (numbers, text, lists, dicts, numeric arrays)")


def _ext_hook(code: int, data: memoryview) -> np.ndarray:
    assert code == _ARRAY, f"unknown msgpack extension {code}"
    start = 2 + int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2:start])
    return np.frombuffer(data[start:], dtype=dtype).reshape(shape).copy()


def _dec_hook(type: Any, value: Any) -> Any:
    assert type is np.ndarray and isinstance(value, np.ndarray), f"expected an array, got {value!r}"
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
