"""The planner: the library's memory and seconds as HTML, and an element that asks for those of another plan."""

import json
import re

import pytest
from drawing_page import check_accessibility

from dualpipe_lab.plan import Plan, estimate, memory, model_of
from dualpipe_lab.viz import Planner
from dualpipe_lab.viz.planner import START, answer


def test_it_says_what_memory_and_estimate_say():
    html = json.loads(answer(json.dumps(START | {"model": "llama3-70b", "tp": 8, "sequences": 64, "zero": 0})))["html"]
    model, fields = model_of("llama3-70b"), {"pp": 8, "tp": 8, "num_microbatches": 16, "sequence_parallel": True}
    plan = Plan(**fields, precision="bfloat16")
    found, step = memory(model, plan, 8192, 64), estimate(model, plan, 8192, 64)
    assert f"64 GPUs, 64 sequences of 8,192 tokens a step: {step.seconds}; " in html
    shown = [float(total) for total in re.findall(r"<td>([\d.]+)</td></tr>", html)]
    assert shown == [round(max(found.of(8 * pp + tp).total for tp in range(8)) / 1e9, 1) for pp in range(8)]


def test_a_plan_that_cannot_be_is_refused_with_the_nearest_one():
    told = json.loads(answer(json.dumps(START | {"tp": 3})))["error"]
    assert told.startswith("num_heads must divide among the ranks, got 32 on 3 ranks; the nearest plan of 24 ranks")


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_another_plan_is_asked_for_and_an_illegal_one_leaves_a_sentence(page, theme):
    page.expose_function("askPython", answer)
    page.add_init_script("globalThis.dualpipePython = { isStarted: true, ask: (call, [text]) => askPython(text) }")
    page.show(Planner().to_html(), theme)
    shown = page.locator("dp-planner .shown")
    assert shown.inner_text().startswith("8 GPUs, 16 sequences of 8,192 tokens a step: 2.9 to 4.1 s")
    page.get_by_label("zero", exact=True).select_option("1")
    page.get_by_label("pp", exact=True).fill("4")
    page.get_by_label("dp", exact=True).fill("2")
    page.get_by_label("sequences").fill("64")
    page.get_by_label("sequences").press("Tab")
    page.wait_for_function("document.querySelector('dp-planner').shown.innerText.startsWith('8 GPUs, 64 sequences')")
    assert shown.locator("tbody tr").count() == 4
    check_accessibility(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("tp", exact=True).fill("3")
    page.get_by_label("tp", exact=True).press("Tab")
    page.wait_for_function("document.querySelector('dp-planner').shown.innerText.startsWith('num_heads must divide')")
