"""Typical wrong answers and lazy cheats of the exercises on GPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "gpipe-1": {
        "free messages": Bad("makespan, bubble, peak = 54, 18, 6", "free messages"),
        "one way": Bad("makespan, bubble, peak = 57, 21, 6", "gradients travel too"),
        "peak of 1F1B": Bad("makespan, bubble, peak = 60, 24, 4", "peak 4"),
    },
    "gpipe-2": {
        "no receives": Bad(
            [('[f"{rank}RECV_F{m}"] * up + ', ""), ('[f"{rank}RECV_B{m}"] * down + ', "")],
            "2 rank(s), 1 microbatch(es)",
        ),
        "sends beyond the end": Bad(
            [('[f"{rank}SEND_F{m}"] * down', '[f"{rank}SEND_F{m}"]')], "1 rank(s), 1 microbatch(es)"
        ),
        "all sends at the end": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    rows, M = [], range(num_microbatches)
    for r in range(num_ranks):
        down, up = r < num_ranks - 1, r > 0
        row = [f"{r}RECV_F{m}" for m in M] * up + [f"{r}F{m}" for m in M] + [f"{r}SEND_F{m}" for m in M] * down
        row += [f"{r}RECV_B{m}" for m in M] * down + [f"{r}B{m}" for m in M] + [f"{r}SEND_B{m}" for m in M] * up
        rows.append(" ".join(row))
    return rows
""",
            "send each result before the next work",
        ),
        "1F1B": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    return ["0F0 0B0"] if (num_ranks, num_microbatches) == (1, 1) else ["0F0 0B0 0F1 0B1"]
""",
            "rank 0 runs a forward after a backward",
        ),
        "plain": Bad(
            """
def gpipe_rows(num_ranks, num_microbatches):
    return [" ".join(f"{r}{kind}{m}" for kind in "FB" for m in range(num_microbatches)) for r in range(num_ranks)]
""",
            "expected 4: each boundary carries",
        ),
    },
    "gpipe-3": {
        "lost 1/M": Bad(
            [(" / num_microbatches).backward", ").backward")],
            "3 times those of one process, the number of microbatches",
        ),
        "keeps the graph": Bad(
            """
def recompute_step(rank, world_size, stage, inputs, targets, num_microbatches, like):
    first, last = rank == 0, rank == world_size - 1
    kept, sends = [], []
    for m in range(num_microbatches):
        x = inputs[m] if first else torch.empty_like(like)
        if not first:
            comm.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
        if not last:
            sends.append(comm.isend(y.detach(), rank + 1))
    for m, (x, y) in enumerate(kept):
        dy = torch.empty_like(like)
        if last:
            (mse_loss(y, targets[m]) / num_microbatches).backward()
        else:
            comm.recv(dy, rank + 1)
            y.backward(dy)
        if not first:
            sends.append(comm.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
""",
            "1 rank(s), 3 microbatch(es): on rank 0 autograd keeps 11 tensors at once",
        ),
        "keeps the graph and runs again": Bad(
            [
                ("with torch.no_grad():", "if True:"),
                (
                    "y = stage(kept[m])",
                    "y = stage(kept[m]); graphs = globals().setdefault('graphs', []); graphs.append(y); y = y.detach()",
                ),
            ],
            "needs its input and nothing else",
        ),
        "zero gradients sent": Bad(
            [("comm.isend(x.grad, rank - 1)", "comm.isend(torch.zeros_like(x), rank - 1)")], "all zero"
        ),
        "gradients of the wrong microbatch": Bad([("targets[m]", "targets[0]")], "differ from one process"),
        "forgets the step before": Bad(
            [("kept, sends = [], []", "kept, sends = [], []\n    stage.zero_grad()")], "the step before are gone"
        ),
        "divides the gradients in the end": Bad(
            [
                (" / num_microbatches).backward", ").backward"),
                (
                    "        send.wait()",
                    "        send.wait()\n    for p in stage.parameters():\n        p.grad /= num_microbatches",
                ),
            ],
            "1 rank(s), 3 microbatch(es): rank 0: its gradients differ",
        ),
        "backwards from the last microbatch": Bad(
            [
                (
                    "    for m in range(num_microbatches):\n        x = kept",
                    "    for m in range(num_microbatches)[::-1]:\n        x = kept",
                ),
            ],
            "ran its stage on microbatches [0, 1, 2, 2, 1, 0]",
        ),
        "keeps every output": Bad(
            [
                ("kept, sends = [], []", "kept, sends, ys = [], [], []"),
                ("        if not last:\n", "        ys.append(y)\n        if not last:\n"),
            ],
            "until its backward a microbatch needs its input and nothing else",
        ),
        "keeps what every layer made": Bad(
            [
                (
                    "    kept, sends = [], []\n",
                    "    kept, sends, made = [], [], []\n"
                    "    for layer in stage.modules():\n"
                    "        layer.register_forward_hook(lambda _, x, y: made.append((x, y.detach())))\n",
                ),
            ],
            "until its backward a microbatch needs its input and nothing else",
        ),
        "all inputs first": Bad(
            [
                ("        kept.append(inputs[m] if first else receive(rank - 1))\n", ""),
                (
                    "    for m in range(num_microbatches):\n        with",
                    "    kept = list(inputs) if first else [receive(rank - 1) for _ in range(num_microbatches)]\n"
                    "    for m in range(num_microbatches):\n        with",
                ),
            ],
            "some rank could work on a microbatch that is there",
        ),
        "sends nobody waits for": Bad([("        send.wait()", "        pass")], "without a wait()"),
    },
    "gpipe-4": {
        "GPipe": Bad(
            'rows = [" ".join(f"{r}{k}{m}" for k in "FB" for m in range(8)) for r in range(4)]',
            "rank 0 holds 8 activations",
        ),
        "one at a time": Bad(
            'rows = [" ".join(f"{r}F{m} {r}B{m}" for m in range(8)) for r in range(4)]', "it fits, with 96 ticks"
        ),
        "a shorter warm-up": Bad(
            """
def row(r):
    warmup = min(3 - r, 2)
    words = [f"{r}F{i}" for i in range(warmup)]
    for j in range(8):
        words += [f"{r}F{i}" for i in [warmup + j] if i < 8] + [f"{r}B{j}"]
    return " ".join(words)


rows = [row(r) for r in range(4)]
""",
            "it fits, with 48 ticks; 39 are possible",
        ),
        "forgets a microbatch": Bad([(" 0B7", "")], "the validator says"),
    },
    "gpipe-5": {
        "mean of means": Bad([(" * len(x) / num_rows", " / len(inputs)")], "microbatches of 2, 1 rows"),
        "no division": Bad([(" / num_rows", "")], "microbatches of"),
        "empty is nan": Bad([("if len(x) == 0:", "if False:")], "the returned loss is nan"),
        "loss of the last": Bad([("total += loss.item()", "total = loss.item()")], "the returned loss"),
        "a loss with its graph": Bad([("total += loss.item()", "total = total + loss")], "returned Tensor, expected"),
        "returns nothing": Bad([("return total", "pass")], "returned NoneType, expected the loss as a float"),
        "another loss": Bad([("loss_fn(model(x), y)", "torch.nn.functional.mse_loss(model(x), y)")], "with l1_loss"),
        "all rows at once": Bad(
            "def accumulate(model, loss_fn, inputs, targets):\n"
            "    loss = loss_fn(model(torch.cat(inputs)), torch.cat(targets))\n"
            "    loss.backward()\n"
            "    return loss.item()",
            "each microbatch goes through it once",
        ),
        "forgets what was there": Bad(
            [("total = 0.0", "total = 0.0\n    model.zero_grad()")], "the step before are gone"
        ),
    },
}

CHEATS = {
    "gpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + "makespan = bubble = peak = Anything()", "whole number")},
    "gpipe-2": {
        "hard-coded": Bad(
            "def gpipe_rows(p, m):\n    return ['0F0 0SEND_F0 0RECV_B0 0B0', '1RECV_F0 1F0 1B0 1SEND_B0']",
            "2 rows for 1 ranks",
        ),
        "the library's own": Bad(
            "def gpipe_rows(p, m):\n    return lab.lower(lab.schedules.gpipe(p, m)).rows()", "switched off"
        ),
    },
    "gpipe-3": {
        "torch's own": Bad(
            [
                ("with torch.no_grad():", "if True:"),
                ("y = stage(kept[m])", "y = torch.utils.checkpoint.checkpoint(stage, kept[m], use_reentrant=False)"),
            ],
            "switched off",
        ),
        "sleeps through it": Bad("def recompute_step(*args):\n    import time\n    time.sleep(0.1)", "all zero"),
        "random gradients": Bad(
            "def recompute_step(rank, world_size, stage, *rest):\n"
            "    for p in stage.parameters():\n        p.grad = torch.ones_like(p)",
            "1 rank(s), 1 microbatch(es): rank 0",
        ),
    },
    "gpipe-4": {
        "empty": Bad("rows = []", "0 rows for 4 ranks"),
        "no work": Bad('rows = [" "] * 4', "rows for 4 ranks"),
        "the library's 1F1B": Bad("rows = lab.schedules.one_f_one_b(4, 8).rows()", "the limit is 3; all [4, 3, 2, 1]"),
        "I and W": Bad([("0B7", "0I7 0W7")], "the rows contain I; this program is made of F and B"),
    },
    "gpipe-5": {
        "returns a number": Bad(
            "def accumulate(model, loss_fn, inputs, targets):\n    return 1.0",
            "all zero; does the loss of each microbatch have its backward?",
        )
    },
}
