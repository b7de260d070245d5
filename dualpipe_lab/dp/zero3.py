"""ZeRO-3: weights, gradients and optimizer state are dealt out; each unit is whole only while it works.

Chapter: book/dp/zero-3.  In: a module, its units, a group of N ranks.  Out: updated shards; no rank holds the model.
  bytes per parameter   16 / N          (bf16 with a master copy, and pure fp32)
  on top, for a moment  the weights of two units (one works, one comes), the gradients of two (one fills, one leaves)
  bytes sent            3 m (N - 1) / N * bytes of the units' parameters for m microbatches: gather, gather, scatter
                        2 m with reshard_after_forward=False, and for what lies outside of the units (the root)
The plan: before a unit's forward its weights are gathered and the next unit's are asked for; after it they are freed.
The gradient that reaches a unit's output starts its backward: the weights are gathered again, the unit before is asked
for, and the unit whose backward is over scatters its gradients and is freed.  These moments come in the same order on
every rank, so the collectives match.
Elsewhere: torch FSDP2 `fully_shard`; DeepSpeed stage 3.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023 (arXiv 2304.11277), section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dualpipe_lab.dp.flat_parameter import FlatParameter
from dualpipe_lab.dp.sharded import Options, ShardedOptimizer
from dualpipe_lab.world.comm.groups import Group


class Zero3(ShardedOptimizer):
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
        self._open: list[_Unit] = []  # units whose backward has begun, and is not known to be over
        self._leaving: list[FlatParameter] = []
        self.in_backward = False

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

    def start(self, index: int) -> None:
        """Ask for the weights of a unit, if there is one of this number."""
        if 0 <= index < len(self._units):
            for flat in self._units[index].flats:
                flat.start_gather()

    def stays_whole(self, unit: "_Unit") -> bool:
        """Whether a unit keeps its weights after a forward: a backward will want them, or is under way."""
        return self.in_backward or (torch.is_grad_enabled() and (unit is self._root or not self._reshard))

    def begin_backward(self, unit: "_Unit") -> None:
        """Make a unit whole for its backward; those that began before it are over."""
        self._check_open()
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if unit in self._open:
            return
        for flat in unit.flats:
            flat.gather()
        if unit is not self._root:  # whose output may be that of the last unit, and whose backward ends last
            self.start(unit.index - 1)
            self._close([other for other in self._open if other is not self._root])
        self._open.append(unit)

    def _end_backward(self) -> None:
        # a unit that was closed may have had gradients since: its output was used twice
        units = [unit for unit in self._units if unit in self._open or any(flat.has_gradients for flat in unit.flats)]
        self._close([*units, self._root])
        self._settle()
        self._open, self.in_backward = [], False
        for flat in self.flats:
            flat.free()

    def _close(self, units: "list[_Unit]") -> None:
        """Scatter the gradients of units whose backward is over, and free their weights."""
        for unit in units:
            self._settle()
            for flat in unit.flats:
                flat.free()
                if flat.is_trained:
                    flat.start_scatter()
                    self._leaving.append(flat)
            if unit in self._open:
                self._open.remove(unit)

    def _settle(self) -> None:
        while self._leaving:
            self._leaving.pop().settle()

    def _zero(self) -> None:
        for flat in self.flats:
            if flat.grad is not None:
                flat.grad.zero_()

    def _gradients(self) -> list[Tensor]:
        return [flat.grad for flat in self.flats if flat.grad is not None]

    def _flatten(self, parameters: Sequence[nn.Parameter], on_change: Callable[[bool], None]) -> list[FlatParameter]:
        """One flat parameter for each run of parameters of one kind, with its optimizer state."""
        flats = []
        for (is_trained, _), run in groupby(
            parameters, lambda parameter: (parameter.requires_grad, self.kind(parameter))
        ):
            flat = FlatParameter(list(run), self.group, self.options.grad_dtype, on_change)
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
            self.owner.start(0 if module is self.owner.module else self.index + 1)

    def after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._before_backward)
        if not self.owner.stays_whole(self):
            for flat in self.flats:
                flat.free()

    def _before_backward(self, grad: Tensor) -> None:
        self.owner.begin_backward(self)


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
