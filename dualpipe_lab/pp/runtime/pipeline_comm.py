"""What travels between stages: activations down, gradients up, straight across where both stages share a rank.

Chapter: book/pp/pp-basic.  In: results of actions.  Out: inputs of actions.
Buffers are made when their receive is posted and belong to the action that takes them; a result that goes to another
rank is held until it has arrived there.
"""

import torch

from dualpipe_lab.comm import Work
from dualpipe_lab.pp.program import SEND_F, Action, B, F, Program
from dualpipe_lab.pp.runtime.p2p import Post
from dualpipe_lab.pp.runtime.rank_plan import made_by
from dualpipe_lab.pp.runtime.shapes import Shapes, Spec, gradients_of, spec_of
from dualpipe_lab.pp.runtime.stage import Tensors


class Mailroom:
    """Receives the inputs and sends the results of one rank's actions in one step.

    Attributes:
        peak_buffers: the most messages for which a receive buffer stood ready at once.
    """

    def __init__(self, program: Program, post: Post, shapes: Shapes) -> None:
        self._program, self._post, self._shapes = program, post, shapes
        self._coming: dict[Action, tuple[Tensors, list[Work]]] = {}
        self._made: dict[Action, tuple[str, Tensors]] = {}  # on this rank, neither fetched nor sent yet
        self.peak_buffers = 0

    def expect(self, receive: Action) -> None:
        """Post a receive ahead of time, if its shape is known already."""
        result = made_by(receive)
        spec = self._shapes.known(_boundary(result), result.microbatch)
        if spec is not None:
            self._post_receive(result, spec)

    def receive(self, receive: Action) -> None:
        """Post a receive unless that is done; ask for its shape if it is not known."""
        result = made_by(receive)
        if result not in self._coming:
            self._post_receive(result, self._shapes.learn(_boundary(result), result.microbatch))

    def take(self, action: Action) -> Tensors:
        """The input of an action: what the stage before it made, or after it for a backward."""
        stage, kind, microbatch = action
        result = Action(stage - 1, F, microbatch) if kind == F else Action(stage + 1, B, microbatch)
        if result in self._made:
            return self._made.pop(result)[1]
        for work in self._coming[result][1]:
            work.wait()
        return self._coming.pop(result)[0]

    def deliver(self, action: Action, tensors: Tensors) -> None:
        """Keep the result of F, or of B or I, until it is sent or fetched."""
        stage, kind, microbatch = action
        self._made[Action(stage, F if kind == F else B, microbatch)] = str(action), tensors

    def send(self, message: Action) -> None:
        """Send a result on."""
        stage, kind, microbatch = message
        forward = kind == SEND_F
        result = Action(stage, F if forward else B, microbatch)
        label, tensors = self._made.pop(result)
        if forward:
            self._shapes.announce(stage, microbatch, spec_of(tensors))
        target = self._program.rank_of(stage + 1 if forward else stage - 1, microbatch)
        for number, tensor in enumerate(tensors):
            name = f"{label} ({number})" if number else label
            self._post.isend(tensor.contiguous(), target, self._post.result_tag(result, number), name)

    def _post_receive(self, result: Action, spec: Spec) -> None:
        if result.kind == B:
            spec = gradients_of(spec)
        buffers = tuple(torch.empty(shape, dtype=dtype, device=self._post.device) for shape, dtype in spec)
        source = self._program.rank_of(result.stage, result.microbatch)
        tags = [self._post.result_tag(result, number) for number in range(len(buffers))]
        works = [self._post.irecv(buffer, source, tag) for buffer, tag in zip(buffers, tags, strict=True)]
        self._coming[result] = buffers, works
        self.peak_buffers = max(self.peak_buffers, len(self._coming))


def _boundary(result: Action) -> int:
    """The stage behind which a message crosses."""
    return result.stage if result.kind == F else result.stage - 1
