"""Typical wrong answers and lazy cheats of the exercises on data parallelism."""

from bad_answer import Bad

TYPICAL = {
    "data_parallel-5": {
        "mean of means": Bad(
            [('reduction="sum")\n    return summed / max(total, 1.0)', 'reduction="mean")\n    return summed')],
            "the mean over this rank's own tokens",
        ),
        "0 by 0": Bad([("max(total, 1.0)", "total")], "0 was divided by 0"),
        "nothing where nothing is": Bad(
            [
                ("parameter.grad = torch.zeros_like(parameter)", "continue"),
            ],
            "no progress",
        ),
        "counts every target": Bad(
            [("(targets != -100).sum()", "(targets >= -100).sum()")], "it counts targets of -100"
        ),
    },
    "data_parallel-3": {
        "the sum over its own tokens": Bad(
            [("    comm.all_reduce(n)\n", ""), ("comm.get_world_size() * loss", "loss")], "depends on its rank"
        ),
        "forgets the ranks": Bad(
            [("comm.get_world_size() * loss", "loss")], "one over the number of ranks: it was divided twice"
        ),
        "zero by zero": Bad(
            [
                ('reduction="sum")', 'reduction="mean") * (targets != -100).sum()'),
                ("loss / n", "loss.nan_to_num() / n if not loss.isnan() else logits.sum() * float('nan')"),
            ],
            "2 rank(s) with [4, 0] valid token(s): rank 0: the gradient of the table is not a number",
        ),
    },
}

CHEATS = {
    "data_parallel-5": {
        "the library's own": Bad(
            [("from mine.ring import all_reduce", "from dualpipe_lab.dp import all_reduce_gradients")],
            "dualpipe_lab.dp.all_reduce_gradients is the library's",
        ),
        "a later part": Bad(
            [("from mine.ring import all_reduce", "from mine.buckets import Buckets")],
            "is not before data",
        ),
    },
    "data_parallel-3": {
        "does nothing": Bad(
            "def backward_and_average(model, tokens, targets, average):\n    pass", "called average() 0"
        ),
    },
}
