"""Ranks agree on what crosses their boundaries, without asking again for what they know.

Chapter: book/pp/pp-basic.  In: the inputs of a step, on the ranks of the first stage.  Out: a `Spec` per boundary.
  kinds    microbatches are of one kind if their inputs have the same shapes.  As that may change from step to step, the
           first stage's rank says at the start of every step which microbatch is of which kind: one small message to
           every other rank of a direction, handed on from stage to stage ahead of the first activation
  header   what a kind looks like behind a stage, sent once, before the first activation of that kind
  memory   one entry per boundary and kind; nothing per microbatch that outlives a step
Elsewhere: Megatron's variable_seq_lengths sends a header with every activation; torch infers shapes in the first step
and refuses others after it; DeepSeek's set_p2p_tensor_shapes is given one shape.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.comm import Work
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.batch import Batch
from dualpipe_lab.pp.runtime.p2p import Post
from dualpipe_lab.pp.runtime.shapes import HEADER_LENGTH, Spec, from_header, to_header, write
from dualpipe_lab.pp.validation.routes import Route, routes


class _Direction:
    """The microbatches that take one route, and what is known about their kinds in this step."""

    def __init__(self, route: Route, microbatches: list[int], rank: int) -> None:
        self.microbatches = microbatches
        self.is_first, self.is_on = route[0] == rank, rank in route
        self.parent = route[route.index(rank) - 1] if self.is_on else rank
        arrivals = [route.index(other) for other in sorted(set(route[1:]) - {route[0]})]
        self.children = [route[stage] for stage in arrivals if route[stage - 1] == rank]
        self.numbers: dict[Any, int] = {}  # on the first rank: shapes of an input -> its kind
        self.kinds: dict[int, int] = {}
        self.pending: tuple[Tensor, Work] | None = None


class Negotiated:
    """Shapes as both sides of a boundary have agreed."""

    def __init__(self, program: Program, rank: int, post: Post) -> None:
        self._post, self._rank = post, rank
        taken = routes(program)
        self._directions = [
            _Direction(route, [m for m, other in enumerate(taken) if other == route], rank)
            for route in sorted(set(taken))
        ]
        self._of = {m: number for number, one in enumerate(self._directions) for m in one.microbatches}
        self._route = dict(enumerate(taken))
        self._known: dict[tuple[int, int, int], Spec] = {}  # stage, direction, kind

    def begin(self, batch: Batch) -> None:
        """Start a step: say which microbatch is of which kind, or expect to be told."""
        for number, direction in enumerate(self._directions):
            direction.kinds.clear()
            if direction.is_first:
                shapes = [batch.kind(microbatch) for microbatch in direction.microbatches]
                self._settle(number, [direction.numbers.setdefault(kind, len(direction.numbers)) for kind in shapes])
            elif direction.is_on:
                buffer = torch.empty(len(direction.microbatches), dtype=torch.int64, device=self._post.device)
                direction.pending = buffer, self._post.irecv(buffer, direction.parent, self._post.kinds_tag(number))

    def known(self, stage: int, microbatch: int) -> Spec | None:
        """What stage `stage` sends on; None if this rank cannot tell yet."""
        number = self._of[microbatch]
        kind = self._directions[number].kinds.get(microbatch)
        return None if kind is None else self._known.get((stage, number, kind))

    def learn(self, stage: int, microbatch: int) -> Spec:
        """On the receiving side: the same, after reading the messages that say so."""
        key = self._key(stage, microbatch)
        if key not in self._known:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._post.device)
            source = self._route[microbatch][stage]
            self._post.irecv(header, source, self._post.header_tag(stage, microbatch)).wait()
            self._known[key] = from_header(header)
        return self._known[key]

    def announce(self, stage: int, microbatch: int, made: Spec) -> None:
        """On the sending side: send a header for a kind that is new; ValueError if its shape has changed."""
        key = self._key(stage, microbatch)
        if key not in self._known:
            self._known[key] = made
            header, target = to_header(made).to(self._post.device), self._route[microbatch][stage + 1]
            self._post.isend(header, target, self._post.header_tag(stage, microbatch), f"header {stage}F{microbatch}")
        elif self._known[key] != made:
            raise ValueError(
                f"stage {stage} made {write(made)} for microbatch {microbatch}, but {write(self._known[key])} for one "
                "whose input has the same shape; pass `boundary`, a function from the microbatch to an example"
            )

    def _key(self, stage: int, microbatch: int) -> tuple[int, int, int]:
        number = self._of[microbatch]
        direction = self._directions[number]
        if direction.pending:
            buffer, work = direction.pending
            direction.pending = None
            work.wait()
            self._settle(number, buffer.tolist())
        return stage, number, direction.kinds[microbatch]

    def _settle(self, number: int, kinds: Iterable[int]) -> None:
        """Take note of the kinds of a direction, and hand them on."""
        direction = self._directions[number]
        direction.kinds.update(zip(direction.microbatches, kinds, strict=True))
        for child in direction.children:
            message = torch.tensor(list(direction.kinds.values()), device=self._post.device)
            self._post.isend(message, child, self._post.kinds_tag(number), "kinds")
