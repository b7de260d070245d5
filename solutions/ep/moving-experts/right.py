"""Right answers of another style to the exercises on experts that move."""

RIGHT = {
    "moving_experts-2": {
        "levels of distance": """
from collections import Counter

def slots_of(chosen, slots, rank, slots_per_rank, ranks_per_node):
    seen = Counter()

    def distance(slot):
        there = slot // slots_per_rank
        return (there != rank) + (there // ranks_per_node != rank // ranks_per_node)

    def choose(expert):
        least = min(map(distance, slots[expert]))
        allowed = [slot for slot in slots[expert] if distance(slot) == least]
        seen[expert] += 1
        return allowed[(rank + seen[expert] - 1) % len(allowed)]

    return [choose(expert) for expert in chosen]
""",
        "one cycle for each expert": """
from itertools import cycle, islice

def slots_of(chosen, slots, rank, slots_per_rank, ranks_per_node):
    cycles = []
    for row in slots:
        size = slots_per_rank * ranks_per_node
        for start, width in ((rank, slots_per_rank), (rank // ranks_per_node, size), (0, 10**9)):
            near = [slot for slot in row if slot // width == start]
            if near:
                break
        cycles.append(islice(cycle(near), rank % len(near), None))
    return [next(cycles[expert]) for expert in chosen]
""",
    },
    "moving_experts-3": {
        "experts instead of slots": """
def squared(rows, table, rank):
    start = rank * len(rows)
    firsts = {expert: slot for slot, expert in reversed(list(enumerate(table)))}
    return sum(x * x for slot in firsts.values() if start <= slot < start + len(rows) for x in rows[slot - start])
""",
        "a share of every replica": """
def squared(rows, table, rank):
    here = table[rank * len(rows):][:len(rows)]
    return sum(sum(x * x for x in row) / table.count(expert) for row, expert in zip(rows, here))
""",
    },
}
