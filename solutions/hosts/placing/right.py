"""Right answers of another style to the exercises on what the network does to each axis."""

RIGHT = {
    "placing-2": {
        "one prediction, renumbered": """
from collections import Counter

def place(plan, config, batch_size, sequence_length, ranks_per_node):
    step, grid = plan.traffic(config, batch_size, sequence_length, clips=False), plan.topology
    sent = Counter()
    for rank, ledger in enumerate(step.ledger.ranks):
        for entry in ledger.entries.values():
            for peer, num_bytes in entry.sent_to.items():
                sent[rank, peer] += num_bytes
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]

    def number(order, place):
        found = 0
        for axis in order:
            found = found * grid.size(axis) + place[axis]
        return found

    def leaving(order):
        nodes = [number(order, place) // ranks_per_node for place in places]
        return sum(num_bytes for (a, b), num_bytes in sent.items() if nodes[a] != nodes[b])

    return list(min(permutations(grid.names), key=leaving))
""",
        "all orders of five axes, as a plan from its description": """
def place(plan, config, batch_size, sequence_length, ranks_per_node):
    best, least, seen = None, None, set()
    for order in permutations(("tp", "ep", "cp", "dp", "pp")):
        short = tuple(axis for axis in order if plan.sizes[axis] > 1)
        if short in seen:
            continue
        seen.add(short)
        other = lab.Plan.from_description({**plan.describe(), "order": order})
        sent = other.traffic(config, batch_size, sequence_length).ledger.between_nodes(ranks_per_node)
        if least is None or sent < least:
            best, least = other, sent
    return best
""",
    },
    "placing-3": {
        "from strides": """
from math import prod

def apart(hosts, axes, axis):
    names = [name for name, _ in axes]
    place = names.index(axis)
    size, stride = axes[place][1], prod(s for _, s in axes[place + 1:])
    found = []
    for rank in range(len(hosts)):
        if rank // stride % size == 0:
            group = [rank + i * stride for i in range(size)]
            if any(hosts[each] != hosts[rank] for each in group):
                found.append(group)
    return found
""",
        "a set": """
def apart(hosts, axes, axis):
    grid = lab.Topology(axes)
    return {grid.at(a).ranks(axis) for a in range(len(hosts)) for b in grid.at(a).ranks(axis) if hosts[a] != hosts[b]}
""",
    },
}
