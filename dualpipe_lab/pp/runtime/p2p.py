"""The post between ranks of one pipeline: tags, and sends that are let go of once they have arrived.

In: tensors and a rank of the pipeline.  Out: works.
Every message of a step has a tag of its own, so the order in which two ranks name their messages need not agree.  A
send holds its tensor until the other side has it; at most `UNSETTLED` of them to one rank are left unchecked.
"""

from collections import defaultdict, deque

import torch
from torch import Tensor

from dualpipe_lab.comm import Work, irecv, isend
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.pp.program import Action, F, Program
from dualpipe_lab.pp.runtime.shapes import MAX_TENSORS

UNSETTLED = 8
_PER_RESULT = MAX_TENSORS + 1  # the last one is the header's


class Post:
    """Sends and receives by ranks of the pipeline's group."""

    def __init__(self, program: Program, group: Group | None, device: torch.device) -> None:
        self._num_stages, self._num_results = program.num_stages, 2 * program.num_stages * program.num_microbatches
        self.group, self.global_ranks = group, members(group)
        self.device, self.num_ranks = device, program.num_ranks
        self._sends: defaultdict[int, deque[Work]] = defaultdict(deque)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Work:
        """Start filling a buffer."""
        return irecv(buffer, self.global_ranks[source], tag, self.group)

    def isend(self, tensor: Tensor, target: int, tag: int, label: str) -> None:
        """Start sending; let go of what has arrived meanwhile."""
        sends = self._sends[target]
        sends.append(isend(tensor, self.global_ranks[target], tag, self.group, label))
        while len(sends) > UNSETTLED and sends[0].has_left:
            sends.popleft().wait()

    def close(self) -> None:
        """Return when everything that was sent has been received."""
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()

    def result_tag(self, action: Action, number: int) -> int:
        """The tag of one tensor of an action's result."""
        stage, kind, microbatch = action
        return _PER_RESULT * (2 * (microbatch * self._num_stages + stage) + (kind == F)) + number

    def header_tag(self, stage: int, microbatch: int) -> int:
        """The tag of the header of an activation."""
        return self.result_tag(Action(stage, F, microbatch), MAX_TENSORS)

    def kinds_tag(self, direction: int) -> int:
        """The tag of the kinds of a direction's microbatches."""
        return _PER_RESULT * self._num_results + direction

    def copies_tag(self, stage: int, number: int = 0) -> int:
        """The tag of some of the gradients of a stage that several ranks hold."""
        return _PER_RESULT * (self._num_results + stage) + self._num_results + number
