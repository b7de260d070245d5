"""Typical wrong answers and lazy cheats of the exercises on cross-entropy."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "cross_entropy-1": {
        "one way": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 43_008, 860_160_000, 57_344", "each byte passes a rank twice"
        ),
        "forgets the maximum": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 57_344, 860_160_000, 86_016", "the maximum is the third"
        ),
        "own part too": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 86_016, 983_040_000, 114_688", "own eighth does not travel"
        ),
    },
    "cross_entropy-2": {
        "empty part": Bad(
            [(" if y.shape[1] else y.new_full((len(y),), -torch.inf)", "")], "4 entries on 3 rank(s): rank 2 raised"
        ),
        "0 by 0": Bad([("max(int(valid.sum()), 1)", "valid.sum()")], "no target but -100, rank 0: the loss is not"),
        "divides by all tokens": Bad([("max(int(valid.sum()), 1)", "len(y)")], "targets of -100, rank 0: the loss is"),
    },
    "cross_entropy-3": {
        "as it was": Bad([('    comm.all_reduce(largest, "max")\n', "")], "subtracted different maxima were added up"),
        "no maximum": Bad(
            [('    largest = y.amax(1)\n    comm.all_reduce(largest, "max")\n', "    largest = torch.zeros(len(y))\n")],
            "logits of +-8192, rank 0: the loss of token 0",
        ),
        "only for the sum": Bad(
            [("shifted.gather(1, column[:, None])", "(y - y.amax(1, keepdim=True)).gather(1, column[:, None])")],
            "random logits, rank 0: the loss of token",
        ),
    },
}

CHEATS = {
    "cross_entropy-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "loss_bytes = gather_bytes = smoothed_bytes = Anything()", "must be a whole number"
        ),
    },
    "cross_entropy-2": {
        "the library's function": Bad(
            """
def loss_and_gradient(y, targets, first):
    from dualpipe_lab.tp.cross_entropy import CrossEntropy, LossOptions
    from dualpipe_lab.tp.shard import TensorParallel
    y, n = y.requires_grad_(), max(int((targets != -100).sum()), 1)
    loss = CrossEntropy.apply(y, targets, 4, TensorParallel(), LossOptions()).sum() / n
    loss.backward()
    return loss.detach(), y.grad
""",
            "the library's own is switched off",
        ),
    },
    "cross_entropy-3": {
        "past the ledger": Bad(
            """
def losses(y, targets, first):
    parts = [None] * comm.get_world_size()
    torch.distributed.all_gather_object(parts, y)
    return functional.cross_entropy(torch.cat(parts, 1), targets, reduction="none")
""",
            "the ranks sent 0 bytes",
        ),
    },
}
