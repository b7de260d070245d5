"""`PipelineP2P`: the ranks, tags and outstanding sends of one pipeline's point-to-point messages.

In: a program, a group.  Out: arguments for `comm.isend` and `comm.irecv`.
  tags    every message of a step has its own, so two ranks need not launch their messages in one order
  sends   a send keeps its tensor until the receiver has it; `MAX_UNCHECKED_SENDS` to one rank are left unchecked
"""

from collections import defaultdict, deque

import torch

from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.pp.program import Action, F, Program

MAX_TENSORS = 7  # at one boundary
MAX_UNCHECKED_SENDS = 8
_TAGS_PER_RESULT = MAX_TENSORS + 1  # the last one is the header's


class PipelineP2P:
    """The ranks, tags and outstanding sends of one pipeline.

    Attributes:
        group: the ranks of the pipeline.
        global_ranks: their numbers in the world, by rank of the pipeline.
        device: where receive buffers are allocated.
    """

    def __init__(self, program: Program, group: Group | None, device: torch.device) -> None:
        self._num_stages, self._num_results = program.num_stages, 2 * program.num_stages * program.num_microbatches
        self.group, self.global_ranks = group, members(group)
        self.device, self.num_ranks = device, program.num_ranks
        self._sends: defaultdict[int, deque[Work]] = defaultdict(deque)

    def keep_send(self, target: int, send: Work) -> None:
        """Keep a send to a rank of the pipeline until it has arrived; wait for old ones whose last byte has left."""
        sends = self._sends[target]
        sends.append(send)
        while len(sends) > MAX_UNCHECKED_SENDS and sends[0].has_left:
            sends.popleft().wait()

    def wait_for_sends(self) -> None:
        """Return when every rank has received what this rank sent."""
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()

    def result_tag(self, action: Action, number: int) -> int:
        """Return the tag of one tensor of an action's result."""
        stage, kind, microbatch = action
        return _TAGS_PER_RESULT * (2 * (microbatch * self._num_stages + stage) + (kind == F)) + number

    def header_tag(self, stage: int, microbatch: int) -> int:
        """Return the tag of the header of an activation."""
        return self.result_tag(Action(stage, F, microbatch), MAX_TENSORS)

    def signatures_tag(self, direction: int) -> int:
        """Return the tag of the signatures of a direction's microbatches."""
        return _TAGS_PER_RESULT * self._num_results + direction

    def grads_tag(self, stage: int, number: int = 0) -> int:
        """Return the tag of one of the gradient buffers of a stage that several ranks hold."""
        return _TAGS_PER_RESULT * (self._num_results + stage) + self._num_results + number
