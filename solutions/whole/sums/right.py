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
}
