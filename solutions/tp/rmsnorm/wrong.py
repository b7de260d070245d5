"""Typical wrong answers and lazy cheats of the exercises on RMSNorm."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "norm_bytes, step_bytes, forward_bytes, times = "

TYPICAL = {
    "rmsnorm-1": {
        "bytes of the weight": Bad(_PREDICT + "2_048, 199_680, 384, 4", "2 (t - 1) / t of them"),
        "per microbatch": Bad(_PREDICT + "3_072, 1_597_440, 384, 4", "not per microbatch"),
        "features travel": Bad(_PREDICT + "3_072, 199_680, 196_608, 4", "features do not travel"),
    },
    "rmsnorm-2": {
        "no epsilon": Bad([(" + EPS).sqrt()", ").sqrt()")], "is EPS under the root"),
        "own squares": Bad([("        comm.all_reduce(squares)\n", "")], "y differs from one process"),
        "own products": Bad([("        comm.all_reduce(inner)\n", "")], "at right angles"),
    },
}

CHEATS = {
    "rmsnorm-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "norm_bytes = step_bytes = forward_bytes = times = Anything()", "must be a whole number"
        ),
    },
    "rmsnorm-2": {
        "the library's own": Bad(
            """
class CutNorm:
    @staticmethod
    def apply(x, gamma, hidden_size):
        from dualpipe_lab import tp
        return tp.RMSNorm(hidden_size, EPS, sharded="hidden")(x)
""",
            "the library's own is switched off",
        ),
    },
}
