"""`deepspeed`: a plan as values of DeepSpeed's ds_config, commit edaa7221 (2026-08-22).

In: a plan, a model, the shape of a step.  Out: values by their names, and what ds_config has no value for.
  dp                  follows from the number of ranks of the launcher, which has those of a node too
  num_microbatches    `gradient_accumulation_steps`, also of a pipeline
  pp                  is a `PipelineModule` of the program, which runs 1F1B and refuses ZeRO-2 and 3
  tp, ep              AutoTP and AutoEP, for models of transformers
  hybrid              of ZeRO-3, MiCS
  cp                  none: its sequence parallelism exchanges heads (Ulysses), and has no ring
Left to the user: model, data, optimizer, learning rate.
"""

from typing import Any

from dualpipe_lab.plan.exports.export import Export, has_order, rows_of
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts, has_second
from dualpipe_lab.plan.states import AnyModel, config_of, shard_counts


def deepspeed(plan: Plan, model: AnyModel, sequence_length: int, global_batch: int) -> Export[dict[str, Any]]:
    """Return the values of DeepSpeed for a plan; arguments and errors as for `megatron`.

    >>> from dualpipe_lab.plan import model_of
    >>> found = deepspeed(Plan(dp=8, num_microbatches=2, zero=3, precision="bfloat16"), model_of("llama3-8b"), 8192, 16)
    >>> found.settings["zero_optimization"], found.settings["gradient_accumulation_steps"], found.missing
    ({'stage': 3}, 2, ())
    """
    rows = rows_of(plan, model, sequence_length, global_batch)
    settings: dict[str, Any] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": plan.zero},
    }
    missing: list[str] = []
    _add_zero(settings, missing, plan)
    _add_precision(settings, missing, plan)
    _add_shards(settings, missing, plan)
    if has_experts(config_of(model)):
        _add_experts(settings, missing, plan)
    if plan.recompute and plan.pp > 1:
        settings["pipeline"] = {"activation_checkpoint_interval": 1}  # layers of the PipelineModule
    missing += _in_code(plan, model)
    return Export("DeepSpeed", settings, tuple(missing))


def _add_zero(settings: dict[str, Any], missing: list[str], plan: Plan) -> None:
    if not plan.hybrid:
        return
    if plan.zero == 3:
        settings["zero_optimization"]["mics_shard_size"] = shard_counts(plan)[0]
    else:
        missing.append(f"hybrid ZeRO-{plan.zero}: mics_shard_size is of stage 3")


def _add_precision(settings: dict[str, Any], missing: list[str], plan: Plan) -> None:
    if plan.precision == "float64":
        missing.append("precision float64: it trains in fp32, bf16 or fp16")
    if plan.precision != "bfloat16":
        return
    settings["bf16"] = {"enabled": True}
    if plan.zero:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    else:
        missing.append("float32 gradients and master weights of bfloat16 without ZeRO: its gradients are bfloat16 then")


def _add_shards(settings: dict[str, Any], missing: list[str], plan: Plan) -> None:
    if plan.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.sequence_parallel and plan.tp > 1:
        missing.append("sequence_parallel: AutoTP keeps all tokens on each rank of tp between the layers")
    if plan.cp > 1:
        missing.append(f"cp {plan.cp}: its sequence parallelism exchanges heads, and has no ring of keys and values")
    if not has_order(plan, "pp", "dp", "ep", "cp", "tp"):
        missing.append(f"order {' '.join(plan.order)}: ranks are pp dp tp, outermost first")


def _add_experts(settings: dict[str, Any], missing: list[str], plan: Plan) -> None:
    if plan.ep > 1:
        settings["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep, "expert_tensor_parallel_size": 1}
    if plan.ep > 1 and plan.zero == 3 and (plan.tp > 1 or plan.hybrid):
        missing.append("ep under ZeRO-3 with tp or hybrid shards: it refuses them together")
    if plan.tp > 1 and plan.ep > 1:
        missing.append("experts that ranks of tp copy: its experts are spread over the ranks of tp as well")
        if plan.pp > 1:
            missing.append("ep with tp under pp: it refuses the three together")
    if plan.overlap:
        missing.append("overlapped experts: its pipeline runs a forward and a backward one after the other")


def _in_code(plan: Plan, model: AnyModel) -> list[str]:
    """Return what a program says in its code, if at all."""
    found = []
    if plan.pp > 1:
        found.append(f"pp {plan.pp}: its stages are those of a PipelineModule(num_stages={plan.pp}) in the program")
        if plan.schedule != "1f1b":
            found.append(f"schedule {plan.schedule}: it runs 1F1B")
        if plan.zero > 1:
            found.append(f"ZeRO-{plan.zero} under pp: it refuses stages 2 and 3 there")
    if plan.recompute and plan.pp == 1:
        found.append("recompute: the model calls deepspeed.checkpointing.checkpoint itself")
    if plan.loss_chunk is not None:
        found.append(f"a loss in chunks of {plan.loss_chunk} tokens: the model calls its tiled loss itself")
    if has_second(plan, config_of(model)):
        found.append("a second token: it is the model's")
    return found
