"""Right answers of another style to the exercises on row-parallel layers."""

RIGHT = {
    "row_parallel-2": {
        "added in place": [
            (
                "    behind = len(weight) - first - len(bias)\n"
                "    return ReduceFromRanks.apply(linear(x, weight) + pad(bias, (first, behind)))",
                "    part = x @ weight.T\n"
                "    part[..., first : first + len(bias)] += bias\n"
                "    return ReduceFromRanks.apply(part)",
            ),
        ],
        "a full bias of zeros": """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        part = part.contiguous().clone()
        comm.all_reduce(part)
        return part

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()

def row_linear(x, weight, bias, first):
    zeros = bias.new_zeros(len(weight))
    full = torch.cat([zeros[:first], bias, zeros[first + len(bias) :]])
    return Sum.apply(linear(x, weight, full))
""",
    },
    "row_parallel-3": {
        "written out": """
def project(x, weight, bias):
    y = reduce_from_ranks(x @ weight.T)
    return torch.add(y, bias)
""",
        "the bias expanded": [("linear(x, weight)) + bias", "linear(x, weight)) + bias.expand(*x.shape[:-1], -1)")],
    },
}
