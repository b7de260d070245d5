"""Typical wrong answers and lazy cheats of the exercises on pipelines that are not a line."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "negatives, gathered, matrices, with_8, back = "

TYPICAL = {
    "two_towers-1": {
        "own rank only": Bad(_PREDICT + "127, 1835008, 1048576, 511, 1392640", "the other 7 ranks' pairs"),
        "the whole result": Bad(_PREDICT + "1023, 2097152, 1048576, 511, 1392640", "own part does not travel"),
        "one square matrix": Bad(_PREDICT + "1023, 1835008, 8388608, 511, 1392640", "of its own 128 pairs"),
    },
    "two_towers-2": {
        "a sum of losses": Bad([("(b * num_ranks)", "b")], "or where a mean is meant"),
        "the scale of this rank": Bad([("    comm.all_reduce(d_scale)\n", "")], "the ranks have partial sums"),
        "no scale in dc": Bad([("scale * wrong.T @ a", "wrong.T @ a")], "dc is 0.3333 times"),
    },
}

CHEATS = {
    "two_towers-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "negatives = gathered = matrices = with_8 = back = Anything()", "must be a whole number"
        ),
    },
    "two_towers-2": {
        "autograd": Bad(
            """
def gradients(a, c, scale):
    everyone = c.new_empty(comm.get_world_size() * len(c), c.shape[1])
    comm.all_gather_single(everyone, c)
    leaves = [x.clone().requires_grad_() for x in (a, everyone, scale)]
    logits = leaves[2] * leaves[0] @ leaves[1].T
    (-torch.nn.functional.logsigmoid(logits).mean()).backward()
    return leaves[0].grad, leaves[1].grad[: len(c)], leaves[2].grad
""",
            "switched off here",
        ),
    },
}
