"""Right answers of another style to the exercises on a run on many hosts."""

RIGHT = {
    "many_hosts-2": {
        "all answers narrow the bound": """
def read_clock(answers):
    low = max(s - t1 for t0, s, t1 in answers)
    high = min(s - t0 for t0, s, t1 in answers)
    return (low + high) / 2, (high - low) / 2

def on_their_clock(time, first, second):
    part = (time - first[0]) / (second[0] - first[0])
    offset = (1 - part) * first[1] + part * second[1]
    return time + offset, (1 - part) * first[2] + part * second[2]
""",
        "numpy": """
import numpy as np

def read_clock(answers):
    t0, s, t1 = np.array(answers).T
    best = np.argmin(t1 - t0)
    return (s - t0 - (t1 - t0) / 2)[best], ((t1 - t0) / 2)[best]

def on_their_clock(time, first, second):
    offset = np.interp(time - first[0], [0, second[0] - first[0]], [first[1], second[1]])
    return [time + offset, np.maximum(first[2], second[2])]
""",
    },
}
