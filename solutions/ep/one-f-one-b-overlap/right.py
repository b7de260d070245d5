"""Right answers of another style to the exercises on the overlapped pair."""

RIGHT = {
    "one_f_one_b_overlap-2": {
        "queues": """
from collections import deque

def host(compute, comm, needs):
    calls, over, to_issue, to_wait = [], set(), deque(comm), deque()

    def issue_all():
        while to_issue and (needs.get(to_issue[0]) is None or needs[to_issue[0]] in over):
            op = to_issue.popleft()
            to_wait.append(op)
            calls.append(("issue", op))

    def wait_for(op):
        while op in to_wait:
            done = to_wait.popleft()
            over.add(done)
            calls.append(("wait", done))

    issue_all()
    for op in compute:
        if op in needs:
            wait_for(needs[op])
        calls.append(("run", op))
        over.add(op)
        issue_all()
    while to_wait:
        wait_for(to_wait[0])
    return calls
""",
        "lists of lists": """
def host(compute, comm, needs):
    ready_at = [0]
    for op in comm:
        need = compute.index(needs[op]) + 1 if needs.get(op) in compute else 0
        ready_at.append(max(ready_at[-1], need))
    calls, waited = [], 0
    for place in range(len(compute) + 1):
        calls += [["issue", op] for op, at in zip(comm, ready_at[1:]) if at == place]
        if place == len(compute):
            break
        op = compute[place]
        if needs.get(op) in comm:
            last = comm.index(needs[op])
            calls += [["wait", other] for other in comm[waited : last + 1]]
            waited = max(waited, last + 1)
        calls += [["run", op]]
    return calls + [["wait", op] for op in comm[waited:]]
""",
    },
    "one_f_one_b_overlap-3": {
        "M_W before the last attention": """rows = (
    "A_F0 M_B1 M_F0 A_B1 M_W1 A_F1 M_B0 M_F1 M_W0 A_B0 A_W0 A_W1",
    "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1",
)""",
        "all W of attention at the end": """rows = [
    "A_F0 M_B1 M_F0 A_B1 M_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W1 A_W0",
    "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1",
]""",
    },
    "one_f_one_b_overlap-4": {
        "waits in the order of issue": """
def carry_out(program, do, issue, needs):
    handles, order = {}, []
    for op in program:
        if op.startswith(("D", "C")):
            handles[op] = issue(op)
            order.append(op)
        else:
            if needs.get(op) in order:
                for other in order[: order.index(needs[op]) + 1]:
                    handles[other].wait()
                order = order[order.index(needs[op]) + 1 :]
            do(op)
    for other in order:
        handles[other].wait()
""",
        "waits twice": """
def carry_out(program, do, issue, needs):
    handles = {}
    for op in program:
        if op[0] in {"C", "D"}:
            handles[op] = issue(op)
        else:
            handle = handles.get(needs.get(op))
            if handle is not None:
                handle.wait()
            do(op)
    [handle.wait() for handle in handles.values()]
""",
    },
}
