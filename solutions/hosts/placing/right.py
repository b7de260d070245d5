"""Right answers of another style to the exercises on what the network does to each axis."""

RIGHT = {
    "placing-2": {
        "recursion, and the table by node": """
def place(plan, config, batch_size, sequence_length, ranks_per_node):
    def orders(axes):
        if not axes:
            yield ()
        for axis in axes:
            for rest in orders([other for other in axes if other != axis]):
                yield (axis, *rest)

    best = None
    for order in orders(list(plan.topology.names)):
        alone = tuple(axis for axis in ("tp", "cp", "ep", "dp", "pp") if axis not in order)
        other = replace(plan, order=alone + order)
        table = other.traffic(config, batch_size, sequence_length, clips=False).ledger.by_node(ranks_per_node)
        away = sum(map(sum, table)) - sum(row[node] for node, row in enumerate(table))
        if best is None or away < best[0]:
            best = away, order
    return best[1]
""",
        "all orders of five axes, plans from a description": """
def place(plan, config, batch_size, sequence_length, ranks_per_node):
    best, least, seen = None, None, set()
    for order in permutations(("tp", "ep", "cp", "dp", "pp")):
        short = tuple(axis for axis in order if plan.sizes[axis] > 1)
        if short in seen:
            continue
        seen.add(short)
        other = lab.Plan(**{**plan.describe(), "order": order})
        sent = other.traffic(config, batch_size, sequence_length).ledger.between_nodes(ranks_per_node)
        if least is None or sent < least:
            best, least = order, sent
    return best
""",
    },
}
