"""Asynchronous pipelines: every stage updates its weights during the run, and keeps the old versions that it needs.

Chapter: book/pp/pipedream.  In: a program, modules, an optimizer, a rule.  Out: trained modules, losses.
Versions are found by counting (`dualpipe_lab.pp.schedules.pipedream`), for any program with each stage on one rank.
Elsewhere: msr-fiddle/pipedream's `OptimizerWithWeightStashing` copies all weights after every update.
Sources: Narayanan et al. 2019 (SOSP), section 3.3; Narayanan et al. 2021 (arXiv 2006.09503), section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.batch import StepResult
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime
from dualpipe_lab.pp.runtime.stage import Stage, Tensors, call_with
from dualpipe_lab.pp.schedules.pipedream import double_buffered, updates_before, vertical_sync

Rule: TypeAlias = Literal["stash", "vertical sync", "2bw", "naive"]
NamedWeights: TypeAlias = dict[str, Tensor]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def choose_versions(program: Program, rule: Rule, update_every: int = 1) -> list[list[int]]:
    """Return, as [stage][microbatch], the version that a rule uses.

    "stash" takes the stage's version when F starts (PipeDream's weight stashing), "vertical sync" stage 0's at that
    time, "2bw" one version for all microbatches of a batch, the newest that every stage has.  Under "naive" F uses the
    current weights, and so does B, later: the gradient of no function.

    Raises:
        ValueError: for an unknown rule, a batch that the run does not divide into, or a stage on two ranks.

    >>> from dualpipe_lab.pp.schedules import pipedream
    >>> choose_versions(pipedream(2, 4), "stash")
    [[0, 0, 1, 2], [0, 1, 2, 3]]
    """
    if update_every < 1 or program.num_microbatches % update_every:
        raise ValueError(
            f"a run of {program.num_microbatches} microbatches has no whole number of updates after every "
            f"{update_every}; use a divisor"
        )
    now = updates_before(program, update_every)
    rules = {"stash": now, "naive": now, "vertical sync": vertical_sync(now)}
    if rule not in (*rules, "2bw"):
        raise ValueError(f"there is no rule {rule!r} for weight versions; use one of {', '.join((*rules, '2bw'))}")
    return double_buffered(now, update_every) if rule == "2bw" else rules[rule]


class VersionedStage(Stage):
    """A stage that updates itself after every `update_every` backwards.

    Attributes:
        version: the number of updates so far.
        most_kept: the most versions of the weights that were held at once, the current one included.
        most_bytes: the most bytes of all held versions, each storage counted once.
    """

    takes_loss_weights = False  # the versions are leaves of their own

    def __init__(
        self, index: int, module: nn.Module, optimizer: torch.optim.Optimizer, versions: Sequence[int],
        update_every: int, stash: bool,
    ) -> None:  # fmt: skip
        super().__init__(index, module)
        self._optimizer, self._versions = optimizer, versions
        self._update_every, self._stash = update_every, stash
        self._waiting = set(range(len(versions)))  # microbatches before their backward
        self._kept: dict[int, NamedWeights] = {}
        self._num_backwards, self.version, self.most_kept, self.most_bytes = 0, 0, 1, 0
        self._keep_current()

    def call(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any]) -> Any:
        """Run the module with the version of the weights that the rule chooses."""
        weights = self._kept[self._versions[microbatch]]

        def module(*arguments: Any, **named: Any) -> Any:
            return functional_call(self.module, weights, arguments, named)

        return call_with(module, inputs, extra)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B, then the update if it is due."""
        found = super().backward(microbatch, grads)
        self._done(microbatch)
        return found

    def weight_grad(self, microbatch: int) -> None:
        """W, then the update if it is due."""
        super().weight_grad(microbatch)
        self._done(microbatch)

    def _done(self, microbatch: int) -> None:
        self._waiting.remove(microbatch)
        self._num_backwards += 1
        if self._num_backwards % self._update_every == 0:
            self._collect_grads()
            self._update()

    def _collect_grads(self) -> None:
        for name, parameter in self.module.named_parameters():
            grads = [weights[name].grad for weights in self._kept.values() if weights[name].grad is not None]
            parameter.grad = sum(grads[1:], grads[0]) if grads else None
            for weights in self._kept.values():
                weights[name].grad = None

    def _update(self) -> None:
        needed = {self._versions[microbatch] for microbatch in self._waiting}
        self._kept = {number: weights for number, weights in self._kept.items() if number in needed}
        if self._stash and self.version in needed:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()  # the old storage stays with the old version
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        self._keep_current()

    def _keep_current(self) -> None:
        """Keep the current weights as new leaves: `.data` shares the storage and has a version counter of its own."""
        named = self.module.named_parameters()
        self._kept[self.version] = {name: p.data.requires_grad_(p.requires_grad) for name, p in named}
        self.most_kept = max(self.most_kept, len(self._kept) if self._stash else 1)
        weights = [weight for version in self._kept.values() for weight in version.values()]
        storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
        self.most_bytes = max(self.most_bytes, sum(storages.values()))


class AsynchronousRuntime:
    """Executes one rank's part of an asynchronous pipeline.

    Args:
        program: the program of a full run, such as `pipedream(P, M)`; each stage on one rank.
        modules: the modules of this rank's stages; the run trains them.
        loss_fn: as for `PipelineRuntime`.
        make_optimizer: called with the parameters of each stage.
        rule: which version of the weights a microbatch uses.
        update_every: the number of a stage's backwards per update; their gradients are averaged.
        options: `boundary`, `group` and `cost`, as for `PipelineRuntime`.

    Raises:
        ValueError: as `PipelineRuntime`, or a rule that does not fit the program or its updates.
    """

    def __init__(
        self,
        program: Program,
        modules: Mapping[int, nn.Module],
        loss_fn: Callable[..., Tensor],
        make_optimizer: MakeOptimizer,
        rule: Rule = "stash",
        update_every: int = 1,
        **options: Any,
    ) -> None:
        self._program, self._modules, self._update_every = program, modules, update_every
        self._versions, self._stash = choose_versions(program, rule, update_every), rule != "naive"
        self._optimizers = {index: make_optimizer(module.parameters()) for index, module in modules.items()}
        self._loss_fn, self._options = loss_fn, options
        self.versions_kept: dict[int, int] = {}
        self.weight_bytes: dict[int, int] = {}

    def run(self, inputs: Sequence[Any], targets: Sequence[Any]) -> StepResult:
        """Fill the pipeline, train on every microbatch, and drain the pipeline.

        Afterwards `versions_kept` has the most versions of its weights that each stage held, and `weight_bytes` the
        most bytes of them.
        """
        stages = {
            index: VersionedStage(
                index, module, self._optimizers[index], self._versions[index], self._update_every, self._stash
            )
            for index, module in self._modules.items()
        }
        runtime = PipelineRuntime(self._program, stages, self._loss_fn, **self._options)
        result = runtime.step(inputs, targets, [1 / self._update_every] * self._program.num_microbatches)
        self.versions_kept = {index: stage.most_kept for index, stage in stages.items()}
        self.weight_bytes = {index: stage.most_bytes for index, stage in stages.items()}
        return result
