"""Typical wrong answers and lazy cheats of the exercises on zero bubble."""

from bad_answer import Bad

TYPICAL = {
    "zero_bubble-5": {
        "one list, reused before its W": Bad(
            [
                ("        left: Left = []\n", "        left = ALL\n        left.clear()\n"),
                (
                    "Left = list[tuple[Tensor, Tensor, Tensor]]\n",
                    "Left = list[tuple[Tensor, Tensor, Tensor]]\nALL = []\n",
                ),
                ("weight.grad + grad\n", "weight.grad + grad\n        left.clear()\n"),
            ],
            "F0 F1 I0 I1 W0 W1: rank 0: gradient of up",
        ),
        "the product at once, the sum later": Bad(
            [
                ("left.append((weight, x, dy))", "left.append((weight, dy.t() @ x))"),
                ("for weight, x, dy in left:\n            grad = dy.t() @ x\n", "for weight, grad in left:\n"),
            ],
            "an I made 4 matrix products",
        ),
        "slices of a parameter": Bad([("if not weight.is_leaf:", "if weight is None:")], "is lost without a word"),
    },
    "zero_bubble-6": {
        "W at once": Bad([('W{i - stage}"] * (i >= stage)', 'W{i}"]')], "expected"),
        "the last W are forgotten": Bad(
            [('words += [f"W{i}" for i in range(max(m - stage, 0), m)]', "pass")],
            "rank 1, action 3: nothing, expected 1W0",
        ),
        "fewer microbatches than stages": Bad(
            [("warmup = min(p - 1 - stage, m)", "warmup = p - 1 - stage")], "p = 4, m = 2"
        ),
    },
    "zero_bubble-3": {
        "W at once": Bad(
            'rows = [" ".join(w for w in r.split()) for r in ["'
            '0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5", "'
            '1F0 1F1 1F2 1I0 1W0 1F3 1I1 1W1 1F4 1I2 1W2 1F5 1I3 1W3 1I4 1W4 1I5 1W5", "'
            '2F0 2F1 2I0 2W0 2F2 2I1 2W1 2F3 2I2 2W2 2F4 2I3 2W3 2F5 2I4 2W4 2I5 2W5", "'
            '3F0 3I0 3W0 3F1 3I1 3W1 3F2 3I2 3W2 3F3 3I3 3W3 3F4 3I4 3W4 3F5 3I5 3W5"]]',
            "it fits, with 24 ticks",
        ),
        "ZB-H1": Bad(
            "rows = lab.schedules.zero_bubble_h1(4, 6).rows()", "rank 1 holds 4 activations and has room for 3"
        ),
        "W before its I": Bad([("3I0 3F1 3I1 3W0", "3W0 3F1 3I1 3I0")], "the validator says"),
    },
    "zero_bubble-4": {
        "grad =": Bad(
            [("grad if parameter.grad is None else parameter.grad + grad", "grad")],
            "F0 I0 W0 F1 I1 W1: after step 1, the gradient is that of microbatch 1 alone",
        ),
        "W before its I left out": Bad(
            [('raise ValueError(f"{word} comes before I{m}")', "continue")], "W0 comes before I0 without an error"
        ),
        "I counts W too": Bad(
            [("sent += torch", "y.backward(due[m], retain_graph=True); sent += torch")],
            "the weights have a gradient; an I makes none",
        ),
    },
}

CHEATS = {
    "zero_bubble-5": {
        "two passes through the graph": Bad(
            [
                (
                    "return self.backward(saved, dy), left",
                    "return torch.autograd.grad(saved[1], saved[0], dy, retain_graph=True)[0], (saved[1], dy)",
                ),
                ("from typing import Any", "from typing import Any\n\nimport torch"),
                (
                    'before, HOOKS["weight_grad"] = HOOKS["weight_grad"], now_or_later(left)',
                    'before = HOOKS["weight_grad"]',
                ),
                (
                    "for weight, x, dy in left:\n            grad = dy.t() @ x\n"
                    "            weight.grad = grad if weight.grad is None else weight.grad + grad\n",
                    "torch.autograd.backward(*left)\n",
                ),
            ],
            "an I made 4 matrix products",
        ),
    },
    "zero_bubble-6": {
        "the library's own": Bad(
            "from dualpipe_lab.pp import schedules\n\n"
            "def zb_h1_rows(p, m):\n    return schedules.zero_bubble_h1(p, m).rows()\n",
            "is the library's",
        )
    },
    "zero_bubble-3": {
        "empty": Bad("rows = []", "0 rows for 4 ranks"),
    },
    "zero_bubble-4": {
        "refuses all": Bad("def follow(stage, row, inputs, dys):\n    raise ValueError(row)", "ValueError"),
    },
}
