"""The self-test keeps right paths, gives up wrong ones on all ranks and aloud, and raises where nothing is right."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.errors import MegarlError
from megarl.ops import dispatch, linear_logprob, logprob, logprob_kl, self_test
from tests.parallel_utils import run_ranks

VOCAB, ROWS = 131, 136  # five rows are padding
SIZES = {"hidden_size": 16, "vocab_size": VOCAB, "rows_local": ROWS}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_refused", False)
    monkeypatch.setattr(dispatch, "_found", dispatch._found)


def right(ops) -> dict:
    return {"local_statistics": ops.reference_local_statistics, "backward_into": ops.reference_backward_into}


def install(change=None, name="local_statistics") -> list[str]:
    """Kernels that are the reference's functions, the named one's result changed; the calls that it gets."""
    calls, kernels = [], {}
    for op, ops in (("logprob", logprob), ("logprob_kl", logprob_kl)):
        functions = right(ops)

        def changed(*arguments, function=functions[name]):
            calls.append(name)
            result = function(*arguments)
            if change is not None:
                change(arguments[0] if result is None else result, arguments)
            return result

        kernels[op] = SimpleNamespace(**functions | {name: changed})
    dispatch._found = lambda device_type: dispatch.Path("Triton", kernels)
    return calls


def forget_the_last_column(statistics, arguments):
    logits, targets, *columns, num_valid = arguments[0], *arguments[-5:]
    statistics[:4] = logprob.reference_local_statistics(logits, targets, *columns, num_valid - 1)


def not_a_number(statistics, arguments):
    statistics[1, 2] = torch.nan


def raise_an_error(result, arguments):
    raise RuntimeError("no kernel image is available")


def spoil_the_tail(out, arguments):
    out[:, VOCAB - 3 : VOCAB] *= 1.5


def write_into_padding(out, arguments):
    out[:, VOCAB] = 1e-3


def ignore_nothing(out, arguments):
    out[self_test.IGNORED, 7] = 0.25


FAULTS = [
    (forget_the_last_column, "local_statistics"),
    (not_a_number, "local_statistics"),
    (raise_an_error, "local_statistics"),
    (spoil_the_tail, "backward_into"),
    (write_into_padding, "backward_into"),
    (ignore_nothing, "backward_into"),
]
MODES = [(fused, with_kl) for fused in (True, False) for with_kl in (True, False)]
PATHS = pytest.mark.parametrize(("fused", "with_kl"), MODES)
OPS = {
    (True, True): "linear_loss",
    (True, False): "linear_loss",
    (False, True): "logprob_entropy_and_kl",
    (False, False): "logprob_and_entropy",
}


@PATHS
@pytest.mark.parametrize("dtype", self_test.OF_LOGITS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "scales"),
    [((16, VOCAB, ROWS), (1.0, None)), ((64, 5, 8), (0.3, None)), ((8, 5000, 5000), (1.4, 2.0))],
    ids=str,
)
def test_what_a_cpu_has_passes(each_path, fused, with_kl, dtype, sizes, scales):
    temperature, soft_cap = scales
    report = self_test.check(*sizes, dtype, None, temperature, "cpu", with_kl, fused, soft_cap)
    path = "torch" if dtype == torch.float16 else each_path
    assert (report.op, report.path, report.given_up) == (OPS[fused, with_kl], path, None)
    values = ["log-prob", "entropy", "KL"][: 3 if with_kl else 2]
    compared = [*(f"{name} of logits" for name in values), "dlogits"] + fused * [*values, "dhidden", "dweight"]
    assert list(report.errors) == list(report.tolerances) == compared and max(report.errors.values()) > 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_large_weight_is_tested_in_part(monkeypatch, whole):
    monkeypatch.setitem(self_test.WEIGHT_ELEMENTS, "cpu", 16 * (ROWS if whole else 50))
    seen, real = [], self_test.linear_loss

    def recorded(hidden, weight, targets, *arguments, **options):
        seen.append((len(weight), options["vocab_size"], targets.max().item()))
        return real(hidden, weight, targets, *arguments, **options)

    monkeypatch.setattr(self_test, "linear_loss", recorded)
    self_test.check(**SIZES, dtype=torch.float32, with_kl=True)
    assert seen == [(ROWS, VOCAB, VOCAB - 1) if whole else (50, 45, 44)]  # five rows of padding either way


@PATHS
def test_right_kernels_are_kept(fused, with_kl, caplog):
    calls = install()
    report = self_test.check(**SIZES, dtype=torch.float32, fused=fused, with_kl=with_kl)
    assert (report.path, report.given_up) == ("Triton", None) and len(calls) == 2 + fused  # the first is a launch alone
    assert not dispatch.is_refused() and not caplog.records


@PATHS
@pytest.mark.parametrize(("change", "name"), FAULTS, ids=[change.__name__ for change, _ in FAULTS])
def test_wrong_kernels_are_given_up_aloud(fused, with_kl, change, name, caplog):
    install(change, name)
    report = self_test.check(**SIZES, dtype=torch.bfloat16, fused=fused, with_kl=with_kl)
    assert report.path == "torch" and dispatch.is_refused()
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    said = record.getMessage()
    assert "torch operations are" in said and "Install megarl again" in said
    assert report.given_up in said
    if change is raise_an_error:
        assert "RuntimeError: no kernel image is available" in said
    else:
        assert f"{OPS[fused, with_kl]} by Triton is not fp64's: its " in said and "allowed are " in said


@pytest.mark.parametrize("with_kl", [False, True])
def test_a_weight_gradient_that_cannot_be_launched_is_given_up(monkeypatch, with_kl, caplog):
    real = linear_logprob.add_weight_gradient

    def unsupported(*arguments):
        if not dispatch.is_refused():
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return real(*arguments)

    install()
    monkeypatch.setattr(linear_logprob, "add_weight_gradient", unsupported)
    report = self_test.check(**SIZES, dtype=torch.bfloat16, with_kl=with_kl)
    assert report.path == "torch" and report.given_up in caplog.text
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in report.given_up


def test_a_wrong_reference_is_an_error(monkeypatch):
    real = logprob.merge_statistics

    def wrong(packed, targets, temperature):
        *others, entropy = real(packed, targets, temperature)
        return *others, entropy * 1.001

    monkeypatch.setattr(logprob, "merge_statistics", wrong)
    with pytest.raises(MegarlError, match="logprob_and_entropy by torch is not fp64's: its dlogits is wrong by up to"):
        self_test.check(**SIZES, dtype=torch.float32, fused=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "no tolerances for torch.float64"),
        ({"temperature": 0.0}, "temperature 0.0 must be > 0"),
        ({"vocab_size": 137}, r"vocab_size 137 must lie in 1..136"),
    ],
)
def test_what_it_cannot_test_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        self_test.check(**SIZES | {"dtype": torch.float32} | change)


def test_a_report_in_a_line(each_path):
    report = self_test.check(**SIZES, dtype=torch.float32, fused=False)
    said = f"logprob_and_entropy by {each_path}; errors against fp64 (allowed): log-prob of logits "
    assert str(report).startswith(said)


def _on_two_ranks() -> dict:
    """{what happened: (path, given up, errors)} with kernels that are right, wrong or raise on rank 1 alone."""
    sizes = SIZES | {"rows_local": ROWS // 2, "group": dist.group.WORLD, "temperature": 0.7}
    on_rank_1 = dist.get_rank() == 1
    found = {}

    def note(name: str, dtype=torch.float32, **options) -> None:
        dispatch._refused = False
        report = self_test.check(**sizes, dtype=dtype, **options)
        found[name] = (report.path, report.given_up, report.errors)

    for path in (dispatch._found("cpu"), dispatch.TORCH):
        dispatch._found = lambda device_type, path=path: path
        for fused, with_kl in MODES:
            note(f"{path.name} {fused} {with_kl}", fused=fused, with_kl=with_kl)
        self_test.WEIGHT_ELEMENTS["cpu"] = 16 * 20
        note(f"{path.name} in part", with_kl=True)
        self_test.WEIGHT_ELEMENTS["cpu"] = 1 << 24
    install()
    note("right")
    install(not_a_number if on_rank_1 else None)
    note("wrong", fused=True)
    note("wrong logits", fused=False, with_kl=True)
    install(raise_an_error if on_rank_1 else None)
    note("raises")

    from megarl.csrc import logprob as triton_logprob
    from megarl.csrc import logprob_kl as triton_kl

    kernels = {"logprob": triton_logprob, "logprob_kl": triton_kl}
    dispatch._found = lambda device_type: dispatch.Path("Triton", kernels)
    note("interpreted")
    note("interpreted KL", with_kl=True)
    dispatch._found = (lambda device_type: dispatch.Path("Triton", kernels)) if on_rank_1 else lambda _: dispatch.TORCH
    note("interpreted on one rank")
    return found


@pytest.fixture(scope="module")
def on_two_ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return run_ranks(_on_two_ranks, 2)


@PATHS
def test_shards_of_what_a_cpu_has_pass(on_two_ranks, each_path, fused, with_kl):
    for name in (f"{each_path} {fused} {with_kl}", f"{each_path} in part"):
        first, second = (of_rank[name] for of_rank in on_two_ranks)
        assert first == second and first[:2] == (each_path, None)


@pytest.mark.parametrize("name", ["right", "interpreted", "interpreted KL"])
def test_right_kernels_are_kept_on_every_rank(on_two_ranks, name):
    first, second = (of_rank[name] for of_rank in on_two_ranks)
    assert first == second and first[:2] == ("Triton", None)


def test_ranks_may_differ_in_what_they_have(on_two_ranks):
    assert [of_rank["interpreted on one rank"][:2] for of_rank in on_two_ranks] == [("torch", None), ("Triton", None)]


@pytest.mark.parametrize("name", ["wrong", "wrong logits", "raises"])
def test_no_rank_falls_back_alone(on_two_ranks, name):
    for path, given_up, _ in (of_rank[name] for of_rank in on_two_ranks):
        assert path == "torch" and "The run goes on, slower" in given_up
    if name == "raises":
        assert "kernels of another rank raised an error" in on_two_ranks[0][name][1]
        assert "no kernel image is available" in on_two_ranks[1][name][1]
