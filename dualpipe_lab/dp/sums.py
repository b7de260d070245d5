"""`GradientSum`: which ranks add which gradients, and when, as data: from what a model says about its parameters.

Chapter: book/whole/sums.  In: a `ParamSpec` per parameter, a rank's coordinates.  Out: the sums of that rank, in order.
  why           ranks                                                 when                    executed by
  mirrors       that hold the same stage of a pipeline                its last backward       `PipelineRuntime`
  dp x ep x cp  with other data; of experts, dp x cp                  as buckets are full     reducers of DDP, ZeRO
  replicas      with the same shard on other nodes, in hybrid ZeRO    after the backwards     `ModelSpec`
  tp, KV heads  that left the gradient of a copied weight partial     after the backwards     `ModelSpec`
  tied stages   that hold other stages with the same weight           last                    `ModelSpec`
Elsewhere: Megatron `finalize_model_grads`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dualpipe_lab.topology import RankCoordinates, Topology

if TYPE_CHECKING:  # plans print sums without torch
    from dualpipe_lab.tp.shard import Shard

DATA_AXES = ("dp", "ep", "cp")  # ranks that differ along these have the same dense weights and other tokens
BACKWARD, STEP = "in the backwards", "after the backwards"


@dataclass(frozen=True)
class ParamSpec:
    """What a module says about one parameter.

    Attributes:
        name: in the full model; of a tied weight, in the first of its stages.
        shape: of the full tensor.
        shard: which part of it this rank holds; None for all of it.
        axes: along which other ranks hold other parts: "tp" or "ep".
        stage: of the pipeline; None where there is none.
        holders: the ranks of the pipeline that hold this stage; two are mirrors, which add their gradients.
        tied: the stages that hold the same weight, of which the first counts it; empty for one stage.
        partial: the global ranks that leave parts of the gradient, for their sum; empty for a complete one.
    """

    name: str
    shape: tuple[int, ...]
    shard: "Shard | None" = None
    axes: tuple[str, ...] = ()
    stage: int | None = None
    holders: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()

    @property
    def mirrored(self) -> bool:
        """Whether several ranks of the pipeline hold this parameter."""
        return len(self.holders) > 1

    @property
    def is_replica(self) -> bool:
        """Whether another rank counts the same gradient in the norm: of a replicated KV head, of a tied weight."""
        return self.stage in self.tied[1:] or (self.shard is not None and self.shard.is_replica)


class GradientSum(NamedTuple):
    """One sum of the gradients of some parameters.

    Attributes:
        why: the axes along which the ranks have other data, or the reason, as in the table above.
        ranks: the global ranks that add, in group order; one rank adds its own stages alone.
        parameters: their names in the full model.
        when: after the last backward of a stage, `BACKWARD` or `STEP`.
    """

    why: str
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    when: str

    def __str__(self) -> str:
        ranks, others = " ".join(map(str, self.ranks)), len(self.parameters) - 1
        return f"{self.why}: ranks {ranks} {self.when}: {self.parameters[0]}{f' and {others} more' if others else ''}"


def sums_of(
    specs: Iterable[ParamSpec],
    here: RankCoordinates,
    holders: Mapping[int, Sequence[int]] | None = None,
    hybrid: bool = False,
) -> tuple[GradientSum, ...]:
    """Return the sums in which a rank takes part, in the order of a step.

    Args:
        specs: of the rank's parameters.
        here: the coordinates of the rank.
        holders: the ranks of the pipeline that hold each stage, where there is one.
        hybrid: whether ZeRO shards within nodes and replicates across them.

    >>> here = Topology([("dp", 2), ("ep", 2), ("tp", 2)]).at(0)
    >>> for one in sums_of([ParamSpec("norm", (4,)), ParamSpec("gate", (8, 4), axes=("ep",))], here):
    ...     print(one)
    dp x ep: ranks 0 2 4 6 in the backwards: norm
    dp: ranks 0 4 in the backwards: gate
    """
    found: dict[GradientSum, list[str]] = {}
    for spec in specs:
        for one in _sums_of_one(spec, here, holders or {}, hybrid):
            names = found.setdefault(one, [])
            names += [] if spec.name in names else [spec.name]
    merged = [one._replace(parameters=tuple(names)) for one, names in found.items()]
    return tuple(sorted(merged, key=lambda one: (one.when == STEP, one.when == BACKWARD, one.why == "tied stages")))


def _sums_of_one(
    spec: ParamSpec, here: RankCoordinates, holders: Mapping[int, Sequence[int]], hybrid: bool
) -> Iterator[GradientSum]:
    if spec.mirrored:
        yield sum_of_mirrors(spec.stage or 0, on_pipeline(here, spec.holders))
    dense, experts = copy_axes(here.topology)
    axes = tuple(axis for axis in (experts if "ep" in spec.axes else dense) if here.size(axis) > 1)
    ranks, replicas = copy_ranks(here, axes, hybrid)
    if len(ranks) > 1:
        yield GradientSum(" x ".join(axes), ranks, (), BACKWARD)
    if replicas:
        yield GradientSum("replicas", replicas, (), STEP)
    if len(spec.partial) > 1:
        yield GradientSum("tp" if spec.partial == here.ranks("tp") else "KV heads", spec.partial, (), STEP)
    if len(spec.tied) > 1:
        yield sum_of_tied(on_pipeline(here, tied_ranks(holders, spec.tied, here.rank("pp"))))


def sum_of_mirrors(stage: int, ranks: tuple[int, ...], names: Iterable[str] = ()) -> GradientSum:
    """Return the sum of a stage's gradients over the ranks of a pipeline that hold it."""
    return GradientSum("mirrors", ranks, tuple(names), f"after the last backward of stage {stage}")


def sum_of_tied(ranks: tuple[int, ...], names: Iterable[str] = ()) -> GradientSum:
    """Return the sum of the gradients of a weight that several stages hold, over the ranks with some of them."""
    return GradientSum("tied stages", ranks, tuple(names), STEP)


def tied_ranks(holders: Mapping[int, Sequence[int]], stages: Iterable[int], pp_rank: int) -> tuple[int, ...]:
    """Return the ranks of a pipeline that add their stages' gradients of one weight: a rank with all of them, alone."""
    every = {tuple(holders.get(stage, ())) for stage in stages}
    return (pp_rank,) if len(every) == 1 else tuple(sorted({rank for ranks in every for rank in ranks}))


def on_pipeline(here: RankCoordinates, pp_ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the global ranks of some ranks of a rank's pipeline."""
    return tuple(here.ranks("pp")[rank] for rank in pp_ranks)


def copy_axes(topology: Topology) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which dense parameters are copied, and those along which experts are; needs no rank.

    >>> copy_axes(Topology([("dp", 2), ("ep", 2), ("cp", 2), ("tp", 2)]))
    (('dp', 'ep', 'cp'), ('dp', 'cp'))
    >>> copy_axes(Topology([("dp", 4), ("tp", 2)], edp=2))
    (('dp',), ('edp',))

    Raises:
        ValueError: `edp=` counts other ranks than those with other data.
    """
    dense = tuple(axis for axis in DATA_AXES if axis in topology.names)
    if not topology.edp:
        return dense, tuple(axis for axis in dense if axis != "ep")
    if {axis for axis in topology.experts_over if topology.size(axis) > 1} != {
        a for a in dense if topology.size(a) > 1
    }:
        raise ValueError(
            f"edp= counts the copies of an expert among all ranks with other data, got {topology.shape} ranks with "
            f"experts_over={topology.experts_over}; use experts_over={dense}"
        )
    return dense, ("edp",)


def copy_ranks(here: RankCoordinates, axes: Sequence[str], hybrid: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks along axes; if `hybrid`, those on this node, and the ranks with the same shard on others.

    Raises:
        ValueError: hybrid, and the topology says no nodes, or the ranks lie unevenly on them.
    """
    if not hybrid:
        return here.ranks(*axes), ()
    if here.topology.ranks_per_node is None:
        raise ValueError(
            f"hybrid ZeRO shards within nodes, got {here.topology.shape} ranks; give the topology ranks_per_node="
        )
    parts = next(parts for parts in here.topology.parts_by_node(*axes) if here.global_rank in sum(parts, ()))
    within = next(part for part in parts if here.global_rank in part)
    across = tuple(part[within.index(here.global_rank)] for part in parts)
    return within, across if len(parts) > 1 else ()
