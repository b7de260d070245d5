"""Right answers of another style to the exercises on the embedding."""

RIGHT = {
    "embedding-2": {
        "token by token": """
def look_up(ids, table, first):
    zero = torch.zeros(table.shape[1], dtype=table.dtype)
    rows = [table[i - first] if first <= i < first + len(table) else zero for i in ids.tolist()]
    found = torch.stack(rows)
    comm.all_reduce(found)
    return found
""",
        "a product with one-hot rows": """
def look_up(ids, table, first):
    numbers = torch.arange(first, first + len(table))
    found = (ids[:, None] == numbers).to(table.dtype) @ table
    comm.all_reduce(found)
    return found
""",
    },
    "embedding-4": {
        "one-hot rows both ways": """
class OneHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, table, first):
        hot = (ids[:, None] == torch.arange(first, first + len(table))).to(table.dtype)
        ctx.save_for_backward(hot)
        own = table.new_empty(len(ids) // comm.get_world_size(), table.shape[1])
        comm.reduce_scatter_single(own, hot @ table)
        return own

    @staticmethod
    def backward(ctx, grad):
        (hot,) = ctx.saved_tensors
        whole = grad.new_empty(len(hot), grad.shape[1])
        comm.all_gather_single(whole, grad.clone(memory_format=torch.contiguous_format))
        return None, hot.T @ whole, None

def look_up_tokens(ids, table, first):
    return OneHot.apply(ids, table, first)
""",
        "a scatter as a Function, the lookup by autograd": """
class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.length = len(x)
        own = x.new_empty(len(x) // comm.get_world_size(), x.shape[1])
        comm.reduce_scatter_single(own, x.contiguous())
        return own

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_empty(ctx.length, grad.shape[1])
        comm.all_gather_single(whole, grad.contiguous())
        return whole

def look_up_tokens(ids, table, first):
    row = ids - first
    mine = ((row >= 0) & (row < len(table))).nonzero()[:, 0]
    x = table.new_zeros(len(ids), table.shape[1]).index_add(0, mine, table[row[mine]])
    return Scatter.apply(x)
""",
    },
}
