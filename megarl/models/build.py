"""From a Hugging Face config.json to a Megatron GPTModel, on either device, with local or TransformerEngine layers."""

import copy
from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl import models
from megarl.config.model import ModelConfig
from megarl.models.attention import PackedAttention
from megarl.models.dense import head_dim
from megarl.models.heads import ValueHead
from megarl.models.supported import check
from megarl.parallel import device
from megarl.parallel.layout import Layout


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tp_size) * tp_size


class RMSNormShard:
    """torch's RMSNorm for Megatron's specs; sequence parallelism sums its gradient over tensor-parallel ranks.

    Megatron's own wrapper around torch norms refuses sequence parallelism.
    """

    def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current())
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def _replaced(spec, exchange):
    """A copy of a layer spec with some modules exchanged, everywhere in the tree."""
    spec = copy.deepcopy(spec)

    def visit(node):
        for name, value in vars(node).items():
            if isinstance(value, type) and value in exchange:
                setattr(node, name, exchange[value])
            elif isinstance(value, ModuleSpec):
                visit_spec(value)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ModuleSpec):
                        visit_spec(item)

    def visit_spec(module_spec):
        if module_spec.module in exchange:
            module_spec.module = exchange[module_spec.module]
        if module_spec.submodules is not None:
            visit(module_spec.submodules)

    visit(spec)
    return spec


def _block_spec(config: TransformerConfig, use_te: bool, pp_rank: int, vp_stage: int | None):
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    exchange = {DotProductAttention: PackedAttention, WrappedTorchNorm: RMSNormShard}
    if use_te:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        exchange[TEDotProductAttention] = PackedAttention
    return _replaced(spec, exchange)


class Rotary(torch.nn.Module):
    """Rotary angles for given positions, with the inverse frequencies that transformers computes from config.json.

    forward: position_ids [1, N] -> angles [N, 1, 1, head_dim] fp32, in the two-halves layout that Megatron rotates.
    """

    def __init__(self, hf: PretrainedConfig):
        super().__init__()
        rope = hf.rope_parameters
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, head_dim(hf), 2, dtype=torch.float32) / head_dim(hf)
            inverse_frequencies, self.attention_factor = 1.0 / rope["rope_theta"] ** exponents, 1.0
        else:
            inverse_frequencies, self.attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
        self.inverse_frequencies = inverse_frequencies.float().to(device.current())  # no buffer: never cast to bf16

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(position_ids.flatten().float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedGPTModel(GPTModel):
    """GPTModel whose rotary positions are given per token, so that any number of sequences share one packed row."""

    def __init__(self, *args, rotary: Rotary, **kwargs):
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.rotary = rotary

    def _preprocess(self, input_ids, position_ids, *args, **kwargs):
        decoder_input, _, *rest = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        return decoder_input, self.rotary(position_ids), *rest


def transformer_config(hf: PretrainedConfig, model: ModelConfig, layout: Layout, **overrides) -> TransformerConfig:
    """Megatron's TransformerConfig for this checkpoint under this layout."""
    dtype, sizes = getattr(torch, model.dtype), layout.sizes
    fields = device.transformer_settings() | models.get(hf.model_type).transformer_fields(hf)
    fields |= dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=sizes.first_stage_layers,
        num_layers_in_last_pipeline_stage=sizes.last_stage_layers,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        overlap_p2p_comm=sizes.vpp > 1,
        batch_p2p_comm=sizes.vpp == 1,  # interleaved stages with batched sends give wrong gradients, without an error
        sequence_parallel=layout.sequence_parallel,
        calculate_per_token_loss=True,  # the loss is already a weighted sum with global weights: nothing may rescale it
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths even for dense models
    )
    if model.enable_gradient_checkpointing:
        fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(**fields | overrides)


def build(hf: PretrainedConfig, model: ModelConfig, layout: Layout, value_head: bool = False) -> torch.nn.Module:
    """The model of this rank, randomly initialised, on this rank's device: a PackedGPTModel, or with several chunks on
    each pipeline stage (VPP) a ModuleList of them. Collective where embeddings are tied over pipeline stages.

    A chunk's forward: input_ids and position_ids [1, N], packed_seq_params from `pack_sequences` -> logits
    [1, N, V_padded / tp], or before the last stage hidden states [N, 1, H] (N / tp under sequence parallelism), which
    the next chunk takes by `set_input_tensor`.

    With `value_head`, a `heads.ValueHead` takes the place of the output layer: one value per token, [1, N, 1] fp32.
    """
    sizes = layout.sizes
    check(hf, sizes, model.transformer_impl)
    use_te = model.transformer_impl == "te" or (
        model.transformer_impl == "auto" and device.HAS_CUDA and find_spec("transformer_engine") is not None
    )
    rotary = Rotary(hf)
    # YaRN scales cos and sin by a factor; with the whole head rotated, that is scaling the scores by its square.
    scale = rotary.attention_factor**2 / head_dim(hf) ** 0.5
    config = transformer_config(hf, model, layout, softmax_scale=scale, moe_grouped_gemm=use_te)
    pp_rank = layout.coordinates.pp
    chunks = []
    for chunk in range(sizes.vpp):
        vp_stage = chunk if sizes.vpp > 1 else None
        chunks.append(
            PackedGPTModel(
                config=config,
                transformer_layer_spec=_block_spec(config, use_te, pp_rank, vp_stage),
                vocab_size=padded_vocab_size(hf.vocab_size, sizes.tp),
                max_sequence_length=hf.max_position_embeddings,
                pre_process=(pp_rank, chunk) == (0, 0),
                post_process=(pp_rank, chunk) == (sizes.pp - 1, sizes.vpp - 1),
                parallel_output=True,
                share_embeddings_and_output_weights=hf.tie_word_embeddings and not value_head,
                pg_collection=layout.groups,
                vp_stage=vp_stage,
                rotary=rotary,
            )
        )
    if value_head and chunks[-1].post_process:
        chunks[-1].output_layer = ValueHead(config, layout.groups.tp)
    whole = torch.nn.ModuleList(chunks) if sizes.vpp > 1 else chunks[0]
    for name, parameter in whole.named_parameters():
        if ".mlp.experts." in name:
            # False: summed over the copies of the experts instead of the data-parallel ranks. Megatron says so only
            # where ep > 1; under tp > 1 with etp = 1 the tokens of tensor-parallel peers would silently be left out.
            parameter.allreduce = False
    return whole.to(device.current())
