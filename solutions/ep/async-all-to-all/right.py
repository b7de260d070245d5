"""Right answers of another style to the exercises on the asynchronous all-to-all."""

RIGHT = {
    "async_all_to_all-2": {
        "a state beside the object": """
class Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        state["rows"] = start_rows(x.detach(), state["there"])
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx, token):
        return ctx.state.pop("grads").wait(), None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, state):
        ctx.state = state
        return state.pop("rows").wait()

    @staticmethod
    def backward(ctx, grad):
        ctx.state["grads"] = start_rows(grad.contiguous(), ctx.state["there"].transposed)
        return grad.new_zeros(1), None


class Rows:
    def __init__(self, x, splits):
        self.state = {"there": splits}
        self.token = Issue.apply(x, self.state)

    def wait(self):
        return Wait.apply(self.token, self.state)


start_dispatch = Rows
""",
        "comm itself": """
from dualpipe_lab import comm


class Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, travel):
        ctx.travel = travel
        travel.rows = x.new_empty(sum(travel.splits.receives), x.shape[1])
        travel.leaving = x.contiguous()
        travel.work = comm.all_to_all_single(
            travel.rows, travel.leaving, travel.splits.receives, travel.splits.sends, async_op=True
        )
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, token):
        ctx.travel.work.wait()
        return ctx.travel.rows, None


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, travel):
        ctx.travel = travel
        travel.work.wait()
        return travel.rows

    @staticmethod
    def backward(ctx, grad):
        travel = ctx.travel
        travel.rows = grad.new_empty(sum(travel.splits.sends), grad.shape[1])
        travel.leaving = grad.contiguous()
        travel.work = comm.all_to_all_single(
            travel.rows, travel.leaving, travel.splits.sends, travel.splits.receives, async_op=True
        )
        return grad.new_empty(0), None


class Travelling:
    def __init__(self, x, splits):
        self.splits = splits
        self.token = Issue.apply(x, self)

    def wait(self):
        return Wait.apply(self.token, self)


def start_dispatch(x, splits):
    return Travelling(x, splits)
""",
    },
    "async_all_to_all-3": {
        "beside the way back": """
def moe(x, splits, expert, shared):
    rows = expert(issue_dispatch(x, splits).wait())
    back = start_combine(rows, splits)
    other = shared(x)
    return back.wait() + other
""",
        "added in place of order": [
            (
                "    other = shared(x)\n    rows = expert(travelling.wait())\n"
                "    return start_combine(rows, splits).wait() + other",
                "    y = shared(x)\n    made = expert(travelling.wait())\n    back = start_combine(made, splits)\n"
                "    return y.add(back.wait())",
            ),
        ],
    },
}
