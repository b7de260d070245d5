"""SimuMax's measured steps on 8 B200: dense models, three of 31 rows as calibration points; `pytest -s` prints all.

MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md, commit 4dcaae51: milliseconds of Megatron-LM 0.14 without
overlapped tp, bf16, microbatches of one sequence, and the published error of SimuMax in percent, whose operators have
measured tables of that machine.  Its script gives 405B 16 key heads, twice as many as Llama has.  Here one row says how
much of the peak products reach, one of tp 8 how much of NVLink's bandwidth, one of 131,072 tokens how fast attention
is; the others are predicted.
"""

from dataclasses import replace
from functools import cache
from statistics import median

from fits import solve, with_attention, with_inside, with_products

from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import Cluster, Plan
from dualpipe_lab.plan.step_time import StepTimer
from dualpipe_lab.plan.time_rules import MEGATRON_TIME

MODELS = {"70B": LlamaConfig(128256, 8192, 28672, 12, 64, 8), "405B": LlamaConfig(128256, 16384, 53248, 4, 128, 16)}
ROWS = [  # model, tp, pp, dp, cp, tokens, and by microbatches of a data rank milliseconds and SimuMax's error
    ("70B", 1, 2, 4, 1, 4096, {4: (843.0, -1.69), 8: (1476.8, -2.41), 32: (5436.5, -5.90)}),
    ("70B", 2, 1, 4, 1, 4096, {4: (725.5, -3.68), 8: (1387.0, -5.57), 32: (5376.5, -7.45)}),
    ("70B", 4, 1, 2, 1, 4096, {4: (409.8, -3.56), 8: (765.6, -2.34), 32: (2964.6, -3.45)}),
    ("70B", 8, 1, 1, 1, 4096, {4: (280.9, -8.97), 8: (556.7, -11.37), 32: (2073.7, -7.44)}),
    ("405B", 1, 2, 4, 1, 4096, {4: (1074.6, -0.18), 8: (1935.4, -3.34), 32: (7046.4, -5.49)}),
    ("405B", 2, 1, 4, 1, 4096, {4: (907.3, -5.13), 8: (1716.8, -6.78), 32: (6604.1, -8.56)}),
    ("405B", 4, 1, 2, 1, 4096, {4: (476.0, -4.85), 8: (899.6, -5.86), 32: (3455.4, -7.08)}),
    ("405B", 8, 1, 1, 1, 4096, {4: (258.8, -1.15), 8: (488.1, -0.26), 32: (1901.8, -1.54)}),
    ("70B", 2, 1, 1, 4, 32768, {4: (1758.0, -9.27)}),
    ("70B", 1, 1, 1, 8, 32768, {4: (1768.1, -7.97)}),
    ("70B", 2, 1, 1, 4, 131072, {4: (11315.7, -5.70)}),
    ("70B", 1, 1, 1, 8, 131072, {4: (11301.9, -6.96)}),
    ("405B", 2, 1, 1, 4, 32768, {4: (1984.7, -8.59)}),
    ("405B", 1, 1, 1, 8, 32768, {4: (2003.6, -5.36)}),
    ("405B", 2, 1, 1, 4, 131072, {4: (10577.6, -5.05)}),
]
CALIBRATION = {(0, 32): "products", (3, 32): "inside", (11, 4): "attention"}


def milliseconds(row, num_microbatches, products, inside, attention):
    name, tp, pp, dp, cp, length, _ = row
    model = MODELS[name]
    plan = Plan(
        pp=pp, tp=tp, dp=dp, cp=cp, zero=int(dp * cp > 1), num_microbatches=num_microbatches, precision="bfloat16",
        sequence_parallel=tp > 1, layers=(model.num_layers // pp,) * pp,
    )  # fmt: skip
    cluster = with_inside(with_products(Cluster.of("b200", 8), products), inside)
    rules = with_attention(replace(MEGATRON_TIME, tensor_hidden=0.0), attention)
    return StepTimer(model, plan, cluster, length, num_microbatches * dp, rules).result.seconds * 1e3


@cache
def machine():
    """Parts of the products' peak, of NVLink's bandwidth, of attention's quoted part."""
    found = {"products": 0.5, "inside": 0.6, "attention": 1.0}
    for _ in range(3):
        for (index, count), name in CALIBRATION.items():
            row = ROWS[index]

            def of(part, row=row, count=count, name=name):
                return milliseconds(row, count, **(found | {name: part}))

            found[name] = solve(of, row[6][count][0], 0.1, 1.5 if name == "attention" else 1.0)
    return found


def test_simumax_s_measured_steps_are_predicted_from_three_of_them():
    print(f"\n{ {name: round(part, 3) for name, part in machine().items()} }")
    errors, theirs = [], []
    for index, row in enumerate(ROWS):
        for count, (measured, published) in row[6].items():
            found = milliseconds(row, count, **machine())
            is_point = (index, count) in CALIBRATION
            mark = "calibration" if is_point else f"{found / measured - 1:+.1%}, SimuMax {published:+.2f}%"
            print(*row[:6], f"m {count}: measured {measured} ms, {mark}")
            if is_point:
                assert abs(found / measured - 1) < 0.002
                continue
            errors.append(abs(found / measured - 1))
            theirs.append(abs(published) / 100)
    print(f"{len(errors)} rows: median {median(errors):.2%} (SimuMax {median(theirs):.2%}), worst {max(errors):.1%}")
    assert len(errors) == 28
    assert max(errors) < 0.15
    assert median(errors) < median(theirs)
