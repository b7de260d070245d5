"""Right answers of another style to the exercises on all-to-all."""

RIGHT = {
    "all_to_all-2": {
        "counts in 4 bytes": [
            ("minlength=comm.get_world_size())", "minlength=comm.get_world_size()).int()"),
            ("(granted, taken)", "(granted, taken.int())"),
        ],
        "a place in the queue of each rank": """
def dispatch(x, to, room):
    order = to.argsort(stable=True)
    wanted = to.bincount(minlength=comm.get_world_size())
    offered, granted = torch.zeros_like(wanted), torch.zeros_like(wanted)
    comm.all_to_all_single(offered, wanted)
    ends = offered.cumsum(0).clamp(max=room)
    taken = torch.diff(ends, prepend=ends.new_zeros(1))
    comm.all_to_all_single(granted, taken)
    place = torch.arange(len(to)) - (wanted.cumsum(0) - wanted)[to[order]]
    kept = order[place < granted[to[order]]]
    return AllToAll.apply(x[kept], granted.tolist(), taken.tolist())
""",
    },
    "all_to_all-3": {
        "back along transposed splits": [("combine(rows, splits)", "library_dispatch(rows, splits.transposed)")],
        "in one line": """
def round_trip(x, sends, work):
    return combine(work(library_dispatch(x, splits := exchange_splits(sends))), splits)
""",
    },
}
