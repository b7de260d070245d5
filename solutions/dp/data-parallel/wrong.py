"""Typical wrong answers and lazy cheats of the exercises on data parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "data_parallel-1": {
        "means exchanged": Bad("loss, mean_of_means, bytes_sent = 7, 6, 6000", "that is the mean of means"),
        "average over three": Bad("loss, mean_of_means, bytes_sent = 6, 9.33, 6000", "divides by all 4 ranks"),
        "per microbatch": Bad("loss, mean_of_means, bytes_sent = 6, 7, 18000", "once per step"),
    },
    "data_parallel-2": {
        "own tokens only": Bad(
            [("    comm.all_reduce(n)\n", "")], "2 rank(s) with 2, 2 valid token(s): rank 0: the gradients are 2 times"
        ),
        "mean of means": Bad(
            [('reduction="sum") / n', 'reduction="mean") / len(microbatches) / comm.get_world_size()')],
            "2 rank(s) with 1, 3 valid token(s): rank 0: the gradients differ",
        ),
        "nothing where nothing is": Bad(
            [("if parameter.grad is None:", "if False:")],
            "rank 2 raised",
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
            "2 rank(s) with 4, 0 valid token(s): rank 0: the gradients are not numbers",
        ),
    },
    "data_parallel-4": {
        "in order": Bad("dealt = [[4 * r + i for i in range(4)] for r in range(4)]", "rank 2 has 238 tokens"),
        "to and fro": Bad("dealt = [[0, 15, 3, 1], [9, 12, 8, 5], [7, 2, 14, 11], [10, 13, 4, 6]]", "213 tokens"),
        "dealt twice": Bad("dealt = [[0, 2, 5, 6]] * 4", "dealt out twice"),
    },
}

CHEATS = {
    "data_parallel-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "loss = mean_of_means = bytes_sent = Anything()", "must be a whole number"
        ),
    },
    "data_parallel-2": {
        "the library's own": Bad(
            """
def data_parallel_step(model, microbatches):
    from dualpipe_lab.dp.data_parallel import all_reduce_gradients, num_valid_tokens, token_loss
    n = num_valid_tokens([targets for _, targets in microbatches])
    loss = sum((token_loss(model(tokens), targets, n) for tokens, targets in microbatches), torch.zeros(()))
    loss.backward()
    all_reduce_gradients(model.parameters())
    comm.all_reduce(loss)
    return loss
""",
            "the library's own is switched off",
        ),
    },
    "data_parallel-3": {
        "does nothing": Bad(
            "def backward_and_average(model, tokens, targets, average):\n    pass", "called average() 0"
        ),
    },
    "data_parallel-4": {
        "a number that is all": Bad(EQUAL_TO_ALL + "dealt = [[Anything()] * 4] * 4", "sequences have the numbers"),
    },
}
