"""Right answers of another style to the exercises on column-parallel layers."""

RIGHT = {
    "column_parallel-2": {
        "one Function for the whole layer": """
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, other, bias):
        ctx.save_for_backward(x, z, weight, other)
        return x @ weight.T + z @ other.T + bias

    @staticmethod
    def backward(ctx, dy):
        x, z, weight, other = ctx.saved_tensors
        both = torch.cat([dy @ weight, dy @ other], -1)
        comm.all_reduce(both)
        dx, dz = both.split([x.shape[-1], z.shape[-1]], -1)
        rows = dy.flatten(0, -2)
        return dx, dz, rows.T @ x.flatten(0, -2), rows.T @ z.flatten(0, -2), rows.sum(0)

def column_linear(x, z, weight, other, bias):
    return Both.apply(x, z, weight, other, bias)
""",
        "f of both, side by side": """
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        comm.all_reduce(grad)
        return grad

def column_linear(x, z, weight, other, bias):
    return linear(Copy.apply(torch.cat([x, z], -1)), torch.cat([weight, other], 1), bias)
""",
    },
    "column_parallel-3": {
        "by hand": """
def scaled_linear(x, scale, weight):
    h = copy_to_ranks(torch.mul(x, scale))
    return h @ weight.T
""",
        "with einsum": """
def scaled_linear(x, scale, weight):
    return torch.einsum("...i,oi->...o", copy_to_ranks(scale * x), weight)
""",
    },
}
