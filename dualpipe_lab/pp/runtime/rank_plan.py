"""`RankPlan`: what one rank does in a step, in order, and which receives it prefetches.

Chapter: book/pp/pp-basic.  In: a lowered program, a rank.  Out: a `RankPlan`.
A stream is one source rank and one direction of travel; the messages of its next `lookahead` receives travel while the
rank works.  A receive is launched at latest where the lowered program has the RECV.  All ranks follow one common order
there, so the step ends even if a send blocks until its receive is launched.
Elsewhere: torch posts all receives of a step where its lowered order has them, and keeps a buffer for each microbatch;
here a stream has `lookahead`, or what the schedule itself lets pile up before its use.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from dualpipe_lab._private import version_of
from dualpipe_lab.comm import P2P, Pending
from dualpipe_lab.pp.program import (
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
    SEND_F,
    Action,
    B,
    F,
    I,
    Overlap,
    Program,
    ProgramStep,
    W,
    actions_of,
)
from dualpipe_lab.pp.runtime.p2p import Handed, PipelineP2P
from dualpipe_lab.pp.runtime.shape_inference import BoundaryShapes, gradients_of, spec_of
from dualpipe_lab.pp.runtime.stage import Tensors, with_names

_MADE_BY = {RECV_F: -1, RECV_B: 1}  # from the stage that receives to the stage that made the result


class RankPlan(NamedTuple):
    """The steps and messages of one rank.

    Attributes:
        steps: the rank's steps, in order.
        prefetched_receives: for positions in `steps`, the receives that may be launched before them.
        last_backward: the last backward action of each stage.
        full_backwards: I and W of the first stage where W directly follows I.  No rank waits for the result of this I,
            so I may be one walk of autograd that does the work of both, as B does.
    """

    steps: tuple[ProgramStep, ...]
    prefetched_receives: dict[int, list[Action]]
    last_backward: dict[int, Action]
    full_backwards: frozenset[Action]


def choose_lookahead(asked: int | None, in_order: bool) -> int:
    """Return the number of prefetched receives per stream: as asked, or by default 2 with tags and 0 in order.

    In order, a rank of 1F1B that launched its receives first would wait for a gradient whose activation it has not
    sent, while the other rank waits for this activation behind its own receives.

    >>> choose_lookahead(None, in_order=False), choose_lookahead(None, in_order=True)
    (2, 0)
    """
    if in_order and asked:
        raise ValueError(
            f"NCCL has no tags and completes the messages between two ranks in the order of their launch, so a receive "
            f"launched ahead of its turn would block those before it, got lookahead={asked}; use lookahead=0 or None"
        )
    return (0 if in_order else 2) if asked is None else asked


def plan_rank(lowered: Program, rank: int, lookahead: int, forward_only: bool = False) -> RankPlan:
    """Plan one rank's step; with `forward_only`, its forwards and their messages alone.

    >>> from dualpipe_lab.pp.lowering import lower
    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> plan = plan_rank(lower(gpipe(2, 3)), 1, lookahead=1)
    >>> {position: " ".join(map(str, receives)) for position, receives in plan.prefetched_receives.items()}
    {0: '1RECV_F0', 2: '1RECV_F1', 4: '1RECV_F2'}
    """
    steps = lowered.ranks[rank]
    if forward_only:
        steps = tuple(_forwards(steps))
    last_backward = {action.stage: action for step in steps for action in actions_of(step) if action.kind in (B, W)}
    prefetched = _prefetched_receives(lowered, steps, lookahead) if lookahead else {}
    return RankPlan(steps, prefetched, last_backward, frozenset(_full_backwards(steps)))


def made_by(receive: Action) -> Action:
    """Return the action whose result a RECV expects: an F, or a B (which stands for B and I).

    >>> print(made_by(Action(2, RECV_B, 0)))
    3B0
    """
    stage, kind, microbatch = receive
    return Action(stage + _MADE_BY[kind], F if kind == RECV_F else B, microbatch)


def _forwards(steps: tuple[ProgramStep, ...]) -> list[ProgramStep]:
    singles = [step.forward if isinstance(step, Overlap) else step for step in steps]
    return [step for step in singles if step.kind in (F, SEND_F, RECV_F)]


def _full_backwards(steps: tuple[ProgramStep, ...]) -> Iterator[Action]:
    work = [step for step in steps if isinstance(step, Overlap) or step.kind not in MESSAGE_KINDS]
    for first, second in pairwise(work):
        if isinstance(first, Action) and first[:2] == (0, I) and second == first._replace(kind=W):
            yield from (first, second)


def _prefetched_receives(lowered: Program, steps: tuple[ProgramStep, ...], lookahead: int) -> dict[int, list[Action]]:
    """A receive is launched once the message `lookahead` places before it in its stream has been used."""
    streams: defaultdict[tuple[int, str], list[tuple[int, Action]]] = defaultdict(list)
    latest = {step: position for position, step in enumerate(steps) if isinstance(step, Action)}
    for position, step in enumerate(steps):
        for stage, kind, microbatch in actions_of(step):
            receive = Action(stage, RECV_F if kind == F else RECV_B, microbatch)
            if kind not in MESSAGE_KINDS and kind != W and receive in latest:
                source = lowered.rank_of(made_by(receive).stage, microbatch)
                streams[source, receive.kind].append((position, receive))
    prefetched: defaultdict[int, list[Action]] = defaultdict(list)
    for uses in streams.values():
        for number, (_, receive) in enumerate(uses):
            position = uses[number - lookahead][0] + 1 if number >= lookahead else 0
            if position <= latest[receive]:
                prefetched[position].append(receive)
    return dict(sorted(prefetched.items()))


class PipelineComm:
    """Receives the inputs and sends the results of one rank's actions; who takes a receive buffer owns it."""

    def __init__(self, program: Program, p2p: PipelineP2P, shapes: BoundaryShapes) -> None:
        self._program, self._p2p, self._shapes = program, p2p, shapes
        self._receives: dict[Action, Pending[Tensors]] = {}  # by the F or B whose result it is
        self._results: dict[
            Action, tuple[str, Tensors, list[Handed]]
        ] = {}  # made on this rank, neither taken nor sent yet
        self.peak_buffers = 0  # the most results of this step for which receive buffers were allocated at once

    def begin_step(self) -> None:
        """Forget the messages of the step before."""
        self._receives.clear()
        self._results.clear()
        self.peak_buffers = 0

    def start_receive(self, receive: Action, prefetch: bool = False) -> None:
        """Launch a receive unless it is launched already.

        A prefetched receive is left for later if its shape is not known yet; otherwise the shape is received first.
        """
        result = made_by(receive)
        if result in self._receives:
            return
        boundary = result.stage if result.kind == F else result.stage - 1  # the stage in front of it
        spec = self._shapes.known_spec(boundary, result.microbatch)
        if spec is None:
            if prefetch:
                return
            spec = self._shapes.receive_spec(boundary, result.microbatch)
        if result.kind == B:
            spec = gradients_of(spec)
        p2p = self._p2p
        source = p2p.global_ranks[self._program.rank_of(result.stage, result.microbatch)]
        allocated = (torch.empty(shape, dtype=dtype, device=p2p.device) for shape, dtype, _ in spec)
        buffers = with_names(allocated, [name for *_, name in spec])
        tags = [p2p.result_tag(result, number) for number in range(len(buffers))]
        messages = [P2P("irecv", buffer, source, tag) for buffer, tag in zip(buffers, tags, strict=True)]
        self._receives[result] = Pending(p2p.launch(messages), lambda: buffers)
        self.peak_buffers = max(self.peak_buffers, len(self._receives))

    def take(self, action: Action) -> Tensors:
        """Wait for the input of an action and return it.

        The input of F is the result of the previous stage, that of B and I the gradient from the next stage.
        """
        stage, kind, microbatch = action
        result = Action(stage - 1, F, microbatch) if kind == F else Action(stage + 1, B, microbatch)
        if result in self._results:
            _, tensors, handed = self._results.pop(result)
            for one in handed:
                one.check()
            return tensors
        tensors = self._receives[result].wait()
        del self._receives[result]
        return tensors

    def keep(self, action: Action, tensors: Tensors) -> None:
        """Keep the result of F, or of B or I, until it is sent or taken."""
        stage, kind, microbatch = action
        label = str(action)
        handed = [Handed(label, tensor, version_of(tensor)) for tensor in tensors]
        self._results[Action(stage, F if kind == F else B, microbatch)] = label, tensors, handed

    def send(self, message: Action) -> None:
        """Launch the sends of a result: those of an activation to the next stage, of a gradient to the previous one."""
        stage, kind, microbatch = message
        is_forward = kind == SEND_F
        result = Action(stage, F if is_forward else B, microbatch)
        label, tensors, handed = self._results.pop(result)
        for one in handed:
            one.check()
        if is_forward:
            self._shapes.send_spec(stage, microbatch, spec_of(tensors))
        p2p = self._p2p
        target = p2p.global_ranks[self._program.rank_of(stage + 1 if is_forward else stage - 1, microbatch)]
        messages = []
        for number, tensor in enumerate(tensors):
            name = f"{label} ({number})" if number else label
            messages.append(P2P("isend", tensor.contiguous(), target, p2p.result_tag(result, number), name))
        p2p.launch(messages)
