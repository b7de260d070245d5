"""Typical wrong answers and lazy cheats of the exercises on the serial order."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "pair, waiting, split_backward, num_bytes = "
_AUTOGRAD = """
def {name}(W_A, w_R, W_M, saved, dy, exchange):
    import torch
    x, A, R, M = (v.clone().requires_grad_() for v in (saved.x, W_A, w_R, W_M))
    x_M = x + torch.tanh(x @ A.T)
    y = x_M + torch.sigmoid(x_M @ R)[:, None] * torch.tanh(x_M @ M.T)
    y.backward(dy)
    return x.grad, A.grad, R.grad, M.grad
"""


TYPICAL = {
    "one_f_one_b_basic-1": {
        "work alone": Bad(_PREDICT + "120, 48, 83, 12288", "wait for the rows too"),
        "one direction": Bad(_PREDICT + "168, 24, 83, 12288", "two all-to-alls forward and two back"),
        "serial backward": Bad(_PREDICT + "168, 48, 104, 12288", "can run while rows travel"),
    },
    "one_f_one_b_basic-2": {
        "no residual": Bad([("dx_M = dy + home", "dx_M = home")], "x_M is used three times"),
        "forgets x itself": Bad([("return dx_M + dt @ W_A", "return dt @ W_A")], "x is used twice"),
        "fetches the results": Bad(
            """
def backward(W_A, w_R, W_M, saved, dy, exchange):
    y_M = exchange(saved.h)[saved.back]
    du = exchange((saved.w[:, None] * dy)[saved.order]) * (1 - saved.h**2)
    dz = (dy * y_M).sum(1) * saved.w * (1 - saved.w)
    dx_M = dy + exchange(du @ W_M)[saved.back] + dz[:, None] * w_R
    dt = dx_M * (1 - saved.t**2)
    return dx_M + dt @ W_A, dt.T @ saved.x, dz @ saved.x_M, du.T @ saved.inputs
""",
            "exchanged rows 3 times",
        ),
    },
    "one_f_one_b_basic-3": {
        "as it was": Bad([("dw = (dy * saved.y_M)", "dw = (rows * saved.y_M)")], "on whose rows?"),
        "order alone": Bad([("dw = (dy * saved.y_M)", "dw = (rows[saved.back] * saved.y_M)")], "what is its gradient"),
        "nothing for the router": Bad([("dw = (dy * saved.y_M)", "dw = (0 * dy * saved.y_M)")], "dw_R"),
    },
}

CHEATS = {
    "one_f_one_b_basic-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "pair = waiting = split_backward = num_bytes = Anything()", "must be a whole number"
        ),
    },
    "one_f_one_b_basic-2": {
        "autograd on its own": Bad(_AUTOGRAD.format(name="backward"), "switched off"),
    },
    "one_f_one_b_basic-3": {
        "autograd on its own": Bad(_AUTOGRAD.format(name="frugal_backward"), "exchanged rows 0 times"),
    },
}
