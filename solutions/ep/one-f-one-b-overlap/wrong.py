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
        "work is longer": Bad(_PREDICT + "220, 121, 130, 120", "communication is longer"),
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
        "issues right before the need": Bad(
            """
def host(compute, comm, needs):
    calls, issued, waited = [], 0, 0
    for op in compute:
        if needs.get(op) in comm:
            until = comm.index(needs[op]) + 1
            for other in comm[issued:until]:
                calls += [("issue", other)]
            issued = max(issued, until)
            calls += [("wait", other) for other in comm[waited:until]]
            waited = max(waited, until)
        calls.append(("run", op))
    return calls + [("issue", o) for o in comm[issued:]] + [("wait", o) for o in comm[waited:]]
""",
            "Which wait comes before it has to, or which issue later than it could?",
        ),
        "one issue per piece of work": Bad(
            """
def host(compute, comm, needs):
    calls, ran, issued, waited = [], set(), 0, 0
    for op in [None, *compute]:
        if op is not None:
            if needs.get(op) in comm:
                until = comm.index(needs[op]) + 1
                calls += [("issue", other) for other in comm[issued:until]]
                issued = max(issued, until)
                calls += [("wait", other) for other in comm[waited:until]]
                waited = max(waited, until)
            calls.append(("run", op))
            ran.add(op)
        if issued < len(comm) and (comm[issued] not in needs or needs[comm[issued]] in ran):
            calls.append(("issue", comm[issued]))
            issued += 1
    return calls + [("issue", o) for o in comm[issued:]] + [("wait", o) for o in comm[waited:]]
""",
            "two that become ready at once",
        ),
        "forgets the last": Bad(
            [('    return calls + [("wait", other) for other in comm[waited:]]', "    return calls")],
            "there is no wait C_F0",
        ),
        "waits alone": Bad(
            [("for other in comm[waited:until]]\n", "for other in [needs[op]]]\n")],
            "but next in that row is",
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
        "one step later": Bad(
            """
def carry_out(program, do, issue, needs):
    last = None
    for op in program:
        if last is not None:
            last.wait()
            last = None
        if op[0] in "DC":
            last = issue(op)
        else:
            do(op)
    if last is not None:
        last.wait()
""",
            "whose rows are not needed yet",
        ),
        "forgets the last": Bad(
            [("    for work in under_way.values():\n        work.wait()\n", "")], "C_F0 was never waited for"
        ),
        "waits when the next one is issued": Bad(
            """
def carry_out(program, do, issue, needs):
    handles, last = {}, None
    for op in program:
        if needs.get(op) in handles:
            handles.pop(needs[op]).wait()
        if op[0] in "DC":
            if last in handles:
                handles.pop(last).wait()
            handles[op], last = issue(op), op
        else:
            do(op)
    for handle in handles.values():
        handle.wait()
""",
            "whose rows are not needed yet",
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
        "nothing": Bad("def host(compute, comm, needs):\n    return []", "there is no run A_F0"),
    },
    "one_f_one_b_overlap-3": {
        "W left out": Bad('rows = ["A_F0 M_B1 M_F0 A_B1 A_F1 M_B0 M_F1 A_B0", "' + _COMM + '"]', "this order does not"),
        "twice the link": Bad(f'rows = ["{_WORK} C_F1", "{_COMM}"]', "runs on the comm stream"),
    },
    "one_f_one_b_overlap-4": {
        "does nothing": Bad("def carry_out(program, do, issue, needs):\n    pass", "not every operation ran once"),
    },
}
