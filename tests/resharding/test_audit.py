"""The checksum is the stated formula, adds up over boxes, and moves with everything that can go wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.audit import checksum, odd

CPU = torch.device("cpu")
MODULUS = 1 << 64


def _by_definition(x: torch.Tensor) -> int:
    """Python integers, element by element."""
    integers = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    total = 0
    for place in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).reshape(-1, x.dim()).tolist():
        term = int(x[tuple(place)].reshape(1).view(integers))
        for d, i in enumerate(place):
            term *= int(odd(d, i, i + 1, CPU))
        total += term
    return total % MODULUS


def _whole(x: torch.Tensor) -> int:
    return int(checksum(x, tuple((0, n) for n in x.shape), x.dtype)) % MODULUS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4), (1, 1)])
def test_is_the_formula(shape, dtype):
    x = torch.randn(shape).to(dtype)
    assert _whole(x) == _by_definition(x)


def test_factors_are_odd_and_differ_between_dimensions():
    rows, columns = odd(0, 0, 5000, CPU), odd(1, 0, 5000, CPU)
    assert bool((rows & 1).all()) and len(set(rows.tolist())) == 5000
    assert not set(rows.tolist()) & set(columns.tolist())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), cut=st.integers(0, 12), across=st.booleans())
def test_adds_up_over_boxes_of_any_strides(rows, columns, cut, across):
    x = torch.randn(columns, rows).bfloat16().t()  # not contiguous
    size = columns if across else rows
    cut = min(cut, size)
    boxes = [(0, cut), (cut, size)]
    total = 0
    for start, stop in boxes:
        if start < stop:
            box = ((0, rows), (start, stop)) if across else ((start, stop), (0, columns))
            total += int(checksum(x[tuple(slice(*ends) for ends in box)], box, x.dtype))
    assert total % MODULUS == _whole(x)


def _flip(x):
    x.view(torch.int16)[3, 5] ^= 1


def _swap_rows(x):
    x[[1, 4]] = x[[4, 1]]


def _swap_blocks(x):
    x[0:4], x[4:8] = x[4:8].clone(), x[0:4].clone()


def _transpose(x):
    x.copy_(x.t().clone())


def _truncate(x):
    x[-1, -3:] = 0


def _sign_of_zero(x):
    x[0, 0] = -0.0


@pytest.mark.parametrize("fault", [_flip, _swap_rows, _swap_blocks, _transpose, _truncate, _sign_of_zero])
def test_moves_with(fault):
    x = torch.randn(8, 8).bfloat16()
    x[0, 0] = 0.0
    before = _whole(x)
    fault(x)
    assert _whole(x) != before


def test_casts_to_the_type_that_travels():
    x = torch.randn(9, 4)
    assert int(checksum(x, ((0, 9), (0, 4)), torch.bfloat16)) % MODULUS == _whole(x.bfloat16())


def test_a_tensor_of_many_chunks():
    x = torch.randn(70, 9000).bfloat16()
    halves = [int(checksum(x[a:b], ((a, b), (0, 9000)), x.dtype)) for a, b in ((0, 33), (33, 70))]
    assert sum(halves) % MODULUS == _whole(x)
