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
    "zero_bubble-4": {
        "refuses all": Bad("def follow(stage, row, inputs, dys):\n    raise ValueError(row)", "ValueError"),
    },
}
