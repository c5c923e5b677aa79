"""The fused loss inside Megatron's schedules and DistributedDataParallel gives the plain path's gradients.

What can go wrong there goes wrong silently: a tied weight loses the embedding's gradient, an untied one is reduced
before its gradient is whole, the schedule rescales a loss whose gradient has already been taken.
"""

import itertools

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.nn.functional import pad

from megarl.config.model import ModelConfig
from megarl.data.batch import cumulative, positions
from megarl.models import build
from megarl.models.attention import pack_sequences
from megarl.ops.linear_logprob import linear_logprob, linear_loss
from megarl.ops.logprob import logprob_and_entropy
from megarl.parallel import layout as layouts
from megarl.parallel.coordinates import ParallelSizes
from tests import tiny_models
from tests.parallel_utils import run_ranks

TEMPERATURE = 0.7
NAMES = {"tied": "qwen2-tied", "untied": "qwen2-untied"}
LENGTHS = [[5, 9], [13], [2, 3, 6]]  # of three micro-batches; some are odd, so that sequence parallelism pads them
CASES = list(itertools.product(NAMES, (1, 2), (False, True), (False, True)))  # weight, PP, SP, overlapped reduction


def _micro_batch(index: int, dp_rank: int, multiple: int):
    """(input arguments, targets [N], weights [N]) of a padded packed row; every third token has no target."""
    lengths = torch.tensor(LENGTHS[index])
    draw = torch.Generator().manual_seed(10 * index + dp_rank)
    count = int(lengths.sum())
    missing = -count % multiple
    tokens = torch.randint(0, 131, (count,), generator=draw)
    targets = torch.where(torch.arange(count) % 3 == 0, -100, tokens.roll(-1))
    weights = torch.rand(count, generator=draw) / 20
    arguments = dict(
        input_ids=pad(tokens, (0, missing))[None],
        position_ids=pad(positions(lengths), (0, missing))[None],
        attention_mask=None,
        packed_seq_params=pack_sequences(cumulative(lengths), count + missing),
    )
    return arguments, pad(targets, (0, missing), value=-100), pad(weights, (0, missing))


class _Model:
    """One rank's part of a model under DistributedDataParallel, whose loss is taken in one of three ways."""

    def __init__(self, name: str, layout, overlap: bool, **changes):
        self.hf, self.layout = tiny_models.CONFIGS[name](), layout
        self.bare = build.build(self.hf, ModelConfig(path="", dtype="float32", transformer_impl="local"), layout)
        for parameter in self.bare.parameters():  # norms, biases and embeddings that are all 1 or 0 would hide mistakes
            parameter.data.add_(0.02)
        config = self.bare.config
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
        self.module = DistributedDataParallel(config, ddp, self.bare, pg_collection=layout.groups)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.module.no_sync if overlap else None
        for field, value in changes.items():
            setattr(config, field, value)
        if self.bare.post_process:
            self.logits_of = self.bare.output_layer.forward

    def _head(self, mode: str) -> None:
        """The output layer stays a module that is called, for DDP's hooks; fused, it hands its input on."""
        if self.bare.post_process:
            passed = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)  # noqa: E731
            self.bare.output_layer.forward = self.logits_of if mode == "plain" else passed

    def _loss(self, mode: str, output, targets, weights, gradient_scale: float):
        def token_loss(logprob, entropy, places):
            return -weights[places] * (torch.exp(logprob) + logprob + 0.1 * entropy)

        group, kept = self.layout.groups.tp, (targets >= 0).nonzero()[:, 0]
        if mode == "plain":
            logprob, entropy = logprob_and_entropy(output[0], targets, group, TEMPERATURE, self.hf.vocab_size)
            return token_loss(logprob[kept], entropy[kept], kept).sum()
        tied = self.hf.tie_word_embeddings
        weight = self.bare.shared_embedding_or_output_weight() if tied else self.bare.output_layer.weight
        options = dict(
            group=group, temperature=TEMPERATURE, vocab_size=self.hf.vocab_size,
            sequence_parallel=self.layout.sequence_parallel, chunk_tokens=4,
        )  # fmt: skip
        if mode == "fused":
            return linear_loss(output[0], weight, targets, token_loss, gradient_scale, **options)[0]
        logprob, entropy = linear_logprob(output[0], weight, targets, **options)
        return token_loss(logprob[kept], entropy[kept], kept).sum()

    def gradients(self, mode: str, gradient_scale: float = 1.0) -> tuple[dict[str, torch.Tensor], list[float]]:
        """(main_grad of each parameter, the micro-batches' losses) after a whole schedule."""
        self._head(mode)
        multiple = self.layout.tp_size if self.layout.sequence_parallel else 1

        def forward_step(batches, model):
            arguments, targets, weights = next(batches)

            def loss_function(output):
                loss = self._loss(mode, output, targets, weights, gradient_scale)
                return loss, torch.zeros((), dtype=torch.int), loss.detach().clone()

            return model(**arguments), loss_function

        self.module.zero_grad_buffer()
        micro_batches = [_micro_batch(index, self.layout.dp_rank, multiple) for index in range(len(LENGTHS))]
        losses = get_forward_backward_func(pp_size=self.layout.sizes.pp, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=P2PCommunicator(self.layout.groups.pp, self.bare.config),
            pg_collection=self.layout.groups,
        )
        found = {name: parameter.main_grad.clone() for name, parameter in self.bare.named_parameters()}
        return found, [loss.item() for loss in losses]


def _of_a_rank() -> dict:
    found = {}
    for case in CASES:
        weight, pp, sequence_parallel, overlap = case
        layout = layouts.join(ParallelSizes(4, tp=2, pp=pp), sequence_parallel, seed=0)
        model = _Model(NAMES[weight], layout, overlap)
        found[case] = {mode: model.gradients(mode) for mode in ("plain", "fused", "two passes")}
    layout = layouts.join(ParallelSizes(4, tp=2), False, seed=0)
    scaled = _Model("qwen2-tied", layout, False, grad_scale_func=lambda loss: 8 * loss)
    found["scaled"] = {"plain": scaled.gradients("plain"), "fused": scaled.gradients("fused", gradient_scale=8.0)}
    found["refused"] = {}
    for reason, model in {
        "a loss scale it was not told of": scaled,
        "a mean over micro-batches": _Model("qwen2-tied", layout, False, calculate_per_token_loss=False),
    }.items():
        with pytest.raises(ValueError, match="taken in the forward for another upstream gradient") as caught:
            model.gradients("fused")
        found["refused"][reason] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_of_a_rank, 4, timeout_seconds=240)


def _assert_equal(found: dict, mode: str) -> None:
    """||d|| <= 1e-5 ||g|| + 1e-7 ||g of all parameters||, parameter by parameter."""
    (plain, plain_losses), (fused, losses) = found["plain"], found[mode]
    assert losses == pytest.approx(plain_losses, abs=1e-6)
    total = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
    assert total > 0
    for name, gradient in plain.items():
        assert (fused[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * total, name


@pytest.mark.parametrize("mode", ["fused", "two passes"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0]} PP{c[1]}{' SP' if c[2] else ''}{' overlap' if c[3] else ''}"
)
def test_every_parameter_s_gradient_is_the_plain_path_s(ranks, case, mode):
    for of_rank in ranks:
        _assert_equal(of_rank[case], mode)


def test_a_loss_scale_is_told_to_the_forward(ranks):
    for of_rank in ranks:
        _assert_equal(of_rank["scaled"], "fused")
        scaled, plain = of_rank["scaled"]["fused"][0], of_rank["tied", 1, False, False]["plain"][0]
        assert scaled.keys() == plain.keys() and all(not torch.equal(scaled[name], plain[name]) for name in plain)


def test_what_rescales_the_loss_afterwards_is_refused(ranks):
    for of_rank in ranks:
        refused = of_rank["refused"]
        assert "expected 1.0, got 8.0" in refused["a loss scale it was not told of"]
        assert "expected 1.0, got 0.33" in refused["a mean over micro-batches"]
