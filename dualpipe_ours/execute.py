"""An executor of rows: it knows words, and no schedule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dualpipe_lab.comm import Work, get_rank

from .messages import recv_tensor, send_tensor
from .row_messages import actions, kind_of
from .stage import Stage

FIRST_TAG = 3
Key = tuple[str, int, int]  # the way, F or B, the stage that it is for (in works: that sends) and the microbatch


class Run:
    """The state of one row: what has arrived, what is to leave, what is kept."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        peers: Callable[[int, int], int],
        num_stages: int,
        inputs: Sequence[Tensor],
        loss: Callable[[Tensor, int], Tensor],
    ) -> None:
        self.stages, self.peers, self.num_stages, self.inputs, self.loss = stages, peers, num_stages, inputs, loss
        self.saved: dict[Any, Any] = {}
        self.arrived: dict[Key, Tensor] = {}
        self.leaving: dict[Key, Tensor] = {}
        self.works: dict[Key, list[Work]] = {}
        self.losses: dict[int, Tensor] = {}

    def tag(self, way: str, stage: int, i: int) -> int:
        """One for each way, stage and microbatch."""
        return FIRST_TAG + 2 * (i * self.num_stages + stage) + (way == "B")

    def hand_on(self, way: str, stage: int, i: int, x: Tensor) -> None:
        """Keep x for a stage of this rank, or until it is sent to that of another one."""
        here = self.peers(stage, i) == get_rank()
        (self.arrived if here else self.leaving)[way, stage, i] = x

    def before_f(self, stage: int, i: int) -> Tensor:
        """The input of a forward."""
        return self.arrived.pop(("F", stage, i)) if stage else self.inputs[i]

    def after_f(self, stage: int, i: int, y: Tensor, saved: Any) -> None:
        """Keep what the backward needs; hand y on, or compute its loss."""
        self.saved[stage, i] = saved
        if stage + 1 < self.num_stages:
            self.hand_on("F", stage + 1, i, y)
            return
        y = y.detach().requires_grad_()
        share = self.loss(y, i)
        share.backward()
        assert y.grad is not None
        self.losses[i], self.arrived["B", stage, i] = share.detach(), y.grad

    def before_b(self, stage: int, i: int) -> tuple[Any, Tensor]:
        """What a forward has kept, and the gradient of its output."""
        return self.saved.pop((stage, i)), self.arrived.pop(("B", stage, i))

    def after_b(self, stage: int, i: int, dx: Tensor | None) -> None:
        """Hand the gradient of an input on."""
        if stage and dx is not None:
            self.hand_on("B", stage - 1, i, dx)


def run_f(run: Run, token: str) -> None:
    """A forward."""
    ((stage, _, i),) = actions(token)
    run.after_f(stage, i, *run.stages[stage].forward(run.before_f(stage, i)))


def run_b(run: Run, token: str) -> None:
    """A whole backward."""
    ((stage, _, i),) = actions(token)
    run.after_b(stage, i, run.stages[stage].backward(*run.before_b(stage, i)))


def run_send(run: Run, token: str) -> None:
    """Start to send what a step has made."""
    ((stage, kind, i),) = actions(token)
    way = kind[-1]
    target = stage + 1 if way == "F" else stage - 1
    x = run.leaving.pop((way, target, i))
    run.works[way, stage, i] = send_tensor(x, run.peers(target, i), run.tag(way, target, i))


def run_recv(run: Run, token: str) -> None:
    """Wait for what a step needs; a gradient says that its activation is no longer under way."""
    ((stage, kind, i),) = actions(token)
    way = kind[-1]
    source = stage - 1 if way == "F" else stage + 1
    run.arrived[way, stage, i] = recv_tensor(run.peers(source, i), run.tag(way, stage, i))
    for work in run.works.pop(("F", stage, i), []) if way == "B" else []:
        work.wait()


KINDS: dict[str, Callable[[Run, str], None]] = {"F": run_f, "B": run_b, "SEND": run_send, "RECV": run_recv}


def execute(
    row: str,
    stages: Mapping[int, Stage],
    peers: Callable[[int, int], int],
    num_stages: int,
    inputs: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
) -> dict[int, Tensor]:
    """Run a row with its messages; return the shares of the loss that this rank has computed.

    `peers(stage, microbatch)` is a global rank, and `loss(y, microbatch)` a share of the total.
    """
    run = Run(stages, peers, num_stages, inputs, loss)
    for token in row.split():
        if kind_of(token) not in KINDS:
            raise ValueError(f"no word {kind_of(token)} in {token}; known are {', '.join(KINDS)}")
        KINDS[kind_of(token)](run, token)
    for works in run.works.values():
        for work in works:
            work.wait()
    return run.losses
