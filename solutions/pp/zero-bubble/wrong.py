"""Typical wrong answers and lazy cheats of the exercises on zero bubble."""

from bad_answer import EQUAL_TO_ALL, Bad

_KEEP = "self.kept[m] = x, h, da, dy"
_TAKE = "x, h, da, dy = self.kept.pop(m)"
_START = """
class SplitMLP:
    def __init__(self, w1, w2):
        self.w1, self.w2 = w1, w2
        self.dw1, self.dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
        self.kept = {}
"""

TYPICAL = {
    "zero_bubble-1": {
        "published": Bad([("9, 6", "3, 6")], "that is the published form"),
        "nothing saved": Bad([("9, 6", "15, 6")], "moves no W"),
        "less than nothing": Bad([("9, 6", "9, -9")], "less than nothing"),
        "H2 as H1": Bad([("9, 6", "9, 9")], "helps with a barrier too"),
        "inside the row": Bad([("9, 6", "9, 3")], "inside a row"),
        "zero bubble": Bad([("75", "72")], "one rank's work"),
        "with a barrier": Bad([("75", "78")], "a step with a barrier"),
    },
    "zero_bubble-2": {
        "= instead of +=": Bad([("dw1 += ", "dw1 = ")], "dw1 is the gradient of microbatch 1 alone"),
        "no mask": Bad([(" * (h > 0)", "")], "went through the ReLU unchanged"),
        "mask of the output's gradient": Bad([("(h > 0)", "((dy @ self.w2) > 0)")], "the gradient of x differs"),
        "a small number taken for 0": Bad([("(h > 0)", "(h > 1e-3)")], "where h is 2e-05, it passes"),
        "products of W made by I": Bad(
            [
                (_KEEP, "self.kept[m] = da.T @ x, dy.T @ h"),
                (_TAKE, "dw1, dw2 = self.kept.pop(m)"),
                ("da.T @ x\n        self", "dw1\n        self"),
                ("+= dy.T @ h", "+= dw2"),
            ],
            "I0 made 4 matrix products, 2 are enough",
        ),
        "I again in W": Bad(
            [
                (_KEEP, "self.kept[m] = x, h, dy"),
                (_TAKE, "x, h, dy = self.kept.pop(m)\n        da = dy @ self.w2 * (h > 0)"),
            ],
            "W0 made 3 matrix products",
        ),
        "forward again": Bad(
            [
                ("self.kept[m] = x, h\n", "self.kept[m] = x,\n"),
                ("x, h = self.kept[m]", "(x,) = self.kept[m]\n        h = (x @ self.w1.T).clamp(min=0)"),
            ],
            "I0 made 3 matrix products",
        ),
        "keeps everything": Bad([("kept.pop(m)", "kept[m]")], "microbatch 0 needs nothing"),
        "keeps a too": Bad(
            [
                ("h = (x @ self.w1.T).clamp(min=0)", "a = x @ self.w1.T\n        h = a.clamp(min=0)"),
                ("self.kept[m] = x, h\n", "self.kept[m] = x, h, a\n"),
                ("x, h = self.kept[m]", "x, h, _ = self.kept[m]"),
            ],
            "needs x and h",
        ),
        "W in the order of I": Bad([("kept.pop(m)", "kept.pop(min(self.kept))")], "after F0 F1 I0 I1 W1"),
        "x let go by I": Bad([("x, h = self.kept[m]", "x, h = self.kept.pop(m)"), (_KEEP, "pass")], "KeyError"),
        "mask in place": Bad(
            [("da = dy @ self.w2 * (h > 0)", "da = (dy @ self.w2) * (h > 0)\n        dy *= 1 + (m > 0)")],
            "dy was changed in place",
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
        "a W forgotten": Bad([(" 0W5", "")], "the validator says"),
    },
    "zero_bubble-4": {
        "grad =": Bad(
            [("grad if parameter.grad is None else parameter.grad + grad", "grad")],
            "F0 I0 W0 F1 I1 W1: after step 1, the gradient is that of microbatch 1 alone",
        ),
        "the latest dy": Bad(
            [("due.pop(m))", "latest)"), ("due[m] = dys[m]", "latest = due[m] = dys[m]")],
            "W0 started from the gradient that arrived for microbatch 1",
        ),
        "cleared at the start": Bad(
            [("graphs, due, sent = {}, {}, []", "graphs, due, sent = {}, {}, []\n    stage.zero_grad()")],
            "the gradients of the step before are gone",
        ),
        "W before its I taken from the list": Bad(
            [('raise ValueError(f"{word} comes before I{m}")', "due[m] = dys[m]")], "expected a ValueError"
        ),
        "W before its I left out": Bad(
            [('raise ValueError(f"{word} comes before I{m}")', "continue")], "W0 comes before I0 without an error"
        ),
        "I does it all": Bad(
            """
def follow(stage, row, inputs, dys):
    graphs, sent, seen = {}, [], set()
    for w in row.split():
        k, m = w[0], int(w[1:])
        if k == "F":
            x = inputs[m].detach().requires_grad_()
            graphs[m] = x, stage(x)
        elif k == "I":
            x, y = graphs[m]
            y.backward(dys[m])
            sent.append(x.grad)
            seen.add(m)
        elif m not in seen:
            raise ValueError(w)
    return sent
""",
            "F0 I0: after step 1, the weights have a gradient",
        ),
        "I does it all and W adds it": Bad(
            [
                (
                    "sent += torch.autograd.grad(y, x, due[m], retain_graph=True)",
                    "dx, *made[m] = torch.autograd.grad(y, [x, *parameters], due[m]); sent.append(dx)",
                ),
                ("graphs, due, sent = {}, {}, []", "graphs, due, sent, made = {}, {}, [], {}"),
                ("grads = torch.autograd.grad(y, parameters, due.pop(m))", "grads = made[m]"),
            ],
            "those of the weights' gradients wait for W",
        ),
        "all F, then all I": Bad(
            [("for word in row.split():", "for word in sorted(row.split(), key=lambda w: 'FIW'.index(w[0])):")],
            "ran F0 F1 I0 I1, the row is F0 I0 F1 I1 without its W",
        ),
        "KeyError": Bad([("if m not in due:", "if False:")], "raised KeyError"),
        "W keeps the graph": Bad(
            [("parameters, due.pop(m))", "parameters, due.pop(m), retain_graph=True)")],
            "F0 I0 W0 F1 I1 W1: F1 starts while autograd keeps",
        ),
        "I counts W too": Bad(
            [("sent += torch", "y.backward(due[m], retain_graph=True); sent += torch")],
            "the weights have a gradient; an I makes none",
        ),
    },
}

CHEATS = {
    "zero_bubble-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "idle_h1 = idle_h2 = step_without_barrier = Anything()", "whole number"
        )
    },
    "zero_bubble-2": {
        "autograd": Bad(
            _START
            + """
    def forward(self, m, x):
        x = x.detach().requires_grad_()
        w1, w2 = (w.detach().requires_grad_() for w in (self.w1, self.w2))
        self.kept[m] = x, torch.relu(x @ w1.T) @ w2.T, w1, w2
        return self.kept[m][1].detach()
    def input_grad(self, m, dy):
        x, y, w1, w2 = self.kept[m]
        self.kept[m] = y, dy, w1, w2
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    def weight_grad(self, m):
        y, dy, w1, w2 = self.kept.pop(m)
        dw1, dw2 = torch.autograd.grad(y, (w1, w2), dy)
        self.dw1 += dw1
        self.dw2 += dw2
""",
            "36 are enough",
        ),
        "nothing": Bad(
            _START
            + """
    def forward(self, m, x):
        return x
    def input_grad(self, m, dy):
        return dy
    def weight_grad(self, m):
        pass
""",
            "y differs from autograd's",
        ),
    },
    "zero_bubble-3": {
        "empty": Bad("rows = []", "0 rows for 4 ranks"),
        "the library's": Bad("rows = lab.schedules.zero_bubble_h2(4, 6).rows()", "has room for"),
    },
    "zero_bubble-4": {
        "refuses all": Bad("def follow(stage, row, inputs, dys):\n    raise ValueError(row)", "ValueError"),
        "returns nothing": Bad("def follow(stage, row, inputs, dys):\n    return []", "expected 1 gradients"),
    },
}
