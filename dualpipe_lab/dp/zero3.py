"""ZeRO-3: weights, gradients and optimizer state are sharded; the full weights of a unit exist only while it works.

Chapter: book/dp/zero-3.  In: a module, its units, a group of N ranks.  Out: updated shards; no rank holds the model.
  bytes per parameter     16 / N        (bf16 with a master copy, and pure fp32)
  peak on top of that     the weights of two units (one works, one is prefetched), the gradients of two
  bytes sent              3 m (N - 1) / N * bytes of the units' parameters for m microbatches: gather, gather, scatter
                          2 m with reshard_after_forward=False, and for what lies outside of the units (the root)
Elsewhere: torch FSDP2 `fully_shard` (unshard, reshard, prefetch); DeepSpeed stage 3.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023 (arXiv 2304.11277), section 3.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Signature, signature
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import call_after_backward, tree_leaves
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.flat_parameter import FlatParameter
from dualpipe_lab.dp.sealed import SealedGrads
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.grad_ready import GradShard, Synchronizer
from dualpipe_lab.launch.mesh import Mesh


class Zero3(ShardedOptimizer):
    """Gather each unit when it works, free it afterwards, reduce-scatter its gradients, update the local shard.

    Every rank must run the same units, forward and backward; a rank without data runs them on any input with a loss
    of weight 0.  `torch.func.vmap` over the module needs `reshard_after_forward=False`.

    Args:
        units: submodules in the order of the forward, none inside of another; None (default) for the direct children
            with parameters, and in the place of a list of modules its items.  Parameters that lie, by one of their
            names, outside of the units or in several (tied weights, shared modules) belong to the root, which is
            gathered throughout a forward and a backward.
        reshard_after_forward: free the units between forward and backward (default: True).
        on_change: called with a unit's number, that of the root being `len(units)`, and whether the memory of its
            full weights has been allocated (True) or freed (default: nothing is called).
        options: all arguments of the other stages, by name; see `__init__`.

    Raises:
        ValueError: as the other stages; a unit is none of the module's, lies inside of another, or has no forward.
        TypeError: the units are no modules.
    """

    reducer: "UnitReducer"

    def __init__(
        self,
        module: nn.Module,
        mesh: Group | Mesh | None = None,
        *,
        units: Iterable[nn.Module] | None = None,
        reshard_after_forward: bool = True,
        on_change: Callable[[int, bool], None] = lambda unit, is_held: None,
        **options: Any,
    ) -> None:
        self._units = _direct_units(module) if units is None else _listed_units(units)
        self._reshard, self._on_change = reshard_after_forward, on_change
        super().__init__(module, mesh, **options)

    def _take(self, module: nn.Module) -> "UnitReducer":
        self.reducer = UnitReducer(module, self.group, self.names, self._reshard)
        for index, parameters in enumerate(_assign_units(module, self._units)):
            flats = self._flatten(parameters, partial(self._on_change, index))
            self.reducer.add_unit([*self._units, module][index], flats)
        self.reducer.seal()
        for part in module.modules():
            part.register_state_dict_post_hook(_copy_weights)
        return self.reducer

    @property
    def flats(self) -> list[FlatParameter]:
        """All flat parameters, the root's last."""
        return self.reducer.flats

    def all_gather_weights(self) -> None:
        """Gather again the full weights that are here now: they were gathered before the shards changed."""
        for flat in self.flats:
            flat.gather_again()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all full weights inside of the `with` block; each rank keeps its shard of what is changed there."""
        for flat in self.flats:
            flat.hold()
        try:
            yield
        finally:
            for flat in self.flats:
                flat.release()

    def _flatten(self, parameters: Sequence[nn.Parameter], on_change: Callable[[bool], None]) -> list[FlatParameter]:
        """Make one flat parameter for each run of parameters of one kind, and its optimizer state."""
        flats = []
        for parameter in parameters:
            vars(parameter)["label"] = self.names[parameter]
        for (is_trained, _), run in groupby(parameters, lambda p: (p.requires_grad, self.updater.kind(p))):
            same = list(run)
            group = self.spec.group_of(same[0])
            flat = FlatParameter(same, group, self.grad_dtype, on_change, self.reducer)
            flats.append(flat)
            if is_trained:
                self.updater.add_shard(flat.bucket, flat.shard, *flat.bucket.layout.span(comm.get_rank(group)))
        return flats


def _show_options(own: Any, shared: Any) -> None:
    """Let help() of a constructor show the arguments that it hands on as **options."""
    mine, others = (list(signature(init).parameters.values()) for init in (own, shared))
    own.__signature__ = Signature([*mine[:-1], *others[3:]])
    own.__doc__ = shared.__doc__


_show_options(Zero3.__init__, ShardedOptimizer.__init__)


class UnitReducer(Synchronizer):
    """Gathers the weights of each unit when it works, and reduce-scatters its gradients when its backward has ended.

    Before a unit's forward the next unit's weights are prefetched; the gradient of its output starts its backward, and
    the previous unit's are prefetched.  These events come in the same order on every rank, so the collectives match.
    In a pipeline the runtime says what is a backward: I scatters nothing, and W visits the units in reverse order and
    gathers them again, except for gradients that I computes early.
    """

    name, is_sharded = "Zero3", True

    def __init__(
        self, module: nn.Module, group: Group | None, names: dict[nn.Parameter, str], reshard_after_forward: bool
    ) -> None:
        self.group, self.units, self.flats = group, list[_Unit](), list[FlatParameter]()
        self._module, self._names, self._reshard = module, names, reshard_after_forward
        self._unit_of: dict[nn.Parameter, _Unit] = {}
        self._flat_of: dict[nn.Parameter, FlatParameter] = {}
        self._open: list[_Unit] = []  # units whose backward has begun, and is not known to have ended
        self._due: list[_Unit] | None = None  # units that have to scatter in this backward; None: a pipeline says
        self._borders: set[int] = set()  # units with which a stage begins: no prefetch across them
        self._in_flight: list[Pending[None]] = []
        self.forwards: list[int] = []  # the units that this step has trained, by number, without the root
        self._is_pipelined = self.is_final = self.in_backward = False

    def add_unit(self, module: nn.Module, flats: list[FlatParameter]) -> None:
        """Register the hooks of the next unit, or of the root."""
        unit = _Unit(self, len(self.units), flats)
        self.units.append(unit)
        self.flats += flats
        self.root = unit  # the last: of the parameters that are in none of the others, or in several
        module.register_forward_pre_hook(unit.before_forward, prepend=True)  # a weight norm's hook reads the weights
        module.register_forward_hook(unit.after_forward)
        for flat in flats:
            self._flat_of |= dict.fromkeys(flat.bucket.parameters, flat)
            self._unit_of |= dict.fromkeys(flat.bucket.parameters, unit)

    def seal(self) -> None:
        """Let nothing but backwards use the gradients of the units, once all have been added."""
        shards = {p: flat.grad for flat in self.flats if flat.grad is not None for p in flat.bucket.parameters}
        self._seals = SealedGrads(shards)

    def prefetch(self, index: int, border: int) -> None:
        """Launch the all-gather of the unit `index`, unless there is none or a stage begins with unit `border`."""
        if 0 <= index < len(self.units) - 1 and border not in self._borders:
            for flat in self.units[index].flats:
                flat.start_gather()

    def stays_full(self, unit: "_Unit") -> bool:
        """Return whether a unit keeps its full weights after a forward: for its backward, now or later."""
        return self.in_backward or (torch.is_grad_enabled() and (unit is self.root or not self._reshard))

    def open(self, unit: "_Unit") -> None:
        """Gather a unit for its backward, prefetch the previous one, and close those whose backward has ended."""
        self.check_open()
        if unit.num_holds:
            return
        if not self.in_backward:
            self.in_backward = True
            if self._due is None:
                call_after_backward(self._end_backward)
        if unit in self._open:
            return
        unit.gather()
        if unit is not self.root:  # whose output may be that of the last unit, and whose backward ends last
            self.prefetch(unit.index - 1, unit.index)
            self._close([other for other in self._open if other is not self.root])
        self._open.append(unit)

    def _close(self, units: "list[_Unit]") -> None:
        """Free the weights of units whose backward has ended, and reduce-scatter their gradients, except in an I."""
        scatters = self._due is not None or not self._is_pipelined
        for unit in units:
            self._complete()
            unit.free()
            for flat in unit.flats:
                if scatters and flat.is_trained:
                    self._in_flight.append(flat.scatter_async())
            for units_left in (self._open, self._due or []):
                if unit in units_left:
                    units_left.remove(unit)

    def _complete(self) -> None:
        while self._in_flight:
            self._in_flight.pop().wait()

    def _end_backward(self) -> None:
        # a unit that was closed may have had gradients since: its output was used twice
        again = [unit for unit in self.units if any(flat.has_gradients for flat in unit.flats)]
        if self._due is not None:
            self._close(sorted({*self._due, *again}, key=self._order))
        elif not self._is_pipelined:
            again = [unit for unit in self.units[:-1] if unit in self._open or unit in again]
            self._close([*again, self.root])
        self._complete()
        self._open, self._due, self.in_backward = [], None, False
        for unit in self.units:
            unit.free()
        if not self._is_pipelined:
            self._seals.close()

    def finish(self) -> list[Tensor]:
        """Return the gradient shards: every backward has completed its sums."""
        self._seals.check()
        self._check_forwards()
        if any(flat.has_gradients for flat in self.flats):
            raise ValueError(self.outside_of_backwards())
        self.is_final = True
        self._seals.close()
        return [flat.grad for flat in self.flats if flat.grad is not None]

    def zero(self, num_backwards: int | None = None) -> None:
        """Set the gradient shards to zero."""
        for unit in self.units:
            unit.num_holds = 0
        if self.in_backward or self._due is not None:  # a backward raised
            self._complete_backward()
        self._is_pipelined = self.is_final = False
        self.forwards.clear()
        self._seals.clear()
        for flat in self.flats:
            flat.zero_grad()

    def _complete_backward(self) -> None:
        """Visit the units that a backward has not reached: ranks that stopped elsewhere have, or will in `zero`."""
        if not self._is_pipelined:
            reached = min((unit.index for unit in self._open), default=self.root.index)
            for unit in reversed(self.units[:reached]):
                self.open(unit)
        self._end_backward()

    def _check_forwards(self) -> None:
        """Raise ValueError if ranks have run other units; those that have run all in order send nothing."""
        starts = self._borders | {0}
        ends = starts | {self.root.index}
        steps = pairwise([-1, *self.forwards, 0])
        if all(unit == last + 1 or (last + 1 in ends and unit in starts) for last, unit in steps):
            return
        ran = comm.all_gather_object(self.forwards, self.group)
        if any(units != self.forwards for units in ran):
            raise ValueError(
                f"ranks have run different units of ZeRO-3, {ran} by rank and number, and gathered and summed one with "
                "another; run the same units in one order on every rank, without data on any input and with a loss of "
                "weight 0, or use Zero2"
            )

    def check_stage(self, module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        """Refuse a stage that is a part of the module and whose weights are not all in units.

        Raises:
            ValueError: no hook would gather them, for the root is gathered when the full module is called.
        """
        if module is not self._module and any(self._unit_of[parameter] is self.root for parameter in parameters):
            names = [self._names[parameter] for parameter in parameters if self._unit_of[parameter] is self.root]
            raise ValueError(
                f"ZeRO-3 over several stages gathers units alone, and {', '.join(names)} belong to none; name units "
                "that hold all parameters of the stages, or give each stage an optimizer of its own"
            )

    def begin_step(self, stages: Collection[Collection[nn.Parameter]], num_microbatches: int) -> None:
        """Let a pipeline say when a backward begins and ends."""
        self.check_open()
        self._seals.open()
        self._is_pipelined = True
        self._borders = {min(self._unit_of[parameter].index for parameter in stage) for stage in stages}

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Expect the gradients of one stage and microbatch; its units scatter in reverse order."""
        self.check_open()
        self._seals.open(parameters)
        self._due = self._units_of(parameters)

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let nothing but the next step of a pipeline use these gradients."""
        self._seals.close(parameters)

    def hold(self, parameters: Collection[nn.Parameter]) -> None:
        """Gather the units of a stage that runs in pieces, and keep them until as many calls of `release`.

        An F&B pair whose halves are of one stage gathers them once.
        """
        held = self._units_of(parameters)
        for flat in (flat for unit in held for flat in unit.flats):
            flat.start_gather()
        for unit in held:
            unit.num_holds += 1
            unit.gather()

    def release(self, parameters: Collection[nn.Parameter]) -> None:
        """Free the units of a stage that runs in pieces, unless another piece of work holds them."""
        for unit in self._units_of(parameters):
            unit.num_holds -= 1
            unit.free()

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Gather the weights of a parameter's unit: those of a weight norm are needed once more."""
        if self._due is None:
            raise ValueError(self.outside_of_backwards())
        unit = self._unit_of[parameter]
        if unit.num_holds:
            return  # the pieces of a B: it ends with all its units
        self._close([other for other in self._due if self._order(other) < self._order(unit)])
        if not is_made:
            self.open(unit)

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Reduce-scatter the remaining units, with zeros for parameters that were not used."""
        for parameter in parameters:
            if parameter.grad is not None:  # not made by autograd
                self._flat_of[parameter].take(parameter)
        self._end_backward()

    def weight_grad_order(self, parameter: nn.Parameter) -> int:
        """Return the place of a parameter in a W: the units in reverse order, the root at the end."""
        return self._order(self._unit_of[parameter])

    def grad_shards(self) -> dict[nn.Parameter, GradShard]:
        """Return, by parameter, the elements of the sums that this rank keeps."""
        found: dict[nn.Parameter, GradShard] = {}
        for flat in self.flats:
            if flat.grad is not None:
                found |= flat.bucket.grad_shards(flat.grad, comm.get_rank(flat.bucket.group))
        return found

    def _units_of(self, parameters: Collection[nn.Parameter]) -> "list[_Unit]":
        """The units of those parameters that are managed here, in the order of a backward."""
        return sorted({self._unit_of[p] for p in parameters if p in self._unit_of}, key=self._order)

    def _order(self, unit: "_Unit") -> int:
        return 1 if unit is self.root else -unit.index


class _Unit:
    """The hooks of one submodule; `num_holds`: the pieces of work that need its full weights now."""

    def __init__(self, reducer: UnitReducer, index: int, flats: list[FlatParameter]) -> None:
        self.reducer, self.index, self.flats, self.num_holds = reducer, index, flats, 0

    def __reduce__(self) -> Any:
        """Refuse copies and pickles of the module, which has this object's methods as hooks."""
        raise ValueError(
            "a module under ZeRO-3 cannot be copied or pickled, as this rank has shards of its weights; copy or save "
            "module.state_dict() inside of `with optimizer.gathered():`, or use dp.full_weights(optimizer) or "
            "dp.checkpoint.save"
        )

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def free(self) -> None:
        for flat in self.flats if not self.num_holds else ():
            flat.free()

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        self.gather()
        if not self.reducer.in_backward:  # else it is recomputed, and the units before it come next
            following = 0
            if self is not self.reducer.root:
                following = self.index + 1
                if torch.is_grad_enabled():  # however long an evaluation is
                    self.reducer.forwards.append(self.index)
            self.reducer.prefetch(following, following)

    def after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._before_backward)
                self.reducer.num_hooks += 1
        if not self.reducer.stays_full(self):
            self.free()

    def _before_backward(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "a backward with create_graph=True is differentiated once more, by weights that ZeRO-3 has freed then; "
                "use Zero2 for gradient penalties and second derivatives"
            )
        self.reducer.open(self)


def _copy_weights(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Copy a module's weights in its state dict, which outlives the memory of the full ones."""
    for name, _ in module.named_parameters(recurse=False):
        value = state.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # as it is with keep_vars=True
            state[f"{prefix}{name}"] = value.clone()


def _assign_units(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit, and last those of the root."""
    inside = [set(unit.modules()) for unit in units]
    for index, unit in enumerate(units):
        if unit is module or unit not in set(module.modules()):
            raise ValueError(f"unit {index} ({type(unit).__name__}) is not a submodule of {type(module).__name__}")
        if type(unit).forward is nn.Module.forward and "forward" not in vars(unit):
            raise ValueError(
                f"unit {index} ({type(unit).__name__}) has no forward, before which it would be gathered; name its "
                "modules as units: [*blocks]"
            )
        if any(unit in other for at, other in enumerate(inside) if at != index):
            raise ValueError(f"unit {index} ({type(unit).__name__}) lies inside of another unit; name only one of them")
    number = {unit: index for index, unit in enumerate(units)}
    unit_at = {name: number[part] for name, part in module.named_modules(remove_duplicate=False) if part in number}
    owners: dict[nn.Parameter, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        enclosing = (unit_at.get(".".join(parts[:length])) for length in range(1, len(parts)))
        owners.setdefault(parameter, set()).add(next((unit for unit in enclosing if unit is not None), len(units)))
    assigned: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, found in owners.items():
        assigned[found.pop() if len(found) == 1 else -1].append(parameter)
    return assigned


def _direct_units(module: nn.Module) -> list[nn.Module]:
    """Return the children that have parameters, and those of a list of modules; none inside of another."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    lists = nn.ModuleList, nn.ModuleDict
    units = [unit for one in children for unit in (_direct_units(one) if isinstance(one, lists) else [one])]
    return [unit for unit in units if not any(unit in other.modules() for other in units if other is not unit)]


def _listed_units(units: Iterable[nn.Module]) -> list[nn.Module]:
    listed = [None] if isinstance(units, nn.Module) or not isinstance(units, Iterable) else list(units)
    if not all(isinstance(unit, nn.Module) for unit in listed):
        raise TypeError(f"ZeRO-3 takes a list of modules, units=[block, ...], got {units!r}")
    return listed
