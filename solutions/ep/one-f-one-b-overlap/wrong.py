"""Typical wrong answers and lazy cheats of the exercises on the overlapped pair."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "serial, overlapped, not_split, slow_link = "
_WORK = "A_F0 M_B1 M_W1 M_F0 A_B1 A_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W0"
_COMM = "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1"

TYPICAL = {
    "one_f_one_b_overlap-1": {
        "work alone": Bad(_PREDICT + "120, 121, 130, 160", "the work alone"),
        "no first wait": Bad(_PREDICT + "220, 120, 130, 160", "the first M_B waits"),
        "as if split": Bad(_PREDICT + "220, 121, 121, 160", "M_F alone hides it"),
    },
    "one_f_one_b_overlap-2": {
        "waits at once": Bad(
            [
                (
                    '            calls.append(("issue", comm[issued]))\n            issued += 1',
                    '            calls += [("issue", comm[issued]), ("wait", comm[issued])]\n'
                    "            issued += 1\n            waited = issued",
                )
            ],
            "the calls are legal and take",
        ),
        "forgets the last": Bad(
            [('    return calls + [("wait", other) for other in comm[waited:]]', "    return calls")],
            "there is no wait C_F0",
        ),
        "waits without looking": Bad(
            [("if needs.get(op) in comm:", "if False:")], "makes, and D_F0 was not waited for"
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
    "one_f_one_b_overlap-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "serial = overlapped = not_split = slow_link = Anything()", "must be a whole number"
        ),
    },
    "one_f_one_b_overlap-2": {
        "the library's own": Bad(
            """
def host(compute, comm, needs):
    from dualpipe_lab.ep.overlap import host_calls
    order = Order.parse("mine", " ".join(compute), " ".join(comm))
    return [(verb, str(op)) for verb, op in host_calls(order)]
""",
            "switched off",
        ),
    },
    "one_f_one_b_overlap-3": {
        "W left out": Bad('rows = ["A_F0 M_B1 M_F0 A_B1 A_F1 M_B0 M_F1 A_B0", "' + _COMM + '"]', "this order does not"),
    },
    "one_f_one_b_overlap-4": {
        "does nothing": Bad("def carry_out(program, do, issue, needs):\n    pass", "not every operation ran once"),
    },
}
