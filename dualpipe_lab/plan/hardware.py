"""`Hardware`: a GPU and its links, and the closed forms for the seconds of arithmetic, collectives and messages.

Chapter: book/whole/plan-your-run.  In: FLOPs, bytes, GPUs of a group.  Out: seconds.
  arithmetic   FLOPs / (peak * utilisation)
  message      latency + bytes / (bandwidth inside of a node, or that of one card)
  collective   of a tensor of n bytes over N GPUs with g on each node, in which each GPU sends n (N - 1) / N bytes: over
               the links inside n (g - 1) / g, over its own card n (N - g) / (N g); the slower of the two decides.  So
               8 GPUs of a node use 8 cards: of 50 GB/s each, 400 GB/s together
  exchange     of b bytes with all N - 1 others: (g - 1) / (N - 1) of them inside, the rest over its own card
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple


class Range(NamedTuple):
    """The least and the most of a number of seconds."""

    low: float
    high: float

    def __str__(self) -> str:
        digits = 0 if self.low >= 10 else 1 if self.low >= 1 else 2
        return f"{self.low:.{digits}f} to {self.high:.{digits}f} s"


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind in nodes of one size.

    Attributes:
        name: of the GPU.
        flops: peak of dense products in bfloat16, in FLOP/s.
        memory_bytes: of one GPU.
        inside: bytes/s of one GPU to others of its node, in one direction.
        card: bytes/s of one network card, in one direction; every GPU has one.
        gpus_per_node: GPUs of a node.
        latency: seconds of a message or a collective, whatever its size.

    Raises:
        ValueError: a number that no hardware has.
    """

    name: str
    flops: float
    memory_bytes: float
    inside: float
    card: float
    gpus_per_node: int = 8
    latency: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "inside", "card", "gpus_per_node"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise ValueError(f"{self.name} needs {name} above 0, got {value!r}; such as {getattr(H100, name):g}")
        if not 0 <= self.latency < inf:
            raise ValueError(f"{self.name} needs a latency of 0 seconds or more, got {self.latency!r}; such as 20e-6")


H100 = Hardware("H100", 989.4e12, 80e9, 450e9, 50e9)  # NVIDIA's H100 SXM data sheet; a card of 400 Gb/s for each GPU
H800 = Hardware("H800", 989.4e12, 80e9, 160e9, 50e9)  # DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.2, as used


def compute_seconds(flops: float, hardware: Hardware = H100, utilisation: float = 0.4) -> float:
    """Return the seconds of arithmetic on one GPU."""
    return flops / (hardware.flops * utilisation)


def message_seconds(num_bytes: float, *, across_nodes: bool, hardware: Hardware = H100) -> float:
    """Return the seconds of a message of one GPU, which takes one card.

    >>> round(message_seconds(50e6, across_nodes=True), 5)
    0.00102
    """
    return hardware.latency + num_bytes / (hardware.card if across_nodes else hardware.inside)


def collective_seconds(
    num_bytes_per_gpu: float,
    group_size: int,
    *,
    across_nodes: bool,
    hardware: Hardware = H100,
    per_node: int | None = None,
) -> float:
    """Return the seconds of an all-gather, a reduce-scatter or an all-reduce.

    Args:
        num_bytes_per_gpu: that each GPU sends: (N - 1) / N of a tensor, of an all-reduce twice that.
        group_size: N, the GPUs of the group.
        across_nodes: whether they are on several nodes.
        hardware: with the links.
        per_node: of the group, the GPUs on each node (default: all of a node's, or one where the group has no more than
            a node has).

    The all-reduce of 8e9 gradients of 4 bytes over 64 GPUs:

    >>> round(collective_seconds(2 * 63 / 64 * 32e9, 64, across_nodes=True), 2)
    0.14
    """
    if group_size < 2:
        return 0.0
    if not across_nodes:
        return hardware.latency + num_bytes_per_gpu / hardware.inside
    nodes_of = hardware.gpus_per_node
    here = per_node or (nodes_of if group_size > nodes_of else 1)
    tensor = num_bytes_per_gpu * group_size / (group_size - 1)
    inside, across = tensor * (here - 1) / here, tensor * (group_size - here) / (group_size * here)
    return hardware.latency + max(inside / hardware.inside, across / hardware.card)


def exchange_seconds(num_bytes_per_gpu: float, group_size: int, *, per_node: int, hardware: Hardware = H100) -> float:
    """Return the seconds of an all-to-all in which each GPU sends so many bytes to the others, spread evenly."""
    if group_size < 2:
        return 0.0
    inside, across = ((per_node - 1) / (group_size - 1), (group_size - per_node) / (group_size - 1))
    return hardware.latency + num_bytes_per_gpu * max(inside / hardware.inside, across / hardware.card)
