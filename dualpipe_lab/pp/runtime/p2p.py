"""`PipelineP2P`: the ranks, tags and outstanding sends of one pipeline's point-to-point messages.

In: a program, a group.  Out: arguments for `comm.isend` and `comm.irecv`.
  tags    on GLOO every message of a step has its own, so two ranks need not launch their messages in one order
  NCCL    has no tags: the messages between two ranks, both directions together, complete in the order of their launch.
          Then no receive is prefetched, and mirrors add their gradients after the step.  A batch has no order within it
  shapes  are read by the host, so they travel between CPUs on any backend, with tags
  sends   a send keeps its tensor until the receiver has it; `MAX_UNCHECKED_SENDS` to one rank are left unchecked
"""

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab._private import version_of
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.pp.program import Action, F, Program

MAX_TENSORS = 7  # at one boundary
MAX_UNCHECKED_SENDS = 8
_TAGS_PER_RESULT = MAX_TENSORS + 1  # the last one is the header's


class Handed(NamedTuple):
    """A tensor that a stage has handed on, under the name of its action, and how often it had been changed by then."""

    label: str
    tensor: Tensor
    version: int

    def check(self) -> None:
        """Raise ValueError if the stage has changed it since: the next one would get other numbers."""
        if version_of(self.tensor) != self.version:
            raise ValueError(
                f"what {self.label} handed on was changed in place before it had arrived, as a buffer is that counts "
                "from forward to forward; hand on a copy: x.clone()"
            )


class PipelineP2P:
    """The ranks, tags and outstanding sends of one pipeline; `device` is where receive buffers are allocated."""

    def __init__(self, program: Program, group: Group | None, device: torch.device) -> None:
        self._num_stages, self._num_results = program.num_stages, 2 * program.num_stages * program.num_microbatches
        self.group, self.global_ranks = group, members(group)  # the numbers in the world, by rank of the pipeline
        self.device, self.num_ranks = device, program.num_ranks
        self.in_order = device.type != "cpu"  # NCCL matches messages by the order of their launch
        self._sends: defaultdict[int, deque[tuple[Work, Handed | None]]] = defaultdict(deque)
        if self.in_order:
            # NCCL connects a group at its first batch, and each rank waits there for all others
            comm.all_reduce(torch.zeros(1, device=device), group=group)

    def keep_send(self, target: int, send: Work, handed: Handed | None = None) -> None:
        """Keep a send to a rank of the pipeline until it has arrived; wait for old ones whose last byte has left."""
        sends = self._sends[target]
        sends.append((send, handed))
        while len(sends) > MAX_UNCHECKED_SENDS and sends[0][0].has_left:
            self._wait_for(*sends.popleft())

    def wait_for_sends(self) -> None:
        """Return when every rank has received what this rank sent."""
        for sends in self._sends.values():
            while sends:
                self._wait_for(*sends.popleft())

    def _wait_for(self, send: Work, handed: Handed | None) -> None:
        send.wait()
        if handed is not None:
            handed.check()

    def result_tag(self, action: Action, number: int) -> int:
        """Return the tag of one tensor of an action's result."""
        return 0 if self.in_order else self._tag(action, number)

    def header_tag(self, stage: int, microbatch: int) -> int:
        """Return the tag of the header of an activation."""
        return self._tag(Action(stage, F, microbatch), MAX_TENSORS)

    def signatures_tag(self, direction: int) -> int:
        """Return the tag of the signatures of a direction's microbatches."""
        return _TAGS_PER_RESULT * self._num_results + direction

    def _tag(self, action: Action, number: int) -> int:
        stage, kind, microbatch = action
        return _TAGS_PER_RESULT * (2 * (microbatch * self._num_stages + stage) + (kind == F)) + number
