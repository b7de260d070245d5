"""Typical wrong answers and lazy cheats of the exercises on gradient checkpointing."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO = "gradient_checkpointing-1", "gradient_checkpointing-2"
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
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    TWO: {
        "the library's own": Bad("from dualpipe_lab.pp.runtime.recompute import recompute", "switched off"),
    },
}
