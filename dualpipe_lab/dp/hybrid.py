"""Hybrid ZeRO, shards inside a node and replicas across nodes: its bytes within and between nodes, derived and counted.

Chapter: book/dp/hybrid-zero.  In: a topology with `ranks_per_node`.  Out: bytes by kind.
                 held per parameter    a node sends out per step
  ZeRO-3 flat    16 / N                3 m (N - 1) / N * S               by its last rank: a ring in the order of ranks
  ZeRO-3 hybrid  16 / N_in             2 (N_out - 1) / N_out * S         in all; each rank sends 1 / N_in of it
with S bytes of the parameters, N = N_in N_out ranks on N_out nodes, m microbatches.  The slow links between nodes carry
the gradients once per step, in place of the weights twice and the gradients once per microbatch.  Every stage of ZeRO
does so over a `Mesh` with `hybrid=True`.
Elsewhere: FSDP2 on a 2-D mesh (HSDP); ZeRO++ hpZ; MiCS.
Source: Zhang et al. 2022 (arXiv 2205.00119), section 3.
"""

from fractions import Fraction
from typing import NamedTuple

from dualpipe_lab.dp.closed_forms import BF16, Precision, Stage, sent_bytes
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.topology import Topology


class NodeBytes(NamedTuple):
    """Bytes that a rank sent within its node (`intra`) and to other nodes (`inter`)."""

    intra: int
    inter: int


def hybrid_sent_bytes(
    stage: Stage,
    ranks_per_node: int,
    num_nodes: int,
    padded_numel: int,
    num_microbatches: int = 1,
    precision: Precision = BF16,
) -> NodeBytes:
    """Return the bytes that each rank sends in a step of hybrid ZeRO-1, 2 or 3.

    >>> hybrid_sent_bytes("zero3", 2, 2, 400, num_microbatches=3)
    NodeBytes(intra=3600, inter=400)
    """
    intra = sent_bytes(stage, ranks_per_node, padded_numel, num_microbatches, precision)
    shard = Fraction(padded_numel, ranks_per_node if stage != "ddp" else 1)
    return NodeBytes(intra, int(2 * shard * precision.grad * (num_nodes - 1) / num_nodes))


class NodeLedger(RankLedger):
    """A rank's ledger that also counts bytes within its node and to other nodes.

    Rings run in the order of a group's ranks, so a rank's bytes go to the next member, in the same node or another.
    Bytes addressed to single ranks, as in an all-to-all, count by the node of each receiver.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        super().__init__()
        self._node_of = {member: node for node, ranks in enumerate(topology.groups("node")) for member in ranks}
        self._rank = rank
        self._sent: dict[str, NodeBytes] = {}

    @property
    def sent_by_operation(self) -> dict[str, NodeBytes]:
        """Bytes of each operation so far."""
        self.pull()
        return self._sent

    def add(
        self, operation: str, sent: int, received: int, peers: set[int], sent_to: dict[int, int] | None = None
    ) -> None:
        """Count one call."""
        super().add(operation, sent, received, peers, sent_to)
        if sent_to is None:
            following = min((peer for peer in peers if peer > self._rank), default=min(peers, default=self._rank))
            sent_to = {following: sent}
        stays = sum(part for peer, part in sent_to.items() if self._node_of[peer] == self._node_of[self._rank])
        intra, inter = self._sent.get(operation, NodeBytes(0, 0))
        self._sent[operation] = NodeBytes(intra + stays, inter + sent - stays)

    def total(self) -> NodeBytes:
        """Return the bytes of all operations."""
        parts = self.sent_by_operation.values()
        return NodeBytes(sum(part.intra for part in parts), sum(part.inter for part in parts))


def count_by_node(topology: Topology) -> NodeLedger:
    """Replace this rank's ledger by one that counts bytes within the node and to other nodes; return it.

    Raises:
        ValueError: the topology has no `ranks_per_node`.
    """
    context = rank_context()
    ledger = NodeLedger(topology, context.rank)
    ledger.found = context.ledger.found
    context.recorder.ledger = ledger
    return ledger
