"""What a model says about its parameters, and the ranks of a mesh that hold copies of each.

Chapter: book/dp/topology.  In: a module, a `Mesh`.  Out: by parameter a `ParamSpec`; the rank's `GradientSum`s.
A layer names its `shards` once; broadcast, sums, norm, ZeRO, averages and checkpoints all read them here.
Each element of the full model is counted by one rank of the world, so a norm is one message: every shard of a linear
layer, the first copy of a KV head, an expert once along tp, the first of two mirrors and of tied stages.
Elsewhere: Megatron `tensor_model_parallel` and `allreduce` attributes of parameters; torch `DTensor` placements.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import plain_name
from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.dp.grad_norm import global_norm
from dualpipe_lab.dp.sums import BACKWARD, STEP, GradientSum, ParamSpec, copy_axes, copy_ranks, on_pipeline, sums_of
from dualpipe_lab.grad_sums import all_reduce_together_async, sum_stages
from dualpipe_lab.launch.context import device
from dualpipe_lab.launch.mesh import GroupMesh, Mesh
from dualpipe_lab.pp.program import Program
from dualpipe_lab.tp.grads import partial_of
from dualpipe_lab.tp.shard import declared_shards, shards_of


def param_specs(module: nn.Module, program: Program | None = None, pp_rank: int = 0) -> dict[nn.Parameter, ParamSpec]:
    """Return what a module says about each of its parameters; it needs no process and sends nothing.

    Names count from the nearest enclosing module with `names_start_here = True`, which stages and models set, so that a
    stage's are those of the full model; else from the module.  `module.stages` numbers the stages of a pipeline, and
    `module.tied` names, by stage, the weight that several stages hold.

    Args:
        module: this rank's part of the model.
        program: of the pipeline, whose placement says which ranks hold a stage.
        pp_rank: of this rank, for a module that is itself the one stage of its rank.

    Raises:
        ValueError: the program places several stages on this rank, and the module does not number them.

    >>> from dualpipe_lab.tp.shard import Shard
    >>> layer = nn.Linear(3, 2, bias=False)
    >>> layer.shards = {"weight": Shard(axis=0, start=2, stop=4, size=6)}
    >>> declared = param_specs(nn.Sequential(layer))[layer.weight]
    >>> declared.name, declared.shape, declared.axes
    ('0.weight', (6, 3), ('tp',))
    """
    full_name, shards, partial = full_name_of(module), shards_of(module), partial_of(module)
    holders, stages = program.holders if program else {}, _stages(module, program, pp_rank)
    stage_of = {parameter: index for index in sorted(stages, reverse=True) for parameter in stages[index].parameters()}
    names = tied_names(module)
    tied = {stages[index].get_parameter(name): names[min(names)] for index, name in names.items() if index in stages}
    found = {}
    for name, parameter in module.named_parameters():
        shard, stage = shards.get(name), stage_of.get(parameter)
        found[parameter] = ParamSpec(
            tied.get(parameter) or full_name(name),
            tuple(parameter.shape) if shard is None else shard.full_shape(parameter),
            shard,
            () if shard is None or shard.is_full else (shard.mesh_axis,),
            stage,
            () if stage is None else holders.get(stage, ()),
            tuple(sorted(names)) if parameter in tied else (),
            members(partial[parameter]) if parameter in partial else (),
        )
    return found


def full_name_of(module: nn.Module) -> Callable[[str], str]:
    """Return a function from the name of a parameter or buffer within a module to its name in the full model."""
    starts = [name for name, part in module.named_modules() if name and getattr(part, "names_start_here", False)]

    def full_name(name: str) -> str:
        start = max((prefix for prefix in starts if name.startswith(f"{prefix}.")), key=len, default="")
        return plain_name(name.removeprefix(f"{start}."))

    return full_name


class CopyGroups(NamedTuple):
    """The ranks that hold the same parameters as this one and see other data.

    Attributes:
        group: over which gradients are summed, and which ZeRO shards over.
        replicas: with hybrid ZeRO the ranks with the same shard, whose gradients are summed once per step; else None.
    """

    group: Group | None
    replicas: Group | None = None


class ModelSpec:
    """What a module declares, on a mesh: for each parameter the ranks with copies, and which of them counts it.

    Every rank of the world makes it, for the process groups.

    Args:
        module: this rank's part of the model.
        mesh: of the world, or a `GroupMesh` of the ranks with copies.
        hybrid: shard within nodes and replicate across them.
        program: of the pipeline, where the mesh has one.

    Attributes:
        parameters: what the module says about each.
        dense, experts: the ranks with copies of the parameters that are not sharded along ep, and of those that are.
        replicated: where there is tp, the parameters that no layer shards: they are equal on all its ranks.
        sums: the sums of this rank's gradients; of those, `complete_sums` runs what comes after the backwards.
        pipeline: the ranks of the pipeline that ran the module, once one has.

    Raises:
        ValueError: layers are sharded over other ranks than the mesh says, or leave gradients partial over others; a
            pipeline has no program or another number of ranks, a tied weight is held by stages of unknown ranks, `edp=`
            leaves out ranks with other data, or copies lie unevenly on the nodes.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, hybrid: bool = False, program: Program | None = None) -> None:
        _check_program(mesh, program)
        _check_tied(module, program)
        check_mesh(module, mesh)
        self.module, self.mesh = module, mesh
        self.parameters = param_specs(module, program, mesh.rank("pp"))
        dense, experts = copy_axes(mesh.topology)
        self.dense = _copy_groups(mesh, dense, hybrid)
        self.experts = self.dense if experts == dense else _copy_groups(mesh, experts, hybrid)
        shared = [parameter for parameter, spec in self.parameters.items() if spec.shard is None]
        self.replicated = shared if mesh.size("tp") > 1 else []
        self.pipeline: Collection[int] = ()
        self.sums = sums_of(self.parameters.values(), mesh, program.holders if program else None, hybrid)

    def copies(self, parameter: nn.Parameter) -> CopyGroups:
        """Return the ranks with copies of a parameter."""
        return self.experts if "ep" in self.parameters[parameter].axes else self.dense

    def group_of(self, parameter: nn.Parameter) -> Group | None:
        """Return the ranks that a parameter's gradient is summed over, and that its shards are spread over."""
        return self.copies(parameter).group

    def num_data_ranks(self) -> int:
        """Return how many ranks have other data, over which gradients are averaged, those of experts too.

        Raises:
            ValueError: the module has shards of experts, and a group does not say how many ranks send tokens.
        """
        experts = [spec.name for spec in self.parameters.values() if "ep" in spec.axes]
        if isinstance(self.mesh, GroupMesh) and experts:
            raise ValueError(
                f"{experts[0]} is sharded along ep, and a mean is over all ranks whose tokens come here, which a group "
                'of its copies does not say; give the optimizer the Mesh, or reduce="sum" and each loss its share'
            )
        dense = self.dense
        return len(members(dense.group)) * (1 if dense.replicas is None else len(members(dense.replicas)))

    def kind(self, parameter: nn.Parameter) -> frozenset[str]:
        """Return what parameters in one buffer have in common: the same on all copies, so that their buffers match."""
        declared, here = self.parameters[parameter], self.mesh.rank("pp")
        is_mirror = declared.mirrored and declared.holders[0] != here
        marks = {"replica": declared.is_replica, "mirror": is_mirror}
        tied = {f"tied to stage {declared.stage}"} if declared.tied else set()  # a buffer of its own
        partial = {f"partial on {len(declared.partial)}"} if declared.partial else set()
        return frozenset(declared.axes) | {mark for mark, holds in marks.items() if holds} | tied | partial

    def counts(self, parameter: nn.Parameter, is_sharded: bool) -> bool:
        """Return whether this rank's values of a parameter, sharded by ZeRO or not, count in the full model's norm."""
        spec = self.parameters[parameter]
        if spec.is_replica or ("tp" not in spec.axes and self.mesh.rank("tp") > 0):
            return False  # another rank, or stage, counts the same values
        sums = (one for one in self.sums if spec.name in one.parameters and one.why != "tied stages")
        own = BACKWARD if is_sharded else None  # of these ranks each counts its shard
        return all(one.ranks[0] == self.mesh.global_rank for one in sums if one.when != own)

    def complete_sums(self, held: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Run the sums after the backwards on flat buffers, each given with a parameter of its bucket."""
        for one in (one for one in self.sums if one.when == STEP):
            mine = [(spec, grad) for p, grad in held if (spec := self.parameters[p]).name in one.parameters]
            if one.why == "tied stages":  # each stage has the gradient of one use
                counted = [grad for spec, grad in mine if self._adds(spec, one)]
                sum_stages([grad for _, grad in mine], counted, one.ranks)
                continue
            grads = [grad for _, grad in mine]
            messages = [[grad] for grad in grads] if one.why == "replicas" else [grads]  # shards are large, others few
            for pending in [all_reduce_together_async(each, group_of(one.ranks)) for each in messages]:
                pending.wait()

    def check_full(self) -> None:
        """Raise ValueError for a norm, if ranks outside of the mesh hold other parts of the model."""
        sharded = next(((one.name, axis) for one in self.parameters.values() for axis in one.axes), None)
        if sharded and self.mesh.size(sharded[1]) == 1:
            outside = f"{sharded[0]} is sharded along {sharded[1]}"
        elif not {*self.pipeline} <= {*self.mesh.ranks(*(a for a in self.mesh.topology.names if a != "tp"))}:
            outside = f"a pipeline over ranks {sorted(self.pipeline)} runs the module"
        else:
            return
        raise ValueError(
            f"a norm (max_norm=, grad_norm()) over {self.mesh.topology.shape} ranks would be that of a part of the "
            f"model: {outside}; give the optimizer the Mesh of all axes in place of a group (and program= in a "
            "pipeline), or pass the full model's norm to step(norm=)"
        )

    def gradient_norm(self, p: float = 2.0) -> float:
        """Return the p-norm of the full model's gradient, once every `.grad` is summed; the same on every rank.

        Raises:
            ValueError: ranks outside of the mesh hold other parts of the model.
        """
        self.check_full()
        counted = [
            (parameter.grad, ("mesh",))
            for parameter in self.parameters
            if parameter.grad is not None and self.counts(parameter, is_sharded=False)
        ]
        return global_norm(counted, {"mesh": self.mesh.everyone}, p)

    def broadcast(self) -> None:
        """Broadcast every parameter and buffer from the first of its copies, of mirrors and tied stages too."""
        for parameter in self.parameters:
            broadcast_over(parameter, self.copies(parameter))
        for buffer in self.module.buffers():
            broadcast_over(buffer, self.dense)
        for parameter in self.replicated:
            broadcast_over(parameter, CopyGroups(self.mesh.group("tp")))  # layers of one's own may start apart
        mirrored = [(found.stage or 0, found.holders, parameter) for parameter, found in self.parameters.items()]
        for _, holders, parameter in sorted(mirrored, key=lambda found: found[0]):  # in one order on both mirrors
            if len(holders) > 1:
                broadcast_over(parameter, CopyGroups(group_of(on_pipeline(self.mesh, holders))))
        for one in (one for one in self.sums if one.why == "tied stages"):
            mine = [(found, parameter.detach()) for parameter, found in self.parameters.items() if found.tied]
            first = [weight for found, weight in mine if found.stage == found.tied[0] and self._adds(found, one)]
            sum_stages([weight for _, weight in mine], first, one.ranks)

    def check_replicated(self, grads: Iterable[tuple[nn.Parameter, Tensor]], is_sharded: bool) -> None:
        """Raise ValueError if gradients of parameters that no layer shards differ over tp; `grads` may be parts.

        Two numbers per parameter are compared, to the rounding of an operation that adds in no order.
        """
        rows = {parameter: row for row, parameter in enumerate(self.replicated)}
        mine = torch.zeros(len(rows), 2, dtype=torch.float64, device=device())
        for parameter, grad in grads:
            if parameter in rows:
                mine[rows[parameter]] += torch.stack((grad.double().square().sum(), grad.double().sum()))
        if is_sharded:
            comm.all_reduce(mine, group=self.dense.group)
        mine[:, 0].sqrt_()
        first = mine.clone()
        comm.broadcast(first, self.mesh.ranks("tp")[0], self.mesh.group("tp"))
        apart = ((mine - first).abs() > 1e-3 * first[:, :1]).any(1).int()
        comm.all_reduce(apart, "max", self.mesh.group("tp"))
        names = [self.parameters[one].name for one, far in zip(rows, apart.tolist(), strict=True) if far]
        if names:
            raise ValueError(
                f"gradients of {', '.join(names[:3])} differ on ranks {list(self.mesh.ranks('tp'))} of tp, which hold "
                "these parameters in full: let dropout and noise draw the same numbers on all of them (one generator), "
                'give token shards to tp.RMSNorm(sharded="tokens") or gather them before a layer of your own '
                "(tp.gather_tokens), and feed all ranks of tp the same batch"
            )

    def _adds(self, found: ParamSpec, tied: GradientSum) -> bool:
        """Whether this rank's gradient of a tied weight is in the sum over stages: of mirrors, the first one's is."""
        return len(tied.ranks) == 1 or found.holders[0] == self.mesh.rank("pp")


def broadcast_over(tensor: Tensor, copies: CopyGroups) -> None:
    """Broadcast a tensor from the first of its copies, in place."""
    for group in [copies.group] if copies.replicas is None else [copies.group, copies.replicas]:
        contiguous = tensor.detach().contiguous()
        comm.broadcast(contiguous, members(group)[0], group)
        tensor.detach().copy_(contiguous)


def check_mesh(module: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError for layers sharded over other ranks than a mesh says: sums would mix or leave out gradients."""
    for name, layer in module.named_modules():
        for group in (getattr(layer, "partial", None) or {}).values():
            if not set(members(group)) <= set(mesh.ranks("tp")):
                raise ValueError(
                    f"{name or 'the module'} ({type(layer).__name__}) leaves gradients partial over ranks "
                    f"{list(members(group))}, and tp of {mesh.topology.shape} ranks has {list(mesh.ranks('tp'))}; "
                    'build it with mesh.group("tp")'
                )
        for axis in {shard.mesh_axis for shard in declared_shards(layer).values()}:
            ranks, along = sharing_ranks(layer), mesh.ranks(axis)
            if ranks and tuple(rank for rank in ranks if rank in members(mesh.everyone)) != along:
                raise ValueError(
                    f"{name or 'the module'} ({type(layer).__name__}) is sharded over ranks {list(ranks)}, and "
                    f'{axis} of {mesh.topology.shape} ranks has {list(along)}; build it with mesh.group("{axis}"), or '
                    "give an optimizer the Mesh that it is built on, in place of a group"
                )


def sharing_ranks(layer: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold the shards of a layer, as its group, `ep` or `tp` says; none if it does not say."""
    sharers = layer if hasattr(layer, "group") else getattr(layer, "ep", None) or getattr(layer, "tp", None)
    return members(sharers.group) if sharers else ()


def _copy_groups(mesh: Mesh, axes: tuple[str, ...], hybrid: bool) -> CopyGroups:
    if not hybrid:
        return CopyGroups(mesh.group(*axes))
    shards, replicas = copy_ranks(mesh, axes, hybrid)
    return CopyGroups(group_of(shards), group_of(replicas) if replicas else None)


def _check_tied(module: nn.Module, program: Program | None) -> None:
    names, stages = tied_names(module), numbered_stages(module) or {}
    if program is None and not names.keys() <= stages.keys():
        raise ValueError(
            f"stages {sorted(names)} hold one weight, and stages {sorted(stages)} are here; give the optimizer the "
            "Mesh and the program, which say where the others are"
        )


def _check_program(mesh: Mesh, program: Program | None) -> None:
    size = mesh.size("pp")
    if program is None and size > 1:
        raise ValueError(
            f"{mesh.topology.shape} ranks have a pipeline, whose program says which ranks hold a stage; give program="
        )
    if program is not None and program.num_ranks != size:
        raise ValueError(
            f"program {program.name!r} is for {program.num_ranks} ranks, {mesh.topology.shape} has pp {size}"
        )


def _stages(module: nn.Module, program: Program | None, pp_rank: int) -> Mapping[int, nn.Module]:
    named = numbered_stages(module)
    if named is not None or program is None:
        return named or {}
    here = [stage for stage, ranks in program.holders.items() if pp_rank in ranks]
    if len(here) != 1:
        raise ValueError(
            f"rank {pp_rank} of program {program.name!r} holds stages {here}, and {type(module).__name__} does not say "
            "which is which; give it `stages`, a dictionary or nn.ModuleDict from each number to its module"
        )
    return {here[0]: module}


def numbered_stages(module: nn.Module) -> Mapping[int, nn.Module] | None:
    """Return `module.stages` by number, or those of an `nn.ModuleDict` whose keys are numbers; None without any."""
    stages = module if isinstance(module, nn.ModuleDict) else getattr(module, "stages", None)
    if isinstance(stages, nn.ModuleDict) and all(key.isdigit() for key in stages):
        return {int(key): stage for key, stage in stages.items()}
    return stages if isinstance(stages, Mapping) else None


def tied_names(module: nn.Module) -> dict[int, str]:
    """Return the names of the weight that several stages hold, by stage; empty where they share none."""
    return dict(getattr(module, "tied", None) or {}) if numbered_stages(module) else {}
