"""Typical wrong answers and lazy cheats of the exercises on data parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "data_parallel-1": {
        "means exchanged": Bad("loss, mean_of_means, bytes_sent = 7, 6, 6000", "that is the mean of means"),
        "average over three": Bad("loss, mean_of_means, bytes_sent = 6, 9.33, 6000", "divides by all 4 ranks"),
        "per microbatch": Bad("loss, mean_of_means, bytes_sent = 6, 7, 18000", "once per step"),
        "no factor": Bad("loss, mean_of_means, bytes_sent = 6, 7, 4000", "each byte passes a rank twice"),
    },
    "data_parallel-2": {
        "own tokens only": Bad(
            [("    comm.all_reduce(n)\n", "")], "2 rank(s) with 2, 2 valid token(s): rank 0: the gradients are 2 times"
        ),
        "mean of means": Bad(
            [('reduction="sum") / n', 'reduction="mean") / len(microbatches) / comm.get_world_size()')],
            "2 rank(s) with 1, 3 valid token(s): rank 0: the gradients differ",
        ),
        "sum, then average": Bad(
            [("comm.all_reduce(parameter.grad)", 'comm.all_reduce(parameter.grad, "avg")')],
            "one over the number of ranks: it was divided twice",
        ),
        "sums every microbatch": Bad(
            """
def data_parallel_step(model, microbatches):
    n = torch.tensor(sum(int((targets != -100).sum()) for _, targets in microbatches))
    comm.all_reduce(n)
    most = torch.tensor(len(microbatches))
    comm.all_reduce(most, "max")
    total, held = 0.0, [torch.zeros_like(p) for p in model.parameters()]
    for i in range(int(most)):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        if i < len(microbatches):
            tokens, targets = microbatches[i]
            logits = model(tokens).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten(), reduction="sum") / n
            loss.backward()
            total += loss.item()
        for p, sum_ in zip(model.parameters(), held):
            if p.requires_grad:
                comm.all_reduce(p.grad)
                sum_ += p.grad
    for p, sum_ in zip(model.parameters(), held):
        p.grad = sum_ if p.requires_grad else None
    loss = torch.tensor(total, dtype=torch.float64)
    comm.all_reduce(loss)
    return float(loss)
""",
            "Gradients are summed once per step",
        ),
        "own loss": Bad([("    comm.all_reduce(total)\n", "")], "as the loss, that of all tokens is"),
        "nothing where nothing is": Bad(
            [("if parameter.grad is None:", "if False:")],
            "rank 2 raised",
        ),
        "frozen too": Bad(
            [("        if parameter.requires_grad:\n", "        if True:\n")], "a frozen parameter has got"
        ),
    },
    "data_parallel-3": {
        "as it was": Bad(
            """
def backward_and_average(model, tokens, targets, average):
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    average(model)
""",
            "2 rank(s) with 1, 2 valid token(s): rank 0: each rank has divided by its own tokens",
        ),
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
        "averages twice": Bad(
            [("    average(model)", "    average(model)\n    average(model)")], "called average() 2 times"
        ),
        "sums by itself": Bad(
            [
                ("(comm.get_world_size() * loss / n)", "(loss / n)"),
                (
                    "    average(model)",
                    "    [comm.all_reduce(p.grad) for p in model.parameters() if p.requires_grad]\n    average(model)",
                ),
            ],
            "average() sends the gradients",
        ),
    },
    "data_parallel-4": {
        "in order": Bad("dealt = [[4 * r + i for i in range(4)] for r in range(4)]", "rank 2 has 238 tokens"),
        "to and fro": Bad("dealt = [[0, 15, 3, 1], [9, 12, 8, 5], [7, 2, 14, 11], [10, 13, 4, 6]]", "213 tokens"),
        "dealt twice": Bad("dealt = [[0, 2, 5, 6]] * 4", "dealt out twice"),
        "no fourth": Bad(
            "dealt = [[0, 2, 5, 6], [9, 1, 8, 13], [7, 3, 11, 12], [10, 4, 14]]", "rank 3 needs a list of 4"
        ),
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
        "everybody computes everything": Bad(
            """
def data_parallel_step(model, microbatches):
    import torch.distributed as dist
    parts = [None] * comm.get_world_size()
    dist.all_gather_object(parts, microbatches)
    batch = [pair for part in parts for pair in part]
    n = sum(int((targets != -100).sum()) for _, targets in batch)
    total = sum(
        cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") for x, y in batch
    ) / n
    total.backward()
    return float(total)
""",
            "the ranks sent 0 bytes in all",
        ),
    },
    "data_parallel-3": {
        "does nothing": Bad(
            "def backward_and_average(model, tokens, targets, average):\n    pass", "called average() 0"
        ),
    },
    "data_parallel-4": {
        "a number that is all": Bad(EQUAL_TO_ALL + "dealt = [[Anything()] * 4] * 4", "sequences have the numbers"),
        "negative": Bad(
            "dealt = [[0, 2, 5, 6], [9, 1, 8, 13], [7, 3, 11, 12], [10, 4, 14, -1]]", "sequences have the numbers"
        ),
    },
}
