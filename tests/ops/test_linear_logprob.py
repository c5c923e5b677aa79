"""linear_logprob and linear_loss against fp64 definitions: values, gradients, products, memory, ranks and refusals."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megarl.ops import linear_logprob as ops
from tests.parallel_utils import run_ranks

pytestmark = pytest.mark.usefixtures("each_path")

# Logits and gradients are rounded to the weight's type, everything else is fp32; dweight is a sum over 20 tokens.
TOLERANCE = {  # weight: (values, gradients)
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (5e-3, 3e-3),
}
TOKENS, HIDDEN, VOCAB = 20, 16, 37
VALID = 33  # the rest of VOCAB is padding


def case(dtype=torch.float32, vocab=VOCAB, vocab_size=VALID, seed=0, ignored=(0, 7, 8, 19)):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = (0.5 * torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, targets


def definition(hidden, weight, targets, temperature=1.0, soft_cap=None, vocab_size=VALID):
    """(logprob, entropy) [N] in fp64, from the definitions; 0 for ignored tokens."""
    z = (hidden.double() @ weight.double().T)[:, :vocab_size]
    z = (z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)) / temperature
    log_p = torch.log_softmax(z, dim=-1)
    kept = targets >= 0
    logprob = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(kept, logprob, 0.0), torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0.0)


OLD = torch.linspace(-6.0, -1.0, TOKENS, dtype=torch.float64)
ADVANTAGES = torch.linspace(1.5, -2.0, TOKENS, dtype=torch.float64)
WEIGHTS = torch.linspace(0.1, 1.0, TOKENS, dtype=torch.float64)


def clipped(logprob, entropy, places):
    """PPO's clipped loss with an entropy bonus, weighted."""
    advantages, ratio = ADVANTAGES[places], torch.exp((logprob - OLD[places]).clamp(-1.0, 1.0))
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (WEIGHTS[places] * (-surrogate - 0.1 * entropy)).to(logprob.dtype)


def without_entropy(logprob, entropy, places):
    return (-WEIGHTS[places] * logprob).to(logprob.dtype)


def only_entropy(logprob, entropy, places):
    return (-WEIGHTS[places] * entropy).to(logprob.dtype)


def of_definition(hidden, weight, targets, token_loss, **scales):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    values = definition(hidden, weight, targets, **scales)
    places = (targets >= 0).nonzero()[:, 0]
    loss = token_loss(values[0][places], values[1][places], places).sum()
    return loss.detach(), *(x.detach() for x in values), *torch.autograd.grad(loss, (hidden, weight))


def two_passes(hidden, weight, targets, token_loss, gradient_scale=1.0, **options):
    logprob, entropy = ops.linear_logprob(hidden, weight, targets, **options)
    places = (targets >= 0).nonzero()[:, 0]
    return token_loss(logprob[places], entropy[places], places).sum(), logprob, entropy


def values_and_gradients(function, hidden, weight, targets, token_loss, **options):
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss, logprob, entropy = function(hidden, weight, targets, token_loss, **options)
    loss.backward()
    return loss.detach(), logprob.detach(), entropy.detach(), hidden.grad, weight.grad


MODES = pytest.mark.parametrize("function", [ops.linear_loss, two_passes])


@MODES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, None), (0.7, 3.0)])
@pytest.mark.parametrize("token_loss", [clipped, without_entropy, only_entropy])
def test_values_and_gradients_are_the_definition(function, dtype, temperature, soft_cap, token_loss):
    inputs = case(dtype)
    scales = {"temperature": temperature, "soft_cap": soft_cap}
    found = values_and_gradients(function, *inputs, token_loss, vocab_size=VALID, chunk_tokens=6, **scales)
    expected = of_definition(*inputs, token_loss, **scales)
    value_tolerance, grad_tolerance = TOLERANCE[dtype]
    assert found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for a, b in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(a.double(), b, atol=value_tolerance, rtol=0)
    torch.testing.assert_close(found[0].double(), expected[0], atol=TOKENS * value_tolerance, rtol=0)
    for a, b in zip(found[3:], expected[3:], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=grad_tolerance, rtol=grad_tolerance)
    assert not found[3][inputs[2] < 0].any() and not found[4][VALID:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@MODES
@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_it_is_the_definition(function, dtype, with_main_grad):
    hidden, weight, targets = (x.cuda() for x in case(dtype))

    def token_loss(logprob, entropy, places):
        return (places + 1) / TOKENS * logprob - 0.3 * entropy

    expected = of_definition(hidden, weight, targets, token_loss, temperature=0.7)
    hidden.requires_grad_()
    weight = parameter(weight) if with_main_grad else weight.requires_grad_()
    options = {"temperature": 0.7, "vocab_size": VALID, "chunk_tokens": 6}
    loss, *values = function(hidden, weight, targets, token_loss, **options)
    loss.backward()
    of_weight = weight.main_grad - 0.25 if with_main_grad else weight.grad
    value_tolerance, grad_tolerance = TOLERANCE[dtype]
    for found, exact in zip(values, expected[1:3], strict=True):
        torch.testing.assert_close(found.double(), exact, atol=value_tolerance, rtol=0)
    for found, exact in zip((hidden.grad, of_weight), expected[3:], strict=True):
        torch.testing.assert_close(found.double(), exact, atol=grad_tolerance, rtol=grad_tolerance)


def test_gradcheck():
    hidden, weight, targets = case(torch.float64)
    hidden, weight, targets = hidden[:5, :4].clone(), weight[:11, :4].clone(), targets[:5] % 9
    targets[1] = -100
    for soft_cap in (None, 1.5):
        assert torch.autograd.gradcheck(
            lambda h, w, cap=soft_cap: ops.linear_logprob(h, w, targets, None, 0.8, 9, cap, chunk_tokens=2),
            (hidden.requires_grad_(), weight.requires_grad_()),
        )


@MODES
def test_chunks_do_not_show(function):
    hidden, weight, targets = case(torch.float64)
    options = {"token_loss": clipped, "vocab_size": VALID}
    whole = values_and_gradients(function, hidden, weight, targets, **options)
    for chunk_tokens in (1, 3, 15):
        cut = values_and_gradients(function, hidden, weight, targets, chunk_tokens=chunk_tokens, **options)
        for a, b in zip(whole, cut, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=0)


@MODES
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_gradient_may_go_unasked(function, frozen):
    hidden, weight, targets = case()
    expected = values_and_gradients(function, hidden, weight, targets, clipped, vocab_size=VALID)
    inputs = {"hidden": hidden.clone().requires_grad_(frozen != "hidden")}
    inputs["weight"] = weight.clone().requires_grad_(frozen != "weight")
    function(**inputs, targets=targets, token_loss=clipped, vocab_size=VALID)[0].backward()
    assert inputs[frozen].grad is None
    asked = "weight" if frozen == "hidden" else "hidden"
    assert torch.equal(inputs[asked].grad, expected[4 if frozen == "hidden" else 3])


@MODES
def test_no_token_has_a_target(function):
    hidden, weight, targets = case()
    loss, logprob, entropy, *gradients = values_and_gradients(
        function, hidden, weight, torch.full_like(targets, -100), clipped
    )
    assert loss == 0 and not logprob.any() and not entropy.any()
    assert all(gradient.shape == x.shape and not gradient.any() for gradient, x in zip(gradients, (hidden, weight)))


def units(call) -> float:
    """FLOP of the products that `call` runs, in units of 2 x tokens with a target x VOCAB x HIDDEN."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (2 * 16 * VOCAB * HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(monkeypatch, dtype):
    """Three units with the loss in the forward, four in two passes, one without gradient; none for ignored tokens."""
    # The counter does not look inside custom ops.
    monkeypatch.setattr(ops, "add_weight_gradient", ops.reference_add_weight_gradient)
    inputs = case(dtype)
    options = {"token_loss": clipped, "chunk_tokens": 5}
    assert units(lambda: values_and_gradients(ops.linear_loss, *inputs, **options)) == 3
    assert units(lambda: values_and_gradients(two_passes, *inputs, **options)) == 4
    assert units(lambda: ops.linear_loss(*inputs, **options)) == 1
    with torch.no_grad():
        assert units(lambda: two_passes(*(x.requires_grad_(x.is_floating_point()) for x in inputs), **options)) == 1


class Largest(TorchDispatchMode):
    """Elements of the storage of the largest tensor with VOCAB columns, or rows, that a product writes."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.out and VOCAB in result.shape:
            self.num_elements = max(self.num_elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@MODES
def test_logits_live_only_as_a_chunk(function):
    inputs = case(torch.bfloat16)
    with Largest() as largest:
        values_and_gradients(function, *inputs, token_loss=clipped, chunk_tokens=4)
    assert largest.num_elements == 4 * VOCAB


def parameter(weight, main_grad_dtype=torch.float32, **marks):
    """A weight as Megatron's DistributedDataParallel leaves it."""
    weight = torch.nn.Parameter(weight.clone())
    weight.main_grad = torch.full_like(weight, 0.25, dtype=main_grad_dtype, requires_grad=False)
    weight.grad_added_to_main_grad = False
    for name, value in marks.items():
        setattr(weight, name, value)
    return weight


@MODES
@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_gradient_goes_into_main_grad(function, tied):
    hidden, weight, targets = case(torch.bfloat16)
    expected = of_definition(hidden, weight, targets, clipped)[4]
    weight = parameter(weight, **{"zero_out_wgrad": True} if tied else {})
    hidden.requires_grad_()
    for _ in range(2):
        weight.grad = None
        function(hidden, weight, targets, clipped, vocab_size=VALID, chunk_tokens=6)[0].backward()
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape and (not tied or not weight.grad.any())
    torch.testing.assert_close(weight.main_grad.double(), 0.25 + 2 * expected, atol=3e-2, rtol=1e-2)


@MODES
def test_main_grad_must_be_fp32(function):
    hidden, weight, targets = case(torch.bfloat16)
    weight = parameter(weight, main_grad_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="grad_reduce_in_fp32=True"):
        function(hidden, weight, targets, clipped)[0].backward()


def test_without_gradient_main_grad_stays():
    hidden, weight, targets = case()
    expected = of_definition(hidden, weight, targets, clipped)
    weight = parameter(weight)
    with torch.no_grad():
        found = ops.linear_loss(hidden.requires_grad_(), weight, targets, clipped, vocab_size=VALID)
    for a, b in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=0)
        assert not a.requires_grad
    assert (weight.main_grad == 0.25).all()


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)], ids=["number", "tensor"])
def test_the_gradient_scale_is_the_upstream_gradient(scale):
    inputs = case()
    expected = values_and_gradients(ops.linear_loss, *inputs, clipped, vocab_size=VALID)
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
    loss, _, _ = ops.linear_loss(hidden, weight, inputs[2], clipped, scale, vocab_size=VALID)
    assert torch.equal(loss.detach(), expected[0])
    (8 * loss).backward()
    torch.testing.assert_close(hidden.grad, 8 * expected[3])
    torch.testing.assert_close(weight.grad, 8 * expected[4])


def test_another_upstream_gradient_is_refused():
    hidden, weight, targets = case()
    loss = ops.linear_loss(hidden.requires_grad_(), weight, targets, clipped)[0]
    with pytest.raises(ValueError, match=r"expected 1.0, got 0.5"):
        (loss / 2).backward()


def test_a_second_backward_is_refused():
    hidden, weight, targets = case()
    loss = ops.linear_loss(hidden.requires_grad_(), weight, targets, clipped)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="a second backward"):
        loss.backward()


def test_a_meter_sees_what_the_forward_keeps():
    hidden, weight, targets = case()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        loss = ops.linear_loss(hidden.requires_grad_(), weight.requires_grad_(), targets, clipped)[0]
    loss.backward()
    assert any(torch.equal(tensor, hidden.grad) for tensor in seen)
    assert any(torch.equal(tensor, weight.grad) for tensor in seen)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_around_it_is_refused(use_reentrant):
    hidden, weight, targets = case()

    def head(hidden):
        return ops.linear_loss(hidden, weight, targets, clipped)[0]

    with pytest.raises(ValueError, match="Leave the output layer out of the recomputed part"):
        checkpoint(head, hidden.requires_grad_(), use_reentrant=use_reentrant).backward()


def test_metrics_carry_no_gradient():
    hidden, weight, targets = case()
    _, logprob, entropy = ops.linear_loss(hidden.requires_grad_(), weight, targets, clipped)
    assert not logprob.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)], ids=str)
def test_the_inner_op_is_well_formed(dtypes):
    out, grad_logits = torch.zeros(9, 4, dtype=dtypes[0]), torch.randn(3, 9).to(dtypes[1])
    torch.library.opcheck(ops.add_weight_gradient, (out, grad_logits, torch.randn(3, 4).to(dtypes[1])))


def test_tiles_of_the_weight_gradient_do_not_show(monkeypatch):
    grad_logits, hidden = torch.randn(3, 9).bfloat16(), torch.randn(3, 4).bfloat16()
    whole, tiled = torch.ones(9, 4), torch.ones(9, 4)
    ops.reference_add_weight_gradient(whole, grad_logits, hidden)
    monkeypatch.setattr(ops, "_TILE", 4)
    ops.reference_add_weight_gradient(tiled, grad_logits, hidden)
    assert torch.equal(whole, tiled)
    torch.testing.assert_close(whole, 1 + grad_logits.float().T @ hidden.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(VOCAB, 5)}, r"\[V_local, H\]"),
        ({"weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}, "of one type"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"must be \[20\] int64"),
        ({"temperature": -1.0}, "temperature -1.0 must be > 0"),
        ({"soft_cap": 0.0}, "soft_cap 0.0 must be > 0"),
        ({"vocab_size": VOCAB + 1}, "vocab_size 38 must lie in"),
        ({"soft_cap": float("inf")}, "soft_cap inf must be > 0 and finite"),
        ({"vocab_size": 9.5}, "vocab_size 9.5 must lie in"),
        ({"weight": torch.zeros(0, HIDDEN)}, "vocab_size 0 must lie in"),
        ({"chunk_tokens": 0}, "chunk_tokens 0 must be a number of tokens, at least 1"),
        ({"chunk_tokens": 2.5}, "chunk_tokens 2.5 must be a number of tokens"),
        ({"gradient_scale": torch.ones(2)}, r"gradient_scale \(2,\) must be a number"),
        ({"reference": [1, 2]}, "reference list must be a tuple"),
        ({"token_loss": lambda logprob, entropy, places: logprob.sum()}, "one loss for each of 16"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    hidden, weight, targets = case()
    inputs = {"hidden": hidden.requires_grad_(), "weight": weight, "targets": targets, "token_loss": clipped}
    with pytest.raises(ValueError, match=message):
        ops.linear_loss(**(inputs | change))


@MODES
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_type_without_statistics_is_refused(function, dtype):
    hidden, weight, targets = case()
    with pytest.raises(ValueError, match="must be bfloat16, float16, float32 or float64"):
        function(hidden.to(dtype), weight.to(dtype), targets, clipped)


def test_losses_without_gradient_are_checked_too():
    with torch.no_grad(), pytest.raises(ValueError, match="one loss for each of 16"):
        ops.linear_loss(*case(), lambda logprob, entropy, places: logprob.sum())


@MODES
def test_main_grad_must_have_the_weights_shape(function):
    hidden, weight, targets = case()
    weight = parameter(weight)
    weight.main_grad = weight.main_grad[:-1].clone()
    with pytest.raises(ValueError, match=r"main_grad \(36, .* must have the weight's shape \(37, "):
        function(hidden, weight, targets, clipped)[0].backward()


@MODES
def test_saved_tensors_that_come_back_as_others_lose_no_gradient(function):
    hidden, weight, targets = case()
    weight = parameter(weight)
    hidden.requires_grad_()
    function(hidden, weight, targets, clipped)[0].backward()
    once = weight.main_grad - 0.25
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        function(hidden, weight, targets, clipped)[0].backward()
    assert once.any()
    torch.testing.assert_close(weight.main_grad, 0.25 + 2 * once)


REF_HIDDEN = 8


def reference(dtype=torch.float32, vocab=VOCAB):
    """(hidden states, output weight) of a model of another width."""
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, REF_HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    return hidden, (0.5 * torch.randn(vocab, REF_HIDDEN, generator=draw, dtype=torch.float64)).to(dtype)


def with_kl(logprob, entropy, places, kl):
    return clipped(logprob, entropy, places) + (WEIGHTS[places] * 0.3 * kl).to(logprob.dtype)


def only_kl(logprob, entropy, places, kl):
    return (WEIGHTS[places] * kl).to(kl.dtype)


def two_passes_with_kl(hidden, weight, targets, token_loss, **options):
    values = ops.linear_logprob(hidden, weight, targets, **options)
    places = (targets >= 0).nonzero()[:, 0]
    logprob, entropy, kl = (value[places] for value in values)
    return token_loss(logprob, entropy, places, kl).sum(), *values


def of_definition_with_kl(hidden, weight, targets, token_loss, ref_hidden, ref_weight, **scales):
    """(loss, log-prob, entropy, KL, dhidden, dweight) in fp64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    temperature, soft_cap = scales["temperature"], scales["soft_cap"]

    def log_softmax(z):
        return torch.log_softmax((z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)) / temperature, -1)

    log_p = log_softmax((hidden @ weight.T)[:, :VALID])
    log_q = log_softmax((ref_hidden.double() @ ref_weight.double().T)[:, :VALID])
    kl = torch.where(targets >= 0, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    logprob, entropy = definition(hidden, weight, targets, **scales)
    places = (targets >= 0).nonzero()[:, 0]
    loss = token_loss(logprob[places], entropy[places], places, kl[places]).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), logprob.detach(), entropy.detach(), kl.detach(), *gradients


def values_and_gradients_with_kl(function, hidden, weight, targets, token_loss, **options):
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss, *values = function(hidden, weight, targets, token_loss, **options)
    loss.backward()
    return loss.detach(), *(value.detach() for value in values), hidden.grad, weight.grad


KL_MODES = pytest.mark.parametrize("function", [ops.linear_loss, two_passes_with_kl])


@KL_MODES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, None), (0.7, 3.0)])
@pytest.mark.parametrize("token_loss", [with_kl, only_kl])
def test_the_exact_kl_is_the_definition_s(function, dtype, temperature, soft_cap, token_loss):
    inputs, of_reference = case(dtype), reference(dtype)
    scales = {"temperature": temperature, "soft_cap": soft_cap}
    found = values_and_gradients_with_kl(
        function, *inputs, token_loss, vocab_size=VALID, chunk_tokens=6, reference=of_reference, **scales
    )
    expected = of_definition_with_kl(*inputs, token_loss, *of_reference, **scales)
    value_tolerance, grad_tolerance = TOLERANCE[dtype]
    for a, b in zip(found[1:4], expected[1:4], strict=True):
        torch.testing.assert_close(a.double(), b, atol=value_tolerance, rtol=0)
    torch.testing.assert_close(found[0].double(), expected[0], atol=TOKENS * value_tolerance, rtol=0)
    for a, b in zip(found[4:], expected[4:], strict=True):
        torch.testing.assert_close(a.double(), b, atol=2 * grad_tolerance, rtol=2 * grad_tolerance)
    with torch.no_grad():
        values = ops.linear_loss(
            *inputs, token_loss, vocab_size=VALID, chunk_tokens=6, reference=of_reference, **scales
        )
    assert all(torch.equal(a, b) for a, b in zip(values[1:], found[1:4], strict=True))


@KL_MODES
def test_the_exact_kl_in_bf16_is_within_a_percent(function):
    """Logits of standard deviation 1, as in the benchmarks. Rounding them to bf16 alone turns dweight by 1.6 %, so
    gradients are held to those of the rounded logits; values to fp64 throughout.
    """
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(TOKENS, 64, generator=draw), torch.randn(4099, 64, generator=draw) / 8
    near = tuple((x + 0.3 * x.std() * torch.randn(x.shape, generator=draw)).bfloat16() for x in (hidden, weight))
    inputs = (hidden.bfloat16(), weight.bfloat16(), torch.randint(0, 4099, (TOKENS,), generator=draw))
    *_, kl, of_hidden, of_weight = values_and_gradients_with_kl(function, *inputs, only_kl, reference=near)

    def definition(rounded):
        exact = [x.double().requires_grad_() for x in inputs[:2]]
        logits, ref_logits = exact[0] @ exact[1].T, near[0].double() @ near[1].double().T
        if rounded:
            logits, ref_logits = logits + (logits.bfloat16() - logits).detach(), ref_logits.bfloat16().double()
        log_p = torch.log_softmax(logits, -1)
        kl = (log_p.exp() * (log_p - torch.log_softmax(ref_logits, -1))).sum(-1)
        return kl.detach(), *torch.autograd.grad((WEIGHTS * kl).sum(), exact)

    torch.testing.assert_close(kl.double(), definition(rounded=False)[0], atol=0, rtol=1e-2)
    for found, expected in zip((of_hidden, of_weight), definition(rounded=True)[1:], strict=True):
        assert ((found.double() - expected).norm(dim=-1) <= 1e-2 * expected.norm(dim=-1)).all()


def test_products_with_a_reference(monkeypatch):
    """The reference's logits cost one unit (of its own width) more, in two passes two; its weight gets no gradient."""
    monkeypatch.setattr(ops, "add_weight_gradient", ops.reference_add_weight_gradient)
    of_reference = tuple(x.requires_grad_() for x in reference())
    options = {"token_loss": with_kl, "chunk_tokens": 5, "reference": of_reference}
    unit = REF_HIDDEN / HIDDEN
    assert units(lambda: values_and_gradients_with_kl(ops.linear_loss, *case(), **options)) == 3 + unit
    assert units(lambda: values_and_gradients_with_kl(two_passes_with_kl, *case(), **options)) == 4 + 2 * unit
    assert all(x.grad is None for x in of_reference)


@pytest.mark.parametrize("shapes", [((TOKENS, 5), (VOCAB, 8)), ((TOKENS - 1, 8), (VOCAB, 8)), ((TOKENS, 8), (9, 8))])
def test_a_reference_that_does_not_fit_is_refused(shapes):
    with pytest.raises(ValueError, match=r"reference: .* must be \[20, K\] and \[37, K\] of one type"):
        ops.linear_logprob(*case(), reference=tuple(torch.zeros(shape) for shape in shapes))


RANKS_VOCAB = 36  # over 4 ranks 9 columns each, of which the last has 6 valid ones
COUNTED = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")


def _on_shards():
    """{(mode, ranks, sequence_parallel): (values and gradients, collectives)} of this rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    sent = []
    for name in COUNTED:
        real = getattr(dist, name)
        setattr(
            dist, name, lambda *a, real=real, name=name, **k: (sent.append((name, [*a[-1].shape])), real(*a, **k))[1]
        )
    results = {}
    for ranks, group in groups.items():
        for sequence_parallel in (False, True):
            hidden, weight, targets = case(vocab=RANKS_VOCAB)
            rank = dist.get_rank(group)
            own = hidden.chunk(ranks)[rank] if sequence_parallel else hidden
            for mode, function in (("loss", ops.linear_loss), ("two passes", two_passes)):
                found = values_and_gradients(
                    function, own, weight.chunk(ranks)[rank], targets, clipped, group=group, vocab_size=VALID,
                    temperature=0.7, sequence_parallel=sequence_parallel, chunk_tokens=6,
                )  # fmt: skip
                results[mode, ranks, sequence_parallel] = (found, list(sent))
                sent.clear()
            ref_hidden, ref_weight = reference(vocab=RANKS_VOCAB)
            found = values_and_gradients_with_kl(
                ops.linear_loss, own, weight.chunk(ranks)[rank], targets, with_kl, group=group, vocab_size=VALID,
                temperature=0.7, sequence_parallel=sequence_parallel, chunk_tokens=6,
                reference=(ref_hidden, ref_weight.chunk(ranks)[rank]),
            )  # fmt: skip
            results["kl", ranks, sequence_parallel] = (found, list(sent))
            sent.clear()
    return results


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(_on_shards, 4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["loss", "two passes"])
def test_shards_equal_one_rank(sharded, mode, ranks, sequence_parallel):
    function = ops.linear_loss if mode == "loss" else two_passes
    loss, logprob, entropy, grad_hidden, grad_weight = values_and_gradients(
        function, *case(vocab=RANKS_VOCAB), clipped, vocab_size=VALID, temperature=0.7
    )
    results = [of_rank[mode, ranks, sequence_parallel] for of_rank in sharded[:ranks]]
    statistics = [("all_gather_into_tensor", [4, size]) for size in (6, 6, 4)]
    piece = [TOKENS // ranks, HIDDEN]
    for (rank_loss, rank_logprob, rank_entropy, *_), sent in results:
        for found, whole in [(rank_loss, loss), (rank_logprob, logprob), (rank_entropy, entropy)]:
            torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-6)
        assert torch.equal(rank_logprob, results[0][0][1]) and torch.equal(rank_entropy, results[0][0][2])
        if sequence_parallel:
            gather = [("all_gather_into_tensor", piece)]
            again = gather if mode == "two passes" else []
            assert sent == [*gather, *statistics, *again, ("reduce_scatter_tensor", [TOKENS, HIDDEN])]
        else:
            assert sent == [*statistics, ("all_reduce", [TOKENS, HIDDEN])]
    grads = [found[3] for found, _ in results]
    for grad in [torch.cat(grads)] if sequence_parallel else grads:
        torch.testing.assert_close(grad, grad_hidden, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([found[4] for found, _ in results]), grad_weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_with_a_reference_equal_one_rank(sharded, ranks, sequence_parallel):
    *values, grad_hidden, grad_weight = values_and_gradients_with_kl(
        ops.linear_loss, *case(vocab=RANKS_VOCAB), with_kl, vocab_size=VALID, temperature=0.7,
        reference=reference(vocab=RANKS_VOCAB),
    )  # fmt: skip
    results = [of_rank["kl", ranks, sequence_parallel] for of_rank in sharded[:ranks]]
    for found, sent in results:
        for value, expected in zip(found[:4], values, strict=True):
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
        statistics = [piece for name, piece in sent if name == "all_gather_into_tensor" and piece[0] == 7]
        assert statistics == [[7, 6], [7, 6], [7, 4]] and len(sent) == (5 if sequence_parallel else 4)
    grads = [found[4] for found, _ in results]
    for grad in [torch.cat(grads)] if sequence_parallel else grads:
        assert (grad - grad_hidden).norm() <= 4e-6 * grad_hidden.norm()
    assert (torch.cat([found[5] for found, _ in results]) - grad_weight).norm() <= 4e-6 * grad_weight.norm()
