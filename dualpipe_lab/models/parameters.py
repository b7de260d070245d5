"""`full_parameters`: every parameter of a full model, in the order of its modules; the one list of them.

Chapter: book/whole/weights, book/whole/sums.  In: a config.  Out: names, shapes, shards, names in published files.
  rows       along tp: queries, gate, up, embedding, head, and what unfolds latents; a rank has some of the outputs
  columns    along tp: `o` and `down`; a rank has some of the inputs
  KV heads   along tp, by rows: ranks share a head where there are more of them
  experts    along ep: one behind the other here, single in published files
Sums, flat buffers, saved activations, and what is read of a published folder are computed from it; it needs no torch.
Elsewhere: transformers `base_model_tp_plan`; Megatron's `sharded_state_dict` of each layer.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, sizes_of
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes

HEAD, TABLE = "head.weight", "embedding.weight"  # the two names of a tied table
ROWS, COLUMNS, KV_HEADS, EXPERTS, FULL = "rows", "columns", "KV heads", "experts", ""


class Parameter(NamedTuple):
    """A parameter of the full model, or a router's bias."""

    name: str  # within its layer, or in the model
    shape: tuple[int, ...]  # [out, in], of experts [number, out, in]
    sharded: str  # FULL: every rank has all of it
    file_name: str  # in published files, with {} in place of an expert's number

    @property
    def file_names(self) -> tuple[str, ...]:
        """The published names: one, or of experts one for each.

        >>> full_parameters(V3MoEConfig())["layers.1.mlp.experts.gate"].file_names[1]
        'model.layers.1.mlp.experts.1.gate_proj.weight'
        """
        return tuple(map(self.file_name.format, range(self.shape[0] if self.sharded == EXPERTS else 1)))

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape in published files."""
        return self.shape[1:] if self.sharded == EXPERTS else self.shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def shard(self, tp_size: int, tp_rank: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Return axis, number and count of a rank's shard along tp; 0 of 1 is all of it."""
        if self.sharded == KV_HEADS:
            count = min(tp_size, num_kv_heads)
            return 0, tp_rank * count // tp_size, count
        return int(self.sharded == COLUMNS), *((tp_rank, tp_size) if self.sharded in (ROWS, COLUMNS) else (0, 1))


@lru_cache(maxsize=64)
def full_parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of a full model by name, in order, and behind them the biases of its routers."""
    embedding, norm, head = end_parameters(config)
    num_dense = config.num_layers if isinstance(config, LlamaConfig) else config.num_dense_layers
    found, biases = [embedding], []
    for number in range(config.num_layers):
        for each in layer_parameters(config, number >= num_dense):
            found.append(_in_layer(each, number))
        if isinstance(config, V3MoEConfig) and config.selection_bias and number >= num_dense:
            bias = Parameter("mlp.router.bias", (config.num_experts,), FULL, "mlp.gate.e_score_correction_bias")
            biases.append(_in_layer(bias, number))
    found += [norm] if isinstance(config, LlamaConfig) and config.tied else [norm, head]
    return {each.name: each for each in found + biases}


def end_parameters(config: ModelConfig) -> tuple[Parameter, Parameter, Parameter]:
    """Return embedding, last norm and head; a tied head is the embedding."""
    table, hidden = (config.vocabulary_size, config.hidden_size), (config.hidden_size,)
    return (
        Parameter(TABLE, table, ROWS, "model.embed_tokens.weight"),
        Parameter("norm.weight", hidden, FULL, "model.norm.weight"),
        Parameter(HEAD, table, ROWS, "lm_head.weight"),
    )


@lru_cache(maxsize=64)
def layer_parameters(config: ModelConfig, has_experts: bool) -> tuple[Parameter, ...]:
    """Return the parameters of one layer, by their names within it."""
    sizes, latent = sizes_of(config), None if isinstance(config, LlamaConfig) else config.latent
    norm = (config.hidden_size,)
    return (
        Parameter("attention_norm.weight", norm, FULL, "input_layernorm.weight"),
        *(_attention(sizes) if latent is None else _latent_attention(latent, sizes.hidden_size, sizes.num_heads)),
        Parameter("mlp_norm.weight", norm, FULL, "post_attention_layernorm.weight"),
        *(
            _experts(config)
            if has_experts and isinstance(config, V3MoEConfig)
            else _network("mlp", "mlp", config.ffn_size, config.hidden_size)
        ),
    )


def _in_layer(parameter: Parameter, number: int) -> Parameter:
    return parameter._replace(
        name=f"layers.{number}.{parameter.name}", file_name=f"model.layers.{number}.{parameter.file_name}"
    )


def _attention(sizes: LlamaConfig) -> Iterator[Parameter]:
    hidden, head = sizes.hidden_size, sizes.size_of_head
    queries, keys = sizes.num_heads * head, sizes.num_kv_heads * head
    for name, length, sharded in (("q", queries, ROWS), ("k", keys, KV_HEADS), ("v", keys, KV_HEADS)):
        yield Parameter(f"attention.{name}.weight", (length, hidden), sharded, f"self_attn.{name}_proj.weight")
    yield Parameter("attention.o.weight", (hidden, queries), COLUMNS, "self_attn.o_proj.weight")
    for name in ("q_norm", "k_norm") if sizes.qk_norm else ():
        yield Parameter(f"attention.{name}.weight", (head,), FULL, f"self_attn.{name}.weight")


def _latent_attention(sizes: LatentSizes, hidden: int, num_heads: int) -> Iterator[Parameter]:
    rank, kv_rank = sizes.query_rank, sizes.kv_rank
    queries, unfolded = num_heads * sizes.key, num_heads * (sizes.content + sizes.value)
    if rank is not None:
        yield Parameter("attention.q_down.weight", (rank, hidden), FULL, "self_attn.q_a_proj.weight")
        yield Parameter("attention.q_norm.weight", (rank,), FULL, "self_attn.q_a_layernorm.weight")
    file_name = "self_attn.q_proj.weight" if rank is None else "self_attn.q_b_proj.weight"
    yield Parameter("attention.q_up.weight", (queries, rank or hidden), ROWS, file_name)
    yield Parameter("attention.kv_down.weight", (sizes.cached, hidden), FULL, "self_attn.kv_a_proj_with_mqa.weight")
    yield Parameter("attention.kv_norm.weight", (kv_rank,), FULL, "self_attn.kv_a_layernorm.weight")
    yield Parameter("attention.kv_up.weight", (unfolded, kv_rank), ROWS, "self_attn.kv_b_proj.weight")
    yield Parameter("attention.o.weight", (hidden, num_heads * sizes.value), COLUMNS, "self_attn.o_proj.weight")


def _network(name: str, file_name: str, ffn_size: int, hidden: int) -> Iterator[Parameter]:
    for part in ("gate", "up"):
        yield Parameter(f"{name}.{part}.weight", (ffn_size, hidden), ROWS, f"{file_name}.{part}_proj.weight")
    yield Parameter(f"{name}.down.weight", (hidden, ffn_size), COLUMNS, f"{file_name}.down_proj.weight")


def _experts(config: V3MoEConfig) -> Iterator[Parameter]:
    number, width, hidden = config.num_experts, config.expert_ffn_size, config.hidden_size
    yield Parameter("mlp.router.weight", (number, hidden), FULL, "mlp.gate.weight")
    for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        file_name = f"mlp.experts.{{}}.{part}_proj.weight"
        yield Parameter(f"mlp.experts.{part}", (number, *shape), EXPERTS, file_name)
    if config.num_shared_experts:
        yield from _network("mlp.shared", "mlp.shared_experts", config.shared_ffn_size, hidden)
