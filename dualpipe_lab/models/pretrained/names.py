"""Names of parameters here and in published files; needs no torch.

Chapter: book/whole/weights.  In: our name of a parameter.  Out: the published name.
A layer's number stays.  Weights are stored [out, in], and rotary pairs are the same on both sides: i and i + K / 2, in
latent attention neighbours.  So no tensor is transposed or permuted.  Experts are stacked here and single in files.
Elsewhere: torchtitan `StateDictAdapter`; Megatron-Bridge's mappings.
"""

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig

_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "mlp.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
_LATENT = {"attention.q_norm.weight": "self_attn.q_a_layernorm.weight"}  # a norm of heads, in other families
_DIRECT = {"attention.q_up.weight": "self_attn.q_proj.weight"}  # without a latent of queries
_EXPERTS = {"mlp.experts.gate": "gate_proj", "mlp.experts.up": "up_proj", "mlp.experts.down": "down_proj"}


def published_name(name: str) -> str:
    """Return the published name of a parameter.

    Raises:
        KeyError: a name that no published model of a known family has.

    >>> published_name("layers.3.attention.q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in _ENDS:
        return _ENDS[name]
    layers, number, rest = name.split(".", 2)
    if layers != "layers":
        raise KeyError(name)
    return f"model.layers.{number}.{_LAYER[rest]}"


def published_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the published names of a parameter: one, or for stacked experts one for each.

    Raises:
        KeyError: a name that no published model of a known family has.

    >>> published_names("layers.3.mlp.experts.up", V3MoEConfig(num_experts=8))[1]
    'model.layers.3.mlp.experts.1.up_proj.weight'
    """
    if not isinstance(config, V3MoEConfig) or name in _ENDS:
        return (published_name(name),)
    layers, number, rest = name.split(".", 2)
    if rest in _EXPERTS and layers == "layers":
        stem = f"model.layers.{number}.mlp.experts"
        return tuple(f"{stem}.{expert}.{_EXPERTS[rest]}.weight" for expert in range(config.num_experts))
    special = {} if config.latent is None else _DIRECT if config.latent.query_rank is None else _LATENT
    if rest in special and layers == "layers":
        return (f"model.layers.{number}.{special[rest]}",)
    return (published_name(name),)


def is_stacked(name: str) -> bool:
    """Return whether a parameter holds experts, one behind the other."""
    return name.endswith(tuple(_EXPERTS))
