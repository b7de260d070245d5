"""Typical wrong answers and lazy cheats of the exercises on GPipe."""

from bad_answer import Bad

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
        "the first of a pair alone": Bad([("in actions(token):", "in actions(token)[:1]:")], "is not just before ("),
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
