"""Right answers of another style to the exercises on all-to-all."""

RIGHT = {
    "all_to_all-2": {
        "counts in 4 bytes": [
            ("minlength=comm.get_world_size())", "minlength=comm.get_world_size()).int()"),
            ("(granted, taken)", "(granted, taken.int())"),
        ],
        "all in one function": """
class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to, room):
        size = comm.get_world_size()
        parts = [[i for i, rank in enumerate(to.tolist()) if rank == j] for j in range(size)]
        offered, granted = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        comm.all_to_all_single(offered, torch.tensor(list(map(len, parts))))
        ctx.receives = []
        for number in offered.tolist():
            ctx.receives.append(min(number, room))
            room -= ctx.receives[-1]
        comm.all_to_all_single(granted, torch.tensor(ctx.receives))
        ctx.sends, ctx.length = granted.tolist(), len(x)
        ctx.kept = torch.tensor([i for part, n in zip(parts, ctx.sends) for i in part[:n]], dtype=torch.int64)
        y = torch.zeros((sum(ctx.receives),) + x.shape[1:], dtype=x.dtype)
        comm.all_to_all_single(y, x[ctx.kept].contiguous(), ctx.receives, ctx.sends)
        return y

    @staticmethod
    def backward(ctx, dy):
        back = dy.new_zeros((sum(ctx.sends),) + dy.shape[1:])
        comm.all_to_all_single(back, dy.contiguous(), ctx.sends, ctx.receives)
        dx = dy.new_zeros((ctx.length,) + dy.shape[1:])
        dx[ctx.kept] = back
        return dx, None, None


def dispatch(x, to, room):
    return Rows.apply(x, to, room)
""",
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
