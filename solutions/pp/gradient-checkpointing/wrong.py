"""Typical wrong answers and lazy cheats of the exercises on gradient checkpointing."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"gradient_checkpointing-{number}" for number in range(1, 5))
NUMBERS = "kept, peak, best_length"

TYPICAL = {
    ONE: {
        "an input per block": Bad(f"{NUMBERS} = 36, 39, 2", "one input per block"),
        "one segment only": Bad(f"{NUMBERS} = 12, 27, 2", "the inputs of the segments are there too"),
        "square root of the blocks": Bad(f"{NUMBERS} = 12, 39, 6", "it peaks at 60"),
    },
    TWO: {
        "other masks": Bad([("torch.set_rng_state(ctx.random_state)", "pass")], "dropout: the gradient"),
        "no anchor": Bad([("torch.zeros((), requires_grad=True)", "torch.zeros(())")], "whole numbers"),
        "keeps everything": Bad(
            "def recompute(segment, *inputs):\n    return segment(*inputs)", "one input: autograd keeps"
        ),
    },
    THREE: {
        "too much kept": Bad('recomputed = ["norm 1", "norm 2", "gelu"]', "keeps 23 units"),
        "everything": Bad("recomputed = list(check.gradient_checkpointing.OPERATIONS)", "60 ticks more; 9 are enough"),
        "largest first": Bad('recomputed = ["scores", "values", "gelu"]', "10 ticks more"),
    },
    FOUR: {
        "starter with a fresh seed": Bad(
            [("torch.set_rng_state(now)", "torch.manual_seed(0)")], "the next random number is another one"
        ),
        "no recomputation": Bad("def remember(segment, x):\n    return segment(x)", "autograd keeps"),
        "never restores": Bad([("torch.set_rng_state(ctx.random_state)", "pass")], "the gradients of step 1"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    TWO: {
        "the library's own": Bad("from dualpipe_lab.pp.runtime.recompute import recompute", "switched off"),
    },
    THREE: {
        "equal to everything": Bad(EQUAL_TO_ALL + "recomputed = Anything()", "expected a list of names"),
    },
    FOUR: {
        "torch's own": Bad(
            "from torch.utils.checkpoint import checkpoint\n"
            "def remember(segment, x):\n    return checkpoint(segment, x, use_reentrant=False)",
            "switched off",
        ),
    },
}
