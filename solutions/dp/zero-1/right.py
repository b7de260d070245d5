"""Right answers of another style to the exercises on ZeRO-1."""

RIGHT = {
    "zero_1-3": {
        "pads with zeros": """
def norm_of_shards(flat):
    N = comm.get_world_size()
    own = pad(flat, (0, -len(flat) % N)).view(N, -1)[comm.get_rank()]
    square = (own * own).sum()
    comm.all_reduce(square)
    return square.sqrt().item()
""",
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
