"""Which code an op runs: what is installed decides, the self-test may overrule it, and both are said."""

import importlib.util
import logging
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from megarl.csrc import (
    linear_logprob_cpu,
    logprob,
    logprob_cpu,
    logprob_cuda,
    logprob_kl,
    logprob_kl_cpu,
    logprob_kl_cuda,
)
from megarl.ops import dispatch
from megarl.ops.logprob import logprob_and_entropy, reference_local_statistics

GPU = torch.device("cuda")
CPU_TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_refused", False)
    monkeypatch.setattr(dispatch, "_found", cache(dispatch._found.__wrapped__))


@pytest.mark.parametrize(
    ("compiled", "triton", "name", "kernels", "said"),
    [
        ("both", True, "CUDA C++", {"logprob": logprob_cuda, "logprob_kl": logprob_kl_cuda}, "CUDA C++"),
        ("one", True, "Triton", {"logprob": logprob, "logprob_kl": logprob_kl}, "install megarl with nvcc"),
        (None, True, "Triton", {"logprob": logprob, "logprob_kl": logprob_kl}, "install megarl with nvcc"),
        (None, False, "torch", {}, "or install Triton"),
    ],
)
def test_the_best_that_is_installed_is_taken(monkeypatch, caplog, compiled, triton, name, kernels, said):
    monkeypatch.setattr(logprob_cuda, "library", lambda: object() if compiled else None)
    monkeypatch.setattr(logprob_kl_cuda, "library", lambda: object() if compiled == "both" else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object() if triton else None)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        path = dispatch.path(GPU, torch.bfloat16)
    assert (path.name, path.kernels) == (name, kernels)
    assert [said in message for message in caplog.messages] == [True]  # once


@pytest.mark.parametrize("built", ["all", "two", None])
def test_what_is_built_for_a_cpu_is_taken(monkeypatch, caplog, built):
    kernels = {"logprob": logprob_cpu, "logprob_kl": logprob_kl_cpu, "linear_logprob": linear_logprob_cpu}
    for op, of_op in kernels.items():
        there = built == "all" or (built == "two" and op != "logprob_kl")
        monkeypatch.setattr(of_op, "library", lambda there=there: object() if there else None)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        path = dispatch.path(torch.device("cpu"), torch.bfloat16)
    assert path == (dispatch.Path("C++", kernels, CPU_TYPES, columns=True) if built == "all" else dispatch.TORCH)
    assert dispatch.path(torch.device("cpu"), torch.float16) is dispatch.TORCH
    said = "C++ (csrc/*.cpp)" if built == "all" else "built where megarl is installed with a C++ compiler"
    assert [said in message for message in caplog.messages] == [True]  # once


def test_what_the_reference_computes(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert dispatch.path(torch.device("mps"), torch.float32) is dispatch.TORCH
    assert "no kernels for a mps" in caplog.text
    monkeypatch.setattr(dispatch, "_found", lambda device_type: dispatch.Path("Triton", {"logprob": logprob}))
    assert dispatch.path(GPU, torch.float64) is dispatch.TORCH
    assert dispatch.path(GPU, torch.float32).name == "Triton"


def test_a_refused_path_is_the_reference_from_then_on(monkeypatch, caplog):
    calls = []

    def local_statistics(*arguments):
        calls.append("kernel")
        return reference_local_statistics(*arguments)

    kernels = SimpleNamespace(local_statistics=local_statistics)
    monkeypatch.setattr(dispatch, "_found", lambda device_type: dispatch.Path("Triton", {"logprob": kernels}))
    logits, targets = torch.randn(3, 5), torch.tensor([0, -100, 4])
    of_kernel = logprob_and_entropy(logits, targets)
    assert calls == ["kernel"]
    dispatch.use_reference("a reason")
    assert "a reason" in caplog.text
    of_reference = logprob_and_entropy(logits, targets)
    assert calls == ["kernel"] and all(map(torch.equal, of_kernel, of_reference))
    assert dispatch.path(GPU, torch.float32) is dispatch.TORCH
