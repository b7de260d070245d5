"""`RankMemory`: the memory of one rank, by what it is, with how far each number can be trusted.

In: bytes.  Out: figures, each exact, assumed or fitted; sums.
  reserve    the allocator's share, 7.1% (1.1 to 12.4), and what lies outside of it, 2.9 GiB (2.8 to 3.9): fitted, see
             `dualpipe_lab.plan.estimate`
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dualpipe_lab.plan.kept_tensors import Certainty
    from dualpipe_lab.plan.states import ModelStates

_GIB = 2**30
SHARE = (0.011, 0.071, 0.124)  # of the allocator, above its tensors: least, median, most
OUTSIDE_BYTES = tuple(size * 2**20 for size in (2_912, 2_929, 3_897))


class Figure(NamedTuple):
    """A number of bytes, and how far it can be trusted; of a fitted one the least and the most that were seen."""

    name: str
    num_bytes: int
    certainty: "Certainty"
    least: int
    most: int

    def __str__(self) -> str:
        spread = f", {self.least / _GIB:.2f} to {self.most / _GIB:.2f}" if self.least != self.most else ""
        return f"{self.name} {self.num_bytes / _GIB:.2f} GiB ({self.certainty}{spread})"


@dataclass(frozen=True)
class Peak:
    """What is kept on a rank at the action at which most is.

    Attributes:
        action: at which it is, as the program prints it; empty for a rank without actions.
        kept: by stage, the number of microbatches whose activations are kept.
        layers, ends, logits: bytes of the activations, of what embedding, last norm and head keep, and of logits.
        working: bytes on top, while the action runs.
        received: of inputs from other stages, and their gradients, that are no longer needed and still held.
    """

    action: str = ""
    kept: tuple[tuple[int, int], ...] = ()
    layers: int = 0
    ends: int = 0
    logits: int = 0
    working: int = 0
    received: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.layers + self.ends + self.logits + self.working + self.received


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks at one place along pp, cp and tp: they are equal along the other axes.

    Attributes:
        pp_rank, cp_rank, tp_rank: the place.
        states: between steps.
        peak: of activations.
        buffers: of ZeRO, and of the rules for gradients of weights and for products, in bytes.
        certainty: of the layers' activations.
        staying: bytes of buffers and received inputs that stay between steps.
    """

    pp_rank: int
    cp_rank: int
    tp_rank: int
    states: "ModelStates"
    peak: Peak
    buffers: int
    certainty: "Certainty"
    staying: int = 0

    @property
    def behind_step(self) -> int:
        """Bytes of all tensors between steps, without the reserve."""
        return self.states.total + self.staying

    @property
    def allocated(self) -> int:
        """Bytes of all tensors at the peak, without the reserve."""
        return self.states.total + self.peak.total + self.buffers

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every part, with its certainty."""
        states, peak, mark = self.states, self.peak, self.certainty
        exact = [(name, getattr(states, name)) for name in ("parameters", "gradients", "masters", "moments")]
        assumed = [(name, getattr(peak, name)) for name in ("ends", "logits", "working", "received")]
        assumed.append(("buffers", self.buffers))
        found = [_certain(name, num_bytes, "exact") for name, num_bytes in exact]
        found.append(_certain("activations", peak.layers, mark))
        return *found, *(_certain(name, num_bytes, "assumed") for name, num_bytes in assumed), self.reserve

    @property
    def reserve(self) -> Figure:
        """What allocator and driver take on top of the tensors."""
        bounds = [int(share * self.allocated) + outside for share, outside in zip(SHARE, OUTSIDE_BYTES, strict=True)]
        return Figure("reserve", bounds[1], "fitted", bounds[0], bounds[2])

    @property
    def total(self) -> Figure:
        """All together, with the interval that the reserve has."""
        reserve = self.reserve
        all_of = [self.allocated + part for part in (reserve.num_bytes, reserve.least, reserve.most)]
        return Figure("total", all_of[0], "fitted", all_of[1], all_of[2])


def _certain(name: str, num_bytes: int, certainty: "Certainty") -> Figure:
    return Figure(name, num_bytes, certainty, num_bytes, num_bytes)
