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
    "one_f_one_b_basic-3": {
        "autograd on its own": Bad(_AUTOGRAD.format(name="frugal_backward"), "exchanged rows 0 times"),
    },
}
