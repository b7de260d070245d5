"""ZeRO-3: weights, gradients and optimizer state are dealt out; each unit is whole only while it works.

Chapter: book/dp/zero-3.  In: a module, its units, a group of N ranks.  Out: updated shards; no rank holds the model.
  bytes per parameter   16 / N          (bf16 with a master copy, and pure fp32)
  on top, for a moment  the weights of two units (one works, one comes), the gradients of two (one fills, one leaves)
  bytes sent            3 m (N - 1) / N * bytes of the units' parameters for m microbatches: gather, gather, scatter
                        2 m with reshard_after_forward=False, and for what lies outside of the units (the root)
                        a pipeline that splits the backward gathers for I and, except for what I computes early, for W
The plan: before a unit's forward its weights are gathered and the next unit's are asked for; after it they are freed.
The gradient that reaches a unit's output starts its backward: the weights are gathered again, the unit before is asked
for, and the unit whose backward is over scatters its gradients and is freed.  These moments come in the same order on
every rank, so the collectives match.
In a pipeline the runtime says what is a backward: I scatters nothing, and W goes through the units last one first.
Elsewhere: torch FSDP2 `fully_shard`; DeepSpeed stage 3.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023 (arXiv 2304.11277), section 3.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from dualpipe_lab._private import call_after_backward, tree_leaves
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.flat_parameter import FlatParameter
from dualpipe_lab.dp.sharded import Options, ShardedOptimizer
from dualpipe_lab.dp.synchronizer import Piece, Synchronizer


class Zero3(ShardedOptimizer, Synchronizer):
    """Gather each unit when it works, free it afterwards, scatter its gradients, update the own shard.

    Every rank must run the same units, forward and backward; a rank without data runs them on any input with a loss
    of weight 0.

    Args:
        module: the model; what no unit holds, and what several hold (tied weights), belongs to the root, which is
            gathered for the whole of a forward and a backward.
        units: submodules in the order of the forward, none inside of another.
        group: the ranks that share out the weights.
        options: as for every stage; `bucket_bytes` and `num_backwards` play no part.
        reshard_after_forward: free the units between forward and backward.
        on_change: called with a unit's number, that of the root being `len(units)`, and whether the memory of its
            whole weights has been taken (True) or given back.

    Raises:
        ValueError: no parameter needs a gradient, a unit is none of the module's or lies inside of another.
        TypeError: the units are no modules; the other stages of ZeRO take none.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        group: Group | None = None,
        options: Options | None = None,
        reshard_after_forward: bool = True,
        on_change: Callable[[int, bool], None] = lambda unit, is_held: None,
    ) -> None:
        _check_units(units, group)
        super().__init__(module, group, options or Options())
        self._reshard = reshard_after_forward
        self._units = [
            _Unit(self, index, self._flatten(parameters, partial(on_change, index)))
            for index, parameters in enumerate(_dealt(module, units))
        ]
        self._root = self._units.pop()
        for unit, submodule in zip([*self._units, self._root], [*units, module], strict=True):
            submodule.register_forward_pre_hook(unit.before_forward)
            submodule.register_forward_hook(unit.after_forward)
        if not self.held:
            raise ValueError("no parameter needs a gradient; a frozen module needs no optimizer")
        self._flat_of = {parameter: flat for flat in self.flats for parameter in flat.bucket.parameters}
        self._unit_of = {
            p: unit for unit in [*self._units, self._root] for f in unit.flats for p in f.bucket.parameters
        }
        self._open: list[_Unit] = []  # units whose backward has begun, and is not known to be over
        self._due: list[_Unit] | None = None  # units that have to scatter in this backward; None: a pipeline says
        self._borders: set[int] = set()  # units with which a stage begins: nobody looks ahead across them
        self._leaving: list[FlatParameter] = []
        self._is_led = self.in_backward = False

    @property
    def flats(self) -> list[FlatParameter]:
        """All flat parameters, the root's last."""
        return [flat for unit in [*self._units, self._root] for flat in unit.flats]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all weights whole inside of the `with` block; changes to them are lost."""
        for flat in self.flats:
            flat.gather()
        try:
            yield
        finally:
            for flat in self.flats:
                flat.free()

    def publish(self) -> None:
        """Do nothing: the next forward gathers the new weights."""

    def start(self, index: int, border: int) -> None:
        """Ask for the weights of a unit of this number, unless there is none or a stage begins with `border`."""
        if 0 <= index < len(self._units) and border not in self._borders:
            for flat in self._units[index].flats:
                flat.start_gather()

    def stays_whole(self, unit: "_Unit") -> bool:
        """Whether a unit keeps its weights after a forward: a backward will want them, or is under way."""
        return self.in_backward or (torch.is_grad_enabled() and (unit is self._root or not self._reshard))

    def open(self, unit: "_Unit") -> None:
        """Make a unit whole for its backward; those that began before it are over."""
        self._check_open()
        if not self.in_backward:
            self.in_backward = True
            if self._due is None:
                call_after_backward(self._end_backward)
        if unit in self._open:
            return
        for flat in unit.flats:
            flat.gather()
        if unit is not self._root:  # whose output may be that of the last unit, and whose backward ends last
            self.start(unit.index - 1, unit.index)
            self._close([other for other in self._open if other is not self._root])
        self._open.append(unit)

    def check_stage(self, module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        """Refuse a stage that is a part of the module and whose weights are not all in units.

        Raises:
            ValueError: nobody would gather them, for the root is gathered when the whole module is called.
        """
        if module is not self.module and any(self._unit_of[parameter] is self._root for parameter in parameters):
            names = [self.names[parameter] for parameter in parameters if self._unit_of[parameter] is self._root]
            raise ValueError(
                f"ZeRO-3 over several stages gathers units alone, and {', '.join(names)} belong to none; name units "
                "that hold all parameters of the stages, or give each stage an optimizer of its own"
            )

    def begin_step(self, stages: Collection[Collection[nn.Parameter]]) -> None:
        """Let a pipeline say when a backward begins and when it is over."""
        self._check_open()
        self._is_led = True
        self._borders = {min(self._unit_of[parameter].index for parameter in stage) for stage in stages}

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Await the gradients of one stage and microbatch; its units scatter in turn."""
        self._check_open()
        self._due = sorted({self._unit_of[parameter] for parameter in parameters}, key=self._turn)

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Have the weights of a parameter's unit: those of a weight norm are needed once more."""
        if self._due is None:
            raise ValueError(_OUTSIDE)
        unit = self._unit_of[parameter]
        self._close([other for other in self._due if self._turn(other) < self._turn(unit)])
        if not is_made:
            self.open(unit)

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Scatter what has not left yet, with zeros for what was not used."""
        for parameter in parameters:
            if parameter.grad is not None:  # not made by autograd
                self._flat_of[parameter].take(parameter)
        self._end_backward()

    def turn(self, parameter: nn.Parameter) -> int:
        """The last unit first, and the root at the end: the order in which they scatter."""
        return self._turn(self._unit_of[parameter])

    def pieces(self) -> dict[nn.Parameter, Piece]:
        """By parameter, what this rank's shards hold of the sums."""
        found: dict[nn.Parameter, Piece] = {}
        for flat in self.flats:
            if flat.grad is not None:
                found |= flat.bucket.pieces(flat.grad, self.group_rank)
        return found

    def _turn(self, unit: "_Unit") -> int:
        return 1 if unit is self._root else -unit.index

    def _end_backward(self) -> None:
        # a unit that was closed may have had gradients since: its output was used twice
        again = [unit for unit in [*self._units, self._root] if any(flat.has_gradients for flat in unit.flats)]
        if self._due is not None:
            self._close(sorted({*self._due, *again}, key=self._turn))
        elif not self._is_led:
            again = [unit for unit in self._units if unit in self._open or unit in again]
            self._close([*again, self._root])
        self._settle()
        self._open, self._due, self.in_backward = [], None, False
        for flat in self.flats:
            flat.free()

    def _close(self, units: "list[_Unit]") -> None:
        """Free the weights of units whose backward is over, and scatter their gradients, unless this is an I."""
        scatters = self._due is not None or not self._is_led
        for unit in units:
            self._settle()
            for flat in unit.flats:
                flat.free()
                if scatters and flat.is_trained:
                    flat.start_scatter()
                    self._leaving.append(flat)
            for units_left in (self._open, self._due or []):
                if unit in units_left:
                    units_left.remove(unit)

    def _settle(self) -> None:
        while self._leaving:
            self._leaving.pop().settle()

    def _zero(self) -> None:
        self._is_led = False
        for flat in self.flats:
            if flat.grad is not None:
                flat.grad.zero_()

    def _gradients(self) -> list[Tensor]:
        if any(flat.has_gradients for flat in self.flats):
            raise ValueError(_OUTSIDE)
        return [flat.grad for flat in self.flats if flat.grad is not None]

    def _flatten(self, parameters: Sequence[nn.Parameter], on_change: Callable[[bool], None]) -> list[FlatParameter]:
        """One flat parameter for each run of parameters of one kind, with its optimizer state."""
        flats = []
        for (is_trained, _), run in groupby(
            parameters, lambda parameter: (parameter.requires_grad, self.kind(parameter))
        ):
            flat = FlatParameter(list(run), self.group, self.options.grad_dtype, on_change, self)
            flats.append(flat)
            if is_trained:
                self.held.append(self._hold(flat.bucket, flat.shard, *flat.bucket.layout.span(self.group_rank)))
        return flats


class _Unit:
    """The hooks of one submodule."""

    def __init__(self, owner: Zero3, index: int, flats: list[FlatParameter]) -> None:
        self.owner, self.index, self.flats = owner, index, flats

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        for flat in self.flats:
            flat.gather()
        if not self.owner.in_backward:  # else it is recomputed, and the units before it come next
            following = 0 if module is self.owner.module else self.index + 1
            self.owner.start(following, following)

    def after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._before_backward)
        if not self.owner.stays_whole(self):
            for flat in self.flats:
                flat.free()

    def _before_backward(self, grad: Tensor) -> None:
        self.owner.open(self)


def _dealt(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each unit, and last those of the root."""
    owners: dict[nn.Parameter, list[int]] = {parameter: [] for parameter in module.parameters()}
    inside = [set(unit.modules()) for unit in units]
    for index, unit in enumerate(units):
        if unit is module or unit not in set(module.modules()):
            raise ValueError(f"unit {index} ({type(unit).__name__}) is not a submodule of {type(module).__name__}")
        if any(unit in other for at, other in enumerate(inside) if at != index):
            raise ValueError(f"unit {index} ({type(unit).__name__}) lies inside of another unit; name only one of them")
        for parameter in unit.parameters():
            owners[parameter].append(index)
    dealt: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, indices in owners.items():
        dealt[indices[0] if len(indices) == 1 else -1].append(parameter)
    return dealt


def _check_units(units: object, group: object) -> None:
    listed = list(units) if isinstance(units, Iterable) else [units]
    if not isinstance(units, Iterable) or any(not isinstance(unit, nn.Module) for unit in listed):
        types = ", ".join(type(unit).__name__ for unit in listed)
        raise TypeError(f"ZeRO-3 takes its units before the group: Zero3(module, [block, ...], group), got {types}")
    if isinstance(group, Options):
        raise TypeError("ZeRO-3 takes the group before the options: Zero3(module, units, group, options)")


_OUTSIDE = (
    "ZeRO-3 has got gradients that belong to no backward, as W makes them outside of autograd's engine; run the stages "
    "with a PipelineRuntime, and nothing else in the same step"
)
