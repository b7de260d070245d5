"""`megatron`: a plan and a model as command-line arguments of Megatron-LM, commit d98e8a64 (2026-08-22).

In: a plan, a model, the shape of a step.  Out: arguments, and what Megatron-LM has no argument for.
  dp                   follows from the number of ranks of the launcher, which has those of a node too
  num_microbatches     follows from the two batch sizes
  layers               equal stages are the default; others are a `--pipeline-model-parallel-layout`
  ZeRO-1               the distributed optimizer; it shards over dp and cp, as here
  ZeRO-2, 3            Megatron-FSDP
  experts              are whole: `--expert-tensor-parallel-size 1`; the ranks of tp share them out, as the rules of
                       estimates `MEGATRON` have it, and its size of ep counts those too: ep tp
With tp or cp, and no ZeRO-2 or 3, accelerators older than Blackwell need CUDA_DEVICE_MAX_CONNECTIONS=1 around it.
Left to the user: data, tokenizer, learning rate, length of the run, back ends of attention.
"""

from dualpipe_lab.plan.exports.export import Export, has_order, rows_of
from dualpipe_lab.plan.exports.megatron_model import Command, add_model
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts, has_second
from dualpipe_lab.plan.states import AnyModel, config_of, shard_counts
from dualpipe_lab.pp.schedules.interleaved import round_sizes

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(plan: Plan, model: AnyModel, sequence_length: int, global_batch: int) -> Export[list[str]]:
    """Return the arguments of Megatron-LM for a plan and a model.

    Args:
        plan: how it is trained.
        model: a Llama, a V3-style model or a GPT.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all ranks.

    Raises:
        ValueError: a plan that does not fit the model, or sequences that do not divide.

    >>> from dualpipe_lab.plan import model_of
    >>> found = megatron(Plan(pp=2, tp=4, schedule="dualpipe", num_microbatches=4), model_of("llama3-8b"), 8192, 16)
    >>> found.settings[:4], found.missing[0].split(":")[0]
    (['--tensor-model-parallel-size', '4', '--pipeline-model-parallel-size', '2'], 'schedule dualpipe')
    """
    rows = rows_of(plan, model, sequence_length, global_batch)
    command = Command()
    _add_axes(command, plan, model)
    _add_pipeline(command, plan, model)
    _add_zero(command, plan)
    _add_step(command, plan)
    command.add("--micro-batch-size", rows)
    command.add("--global-batch-size", global_batch)
    command.add("--seq-length", sequence_length)
    add_model(command, model, plan, sequence_length)
    return Export("Megatron-LM", command.arguments, tuple(command.missing))


def _add_axes(command: Command, plan: Plan, model: AnyModel) -> None:
    command.add("--tensor-model-parallel-size", plan.tp)
    command.add("--pipeline-model-parallel-size", plan.pp)
    command.add("--context-parallel-size", plan.cp)
    if plan.sequence_parallel and plan.tp > 1:
        command.add("--sequence-parallel")
    if plan.cp > 1:
        command.add("--cp-comm-type", "p2p")
        if plan.layout != "zigzag":
            command.lack(f"layout {plan.layout}: each rank of cp holds a zigzag pair of chunks")
    if has_experts(config_of(model)):
        _add_experts(command, plan, model)
    if has_order(plan, "dp", "ep", "pp", "cp", "tp") and not has_order(plan, "pp", "dp", "ep", "cp", "tp"):
        command.add("--use-tp-pp-dp-mapping")
    elif not has_order(plan, "pp", "dp", "ep", "cp", "tp"):
        command.lack(f"order {' '.join(plan.order)}: ranks are pp dp cp tp or dp pp cp tp, outermost first")


def _add_experts(command: Command, plan: Plan, model: AnyModel) -> None:
    num_experts = getattr(model, "num_experts", 0)
    divides = num_experts % (plan.ep * plan.tp) == 0
    command.add("--expert-model-parallel-size", plan.ep * plan.tp if divides else plan.ep)
    command.add("--expert-tensor-parallel-size", 1)
    if plan.tp > 1 and not plan.sequence_parallel:
        command.lack("experts under tp without sequence parallelism: it trains them with --sequence-parallel alone")
    if plan.tp > 1:
        how = "its ranks of tp share them out" if divides else "its experts are spread over the ranks of tp as well"
        command.lack(f"experts that ranks of tp copy: {how}")
    if plan.overlap:
        command.lack(
            "overlapped experts in pairs of the schedule: --overlap-moe-expert-parallel-comm overlaps them in its own "
            "interleaved 1F1B"
        )


def _add_pipeline(command: Command, plan: Plan, model: AnyModel) -> None:
    config = config_of(model)
    second = has_second(plan, config)
    if second:
        command.add("--mtp-num-layers", 1)
        command.add("--mtp-loss-scaling-factor", plan.multi_token)
    if plan.pp == 1:
        return
    if plan.schedule not in ("1f1b", "interleaved"):
        command.lack(f"schedule {plan.schedule}: it runs 1F1B, or interleaved 1F1B with virtual stages")
        return
    if plan.schedule == "interleaved" and plan.num_stages == plan.pp:
        command.lack("schedule interleaved with one stage per rank: it runs 1F1B then, which has fewer warm-up steps")
    elif plan.schedule == "interleaved":
        _add_rounds(command, plan)
    counts = [len(layers) for layers in plan.stage_layers(config)]
    if len(set(counts)) > 1 or second:
        command.add("--pipeline-model-parallel-layout", _layout(counts, second))
    elif plan.num_stages > plan.pp:
        command.add("--num-virtual-stages-per-pipeline-rank", plan.num_stages // plan.pp)


def _add_rounds(command: Command, plan: Plan) -> None:
    """Add how many microbatches run through a stage before the next one: as many in all rounds but the last."""
    first, *others = round_sizes(plan.pp, plan.num_microbatches)
    if first < plan.pp:
        command.lack(f"schedule interleaved of {first} microbatches: it has {plan.pp}, those of pp, at least")
    elif any(size != first for size in others[:-1]):
        sizes = f"{first} and {others[-1]} microbatches"
        command.lack(f"schedule interleaved in rounds of {sizes}: all but its last round have as many")
    elif first != plan.pp:
        command.add("--microbatch-group-size-per-virtual-pipeline-stage", first)


def _layout(counts: list[int], has_second_token: bool) -> str:
    """Return stages in Megatron's letters.

    >>> _layout([1, 4, 0], True)
    'Et|t*4|mL'
    """
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "mL" if has_second_token else "L"
    return "|".join(stages)


def _add_zero(command: Command, plan: Plan) -> None:
    if plan.zero:
        command.add("--use-distributed-optimizer")
    if plan.zero > 1:
        command.add("--use-megatron-fsdp")
        command.add("--data-parallel-sharding-strategy", _STRATEGIES[plan.zero])
        command.add("--ckpt-format", "fsdp_dtensor")  # the only one that it saves under these
    if plan.hybrid:
        dense, experts = shard_counts(plan)
        command.add("--num-distributed-optimizer-instances", plan.num_copies // dense)
        if plan.ep > 1 and experts * plan.num_copies != dense * (plan.num_copies // plan.ep):
            command.lack("hybrid shards of experts over another part of their ranks than of other weights")


def _add_step(command: Command, plan: Plan) -> None:
    if plan.recompute:
        command.add("--recompute-granularity", "full")
        command.add("--recompute-method", "uniform")
        command.add("--recompute-num-layers", 1)
    if plan.precision == "bfloat16":
        command.add("--bf16")
        gradients = ("--megatron-fsdp-main-grads-dtype", "fp32")
        command.add(*(gradients if plan.zero > 1 else ("--accumulate-allreduce-grads-in-fp32",)))
    if plan.precision == "float64":
        command.lack("precision float64: it trains in fp32, bf16 or fp16")
    if plan.loss_chunk is not None:
        command.lack(f"a loss in chunks of {plan.loss_chunk} tokens: it has the logits of a microbatch at once")
