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
    "many_hosts-3": {
        "the quickest message": """
def slow_host(timeline, ranks_per_host):
    hosts = timeline.num_ranks // ranks_per_host
    best = [float("inf")] * hosts
    for m in timeline.messages:
        host = m.src // ranks_per_host
        if m.dst // ranks_per_host != host and m.num_bytes > 10_000:
            best[host] = min(best[host], (m.arrived - m.sent) / m.num_bytes)
    there = {host: value for host, value in enumerate(best) if value < float("inf")}
    slowest = max(there, key=there.get)
    others = [value for host, value in there.items() if host != slowest]
    return slowest if there[slowest] > 5 * max(others) else None
""",
        "median without the latency, against the fastest": """
from statistics import median

def slow_host(timeline, ranks_per_host):
    rates = {}
    for m in timeline.messages:
        pair = m.src // ranks_per_host, m.dst // ranks_per_host
        if pair[0] != pair[1] and m.num_bytes > 256:
            rates.setdefault(pair[0], []).append(max(m.arrived - m.sent - 50_000, 1) / m.num_bytes)
    rates = {host: median(values) for host, values in rates.items()}
    slow = [host for host in rates if rates[host] > 3.5 * min(rates.values())]
    return slow[0] if slow else None
""",
    },
}
