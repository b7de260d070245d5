"""Typical wrong answers and lazy cheats of the exercises on V-shapes."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "zbv_held, zbv_idle, v_min_held, v_min_idle, one_more"
LIBRARY = "rows = list(lab.schedules.{}(3, 3).rows())"
STEP = "def v_step(rank, world_size, near, far, batch, like):\n"

TYPICAL = {
    "v_shapes-1": {
        "full size": Bad(f"{NAMES} = 10, 9, 8, 35, 18", "two half-size ones"),
        "zero bubble": Bad(f"{NAMES} = 20, 0, 8, 35, 18", "local bubble"),
        "rounded late": Bad(f"{NAMES} = 20, 9, 9, 35, 18", "rounded down before"),
    },
    "v_shapes-2": {
        "ZBV": Bad(LIBRARY.format("zbv"), "20 ticks, but rank 0 holds 6"),
        "V-Half": Bad(LIBRARY.format("v_half"), "valid, 23 ticks with 4"),
        "V-Min": Bad(LIBRARY.format("v_min"), "valid, 25 ticks with 4"),
    },
    "v_shapes-3": {
        "one backward through both": Bad(
            [
                ("y.detach() if tip", "y if tip"),
                (
                    ").requires_grad_()\n        z,",
                    ")\n        turned.requires_grad_() if not tip else turned.retain_grad()\n        z,",
                ),
                ("(y, penalty), (dy, share)", "(penalty,) if tip else (y, penalty), (share,) if tip else (dy, share)"),
                ("(share, share))", "(share, share), retain_graph=True)"),
                ("(receive(like, rank - 1), share))", "(receive(like, rank - 1), share), retain_graph=True)"),
            ],
            "all gradients are right, and on rank 0 the backwards of the two stages ran 2 and 1 times",
        ),
        "uncut": Bad(
            [
                ("y.detach() if tip", "y if tip"),
                (
                    ").requires_grad_()\n        z,",
                    ")\n        turned.requires_grad_() if not tip else turned.retain_grad()\n        z,",
                ),
                ("(share, share))", "(share, share), retain_graph=True)"),
                ("(receive(like, rank - 1), share))", "(receive(like, rank - 1), share), retain_graph=True)"),
            ],
            "stage 0: its gradients differ from one process",
        ),
        "penalties forgotten": Bad(
            [
                ("(y, penalty), (dy, share)", "y, dy"),
                ("(z, more), (receive(like, rank - 1), share)", "z, receive(like, rank - 1)"),
                ("(mse_loss(z, target), more), (share, share)", "mse_loss(z, target), share"),
            ],
            "differ from one process",
        ),
    },
}

CHEATS = {
    "v_shapes-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 5", "whole number")},
    "v_shapes-2": {
        "empty": Bad("rows = []", "0 rows"),
    },
    "v_shapes-3": {
        "the library's runtime": Bad(
            STEP
            + """
    m, p = len(batch), world_size
    rows = [" ".join(f"{r}F{i} {2 * p - 1 - r}F{i} {2 * p - 1 - r}B{i} {r}B{i}" for i in range(m)) for r in range(p)]
    runtime = lab.PipelineRuntime(
        lab.Program.parse("V", rows), {rank: near, 2 * p - 1 - rank: far}, mse_loss, like
    )
    runtime.step(*zip(*batch))
""",
            "switched off",
        ),
    },
}
