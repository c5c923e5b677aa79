"""The Megatron shim changes what megatron.core sees, and nothing else."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as mcore_random

from megarl.parallel import device
from tests.parallel_utils import run_ranks

pytestmark = pytest.mark.skipif(device.HAS_CUDA, reason="the shim is installed only where there is no CUDA")


def test_torch_itself_is_untouched():
    import megatron.core.optimizer.optimizer as treated

    assert treated.torch is not torch
    assert treated.torch.cuda.current_device() == torch.device("cpu")
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()


def test_factories_fall_back_to_the_cpu_inside_megatron_only():
    import megatron.core.optimizer.clip_grads as treated

    assert treated.torch.zeros(2, device="cuda").device.type == "cpu"
    assert treated.torch.float32 is torch.float32


def test_type_names_are_exchanged_where_the_optimizer_compares_them():
    import megatron.core.optimizer.optimizer as treated

    codes = [f.__code__ for f in vars(treated.Float16OptimizerWithFloat16Params).values() if hasattr(f, "__code__")]
    constants = {
        c for code in codes for const in code.co_consts for c in (const if isinstance(const, tuple) else [const])
    }
    assert "torch.FloatTensor" in constants
    assert "torch.cuda.FloatTensor" not in constants


def test_random_states_are_named_separate_and_restored():
    tracker = mcore_random.CudaRNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(7)
    outside = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert not torch.equal(first, second), "the named state has to move on between forks"
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), first)


def _uneven() -> dict[str, list]:
    from megatron.core.tensor_parallel import mappings

    rank, sizes = dist.get_rank(), [1, 3, 0]
    own = torch.full((sizes[rank], 2), float(rank + 1))
    gathered = mappings.gather_from_sequence_parallel_region(own, group=dist.group.WORLD, output_split_sizes=sizes)
    terms = torch.arange(8.0).view(4, 2) * (rank + 1)
    summed = mappings.reduce_scatter_to_sequence_parallel_region(terms, group=dist.group.WORLD, input_split_sizes=sizes)
    return dict(gathered=gathered[:, 0].tolist(), summed=summed.flatten().tolist())


def test_uneven_parts_are_gathered_and_reduce_scattered():
    """Experts that got unlike numbers of tokens; one got none."""
    ranks = run_ranks(_uneven, 3)
    assert all(rank["gathered"] == [1.0, 2.0, 2.0, 2.0] for rank in ranks)
    assert [rank["summed"] for rank in ranks] == [[0.0, 6.0], [12.0, 18.0, 24.0, 30.0, 36.0, 42.0], []]


def test_split_sizes_of_a_dispatch_are_numbers():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True), np.ndarray)
    assert torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2])))
    assert moe_utils.te_general_gemm is None


@pytest.mark.parametrize("megatron_first", [True, False])
def test_import_order_does_not_matter(megatron_first):
    imports = ["import megatron.core.tensor_parallel.random as r", "import megarl.parallel"]
    code = "; ".join(imports if megatron_first else imports[::-1])
    check = (
        "; assert r.torch.cuda.current_device().type == 'cpu', r.torch; assert 'CPU' in r.CudaRNGStatesTracker.__name__"
    )
    subprocess.run([sys.executable, "-c", code + check], check=True)
