"""Which layers of a model each stage of a pipeline has, and the rules of it; needs no rank and no torch.

Chapter: book/whole/cuts.  In: a config, a topology, a program.  Out: the layers of each stage, or a refusal.
  cost of a layer   the parameters that a token uses there: an expert counts k times, and a lookup costs nothing
  cost of the head  V h, on the last stage; with a second token 2 V h + 2 h^2 + a layer with experts
A stage may be on several ranks (DualPipe: on s and P - 1 - s).
Elsewhere: Megatron `--decoder-first-pipeline-num-layers`; torchtitan `module_fqns_per_model_part`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp.partition import partition
from dualpipe_lab.pp.program import F, Program
from dualpipe_lab.topology import Topology

ModelConfig: TypeAlias = LlamaConfig | V3MoEConfig


def sizes_of(config: ModelConfig) -> LlamaConfig:
    """Return the sizes of a model's attention, embedding and head."""
    return config if isinstance(config, LlamaConfig) else config.dense


def stage_layers(
    config: ModelConfig, num_stages: int, layers: Sequence[int] | None = None, mtp: bool = False
) -> tuple[range, ...]:
    """Return the layers of each stage: the split with the least load on the slowest stage, or the one that is given.

    `layers`: the number of layers of each stage; the first and the last may have none.  `mtp`: the last stage
    predicts a second token too.  Raises ValueError for more stages than layers, and for numbers that do not add up to
    the model's.

    >>> stage_layers(LlamaConfig(num_layers=5), 2)
    (range(0, 3), range(3, 5))
    >>> stage_layers(LlamaConfig(num_layers=5), 2, layers=(1, 4))
    (range(0, 1), range(1, 5))
    """
    if layers is not None:
        if len(layers) != num_stages or sum(layers) != config.num_layers or min(layers) < 0 or 0 in layers[1:-1]:
            raise ValueError(
                f"layers are given for each of {num_stages} stages, from 1 between the ends, {config.num_layers} in "
                f"all, got {tuple(layers)}; leave them out for {tuple(map(len, stage_layers(config, num_stages)))}"
            )
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(layers, initial=0)))
    if num_stages == 1:
        return (range(config.num_layers),)
    if config.num_layers < num_stages:
        raise ValueError(
            f"a stage has a layer, got {config.num_layers} layers for {num_stages} stages; use at most "
            f"{config.num_layers} stages, or {num_stages} layers"
        )
    head = config.vocabulary_size * config.hidden_size
    if mtp:  # the head again, the projection and a layer with experts
        assert isinstance(config, V3MoEConfig), "see check_mtp"
        (layer,) = replace(config, num_layers=1, num_dense_layers=0).layer_costs
        head += (config.vocabulary_size + 2 * config.hidden_size) * config.hidden_size + layer
    return _partitioned(config.layer_costs, num_stages, head)


@lru_cache(maxsize=4096)
def _partitioned(costs: tuple[int, ...], num_stages: int, head: int) -> tuple[range, ...]:
    """Return the best split, which a search over plans asks for again and again."""
    return partition(costs, num_stages, head=head).stages


def stages_of(program: Program | None, pp_rank: int = 0) -> tuple[int, ...]:
    """Return the stages that a program places on a rank; without a program, stage 0.

    >>> from dualpipe_lab import schedules
    >>> stages_of(schedules.dualpipe(4, 8), 1)
    (1, 2)
    """
    return (0,) if program is None else program.stages_of(pp_rank)


def check_stages(
    config: ModelConfig,
    topology: Topology,
    program: Program | None = None,
    *,
    layers: Sequence[int] | None = None,
    sequence_parallel: bool = False,
    num_tokens: int | None = None,
    mtp: float | None = None,
) -> None:
    """Refuse a model that cannot be sharded over a topology, or that has no layers for the stages of a program.

    Args:
        config: sizes of the full model.
        topology: the ranks.
        program: of the pipeline, one for the ranks of `pp`; None without a pipeline.
        layers: the number of layers of each stage (default: as `stage_layers` shares them out).
        sequence_parallel: as in `TensorParallel`.
        num_tokens: of a sequence on one rank of `cp`, if it is known.
        mtp: lambda, the weight of the second token's loss; None for a model that predicts the next one alone.

    Raises:
        ValueError: naming the rule, the values and what to use instead.
    """
    check_sizes(config, topology)
    pp_size, num_ranks = topology.size("pp"), 1 if program is None else program.num_ranks
    if pp_size != num_ranks:
        got = "no program" if program is None else f"{program.name} for {num_ranks}"
        raise ValueError(
            f"a pipeline has a program for its ranks, got {got} in {topology.shape} ranks; build it for {pp_size}"
        )
    if program is not None and (missing := set(range(program.num_stages)) - {a.stage for a in program if a.kind == F}):
        raise ValueError(f"every stage of {program.name} is on a rank, got none for {sorted(missing)}")
    if mtp is not None:
        check_mtp(config, topology.size("tp"), mtp)
    stage_layers(config, 1 if program is None else program.num_stages, layers, mtp is not None)
    if sequence_parallel:
        sizes_of(config).check(topology.size("tp"), num_tokens)


def check_sizes(config: ModelConfig, topology: Topology) -> None:
    """Refuse sizes that do not divide among the ranks of tp and ep, and copies of experts that are not counted."""
    ep_size = topology.size("ep")
    if isinstance(config, LlamaConfig):
        if ep_size > 1:
            raise ValueError(
                f"a Llama has no experts to shard, got ep {ep_size} in {topology.shape} ranks; use dp instead"
            )
        config.check(topology.size("tp"))
        return
    left_out = [axis for axis in ("dp", "cp") if topology.size(axis) > 1 and axis not in topology.experts_over]
    if topology.edp and left_out:
        raise ValueError(
            f"edp counts all replicas, got {topology.shape} ranks with experts_over={topology.experts_over}"
        )
    config.check(topology.size("tp"), ep_size, topology.size("cp"))


def check_mtp(config: ModelConfig, tp_size: int, weight: float) -> None:
    """Refuse a second token that a model cannot predict on so many ranks of tp."""
    if isinstance(config, LlamaConfig):
        raise ValueError("a second token is predicted by a V3-style model, got a LlamaConfig; leave out mtp")
    if not 0 < weight < inf:
        raise ValueError(f"the second token's loss has a finite weight above 0, got mtp={weight}")
    if config.hidden_size % tp_size:
        raise ValueError(
            f"the second token's projection shares hidden_size out among the ranks of tp, got {config.hidden_size} on "
            f"{tp_size}; use a size that divides, or leave out mtp"
        )
