"""`torchtitan`: a plan as values of torchtitan's configuration, commit b5bcd76c (2026-08-21).

In: a plan, a model, the shape of a step.  Out: values by section and name, and what torchtitan has no value for.
  parallelism, training    fields of its dataclasses of that name; a TOML file of older versions has other names
  activation_checkpoint, loss    a component of its own by its class, and that class's fields; None for none
  ZeRO-0                   `data_parallel_replicate_degree`
  ZeRO-2, 3                `data_parallel_shard_degree` times cp, with weights kept after the forward, or not
  ep                       taken from the ranks that shard weights, and from those of tp
  num_microbatches         those of the pipeline, or steps of accumulated gradients, which follow from the tokens
Left to the user: the model, which is a function of its registry; data, optimizer, length of the run.
"""

from typing import Any

from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.exports.export import Export, has_order, rows_of
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts, has_second
from dualpipe_lab.plan.states import AnyModel, config_of, shard_counts, sizes_of
from dualpipe_lab.pp.schedules.interleaved import round_sizes

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_BALANCERS = {"zigzag": "headtail", "contiguous": None}
_RULES = "torch has 1F1B from pp of them, and interleaving in rounds of equal size"
_RESHARDS = {2: "never", 3: "always"}


class _Config:
    """Values that are being collected, and what has none."""

    def __init__(self) -> None:
        self.parallelism: dict[str, Any] = {}
        self.training: dict[str, Any] = {}
        self.missing: list[str] = []


def torchtitan(plan: Plan, model: AnyModel, sequence_length: int, global_batch: int) -> Export[dict[str, Any]]:
    """Return the values of torchtitan for a plan; arguments and errors as for `megatron`.

    >>> from dualpipe_lab.plan import model_of
    >>> found = torchtitan(Plan(dp=8, tp=2, zero=3, precision="bfloat16"), model_of("llama3-8b"), 8192, 8)
    >>> parallelism = found.settings["parallelism"]
    >>> parallelism["data_parallel_shard_degree"], parallelism["tensor_parallel_degree"]
    (8, 2)
    """
    rows = rows_of(plan, model, sequence_length, global_batch)
    found = _Config()
    _add_data(found, plan)
    _add_axes(found, plan, model, rows * sequence_length)
    _add_experts(found, plan, model)
    _add_pipeline(found, plan, model)
    _add_training(found, plan, rows * sequence_length, global_batch * sequence_length, sequence_length)
    settings = {
        "parallelism": found.parallelism,
        "training": found.training,
        "activation_checkpoint": {"component": "FullAC"} if plan.recompute else None,
        "loss": _loss(found, plan, rows * sequence_length // plan.cp),
    }
    return Export("torchtitan", settings, tuple(found.missing))


def _add_data(found: _Config, plan: Plan) -> None:
    """Add how many data ranks shard the weights, and how many have copies."""
    shards = 1
    if plan.zero > 1:
        shards = plan.data_size if not plan.hybrid else shard_counts(plan)[0] // plan.cp
        if plan.hybrid and shard_counts(plan)[0] % plan.cp:
            shards = plan.data_size
            found.missing.append("hybrid shards over a part of cp: it shards over all of cp")
        found.parallelism["fsdp_reshard_after_forward"] = _RESHARDS[plan.zero]
    if plan.zero == 2:
        found.missing.append("ZeRO-2: between steps it shards weights too, and gathers them in each forward")
    if plan.zero == 1:
        name = "hybrid ZeRO-1" if plan.hybrid else "ZeRO-1"
        found.missing.append(f"{name}: it shards weights and gradients with the states of the optimizer, or nothing")
    if plan.zero < 2 and plan.cp > 1:
        found.missing.append(f"ZeRO-{plan.zero} over cp: it always shards weights over the ranks of cp")
    found.parallelism["data_parallel_shard_degree"] = shards
    found.parallelism["data_parallel_replicate_degree"] = plan.data_size // shards


def _add_axes(found: _Config, plan: Plan, model: AnyModel, tokens: int) -> None:
    found.parallelism["tensor_parallel_degree"] = plan.tp
    found.parallelism["enable_sequence_parallel"] = plan.sequence_parallel
    found.parallelism["context_parallel_degree"] = plan.cp
    if plan.cp > 1 and plan.layout in _BALANCERS:
        found.parallelism["context_parallel_load_balancer"] = _BALANCERS[plan.layout]
    elif plan.cp > 1:
        found.missing.append(f"layout {plan.layout}: a rank of cp holds a zigzag pair of chunks, or one chunk")
    if not has_order(plan, "pp", "dp", "ep", "cp", "tp"):
        found.missing.append(f"order {' '.join(plan.order)}: ranks are pp dp cp tp, outermost first")
    parts = (plan.tp if plan.sequence_parallel else 1) * (2 * plan.cp if plan.cp > 1 else 1)
    if tokens % parts:
        found.missing.append(f"microbatches of {tokens} tokens: it refuses those that {parts} parts do not divide")
    num_heads, has_latents = sizes_of(model).num_kv_heads, isinstance(model, V3MoEConfig) and model.latent is not None
    if num_heads % plan.tp and not has_latents:
        found.missing.append(f"{num_heads} heads of keys on tp {plan.tp}: it refuses sizes that do not divide them")


def _add_experts(found: _Config, plan: Plan, model: AnyModel) -> None:
    if not has_experts(config_of(model)):
        return
    sharing = found.parallelism["data_parallel_shard_degree"] * plan.cp * plan.tp
    if plan.ep > 1 and sharing % plan.ep:
        found.missing.append(f"ep {plan.ep} over copies of weights: ep divides the {sharing} ranks that shard them")
    elif plan.ep > 1:
        found.parallelism["expert_parallel_degree"] = plan.ep
    if plan.tp > 1:
        how = "spread over the ranks of tp as well" if plan.ep > 1 else "sharded along tp"
        found.missing.append(f"experts that ranks of tp copy: its experts are {how}")
    if plan.overlap:
        found.missing.append("overlapped experts: DualPipeV runs its pairs without hiding their all-to-alls")


def _add_pipeline(found: _Config, plan: Plan, model: AnyModel) -> None:
    config = config_of(model)
    if plan.pp > 1 and sizes_of(model).tied:
        found.missing.append("a tied table under pp: it refuses one that two stages share")
    if has_second(plan, config):
        found.missing.append("a second token: num_mtp_layers of the model's registry and MTPLoss choose it")
    if plan.pp == 1:
        return
    found.parallelism["pipeline_parallel_degree"] = plan.pp
    found.parallelism["num_pp_microbatches"] = plan.num_microbatches
    if plan.schedule not in _SCHEDULES:
        found.missing.append(f"schedule {plan.schedule}: it has {', '.join(_SCHEDULES.values())}")
        return
    if plan.schedule in ("interleaved", "looped_bfs") and plan.num_stages == plan.pp:
        found.missing.append(f"schedule {plan.schedule} with one stage per rank: it has 2 or more in that schedule")
        return
    if not _runs(plan):
        what = f"{plan.num_microbatches} microbatches on pp {plan.pp}"
        found.missing.append(f"schedule {plan.schedule} of {what}: {_RULES}")
        return
    found.parallelism["pipeline_parallel_schedule"] = _SCHEDULES[plan.schedule]
    stages = [[f"layers.{layer}" for layer in layers] for layers in plan.stage_layers(config)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    found.parallelism["module_fqns_per_model_part"] = stages


def _runs(plan: Plan) -> bool:
    """Return whether torch runs a schedule with so many microbatches."""
    if plan.schedule == "1f1b":
        return plan.num_microbatches >= plan.pp
    return plan.schedule != "interleaved" or len(set(round_sizes(plan.pp, plan.num_microbatches))) == 1


def _add_training(found: _Config, plan: Plan, tokens: int, step_tokens: int, sequence_length: int) -> None:
    found.training["num_tokens_per_microbatch_per_dp_rank"] = tokens
    found.training["num_tokens_per_train_step"] = step_tokens
    found.training["max_context_length"] = sequence_length
    if plan.precision == "float64":
        found.missing.append("precision float64: it trains in float32 and bfloat16")
        return
    found.training["dtype"] = "float32"
    found.training["mixed_precision_param"] = plan.precision
    found.training["mixed_precision_reduce"] = "float32"
    if plan.precision == "bfloat16":
        found.missing.append("bfloat16 weights beside master weights: it casts float32 weights whenever it uses them")


def _loss(found: _Config, plan: Plan, tokens: int) -> dict[str, Any]:
    """Return the component of the loss."""
    if plan.loss_chunk is None or plan.loss_chunk >= tokens:
        return {"component": "CrossEntropyLoss"}
    if tokens % plan.loss_chunk:
        found.missing.append(f"a loss in chunks of {plan.loss_chunk} tokens: equal chunks divide {tokens} tokens")
        return {"component": "CrossEntropyLoss"}
    return {"component": "ChunkedLossWrapper", "num_chunks": tokens // plan.loss_chunk}
