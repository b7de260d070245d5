"""Right answers of another style to the exercises on sequence parallelism."""

RIGHT = {
    "sequence_parallelism-2": {
        "a buffer of zeros": [
            (
                "    comm.all_gather_single(full, pad(x, (0, 0, 0, size - len(x))).contiguous())",
                "    own = x.new_zeros(size, x.shape[-1])\n"
                "    own[: len(x)] = x\n"
                "    comm.all_gather_single(full, own)",
            ),
        ],
        "slices of the full length": [
            (
                "return own[: max(min(size, num_tokens - rank * size), 0)]",
                "return own[: len(range(num_tokens)[rank * size : (rank + 1) * size])]",
            ),
        ],
    },
    "sequence_parallelism-3": {
        "a function of its own": """
class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bias):
        return bias.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        comm.all_reduce(total)
        return total

def biased(x, first, second, bias):
    wide = torch.tanh(linear(gather_tokens(x), first))
    return reduce_scatter_tokens(linear(wide, second)) + Shared.apply(bias)
""",
        "expanded": [("+ copy_to_ranks(bias)", "+ copy_to_ranks(bias).expand_as(x)")],
    },
}
