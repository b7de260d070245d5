"""Typical wrong answers and lazy cheats of the exercises on GPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "gpipe-6": {
        "1F1B": Bad(
            [
                (
                    '" ".join(f"{stage}{kind}{i}" for kind in "FB" for i in range(m))',
                    '" ".join(f"{stage}F{i} {stage}B{i}" for i in range(m))',
                )
            ],
            "runs a forward after a backward",
        ),
        "with messages": Bad([('f"{stage}{kind}{i}"', 'f"{stage}RECV_{kind}{i} {stage}{kind}{i}"')], "p = 1, m = 1"),
        "every second row backwards": Bad(
            [("for i in range(m))", "for i in range(m)[:: 1 - 2 * (stage % 2)])")], "all rows need one order"
        ),
    },
    "gpipe-7": {
        "a message to itself": Bad(
            [(" and place(source, i) != me", ""), (" and place(target, i) != me", "")], "are both here"
        ),
        "the first of a pair alone": Bad(
            [("in actions(token):", "in actions(token)[:1]:")], "does not stand just before ("
        ),
        "W receives, too": Bad([('if kind == "W":', 'if kind == "?":')], "a W needs no message and makes none"),
    },
    "gpipe-8": {
        "y with its graph": Bad([("return y.detach(), (x, y)", "return y, (x, y)")], "y still has its graph"),
        "one leaf for all microbatches": Bad(
            [("x = x.detach().requires_grad_(", "x = x.requires_grad_(")], "work on x.detach()"
        ),
        "the last microbatch counts": Bad(
            [
                (
                    "torch.autograd.backward(y, dy)",
                    "for p in self.parameters:\n            p.grad = None\n        torch.autograd.backward(y, dy)",
                )
            ],
            "adds to what is there",
        ),
    },
    "gpipe-9": {
        "1/m again": Bad(
            [
                (
                    "    run.after_b(stage, i, run.stages[stage].backward(*run.before_b(stage, i)))",
                    "    saved, dy = run.before_b(stage, i)\n"
                    "    run.after_b(stage, i, run.stages[stage].backward(saved, dy / len(run.inputs)))",
                )
            ],
            "nothing divides it again",
        ),
        "all sends waited for at the end": Bad(
            [('if way == "B" else []:', 'if way == "?" else []:')], "so wait for that send then"
        ),
        "unknown words passed over": Bad(
            [("raise ValueError(", "continue\n            raise ValueError(")], "0X0 was passed over"
        ),
    },
    "gpipe-1": {
        "free messages": Bad("makespan, bubble, peak = 54, 18, 6", "free messages"),
        "one way": Bad("makespan, bubble, peak = 57, 21, 6", "gradients travel too"),
        "peak of 1F1B": Bad("makespan, bubble, peak = 60, 24, 4", "before its first backward"),
    },
    "gpipe-2": {
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
    },
    "gpipe-3": {
        "lost 1/M": Bad(
            [(" / num_microbatches).backward", ").backward")],
            "3 times those of one process, the number of microbatches",
        ),
        "keeps every output": Bad(
            [
                ("kept, sends = [], []", "kept, sends, ys = [], [], []"),
                ("        if not last:\n", "        ys.append(y)\n        if not last:\n"),
            ],
            "until its backward a microbatch needs its input and nothing else",
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
        "forgets a microbatch": Bad([(" 0B7", "")], "the validator says"),
    },
    "gpipe-5": {
        "mean of means": Bad([(" * len(x) / num_rows", " / len(inputs)")], "microbatches of 2, 1 rows"),
        "empty is nan": Bad([("if len(x) == 0:", "if False:")], "the returned loss is nan"),
        "forgets what was there": Bad(
            [("total = 0.0", "total = 0.0\n    model.zero_grad()")], "the step before are gone"
        ),
    },
}

CHEATS = {
    "gpipe-6": {
        "the library's own": Bad(
            "from dualpipe_lab.pp.schedules import gpipe\n\ndef gpipe_rows(p, m):\n    return gpipe(p, m).rows()\n\n"
            "def gpipe_place(stage, microbatch):\n    return stage\n",
            "is the library's",
        )
    },
    "gpipe-7": {
        "the library's own": Bad(
            [("import re\n", "import re\nfrom dualpipe_lab.pp import lowering\n")], "is the library's"
        )
    },
    "gpipe-8": {"nothing": Bad([("return y.detach(), (x, y)", "return x.detach(), (x, y)")], "y of 0 differs")},
    "gpipe-9": {
        "the whole trainer": Bad(
            [("import Stage\n", "import Stage\nfrom mine.train import Trainer\n")], "mine.train is not before execute"
        ),
    },
    "gpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + "makespan = bubble = peak = Anything()", "whole number")},
    "gpipe-2": {
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
    },
    "gpipe-4": {
        "empty": Bad("rows = []", "0 rows for 4 ranks"),
    },
    "gpipe-5": {
        "returns a number": Bad(
            "def accumulate(model, loss_fn, inputs, targets):\n    return 1.0",
            "all zero; does the loss of each microbatch have its backward?",
        )
    },
}
