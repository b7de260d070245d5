"""Spans per module: the forward of each layer, its attention and network, router and experts, in a run's timeline.

Chapter: book/whole/training.  In: the stages of a rank.  Out: spans of the stream "modules", inside of the actions.
Stage and microbatch are those of the action around a span: F, or with recompute also the backward that runs it again.
Autograd's backward of a module has no place of its own in Python, so it is a part of its action.  A layer that runs its
network in pieces, as those with experts do, has spans of the pieces: router, experts, shared expert.
  cost   two clock readings per module and microbatch; without them there are no hooks
Elsewhere: Megatron's and torchtitan's `record_function` annotations in a torch profiler trace.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.timeline.spans import MODULES, Span

_SHOWN = re.compile(r"embedding|norm|head|layers\.\d+(\.(attention|mlp(\.(router|experts|shared))?))?")


def record_modules(stages: Mapping[int, nn.Module]) -> None:
    """Let the modules of this rank's stages record their forwards from now on; names are those in the full model."""
    for number, stage in stages.items():
        for name, module in stage.named_modules():
            if _SHOWN.fullmatch(name):
                _record(module, number, name)


def with_modules(step: Timeline, run: Timeline) -> Timeline:
    """Return the timeline of a training step with the spans of modules that its actions contain.

    Args:
        step: the first of `run.steps()`; without such spans in the run, it is returned as it is.
        run: the timeline of all that the ranks recorded.
    """
    zero = min((span.start for row in run.spans_by_rank for span in row if span.actions), default=0)
    rows, found = [], False
    for rank, actions in enumerate(step.spans_by_rank):
        moved = [span._replace(start=span.start - zero, end=span.end - zero) for span in run.stream(rank, MODULES)]
        inside = [_placed(span, actions) for span in moved]
        rows.append([*actions, *(span for span in inside if span is not None)])
        found = found or len(rows[-1]) > len(actions)
    return Timeline(step.name, rows, step.messages, step.source, step.unit) if found else step


def _record(module: nn.Module, stage: int, name: str) -> None:
    starts: list[int] = []  # a module that is left by an error, as `recompute` does when it has enough, leaves one

    def enter(*_: Any) -> None:
        starts[:] = [rank_context().clock.now()]

    def leave(*_: Any) -> None:
        here = rank_context()
        here.recorder.keep(Span(here.rank, starts.pop(), here.clock.now(), "module", stage, label=name, stream=MODULES))

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _placed(span: Span, actions: Iterable[Span]) -> Span | None:
    """Return a span with the microbatch of the action that contains it; None if none does."""
    for action in actions:
        if action.start <= span.start and span.end <= action.end:
            for stage, _, microbatch in action.actions:  # of a pair the forward first
                if stage == span.stage:
                    return span._replace(microbatch=microbatch)
    return None
