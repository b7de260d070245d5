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
        "all of the wait": Bad(f"{NAMES} = 20, 9, 8, 39, 18", "some of it is filled"),
        "V-Half": Bad(f"{NAMES} = 20, 9, 8, 23, 18", "V-Half's"),
        "only the work": Bad(f"{NAMES} = 20, 9, 8, 35, 12", "lock-step"),
    },
    "v_shapes-2": {
        "ZBV": Bad(LIBRARY.format("zbv"), "20 ticks, but rank 0 holds 6"),
        "V-Half": Bad(LIBRARY.format("v_half"), "valid, 23 ticks with 4"),
        "V-Min": Bad(LIBRARY.format("v_min"), "valid, 25 ticks with 4"),
        "a microbatch too few": Bad([(" 0I2 0W2", "")], "the validator says"),
        "W before I": Bad([("0I2 0W2", "0W2 0I2")], "the validator says"),
        "a loop": Bad(
            'rows = ["0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 0F2 3F2 3B2 0B2", '
            '"1F0 4F0 4B0 1B0 1F1 4F1 4B1 1B1 1F2 4F2 4B2 1B2", '
            '"2F0 5F0 5B0 2B0 2F1 5F1 5B1 2B1 2F2 5F2 5B2 2B2"]',
            "rank 0 works on stages [0, 3]",
        ),
    },
    "v_shapes-3": {
        "the page's cut alone": Bad(
            [
                (
                    "        share =",
                    "        (more / len(batch)).backward(retain_graph=True)\n"
                    "        (penalty / len(batch)).backward(retain_graph=True)\n        share =",
                ),
                (
                    "torch.autograd.backward((mse_loss(z, target), more), (share, share))",
                    "(mse_loss(z, target) / len(batch)).backward()",
                ),
                (
                    "torch.autograd.backward((z, more), (receive(like, rank - 1), share))",
                    "z.backward(receive(like, rank - 1))",
                ),
                ("torch.autograd.backward((y, penalty), (dy, share))", "y.backward(dy)"),
            ],
            "the two stages ran 2 and 2 times",
        ),
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
        "penalties below the turn forgotten": Bad(
            [("(y, penalty), (dy, share)", "y, dy")], "stage 0: its gradients differ from one process"
        ),
        "penalties forgotten": Bad(
            [
                ("(y, penalty), (dy, share)", "y, dy"),
                ("(z, more), (receive(like, rank - 1), share)", "z, receive(like, rank - 1)"),
                ("(mse_loss(z, target), more), (share, share)", "mse_loss(z, target), share"),
            ],
            "differ from one process",
        ),
        "penalties of all microbatches": Bad(
            [("(dy, share)", "(dy, torch.ones_like(share))")], "stage 0: its gradients differ from one process"
        ),
        "cut without a gradient": Bad(
            [("y.detach() if tip", "y.detach().clone() if tip"), (").requires_grad_()\n        z,", ")\n        z,")],
            "rank 0 raised",
        ),
        "gradients put in place of the older ones": Bad(
            [
                (
                    "first, tip = rank == 0, rank",
                    "near.zero_grad()\n    far.zero_grad()\n    first, tip = rank == 0, rank",
                )
            ],
            "the gradients of the step before are gone",
        ),
        "no mean": Bad(
            [("torch.tensor(1 / len(batch), dtype=like.dtype)", "torch.ones((), dtype=like.dtype)")], "are 3 times"
        ),
    },
}

CHEATS = {
    "v_shapes-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 5", "whole number")},
    "v_shapes-2": {
        "empty": Bad("rows = []", "0 rows"),
        "a number": Bad("rows = 21", "one line of text per rank"),
        "no work": Bad('rows = ["0F0", "1F0", "2F0"]', "the validator says"),
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
        "nothing": Bad(STEP + "    pass", "its gradients are all zero"),
        "makes gradients up": Bad(
            STEP
            + "    for stage in (near, far):\n"
            + "        for p in stage.parameters():\n            p.grad = torch.ones_like(p)",
            "differ from one process",
        ),
    },
}
