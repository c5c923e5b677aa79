"""csrc/logprob.cpp: compiled without a warning for every level of processors, and run against the torch reference."""

import shutil
import subprocess

import pytest
import torch

from megarl.csrc import compile, libraries, linear_logprob_cpu, logprob_cpu, logprob_kl_cpu
from megarl.ops import logprob as ops
from tests.csrc import cpu_build
from tests.csrc import logprob_cases as cases
from tests.csrc.cpu_build import columns
from tests.csrc.test_logprob import GRAD_TOLERANCE, assert_equal_to_reference

NAMES = [name for name in cases.NAMES if "fp16" not in name]
pytestmark = cpu_build.needs_cpp


@pytest.fixture(scope="module", params=cpu_build.LEVELS_AND_THREADS, ids=str)
def kernels(request, tmp_path_factory):
    level, threads = request.param
    library = cpu_build.compiled("logprob", level, tmp_path_factory.mktemp("compiled"), logprob_cpu._SIGNATURES)
    yield from cpu_build.installed(logprob_cpu, library, threads)


class InColumns:
    """The kernels on copies of that layout, behind the same functions."""

    @staticmethod
    def local_statistics(logits, *arguments, **options):
        return logprob_cpu.local_statistics(columns(logits), *arguments, **options)

    @staticmethod
    def backward_into(out, logits, *arguments):
        of_columns = columns(logits)
        result = of_columns if out is logits else columns(out)
        assert result.stride() == of_columns.stride()
        logprob_cpu.backward_into(result, of_columns, *arguments)
        out.copy_(result)


@pytest.fixture(scope="module")
def reference():
    return of_two_types(ops.reference_local_statistics, ops.reference_backward_into)


def of_two_types(statistics, backward_into) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "CASES", [case for case in cases.CASES if case[1] != "fp16"])
        return cases.outputs(statistics, backward_into)


@pytest.fixture(scope="module")
def outputs(kernels):
    return {
        layout: of_two_types(functions.local_statistics, functions.backward_into)
        for layout, functions in {"rows": logprob_cpu, "columns": InColumns}.items()
    }


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_the_reference(outputs, reference, layout, name):
    assert_equal_to_reference(outputs[layout], reference, name)


@pytest.mark.parametrize("functions", [logprob_cpu, InColumns], ids=["rows", "columns"])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 17, 33, 600])
@pytest.mark.parametrize("width", [1, 15, 2049])
def test_odd_sizes(kernels, functions, num_tokens, width):
    """More tokens and columns than a tile has, and fewer than a vector."""
    generator = torch.Generator().manual_seed(num_tokens * width)
    logits = torch.randn(num_tokens, width + 2, generator=generator) * 3
    logits[:, width:] = torch.nan  # padding is not read
    targets = torch.randint(-1, width, (num_tokens,), generator=generator)
    arguments = (0.8, None, 0, width)
    found = functions.local_statistics(logits, targets, *arguments)
    expected = ops.reference_local_statistics(logits, targets, *arguments)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=2e-6)
    maximum, log_sum, _, entropy = ops.merge_statistics(expected[None], targets, 0.8)
    upstream = torch.randn(2, num_tokens, generator=generator)
    gradient, of_reference = torch.full_like(logits, torch.nan), torch.full_like(logits, torch.nan)
    functions.backward_into(gradient, logits, targets, maximum, log_sum, entropy, *upstream, *arguments)
    ops.reference_backward_into(of_reference, logits, targets, maximum, log_sum, entropy, *upstream, *arguments)
    torch.testing.assert_close(gradient, of_reference, atol=2e-6, rtol=GRAD_TOLERANCE["fp32"])
    assert not gradient[:, width:].any() and not gradient[targets < 0].any()


@pytest.mark.parametrize("functions", [logprob_cpu, InColumns], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", logprob_cpu.DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(kernels, functions, dtype, value):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 7], logits[3, 39] = value, -value
    targets, arguments = torch.arange(5), (1.0, None, 0, 40)
    statistics = functions.local_statistics(logits, targets, *arguments)
    maximum, log_sum, logprob, entropy = ops.merge_statistics(statistics[None], targets, 1.0)
    wrong = [1, 3] if value != value else [1]
    assert logprob.isnan().nonzero()[:, 0].tolist() == entropy.isnan().nonzero()[:, 0].tolist() == wrong
    gradient = torch.empty_like(logits)
    functions.backward_into(gradient, logits, targets, maximum, log_sum, entropy, *torch.ones(2, 5), *arguments)
    assert gradient.isnan().any(dim=1).nonzero()[:, 0].tolist() == wrong


def test_rounding_to_bf16_is_torch_s(kernels):
    """Of every bf16 number's exact half way to the next one, through a gradient that is those numbers."""
    numbers = torch.arange(1, 255 * 128, 1, dtype=torch.int32)
    halfway = ((numbers << 16) + 0x8000).view(torch.float32)
    halfway = halfway[halfway.isfinite() & (halfway > 1e-30) & (halfway < 1e30)]
    # One column has probability 1, and the gradient of an entropy of slope 0 there is the upstream of the log-prob.
    logits, targets = torch.zeros(len(halfway), 1, dtype=torch.bfloat16), torch.full((len(halfway),), 5)
    gradient = torch.empty_like(logits)
    zeros = torch.zeros(len(halfway))
    logprob_cpu.backward_into(gradient, logits, targets, zeros, zeros, zeros, -halfway, None, 1.0, None, 0, 1)
    assert torch.equal(gradient[:, 0], halfway.bfloat16())


@pytest.mark.parametrize("in_columns", [False, True])
@pytest.mark.parametrize("dtype", logprob_cpu.DTYPES, ids=str)
def test_nothing_else_is_written(kernels, in_columns, dtype):
    """Around the gradient, and, out of place, in the logits."""
    generator = torch.Generator().manual_seed(2)
    large = torch.randn(2, 45, 45, generator=generator).to(dtype)
    large = large.transpose(1, 2) if in_columns else large
    before, targets = large.clone(), torch.randint(0, 30, (21,), generator=generator)
    logits, out = large[:, 3:24, 5:36]
    rows = torch.rand(5, 21, generator=generator)
    kernels.backward_into(out, logits, targets, *rows, 1.0, None, 0, 29)
    assert torch.equal(large[0], before[0]) and not out[:, 29:].any()
    out.copy_(before[1, 3:24, 5:36])
    assert torch.equal(large, before)


def test_strides_that_are_neither_rows_nor_columns(kernels):
    logits = torch.randn(12, 5, 2, generator=torch.Generator().manual_seed(1))[:, :, 0]
    targets = torch.stack([torch.arange(12) % 5, torch.zeros(12, dtype=torch.int64)], dim=1)[:, 0]
    found = kernels.local_statistics(logits, targets, 1.0, None, 0, 5)
    torch.testing.assert_close(found, ops.reference_local_statistics(logits, targets, 1.0, None, 0, 5))
    of_columns, rows = columns(logits), torch.rand(5, 12, generator=torch.Generator().manual_seed(3))
    expected = torch.empty_like(logits)
    ops.reference_backward_into(expected, logits, targets, *rows, 1.0, None, 0, 5)
    for out, own in [(logits.clone(), of_columns), (of_columns.clone(), logits.clone()), (logits, logits)]:
        kernels.backward_into(out, own, targets, *rows, 1.0, None, 0, 5)
        torch.testing.assert_close(out, expected)
    over_itself = torch.randn(5).expand(12, 5)
    with pytest.raises(RuntimeError, match="single memory location"):
        kernels.backward_into(over_itself, over_itself, targets, *rows, 1.0, None, 0, 5)


def test_no_tokens_and_no_columns(kernels):
    none = torch.empty(0, dtype=torch.int64)
    assert kernels.local_statistics(torch.empty(0, 8), none, 1.0, None, 0, 8).shape == (4, 0)
    kernels.backward_into(torch.empty(0, 8), torch.empty(0, 8), none, *torch.empty(5, 0), 1.0, None, 0, 8)
    nothing = kernels.local_statistics(torch.randn(2, 8), torch.tensor([1, 2]), 1.0, None, 8, 0)
    assert nothing.tolist() == [[-torch.inf] * 2, [0.0] * 2, [0.0] * 2, [-torch.inf] * 2]


def test_another_type_is_an_error_code(kernels):
    assert kernels.library().megarl_logprob_statistics_cpu(None, 1, 1, 0, None, None, 0, 1, 0, 1.0, 0.0, 1) == 1


def test_a_library_of_another_source_is_not_used(tmp_path, caplog):
    level = torch.backends.cpu.get_cpu_capability()
    if level not in compile.CPU_LEVELS:
        pytest.skip(f"no kernels for {level}")
    for file in cpu_build.FOLDER.glob("*.*[ph]"):
        shutil.copy(file, tmp_path)
    source, header = tmp_path / "logprob.cpp", tmp_path / "lanes.h"
    assert libraries.load_cpu(source, {}) is None and not caplog.records
    library = compile.cpu_library(source, level)
    subprocess.run(compile.cpu_command(compile.find_cpp(), source, library, level), check=True, timeout=120)
    assert libraries.load_cpu(source, logprob_cpu._SIGNATURES) is not None and not caplog.records
    header.write_text(header.read_text() + "\n")
    assert libraries.load_cpu(source, logprob_cpu._SIGNATURES) is None
    assert f"{library} cannot be used (logprob.cpp or a header of it has changed since)" in caplog.messages[-1]
    assert "build it again" in caplog.messages[-1]
    library.unlink()
    library.write_bytes(b"not an ELF file")
    assert libraries.load_cpu(source, logprob_cpu._SIGNATURES) is None and len(caplog.messages) == 2


def test_the_installed_megarl_has_them():
    """`make setup` has built them: they are what CI and every laptop runs."""
    if torch.backends.cpu.get_cpu_capability() in compile.CPU_LEVELS:
        built = [of_op.library() is not None for of_op in (logprob_cpu, logprob_kl_cpu, linear_logprob_cpu)]
        assert all(built), "install megarl again, without MEGARL_BUILD_CPU=0: `make clean setup`"
