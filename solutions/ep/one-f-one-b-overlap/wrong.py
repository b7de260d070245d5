"""Typical wrong answers and lazy cheats of the exercises on the overlapped pair."""

from bad_answer import Bad

_WORK = "A_F0 M_B1 M_W1 M_F0 A_B1 A_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W0"
_WAIT = "            for work in works:\n                work.wait()\n"
_YIELD = "            yield  # somebody else works while the rows travel\n"
_TURNS = "(y, kept), dx = take_turns(forward_of(self.steps, x, FORWARD), backward_of(other.steps, saved, dy, BACKWARD))"
_COMM = "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1"

TYPICAL = {
    "one_f_one_b_overlap-5": {
        "waits at once": Bad(
            [(_YIELD + _WAIT, _WAIT + _YIELD)],
            "it has waited for the rows, and there is nothing left to do beside them",
        ),
        "the carry has no way back": Bad(
            [("[(y, dx), *((made[name], grad) for name, grad in carried.items())]", "[(y, dx)]")],
            "A gradient comes back by two ways: through the exchange, and along the carry",
        ),
        "no turn without rows": Bad(
            [(_YIELD, "            if works:\n                yield\n")],
            "stands aside 0 time(s) for two exchanges: once for each, on every rank",
        ),
    },
    "one_f_one_b_overlap-6": {
        "one after the other": Bad(
            [
                (
                    _TURNS,
                    "y, kept = self.forward(x)\n        dx = other.backward(saved, dy)",
                )
            ],
            "the pair took 200 ms on rank 0: its six pieces of work take 120",
        ),
        "an order of each rank": Bad(
            [
                ("from torch import Tensor\n", "from torch import Tensor\n\nfrom dualpipe_lab.comm import get_rank\n"),
                (
                    _TURNS,
                    "both = forward_of(self.steps, x, FORWARD), backward_of(other.steps, saved, dy, BACKWARD)\n"
                    "        turn = 1 - 2 * (get_rank() % 2)\n"
                    "        (y, kept), dx = take_turns(*both[::turn])[::turn]",
                ),
            ],
            "rank 1: the order of the pair's pieces is not that of rank 0",
        ),
        "a word that nobody knows": Bad(
            [("KINDS.update(OVERLAP_F_B=run_pair)\n", "")], "no word OVERLAP_F_B in (1F3;0B0)OVERLAP_F_B"
        ),
    },
    "one_f_one_b_overlap-3": {
        "DeepSeek's": Bad(f'rows = ["{_WORK}", "{_COMM}"]', "a legal order of 36 ticks"),
        "a layer is missing": Bad('rows = ["A_F0 M_B0 M_F0 A_B0 M_W0 A_W0", "C_B0 D_F0 D_B0 C_F0"]', "contains A_F1"),
        "never ends": Bad(f'rows = ["{_WORK}", "C_F0 C_B1 D_F0 D_B1 C_B0 D_F1 D_B0 C_F1"]', "nothing goes on before"),
    },
    "one_f_one_b_overlap-4": {
        "as it was": Bad(
            """
def carry_out(program, do, issue, needs):
    for op in program:
        if op[0] in "DC":
            issue(op).wait()
        else:
            do(op)
""",
            "the host takes 100 ms; 60 are enough",
        ),
        "forgets the last": Bad(
            [("    for work in under_way.values():\n        work.wait()\n", "")], "C_F0 was never waited for"
        ),
        "never waits": Bad(
            [("            under_way.pop(needs[op]).wait()\n", "            pass\n")], "and C_B0 is not over"
        ),
    },
}

CHEATS = {
    "one_f_one_b_overlap-5": {
        "a later part": Bad(
            "from mine.pair import Compute, Travel, backward_of, forward_of, take_turns",
            "line 1: mine.pair is not before steps",
        ),
    },
    "one_f_one_b_overlap-6": {
        "the library's pair": Bad(
            "from dualpipe_lab.ep import overlapped_forward_backward", "line 1: dualpipe_lab.ep.overlapped_forward"
        ),
    },
    "one_f_one_b_overlap-3": {
        "W left out": Bad('rows = ["A_F0 M_B1 M_F0 A_B1 A_F1 M_B0 M_F1 A_B0", "' + _COMM + '"]', "this order does not"),
    },
    "one_f_one_b_overlap-4": {
        "does nothing": Bad("def carry_out(program, do, issue, needs):\n    pass", "not every operation ran once"),
    },
}
