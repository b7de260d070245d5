"""Right answers of another style to the exercises on who sums what with whom."""

RIGHT = {
    "sums-2": {
        "divided first, a sorted list": """
from itertools import groupby

def reduce_gradients(parameters, said, mesh):
    names = [name for name, _ in mesh.topology.axes]
    places = prod(size for name, size in mesh.topology.axes if name in {"dp", "ep", "cp"})

    def axes_of(pair):
        cut, is_partial = pair[1]
        data = {"dp", "ep", "cp"} - set(cut)
        return [name for name in names if name in data or (is_partial and name == "tp")]

    for axes, pairs in groupby(sorted(zip(parameters, said), key=axes_of), key=axes_of):
        chosen = [parameter for parameter, _ in pairs]
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        flat = torch.nn.utils.parameters_to_vector(rows) / places
        if axes:
            comm.all_reduce(flat, group=mesh.group(*axes))
        for parameter, row in zip(chosen, flat.split([p.numel() for p in chosen])):
            parameter.grad = row.view(parameter.shape).clone()
""",
        "gathered instead of reduced": """
def reduce_gradients(parameters, said, mesh):
    topology = mesh.topology
    data = [axis for axis in ("dp", "ep", "cp") if axis in topology.names]
    places = prod(topology.size(axis) for axis in data)
    groups = {}
    for index, (cut, is_partial) in enumerate(said):
        axes = tuple(a for a in data if a not in cut) + (("tp",) if is_partial and "tp" in topology.names else ())
        groups.setdefault(axes, []).append(index)
    for axes, indices in groups.items():
        own = torch.cat([
            (torch.zeros_like(parameters[i]) if parameters[i].grad is None else parameters[i].grad).reshape(-1)
            for i in indices
        ])
        if axes:
            size = prod(topology.size(axis) for axis in axes)
            rows = own.new_empty(size * len(own))
            torch.distributed.all_gather_into_tensor(rows, own, group=mesh.group(*axes))
            own = rows.view(size, -1).sum(0)
        start = 0
        for i in indices:
            stop = start + parameters[i].numel()
            parameters[i].grad = (own[start:stop] / places).view_as(parameters[i])
            start = stop
""",
    },
    "sums-3": {
        "experts within the data ranks": "plan = dict(dp=4, tp=2, ep=4, experts_in_data=True, zero=2)",
        "searched": """
from itertools import product

for ep, zero in product((2, 4, 8), (0, 1, 2, 3)):
    candidate = lab.Plan(ep=ep, tp=8 // ep, zero=zero)
    try:
        sent = candidate.traffic(config, 16, 32).sent(0, "gradients")
    except ValueError:
        continue
    if sent <= 600_000 and ep > 2 and 1 <= zero <= 2:
        plan = candidate.describe()
""",
    },
    "sums-4": {
        "on one rank only": """
def norm(gradients, mesh):
    squares = []
    for gradient, cut, holders in gradients:
        first = all(mesh.coordinates[axis] == 0 for axis in mesh.topology.names if axis not in cut)
        squares.append(gradient.square().sum() / holders if first else gradient.new_zeros(()))
    total = torch.stack(squares).sum()
    comm.all_reduce(total)
    return total.sqrt()
""",
        "a share of each gradient": """
def norm(gradients, mesh):
    shares = []
    for gradient, cut, holders in gradients:
        copies = holders
        for axis in set(mesh.topology.names) - set(cut):
            copies *= mesh.topology.size(axis)
        shares.append(gradient.flatten() / copies**0.5)
    square = torch.cat(shares).norm() ** 2
    comm.all_reduce(square)
    return square.item() ** 0.5
""",
    },
}
