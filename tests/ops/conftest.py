"""Both ways to compute the ops on a CPU."""

import pytest

from megarl.csrc import logprob_cpu
from megarl.ops import dispatch


@pytest.fixture(params=["C++", "torch"])
def each_path(request, monkeypatch) -> str:
    """The kernels of csrc/*.cpp, and the torch references; ranks that a test starts take the kernels."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "_found", lambda device_type: dispatch.TORCH)
    elif logprob_cpu.library() is None:
        pytest.skip("csrc/*.cpp are not compiled")
    return request.param
