"""`PipelineComm`: the messages of one rank's step; each is checked once, and then started again in every step.

Chapter: book/pp/pp-basic.  In: the messages of a lowered program, results.  Out: inputs of actions.
Elsewhere: torch makes a `P2POp` for every message of every step.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from dualpipe_lab._private import version_of
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.peers import PersistentMessage
from dualpipe_lab.pp.program import MESSAGE_KINDS, Action, B, F, Program, ProgramStep
from dualpipe_lab.pp.runtime.p2p import Handed, PipelineP2P
from dualpipe_lab.pp.runtime.rank_plan import made_by
from dualpipe_lab.pp.runtime.shape_inference import BoundaryShapes, Spec, gradients_of, spec_of
from dualpipe_lab.pp.runtime.stage import Tensors, with_names


class _Link:
    """The messages that carry one result to or from another rank; made anew where its spec changes."""

    def __init__(self, program: Program, message: Action) -> None:
        self.result = made_by(message)
        stage, kind, self.microbatch = self.result
        self.is_forward = kind == F
        self.boundary = stage if self.is_forward else stage - 1  # the stage in front of it
        user = Action(stage + 1 if self.is_forward else stage - 1, B, self.microbatch)
        at = user if message.kind.startswith("SEND") else self.result
        self.peer = program.rank_of(at.stage, self.microbatch)
        self.spec: Spec | None = None
        self.shapes: Spec = ()  # of its tensors: a gradient has those of the floats of the activation
        self.messages: list[PersistentMessage] = []

    def prepare(self, p2p: PipelineP2P, spec: Spec, like: Sequence[torch.Tensor], labels: Sequence[str] = ()) -> None:
        """Check the messages of a spec, once; `labels` of those that are sent."""
        kind: Literal["isend", "irecv"] = "isend" if labels else "irecv"
        peer, self.spec = p2p.global_ranks[self.peer], spec
        tags = [p2p.result_tag(self.result, number) for number in range(len(like))]
        self.messages = [
            PersistentMessage(kind, tensor, peer, tag, p2p.group, label)
            for tensor, tag, label in zip(like, tags, labels or [""] * len(like), strict=True)
        ]


class PipelineComm:
    """Receives the inputs and sends the results of one rank's actions; who takes a receive buffer owns it."""

    def __init__(
        self, program: Program, steps: Iterable[ProgramStep], p2p: PipelineP2P, shapes: BoundaryShapes
    ) -> None:
        self._p2p, self._shapes = p2p, shapes
        messages = (step for step in steps if isinstance(step, Action) and step.kind in MESSAGE_KINDS)
        self._links = {message: _Link(program, message) for message in messages}
        self._receives: dict[Action, tuple[list[Work], Tensors]] = {}  # by the F or B whose result it is
        self._results: dict[Action, tuple[Tensors, list[Handed]]] = {}  # made here, neither taken nor sent yet
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
        link = self._links[receive]
        if link.result in self._receives:
            return
        spec = self._shapes.known_spec(link.boundary, link.microbatch)
        if spec is None:
            if prefetch:
                return
            spec = self._shapes.receive_spec(link.boundary, link.microbatch)
        if spec is not link.spec:
            link.shapes = spec if link.is_forward else gradients_of(spec)
        device = self._p2p.device
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in link.shapes]
        if spec is not link.spec:
            link.prepare(self._p2p, spec, buffers)
        works = [message.start(buffer) for message, buffer in zip(link.messages, buffers, strict=True)]
        self._receives[link.result] = works, with_names(buffers, [name for *_, name in link.shapes])
        self.peak_buffers = max(self.peak_buffers, len(self._receives))

    def take(self, result: Action) -> Tensors:
        """Wait for the result of a neighbouring stage and return it."""
        if result in self._results:
            tensors, handed = self._results.pop(result)
            for one in handed:
                one.check()
            return tensors
        works, tensors = self._receives[result]
        for work in works:
            work.wait()
        del self._receives[result]
        return tensors

    def keep(self, result: Action, label: str, tensors: Tensors) -> None:
        """Keep a result of this rank, under the name of its action, until it is sent or taken."""
        handed = [Handed(f"{label} ({i})" if i else label, y, version_of(y)) for i, y in enumerate(tensors)]
        self._results[result] = tensors, handed

    def send(self, send: Action) -> None:
        """Launch the sends of a result: those of an activation to the next stage, of a gradient to the previous one."""
        link = self._links[send]
        tensors, handed = self._results.pop(link.result)
        spec = spec_of(tensors)
        if link.is_forward:
            self._shapes.send_spec(link.boundary, link.microbatch, spec)
        if spec != link.spec:
            link.prepare(self._p2p, spec, [y.contiguous() for y in tensors], [one.label for one in handed])
        for message, tensor, one in zip(link.messages, tensors, handed, strict=True):
            if not tensor.is_contiguous():  # a copy travels, which the stage cannot reach
                one.check()
                tensor = tensor.contiguous()
                one = Handed(one.label, tensor, version_of(tensor))
            self._p2p.keep_send(link.peer, message.start(tensor), one)
