"""What crosses between hosts in the parts of one launch: calls and bytes as derived, and those that left the sockets.

`run` is the test's end: it hands a list of parts to the ranks, and returns what each rank counted in each of them.
`measure` is the ranks' end.  A part is a function of `PARTS` by its name, and its arguments; job and results are files
in the folder of the agents.
"""

import os
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm, data, ep, train
from dualpipe_lab.tp.shard import full_state_dict
from dualpipe_lab.world import torchrun
from dualpipe_lab.world.cluster import clocks
from torchrun_cases.collectives import every_collective

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _proof

RANKS_PER_HOST = 2
PATIENCE = 500.0  # seconds for what takes a tenth where nothing else runs


class Crossed(NamedTuple):
    """What one rank did by one operation: calls, bytes, who got them; and what its sockets sent to other hosts."""

    count: int
    sent: int
    received: int
    sent_to: dict
    on_the_wire: int

    def between_hosts(self, rank):
        """Bytes for other hosts, as derived."""
        here = rank // RANKS_PER_HOST
        return sum(num_bytes for peer, num_bytes in self.sent_to.items() if peer // RANKS_PER_HOST != here)


def run(agents, hosts, parts, kind="wired_parts", **options):
    """Run parts on hosts: for each part a list of what each rank returned.

    A plan is a launch of its own: each group that counts bytes, 13 for each of the plan's, wakes 100 times a second.

    Args:
        agents: of the test.
        hosts: so many as the parts need.
        parts: pairs of a name in `PARTS` and its arguments.
        kind: "parts" leaves the bytes in the sockets uncounted.
        options: of `Agents.begin`.
    """
    for old in agents.folder.glob("found-*"):
        old.unlink()
    torch.save(parts, agents.folder / "job")
    outcome = agents.run(
        kind, hosts=hosts, ranks_per_host=RANKS_PER_HOST, timeout=PATIENCE, patience=PATIENCE, **options
    )
    assert outcome.codes == [0] * len(hosts), outcome.text
    world_size = RANKS_PER_HOST * len(hosts)
    found = [torch.load(agents.folder / f"found-{rank}", weights_only=False) for rank in range(world_size)]
    return list(zip(*found, strict=True))


def measure(rank, world_size):
    """In a rank: do each part of the job, and leave what it returns in a file."""
    folder = Path(os.environ["TMPDIR"])
    job = torch.load(folder / "job", weights_only=False)
    torch.save([PARTS[name](rank, world_size, *arguments) for name, *arguments in job], folder / f"found-{rank}")


def so_far():
    """This rank's calls and bytes until now, by operation; all ranks call this, and nothing is under way then."""
    torch.distributed.barrier()
    context = lab.rank_context()
    entries, wire = context.ledger.entries, context.wire.sent()
    return {
        name: Crossed(entry.count, entry.sent, entry.received, Counter(entry.sent_to), wire.get(name, (0, 0))[1])
        for name, entry in entries.items()
    }


def since(before, after):
    """What was done between two moments, without operations that were not called."""
    nothing = Crossed(0, 0, 0, Counter(), 0)
    found = {}
    for name, later in after.items():
        changes = [b - a for a, b in zip(before.get(name, nothing), later, strict=True)]
        if changes[0]:
            found[name] = Crossed(*changes)._replace(sent_to=dict(changes[3]))
    return found


def counted(action):
    """What this rank does in an action, and its result."""
    before = so_far()
    result = action()
    return since(before, so_far()), result


def collectives(rank, world_size, numel):
    """Every collective once."""
    return counted(lambda: every_collective(rank, world_size, numel))[0]


def step(rank, world_size, config, plan, options, right):
    """Two steps under a plan: errors beside one process, and in the second what was done and what the plan predicts.

    `right`: the first steps' losses, norms and raw gradients.
    """
    moments = []
    trainer = train.Trainer(config, plan, train.Options(**options), lambda: bool(moments.append(so_far())))
    spy, sampler = _proof.Spy(trainer), trainer.options.sampler(data.frozen_corpus())
    rows = []
    for number in range(2):
        spy.wanted, spy.counted = number == 0, number == 1
        before = so_far()
        rows.append(trainer.step(trainer.batch(sampler)))  # asks for a stop before it exchanges metrics
    losses, norms, gradients = right
    numbers = [abs(row.loss / loss - 1) for row, loss in zip(rows, losses, strict=True)]
    numbers += [abs(row.norm / norm - 1) for row, norm in zip(rows, norms, strict=True)]
    predicted = plan.traffic(config, options["global_batch"], options["sequence_length"], spy.routing())
    entries = predicted.ledger.ranks[rank].entries
    names = sorted(declared.name for declared in trainer.optimizer.declaration.parameters.values())
    return {
        "gradients": _proof.trainer_distance(trainer)(spy.found[0], gradients),
        "numbers": max(numbers),
        "names": names,
        "done": since(before, moments[1]),
        "predicted": {n: (e.count, e.sent, e.received, dict(+Counter(e.sent_to))) for n, e in entries.items()},
        "between": predicted.ledger.between_nodes(RANKS_PER_HOST),
    }


def experts(rank, world_size, case, by_node):
    """A layer of experts forward and backward, its tokens sent straight to their experts or once to each host of them.

    Args:
        rank: this one.
        world_size: number of ranks.
        case: tensors by name; x, weights, experts and dy of all ranks, each with so many tokens.
        by_node: whether each token is sent once to each host.
    """
    layer = ep.Experts.from_full(case["gate"], case["up"], case["down"])
    nodes = node_groups(world_size // RANKS_PER_HOST) if by_node else None
    x, weights, chosen, dy = (case[name].chunk(world_size)[rank] for name in ("x", "weights", "experts", "dy"))
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def both_passes():
        y = layer(x, weights, chosen) if nodes is None else ep.hierarchical_experts(x, weights, chosen, layer, nodes)
        y.backward(dy)
        return y.detach()

    done, y = counted(both_passes)
    grads = full_state_dict(layer, of="grad")
    return {"done": done, "y": y, "x": x.grad, "weights": weights.grad, **grads}


@cache
def node_groups(num_hosts):
    """The groups by host, made once."""
    return ep.NodeGroups.of(num_hosts)


def messages(rank, world_size, folder, pairs, num_bytes, steps):
    """Steps in which a message goes from one rank to another, pair after pair, and whose traces are files."""
    with lab.StepTraces(folder) as traces:
        for number in range(steps):
            with traces.step(number):
                for source, target in pairs:
                    x = torch.zeros(num_bytes, dtype=torch.uint8)
                    waiting = comm.irecv(x, source) if rank == target else None
                    comm.barrier()  # the receiver is ready: what a message takes is the way
                    if rank == source:
                        comm.send(x, target)
                    if waiting:
                        waiting.wait()


def clock(rank, world_size):
    """Nanoseconds by which rank 0's clock is ahead of this one, as estimated, and the bound of the error."""
    found = clocks.read_clocks(rank, world_size, torchrun._Numbers(torch.device("cpu")), time.perf_counter_ns)
    return found.offset_ns, found.bound_ns


PARTS = {"clock": clock, "collectives": collectives, "step": step, "experts": experts, "messages": messages}
