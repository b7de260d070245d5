"""The rules that a plan and a model keep together, each as a sentence with the values; `None` where nothing is wrong.

Chapter: book/whole/cuts.  In: a plan, a model's config, the length of a sequence.  Out: what is wrong, or None.
The rules stand in four groups.
A group reads the sizes of the axes and its own fields, so that `dualpipe_lab.plan.legal` can choose the fields of each
group on their own.
  grid       pp, dp, cp, tp, ep, experts_in_data
  pipeline   num_microbatches, schedule, chunks, layers, overlap, loss_chunk
  sequence   sequence_parallel, layout, multi_token
  zero       zero, hybrid, ranks_per_node; it also reads loss_chunk, multi_token and overlap
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import TypeAlias

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, check_multi_token, stage_layers
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.pp import schedules

Rule: TypeAlias = Callable[[Plan, ModelConfig, int | None], str | None]
_is_synchronous = cache(schedules.is_synchronous)


def _rule(check: Callable[[Plan, ModelConfig, int | None], None]) -> Rule:
    @wraps(check)
    def problem(plan: Plan, config: ModelConfig, sequence_length: int | None) -> str | None:
        try:
            check(plan, config, sequence_length)
        except ValueError as error:
            return str(error)
        return None

    return problem


@_rule
def grid(plan: Plan, config: ModelConfig, sequence_length: int | None) -> None:
    """The sizes of the axes."""
    config.check(plan.tp) if isinstance(config, LlamaConfig) else config.check(plan.tp, plan.ep, plan.cp)
    if plan.ep > 1 and not has_experts(config):
        raise ValueError(f"ep shards experts, and this model has none, got ep {plan.ep}")
    _ = replace(plan, ranks_per_node=None).topology
    if plan.pp > config.num_layers:
        raise ValueError(f"every stage needs a layer, got {config.num_layers} layers for pp {plan.pp}")


@_rule
def pipeline(plan: Plan, config: ModelConfig, sequence_length: int | None) -> None:
    """The schedule, its microbatches and its stages."""
    if not _is_synchronous(plan.schedule):
        raise ValueError(
            f"training needs one version of the weights per step, and {plan.schedule} updates them in between; use a "
            "synchronous schedule"
        )
    if plan.pp == 1 and plan.chunks is not None:
        raise ValueError(f"chunks are stages per rank of pp, got chunks={plan.chunks} and pp 1")
    stage_layers(config, plan.num_stages, plan.layers, has_second(plan, config))
    if plan.overlap and not has_experts(config):
        raise ValueError("overlap hides the all-to-alls of experts, and this model has none, got overlap=True")
    if plan.overlap and not plan.has_pairs:
        where = f"{plan.schedule} has none" if plan.pp > 1 else "a single stage has none"
        raise ValueError(
            f"overlap needs pairs of a forward and a backward, and {where}; use dualpipe, dualpipev or paired_1f1b"
        )


@_rule
def sequence(plan: Plan, config: ModelConfig, sequence_length: int | None) -> None:
    """How a sequence is sharded along cp and tp, and its second targets."""
    if plan.multi_token is not None:
        check_multi_token(config, plan.tp, plan.multi_token)
        if sequence_length == 1:
            raise ValueError("a second token needs sequences of 2 tokens or more, got a length of 1")
    if sequence_length is None:
        return
    uneven = next((size for size in lengths_of(plan, sequence_length) if size % plan.tp), None)
    if plan.sequence_parallel and uneven is not None:
        raise ValueError(
            f"sequence parallelism shards the tokens of a rank evenly along tp, got {uneven} tokens and tp {plan.tp}"
        )


@_rule
def zero(plan: Plan, config: ModelConfig, sequence_length: int | None) -> None:
    """The stage of ZeRO and its shards."""
    nodes = plan.ranks_per_node
    if nodes is not None and plan.world_size % nodes:
        raise ValueError(f"ranks_per_node must divide the ranks, got {nodes} and {plan.world_size} ranks")
    if plan.zero and plan.num_copies == 1:
        raise ValueError(
            f"ZeRO-{plan.zero} shards over the ranks of dp, cp and ep that copy a weight, got one; use zero=0"
        )
    # the loss in chunks calls the head behind its stage; ZeRO-3 frees a stage that it gathers as one unit before that
    is_tied = plan.pp == 1 and getattr(config, "tied", False)
    has_second_head = has_second(plan, config) and not plan.overlap  # overlapped experts hold a stage until its loss
    if plan.zero == 3 and plan.loss_chunk is not None and (is_tied or has_second_head):
        what = "a stage with a tied table at both ends" if is_tied else "a stage that predicts a second token"
        raise ValueError(
            f"ZeRO-3 frees {what} before a loss in chunks uses its head, got zero=3 and "
            f"loss_chunk={plan.loss_chunk}; use zero=2, or leave loss_chunk out"
        )
    if plan.hybrid:
        _check_hybrid(plan)


def _check_hybrid(plan: Plan) -> None:
    if plan.ranks_per_node is None:
        raise ValueError("hybrid ZeRO shards within a node, got ranks_per_node=None; give the ranks of a node")
    if not plan.zero:
        raise ValueError("hybrid says where ZeRO shards, got zero=0; use zero=1, 2 or 3")
    dense, _ = (plan.topology.parts_by_node(*axes) for axes in (plan.copy_axes, plan.expert_copy_axes))
    within, num_nodes = len(dense[0][0]), len(dense[0])
    if within == 1 or num_nodes == 1:
        raise ValueError(
            f"hybrid ZeRO needs copies of a weight on several ranks of each of several nodes, got {within} of "
            f"{plan.num_copies} copies on a node of {plan.ranks_per_node}"
        )


def first_problem(plan: Plan, config: ModelConfig, sequence_length: int | None = None) -> str | None:
    """Return the first rule that a plan breaks, or None."""
    found = (rule(plan, config, sequence_length) for rule in (grid, pipeline, sequence, zero))
    return next((problem for problem in found if problem is not None), None)


def sizes_of(model: ModelConfig) -> LlamaConfig:
    """Return the sizes of a model's attention, embedding and head."""
    return model if isinstance(model, LlamaConfig) else model.dense


def has_experts(config: ModelConfig) -> bool:
    """Whether a model has layers of experts."""
    return config.num_layers > int(getattr(config, "num_dense_layers", config.num_layers))


def has_second(plan: Plan, config: ModelConfig) -> bool:
    """Whether the model's last stage predicts a second token under this plan."""
    return plan.multi_token is not None and not isinstance(config, LlamaConfig)


def layers_of(plan: Plan, config: ModelConfig) -> tuple[range, ...]:
    """Return the layers of every stage."""
    return stage_layers(config, plan.num_stages, plan.layers, has_second(plan, config))


def lengths_of(plan: Plan, sequence_length: int) -> list[int]:
    """Return the tokens of a sequence that each rank of cp holds.

    Raises:
        ValueError: a sequence without tokens, or one that the layout does not shard.
    """
    if sequence_length < 1:
        raise ValueError(f"a sequence has a token at least, got a length of {sequence_length}")
    if plan.cp == 1:
        return [sequence_length]
    layout = make_layout(plan.layout, sequence_length, plan.cp)
    return [layout.size(rank) for rank in range(plan.cp)]
