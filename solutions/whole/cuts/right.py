"""Right answers of another style to the exercises on one model on every cut."""

RIGHT = {
    "cuts-2": {
        "a set of products": """
from itertools import product

def legal_sizes(num_ranks, num_layers, num_heads, num_kv_heads, length, batch, room):
    def is_legal(pp, dp, cp, tp):
        small, large = sorted((num_kv_heads, tp))
        return (
            pp * dp * cp * tp == num_ranks
            and pp <= num_layers
            and num_heads % tp == 0
            and large % small == 0
            and (cp == 1 or length % (2 * cp) == 0)
            and batch % dp == 0
            and (num_layers + pp - 1) // pp / tp <= room
        )

    return {sizes for sizes in product(range(1, num_ranks + 1), repeat=4) if is_legal(*sizes)}
""",
        "recursion, rows as lists": """
from math import ceil

def legal_sizes(num_ranks, num_layers, num_heads, num_kv_heads, length, batch, room):
    def factors(number, count):
        if count == 1:
            return [[number]]
        return [[d, *rest] for d in range(1, number + 1) if number % d == 0 for rest in factors(number // d, count - 1)]

    rows = []
    for tp, cp, dp, pp in factors(num_ranks, 4):
        fits = ceil(num_layers / pp) <= room * tp and pp <= num_layers
        heads = num_heads % tp == 0 and 0 in (num_kv_heads % tp, tp % num_kv_heads)
        if fits and heads and batch % dp == 0 and (cp == 1 or length % (cp + cp) == 0):
            rows.append([pp, dp, cp, tp])
    return rows
""",
    },
    "cuts-4": {
        "by the library's grid": """
def share(rank, axes, batch, num_microbatches, length):
    here = lab.Topology(axes).at(rank).coordinates
    dp, cp = dict(axes).get("dp", 1), dict(axes).get("cp", 1)
    mine = [number for number in range(batch) if number * dp // batch == here.get("dp", 0)]
    each, span = len(mine) // num_microbatches, length // cp
    start = here.get("cp", 0) * span
    return [mine[i : i + each] for i in range(0, len(mine), each)], range(start, start + span)
""",
        "digits from the right": """
def share(rank, axes, batch, num_microbatches, length):
    digits = {}
    for name, size in axes[::-1]:
        rank, digits[name] = divmod(rank, size)

    def piece(count, name):
        size, at = dict(axes).get(name, 1), digits.get(name, 0)
        return list(range(count * at // size, count * (at + 1) // size))

    mine = piece(batch, "dp")
    each = len(mine) // num_microbatches
    return tuple(tuple(mine[i * each : (i + 1) * each]) for i in range(num_microbatches)), piece(length, "cp")
""",
    },
}
