"""Right answers of another style to the exercises on ZeRO-1."""

RIGHT = {
    "zero_1-2": {
        "slices and two buffers": """
def momentum_step(weights, grad, state, lr, momentum):
    N, rank, length = comm.get_world_size(), comm.get_rank(), len(weights)
    size = (length + N - 1) // N
    sums, whole = grad.new_zeros(N * size), weights.new_zeros(N * size)
    sums[:length] = grad
    own = grad.new_empty(size)
    comm.reduce_scatter_single(own, sums)
    state["v"] = momentum * state["v"] + own if state else own
    whole[:length] = weights
    mine = whole[rank * size : (rank + 1) * size] - lr * state["v"]
    comm.all_gather_single(whole, mine)
    weights[:] = whole[:length]
""",
        "velocity that ends where the weights end": """
def momentum_step(weights, grad, state, lr, momentum):
    N = comm.get_world_size()
    size = -(-len(weights) // N)
    own = slice(comm.get_rank() * size, (comm.get_rank() + 1) * size)
    g = grad.new_empty(size)
    comm.reduce_scatter_single(g, pad(grad, (0, N * size - len(grad))).contiguous())
    g = g[: len(weights[own])]
    v = state.setdefault("v", torch.zeros_like(weights[own]))
    v.copy_(momentum * v + g)
    new = pad(weights[own] - lr * v, (0, size - len(v)))
    everything = weights.new_empty(N * size)
    comm.all_gather_single(everything, new.contiguous())
    weights.copy_(everything[: len(weights)])
""",
    },
    "zero_1-3": {
        "pads with zeros": """
def norm_of_shards(flat):
    N = comm.get_world_size()
    own = pad(flat, (0, -len(flat) % N)).view(N, -1)[comm.get_rank()]
    square = (own * own).sum()
    comm.all_reduce(square)
    return square.sqrt().item()
""",
        "the end cut off by hand": [
            (
                "flat[start : start + size].square().sum()",
                "flat.new_tensor(sum(float(flat[i]) ** 2 for i in range(start, min(start + size, len(flat)))))",
            )
        ],
        "a tensor of one number": [(".square().sum()", ".norm().square().reshape(1)")],
    },
    "zero_1-4": {
        "other ranks, as an array": "import numpy as np\nowners = np.array([3, 2, 1, 1, 3, 2, 0, 0, 0])",
        "searched": """
sizes = [7, 7, 6, 6, 5, 5, 4, 4, 4]

def deal(place, loads):
    if place == len(sizes):
        return []
    for rank in range(4):
        if loads[rank] + sizes[place] <= 12:
            rest = deal(place + 1, [load + sizes[place] * (rank == r) for r, load in enumerate(loads)])
            if rest is not None:
                return [rank, *rest]
    return None

owners = tuple(deal(0, [0] * 4))
""",
    },
}  # fmt: skip
