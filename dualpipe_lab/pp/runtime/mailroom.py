"""What travels between stages: activations down, gradients up, straight across where both stages share a rank.

Each message has a tag of its own, so the order in which two ranks name their messages need not agree.  A receive
allocates its buffer when it is due; an activation's send is retired when its gradient comes back, which proves that it
arrived.  The sends of gradients are retired at the end of the step.
"""

from torch import Tensor

from dualpipe_lab.pp.program import Action, F, Program
from dualpipe_lab.world.comm import Work, irecv, isend
from dualpipe_lab.world.comm.groups import Group, members


class Mailroom:
    """Receives the inputs and sends the results of one rank's actions."""

    def __init__(self, program: Program, rank: int, group: Group | None) -> None:
        self._program, self._rank, self._group = program, rank, group
        self._global_ranks = members(group)
        self._here: dict[Action, Tensor] = {}  # made on this rank, for this rank
        self._sends: dict[tuple[bool, int, int], Work] = {}

    def receive(self, action: Action, like: Tensor) -> Tensor:
        """The input of an action of an inner stage: a tensor of the shape and type of `like`."""
        forward = action.kind == F
        source = action.stage - 1 if forward else action.stage + 1
        key = _made(source, forward, action.microbatch)
        if key in self._here:
            return self._here.pop(key)
        buffer = like.new_empty(like.shape)
        peer = self._peer(source, action.microbatch)
        irecv(buffer, peer, self._tag(source, forward, action.microbatch), self._group).wait()
        if not forward:
            self._retire(True, action.stage, action.microbatch)
        return buffer

    def deliver(self, action: Action, result: Tensor) -> None:
        """Hand the result of F, or of B or I, to the next stage."""
        forward = action.kind == F
        target = action.stage + 1 if forward else action.stage - 1
        peer = self._peer(target, action.microbatch)
        if peer == self._global_ranks[self._rank]:
            self._here[_made(action.stage, forward, action.microbatch)] = result
            return
        tag = self._tag(action.stage, forward, action.microbatch)
        send = isend(result.contiguous(), peer, tag, self._group, label=str(action))
        self._sends[forward, action.stage, action.microbatch] = send

    def close(self) -> None:
        """Return when everything that was sent has been received."""
        for send in self._sends.values():
            send.wait()
        self._sends.clear()

    def _retire(self, forward: bool, stage: int, microbatch: int) -> None:
        send = self._sends.pop((forward, stage, microbatch), None)
        if send is not None:
            send.wait()

    def _peer(self, stage: int, microbatch: int) -> int:
        return self._global_ranks[self._program.rank_of(stage, microbatch)]

    def _tag(self, stage: int, forward: bool, microbatch: int) -> int:
        return 2 * (microbatch * self._program.num_stages + stage) + forward


def _made(stage: int, forward: bool, microbatch: int) -> Action:
    """The key of a result: I and B make the same thing."""
    return Action(stage, F if forward else "B", microbatch)
