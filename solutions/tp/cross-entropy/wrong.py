"""Typical wrong answers and lazy cheats of the exercises on cross-entropy."""

from bad_answer import EQUAL_TO_ALL, Bad

_GATHERS = """
    parts = [torch.empty_like(y) for _ in range(comm.get_world_size())]
    comm.all_gather(parts, y)
    whole = torch.cat(parts, 1)
"""

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
        "spoils y": Bad(
            [("    return losses.sum()", "    y.zero_()\n    return losses.sum()")], "the argument y has changed"
        ),
        "own maximum": Bad(
            [('    comm.all_reduce(largest, "max")\n', "")], "2 rank(s), random logits, rank 0: the loss"
        ),
        "empty part": Bad(
            [(" if y.shape[1] else y.new_full((len(y),), -torch.inf)", "")], "4 entries on 3 rank(s): rank 2 raised"
        ),
    },
    "cross_entropy-3": {
        "as it was": Bad([('    comm.all_reduce(largest, "max")\n', "")], "subtracted different maxima were added up"),
        "no maximum": Bad(
            [('    largest = y.amax(1)\n    comm.all_reduce(largest, "max")\n', "    largest = torch.zeros(len(y))\n")],
            "logits of +-8192, rank 0: the loss of token 0",
        ),
        "the maxima's mean": Bad([('comm.all_reduce(largest, "max")', 'comm.all_reduce(largest, "avg")')], "+-8192"),
    },
    "cross_entropy-4": {
        "as it was": Bad([("gather_from_ranks", "gather_tokens")], "2 times that of one process, the number of ranks"),
        "divides the loss": Bad(
            [
                ("gather_from_ranks", "gather_tokens"),
                ("    loss.backward()", "    loss = loss / comm.get_world_size()\n    loss.backward()"),
            ],
            "rank 0: the loss is",
        ),
        "divides the gradient": Bad(
            [
                ("gather_from_ranks", "gather_tokens"),
                ("    loss.backward()", "    loss.backward()\n    y.grad /= comm.get_world_size()"),
            ],
            "and that is no message",
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
        "gathers": Bad(
            f"""
def loss_and_gradient(y, targets, first):{_GATHERS}
    whole.requires_grad_()
    n = max(int((targets != -100).sum()), 1)
    loss = functional.cross_entropy(whole, targets, reduction="sum") / n
    loss.backward()
    return loss.detach(), whole.grad[:, first : first + y.shape[1]]
""",
            "Logits stay where they are",
        ),
    },
    "cross_entropy-3": {
        "gathers": Bad(
            f"""
def losses(y, targets, first):
    size = torch.tensor(y.shape[1])
    comm.all_reduce(size, "max")
    y = functional.pad(y, (0, int(size) - y.shape[1]), value=-torch.inf){_GATHERS}
    return functional.cross_entropy(whole, targets, reduction="none")
""",
            "One maximum per token is all that is missing",
        ),
    },
    "cross_entropy-4": {
        "no backward": Bad([("    loss.backward()\n", "")], "y.grad is empty"),
    },
}
