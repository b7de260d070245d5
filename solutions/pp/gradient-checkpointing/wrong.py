"""Typical wrong answers and lazy cheats of the exercises on gradient checkpointing."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"gradient_checkpointing-{number}" for number in range(1, 5))
NUMBERS = "kept, peak, best_length"

TYPICAL = {
    ONE: {
        "an input per block": Bad(f"{NUMBERS} = 36, 39, 2", "36 is one input per block"),
        "one segment only": Bad(f"{NUMBERS} = 12, 27, 2", "the inputs of the segments are there too"),
        "square root of the blocks": Bad(f"{NUMBERS} = 12, 39, 6", "length 6 peaks at 60"),
        "as asked": Bad(f"{NUMBERS} = 12, 39, 3", "length 3 peaks at 39"),
    },
    TWO: {
        "other masks": Bad([("torch.set_rng_state(ctx.random_state)", "pass")], "dropout: the gradient"),
        "the stream goes back": Bad([("torch.set_rng_state(now)", "pass")], "one input: the next random number"),
        "no anchor": Bad([("torch.zeros((), requires_grad=True)", "torch.zeros(())")], "whole numbers"),
        "keeps everything": Bad(
            "def recompute(segment, *inputs):\n    return segment(*inputs)", "one input: autograd keeps"
        ),
        "only the first input asks": Bad(
            [("asks = ctx.needs_input_grad[2:]", "asks = [True] + [False] * (len(inputs) - 1)")], "two inputs"
        ),
        "every tensor asks": Bad(
            [("asks = ctx.needs_input_grad[2:]", "asks = [isinstance(x, torch.Tensor) for x in inputs]")],
            "whole numbers: ",
        ),
        "keeps the output": Bad(
            [
                (
                    "return segment(*inputs)\n\n    @static",
                    "ctx.y = segment(*inputs).detach()\n        return ctx.y.clone()\n\n    @static",
                )
            ],
            "numbers are held after the forward beside the inputs",
        ),
        "a gradient for each place of one tensor": Bad(
            """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segment, anchor, *inputs):
        ctx.segment, ctx.inputs, ctx.random_state = segment, inputs, torch.get_rng_state()
        return segment(*inputs)

    @staticmethod
    def backward(ctx, dy):
        leaves = {}
        for x, asks in zip(ctx.inputs, ctx.needs_input_grad[2:]):
            if isinstance(x, torch.Tensor):
                leaves.setdefault(x.data_ptr(), x.detach().requires_grad_(asks))
        inputs = [leaves[x.data_ptr()] if isinstance(x, torch.Tensor) else x for x in ctx.inputs]
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            y = ctx.segment(*inputs)
        torch.set_rng_state(now)
        torch.autograd.backward(y, dy)
        return None, None, *[x.grad if asks else None for x, asks in zip(inputs, ctx.needs_input_grad[2:])]


def recompute(segment, *inputs):
    return Recompute.apply(segment, torch.zeros((), requires_grad=True), *inputs)
""",
            "one tensor twice: the gradient of input 0 differs",
        ),
        "keeps the graph under hooks of its own": Bad(
            """
def recompute(segment, *inputs):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x,), lambda kept: kept[0]):
        y = segment(*inputs)
    again = []

    def run(dy):
        if not again:
            again.append(segment(*[x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]))

    y.register_hook(run)
    return y
""",
            "numbers are held after the forward beside the inputs",
        ),
        "runs it three times": Bad(
            [("y = ctx.segment(*inputs)", "ctx.segment(*inputs); y = ctx.segment(*inputs)")],
            "3 times, expected 2",
        ),
    },
    THREE: {
        "too much kept": Bad('recomputed = ["norm 1", "norm 2", "gelu"]', "keeps 23 units"),
        "everything": Bad("recomputed = list(check.gradient_checkpointing.OPERATIONS)", "60 ticks more; 9 are enough"),
        "largest first": Bad('recomputed = ["scores", "values", "gelu"]', "10 ticks more"),
        "a slip": Bad('recomputed = ["norm"]', "no operation named 'norm'"),
    },
    FOUR: {
        "starter with a fresh seed": Bad(
            [("torch.set_rng_state(now)", "torch.manual_seed(0)")], "the next random number is another one"
        ),
        "no recomputation": Bad("def remember(segment, x):\n    return segment(x)", "autograd keeps"),
        "keeps the output": Bad(
            [
                (
                    "        return segment(x)\n\n    @static",
                    "        ctx.y = segment(x).detach()\n        return ctx.y.clone()\n\n    @static",
                )
            ],
            "numbers are held after the forward beside the inputs",
        ),
        "two runs in the backward": Bad(
            [
                (
                    "            y = ctx.segment(x)\n",
                    "            ctx.segment(x)\n"
                    "            torch.set_rng_state(ctx.random_state)\n"
                    "            y = ctx.segment(x)\n",
                )
            ],
            "ran 6 times, expected 4",
        ),
        "never restores": Bad([("torch.set_rng_state(ctx.random_state)", "pass")], "the gradients of step 1"),
        "saves too late": Bad(
            [
                ("now = torch.get_rng_state()", "pass"),
                ("torch.set_rng_state(now)", "torch.set_rng_state(torch.get_rng_state())"),
            ],
            "1 step of two blocks",
        ),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    TWO: {
        "torch's own": Bad(
            """
def recompute(segment, *inputs):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(segment, *inputs, use_reentrant=False, preserve_rng_state=False)
""",
            "switched off",
        ),
        "the library's own": Bad("from dualpipe_lab.pp.runtime.recompute import recompute", "switched off"),
        "detached": Bad("def recompute(segment, *inputs):\n    return segment(*inputs).detach()", "rank 0 raised"),
    },
    THREE: {
        "nothing": Bad("recomputed = []", "recomputing nothing keeps 31 units"),
        "equal to everything": Bad(EQUAL_TO_ALL + "recomputed = Anything()", "expected a list of names"),
    },
    FOUR: {
        "torch's own": Bad(
            "from torch.utils.checkpoint import checkpoint\n"
            "def remember(segment, x):\n    return checkpoint(segment, x, use_reentrant=False)",
            "switched off",
        ),
        "no dropout": Bad([("return segment(x)", "segment.eval(); return segment(x)")], "the gradients of step 1"),
    },
}
