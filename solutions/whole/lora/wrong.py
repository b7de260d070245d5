"""Typical wrong answers and lazy cheats of the exercises on low-rank adapters."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO = "lora-1", "lora-2"
NUMBERS = "zero_1, zero_3, gradients, gathered = "
SUM = "    comm.all_reduce(both)\n"

TYPICAL = {
    ONE: {
        "nothing sharded": Bad(NUMBERS + "16_640, 4_160, 60, 24_120", "12 of the 16 bytes"),
        "ZeRO-2": Bad(NUMBERS + "16_220, 4_160, 60, 24_120", "that is ZeRO-2"),
        "gradients of frozen weights": Bad(NUMBERS + "32_280, 4_160, 60, 24_120", "have no gradient"),
    },
    TWO: {
        "no sum": Bad([(SUM, "")], "the ranks have partial sums, and their sum is right"),
        "dx and dA summed": Bad(
            """
def backward(x, A1, B1, A2, B2, dy1, dy2, s):
    dB1, dB2 = s * dy1.t() @ (x @ A1.t()), s * dy2.t() @ (x @ A2.t())
    du1, du2 = s * dy1 @ B1, s * dy2 @ B2
    sums = torch.cat([du1 @ A1 + du2 @ A2, du1.t() @ x, du2.t() @ x])
    comm.all_reduce(sums)
    dx, dA1, dA2 = sums.split([len(x), len(A1), len(A2)])
    return dx, dA1, dB1, dA2, dB2
""",
            "sum du, R numbers per token",
        ),
        "no scale in du": Bad([("[s * dy1 @ B1, s * dy2 @ B2]", "[dy1 @ B1, dy2 @ B2]")], "dx: the scale s is missing"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {
        "nothing": Bad("def backward(*args):\n    return None", "return five tensors"),
    },
}
