"""The planner: what every rank of a plan holds and how long a step takes, for a plan that the reader makes.

Chapter: book/whole/plan-your-run.  In: a model, a plan, the shape of a step.  Out: HTML, and a widget that answers it.
The first plan is computed where the page is built; for others the element asks `answer`: in a notebook the kernel, on a
published page the Python that the build put beside it.  Every plan is in bfloat16, with ep in the data ranks, sequence
parallelism wherever there is tp, and overlapped experts where the schedule has pairs.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from dualpipe_lab.plan.estimate import estimate
from dualpipe_lab.plan.memory import RankMemory, memory
from dualpipe_lab.plan.model_of import known_models, model_of
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts
from dualpipe_lab.pp import schedules
from dualpipe_lab.viz.embed import AskingElement, element

START = {"model": "llama3-8b", "gigabytes": 80, "pp": 8, "dp": 1, "tp": 1, "cp": 1, "ep": 1, "schedule": "1f1b"} | {
    "zero": 0, "microbatches": 16, "sequences": 16, "tokens": 8192,
}  # fmt: skip
PARTS = {"weights, gradients, Adam": "#0072b2", "activations": "#e69f00", "logits and temporaries": "#009e73"}
MOST_ROWS = 32


def answer(question: str) -> str:
    """Answer the values of the element's fields, in JSON, by {"html": ...} or {"error": a sentence}."""
    try:
        return json.dumps({"html": report(json.loads(question))})
    except ValueError as refused:
        return json.dumps({"error": str(refused)})


class Planner(AskingElement):
    """The element <dp-planner>; it prints as the numbers that it shows first.

    Args:
        start: other values than llama3-8b in eight stages, by the names of `START`.

    >>> print(Planner(pp=1, dp=8, zero=2, microbatches=8, sequences=64))
    8 GPUs, 64 sequences of 8,192 tokens a step: 7.4 to 10.3 s; the fullest rank needs 76 of 80 GB
    """

    answer = staticmethod(answer)

    def __init__(self, **start: Any) -> None:
        self.values = START | start

    def to_html(self, script: bool = True, key: str = "") -> str:
        """Return the element around the numbers of its first plan; `key` names the widget that answers it."""
        choices = {"model": list(known_models()), "schedule": schedules.names(synchronous=True), "zero": [0, 1, 2, 3]}
        shown = report(self.values)
        spec = {"values": self.values, "choices": choices, "shown": shown, "key": key}
        return element("dp-planner", spec, shown, script)

    def __str__(self) -> str:
        return _found(self.values)[0]


def report(values: Mapping[str, Any]) -> str:
    """Return the numbers of a plan as HTML: seconds by what they are, and a bar for the fullest rank of each stage."""
    head, parts, ranks = _found(values)
    widest = 1.04 * max(values["gigabytes"], *(one.total / 1e9 for one in ranks))
    names = [f"pp {rank}" for rank in range(len(ranks))] if len(ranks) > 1 else ["every rank"]
    rows = [_row(name, one, widest, values["gigabytes"]) for name, one in zip(names, ranks, strict=True)]
    if len(rows) > MOST_ROWS:
        rows[MOST_ROWS - 1 : -1] = [f"<tr><th></th><td>{len(rows) - MOST_ROWS} more ranks</td><td></td></tr>"]
    legend = "".join(f'<li><i style="background:{colour}"></i>{name}</li>' for name, colour in PARTS.items())
    table = f"<thead><tr><th>rank</th><th>at its peak</th><th>GB</th></tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<p><strong>{escape(head)}</strong></p><p>{escape(parts)}</p><ul>{legend}</ul><table>{table}</table>"


def _found(values: Mapping[str, Any]) -> tuple[str, str, list[RankMemory]]:
    model, sizes = model_of(values["model"]), {name: values[name] for name in ("pp", "dp", "tp", "cp", "ep", "zero")}
    plan = Plan(
        **sizes,
        schedule=values["schedule"],
        num_microbatches=values["microbatches"],
        experts_in_data=values["ep"] > 1,
        sequence_parallel=values["tp"] > 1,
        precision="bfloat16",
    )
    plan.check(model, values["tokens"])
    plan = replace(plan, overlap=has_experts(model) and plan.has_pairs)
    shape = values["tokens"], values["sequences"]
    places, step = memory(model, plan, *shape).places, estimate(model, plan, *shape)
    ranks = [
        max((one for place, one in places.items() if place[0] == rank), key=lambda one: one.total)
        for rank in range(plan.pp)
    ]
    most, room = max(one.total for one in ranks) / 1e9, values["gigabytes"]
    fits = "needs" if most <= room else "does not fit: it needs"
    head = f"{plan.world_size:,} GPUs, {shape[1]:,} sequences of {shape[0]:,} tokens a step: {step.seconds}"
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in step.parts.items() if seconds >= 0.005)
    rate = f"{step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU {step.mfu:.0%}"
    head += f"; the fullest rank {fits} {most:.0f} of {room:g} GB"
    return head, f"At a utilisation of 0.4: {parts} s; {rate}.", ranks


def _row(name: str, one: RankMemory, widest: float, room: float) -> str:
    sizes = (one.states.total, one.activations, one.logits + one.working + one.buffers)
    bars = "".join(
        f'<i style="background:{colour};width:{size / widest / 1e7:.2f}%" title="{part}: {size / 1e9:.1f} GB"></i>'
        for size, (part, colour) in zip(sizes, PARTS.items(), strict=True)
    )
    mark = f'<b style="left:{100 * room / widest:.2f}%"></b>'
    return f'<tr><th>{name}</th><td class="stack">{bars}{mark}</td><td>{one.total / 1e9:.1f}</td></tr>'
