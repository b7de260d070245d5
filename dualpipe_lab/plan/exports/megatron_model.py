"""The sizes of a model as command-line arguments of Megatron-LM.

In: a model, a plan.  Out: arguments, and what Megatron-LM computes in another way.
  Llama    RMSNorm, SwiGLU, rotary angles, no biases, no dropout
  V3       latent attention, whose norms are its `--qk-layernorm`; dense layers by `--moe-layer-freq`
  Mixtral, Qwen3-MoE    a softmax over the chosen logits, or before the choice where weights are not normalised
  GPT      layer norms, GELU, learned positions, biases; dropout 0, as no estimate here has any
The table has as many rows as the vocabulary, or the next multiple of tp; Megatron-LM's default is one of 128 tp.
"""

from dataclasses import dataclass, field

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts
from dualpipe_lab.plan.states import AnyModel
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import RopeScaling, Scaling, YarnScaling


@dataclass
class Command:
    """Arguments that are being collected, and what has none."""

    arguments: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, name: str, *values: object) -> None:
        """Add an argument with its values."""
        self.arguments += [name, *map(str, values)]

    def lack(self, sentence: str) -> None:
        """Add what has no argument."""
        self.missing.append(sentence)


def add_model(command: Command, model: AnyModel, plan: Plan, sequence_length: int) -> None:
    """Add the arguments of a model."""
    config = model.dense if isinstance(model, V3MoEConfig) else model
    command.add("--num-layers", config.num_layers)
    command.add("--hidden-size", config.hidden_size)
    command.add("--num-attention-heads", config.num_heads)
    command.add("--attention-dropout", 0.0)
    command.add("--hidden-dropout", 0.0)
    _add_table(command, config, plan)
    if isinstance(config, GptConfig):
        _add_gpt(command, config, sequence_length)
    else:
        _add_llama(command, config, sequence_length, model.latent if isinstance(model, V3MoEConfig) else None)
    if isinstance(model, V3MoEConfig) and has_experts(model):
        _add_experts(command, model)


def _add_table(command: Command, config: LlamaConfig | GptConfig, plan: Plan) -> None:
    rows = config.vocabulary_size
    command.add("--vocab-size", rows)
    command.add("--make-vocab-size-divisible-by", 1)
    if rows % plan.tp:
        command.lack(f"a table of {rows} rows over tp {plan.tp}: it has {-(-rows // plan.tp) * plan.tp} rows there")
    if not config.tied:
        command.add("--untie-embeddings-and-output-weights")


def _add_heads(command: Command, num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads != num_heads:
        command.add("--group-query-attention")
        command.add("--num-query-groups", num_kv_heads)


def _add_gpt(command: Command, config: GptConfig, sequence_length: int) -> None:
    command.add("--ffn-hidden-size", config.inner_size)
    _add_heads(command, config.num_heads, config.num_key_heads)
    command.add("--max-position-embeddings", config.num_positions or sequence_length)
    kind = "none" if config.num_positions is None else "learned_absolute"
    command.add("--position-embedding-type", kind)


def _add_llama(command: Command, config: LlamaConfig, sequence_length: int, latent: LatentSizes | None) -> None:
    command.add("--ffn-hidden-size", config.ffn_size)
    command.add("--max-position-embeddings", sequence_length)
    for name, value in (("normalization", "RMSNorm"), ("norm-epsilon", config.eps)):
        command.add(f"--{name}", value)
    command.add("--swiglu")
    command.add("--disable-bias-linear")
    command.add("--position-embedding-type", "rope")
    command.add("--rotary-base", int(config.rope_base))
    if config.rope_base != int(config.rope_base):
        command.lack(f"rope_base {config.rope_base}: its base is a whole number")
    if latent is None:
        _add_heads(command, config.num_heads, config.num_kv_heads)
        command.add("--kv-channels", config.size_of_head)
        _add_scaling(command, config.rope_scaling)
    else:
        _add_latent(command, latent, config.rope_scaling)
    if config.qk_norm or latent is not None:
        command.add("--qk-layernorm")


def _add_scaling(command: Command, scaling: Scaling | None) -> None:
    if isinstance(scaling, RopeScaling):
        command.add("--use-rope-scaling")
        command.add("--rope-scaling-factor", scaling.factor)
        if (scaling.low_factor, scaling.high_factor, scaling.original_length) != (1, 4, 8192):
            command.lack(f"{scaling}: its other numbers are 1, 4 and 8192")
    elif scaling is not None:
        command.lack(f"{scaling}: it has yarn for latent attention alone")


def _add_latent(command: Command, latent: LatentSizes, scaling: Scaling | None) -> None:
    command.add("--multi-latent-attention")
    sizes = {"q-lora-rank": latent.query_rank, "kv-lora-rank": latent.kv_rank, "qk-head-dim": latent.content}
    sizes |= {"qk-pos-emb-head-dim": latent.position, "v-head-dim": latent.value}
    for name, size in sizes.items():
        if size is not None:
            command.add(f"--{name}", size)
    if not isinstance(scaling, YarnScaling):
        command.add("--rope-type", "rope")
        if scaling is not None:
            command.lack(f"{scaling}: with latents it has yarn alone")
        return
    command.add("--rope-type", "yarn")
    command.add("--rotary-scaling-factor", scaling.factor)
    command.add("--mscale", scaling.mscale)
    command.add("--mscale-all-dim", scaling.mscale_all_dim)
    fixed = (scaling.original_length, scaling.beta_fast, scaling.beta_slow, scaling.attention_factor, scaling.truncate)
    if fixed != (4096, 32, 1, None, True):
        command.lack(f"{scaling}: its original length is 4096, with betas of 32 and 1")


def _add_experts(command: Command, config: V3MoEConfig) -> None:
    command.add("--num-experts", config.num_experts)
    command.add("--moe-ffn-hidden-size", config.expert_ffn_size)
    command.add("--moe-router-topk", config.num_experts_per_token)
    command.add("--moe-token-dispatcher-type", "alltoall")
    if config.num_dense_layers:
        num_sparse = config.num_layers - config.num_dense_layers
        command.add("--moe-layer-freq", f"([0]*{config.num_dense_layers}+[1]*{num_sparse})")
    if config.num_shared_experts:
        command.add("--moe-shared-expert-intermediate-size", config.shared_ffn_size)
    _add_router(command, config)


def _add_router(command: Command, config: V3MoEConfig) -> None:
    command.add("--moe-router-score-function", config.scoring)
    if config.num_groups > 1:
        command.add("--moe-router-num-groups", config.num_groups)
        command.add("--moe-router-group-topk", config.num_groups_per_token)
        if config.num_experts_per_token // config.num_groups_per_token != 2:
            command.lack("groups of experts by their two largest scores: it sums top-k / groups per token of them")
    if config.scale != 1:
        command.add("--moe-router-topk-scaling-factor", config.scale)
    if config.selection_bias and config.scoring == "sigmoid":
        command.add("--moe-router-enable-expert-bias")
    elif config.selection_bias:
        command.lack("biases of a selection by softmax: it has them for sigmoid scores")
    if config.scoring == "softmax" and not config.normalise:
        command.add("--moe-router-pre-softmax")
    if config.scoring == "sigmoid" and not config.normalise:
        command.lack("sigmoid weights that keep their sum: it normalises them")
    command.add("--moe-router-load-balancing-type", "seq_aux_loss" if config.balance else "none")
    command.add("--moe-aux-loss-coeff", config.balance)
