"""The formula that answers on attention are judged against: the numbers of the oracle."""

import json
from math import inf
from pathlib import Path

import pytest

from dualpipe_course.cp.formula import attention, why_different

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "flash_attention.json").read_text())


def heads(case):
    """Query heads with the KV head that each uses."""
    groups = len(case["Q"]) // len(case["K"])
    return [(head, head // groups) for head in range(len(case["Q"]))]


def numbers(values):
    return [numbers(value) for value in values] if isinstance(values, list) else float(values)


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["name"])
def test_every_number_of_the_oracle(case):
    q, k, v, do = (numbers(case[name]) for name in ("Q", "K", "V", "dO"))
    expected = {name: numbers(case["expected"][name]) for name in ("O", "LSE", "dQ", "dK", "dV")}
    offset = {"none": inf, "top_left": 0, "bottom_right": len(k[0]) - len(q[0])}[case["mask"]]
    sums = {name: [[[0.0] * len(row) for row in head] for head in expected[name]] for name in ("dK", "dV")}
    for head, kv_head in heads(case):
        found = attention(q[head], k[kv_head], v[kv_head], do[head], lambda i, j: j <= i + offset)
        for name, ours in (("O", found.out), ("LSE", found.lse), ("dQ", found.dq)):
            assert why_different(name, ours, expected[name][head], 1e-12) is None
        for name, ours in (("dK", found.dk), ("dV", found.dv)):
            for total, row in zip(sums[name][kv_head], ours, strict=True):
                total[:] = [a + b for a, b in zip(total, row, strict=True)]
    for name, ours in sums.items():
        assert why_different(name, ours, expected[name], 1e-12) is None
