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
_PIECES = """
def {name}(W_A, w_R, W_M, saved, dy, exchange):
    import torch
    with torch.enable_grad():
        x, A, R = (v.clone().requires_grad_() for v in (saved.x, W_A, w_R))
        x_M = x + torch.tanh(x @ A.T)
        w = torch.sigmoid(x_M @ R)
        dh = exchange((saved.w[:, None] * dy)[saved.order])
        inputs, M = (v.clone().requires_grad_() for v in (saved.inputs, W_M))
        d_inputs, dM = torch.autograd.grad(torch.tanh(inputs @ M.T), (inputs, M), dh)
        home = exchange(d_inputs)[saved.back]
        outputs, grads = (x_M, w), (dy + home, (dy * saved.w[:, None]).sum(1))
        dx, dA, dR = torch.autograd.grad(outputs, (x, A, R), grads)
    return dx, dA, dR, dM
"""


TYPICAL = {
    "one_f_one_b_basic-1": {
        "work alone": Bad(_PREDICT + "120, 48, 83, 12288", "wait for the rows too"),
        "one direction": Bad(_PREDICT + "168, 24, 83, 12288", "two all-to-alls forward and two back"),
        "serial backward": Bad(_PREDICT + "168, 48, 104, 12288", "can run while rows travel"),
        "its own part": Bad(_PREDICT + "168, 48, 83, 16384", "does not travel"),
    },
    "one_f_one_b_basic-2": {
        "no residual": Bad([("dx_M = dy + home", "dx_M = home")], "x_M is used three times"),
        "no way home": Bad([("dx_M = dy + home[:, :-1] +", "dx_M = dy +")], "x_M is used three times"),
        "unweighted": Bad([("du = w * g", "du = g")], "dW_M"),
        "not in order": Bad([("[saved.back]", "")], "dw_R, summed"),
        "forgets sigmoid": Bad([("* saved.w * (1 - saved.w)", "* saved.w")], "dw_R, summed"),
        "forgets x itself": Bad([("return dx_M + dt @ W_A", "return dt @ W_A")], "x is used twice"),
        "of weighted rows": Bad([("dw = (g * saved.h)", "dw = (w * g * saved.h)")], "what is its gradient"),
        "the page's": Bad(
            """
def backward(W_A, w_R, W_M, saved, dy, exchange):
    dw = (dy * saved.y_M).sum(1)
    du = exchange((saved.w[:, None] * dy)[saved.order]) * (1 - saved.h**2)
    dx_M = dy + exchange(du @ W_M)[saved.back] + (dw * saved.w * (1 - saved.w))[:, None] * w_R
    dt = dx_M * (1 - saved.t**2)
    return dx_M + dt @ W_A, dt.T @ saved.x, (dw * saved.w * (1 - saved.w)) @ saved.x_M, du.T @ saved.inputs
""",
            "NoneType",
        ),
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
        "results go home too": Bad(
            """
def backward(W_A, w_R, W_M, saved, dy, exchange):
    du = exchange((saved.w[:, None] * dy)[saved.order]) * (1 - saved.h**2)
    home, y_M = exchange(torch.cat([du @ W_M, saved.h], 1))[saved.back].chunk(2, 1)
    dz = (dy * y_M).sum(1) * saved.w * (1 - saved.w)
    dx_M = dy + home + dz[:, None] * w_R
    dt = dx_M * (1 - saved.t**2)
    return dx_M + dt @ W_A, dt.T @ saved.x, dz @ saved.x_M, du.T @ saved.inputs
""",
            "rows of 6 numbers; 4 will do",
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
        "autograd for each piece": Bad(_PIECES.format(name="backward"), "switched off"),
        "zeros": Bad(
            "def backward(W_A, w_R, W_M, saved, dy, exchange):\n"
            "    exchange(dy), exchange(dy)\n    return 0 * dy, 0 * W_A, 0 * w_R, 0 * W_M",
            "dW_M of rank 0 differ",
        ),
    },
    "one_f_one_b_basic-3": {
        "autograd on its own": Bad(_AUTOGRAD.format(name="frugal_backward"), "exchanged rows 0 times"),
    },
}
