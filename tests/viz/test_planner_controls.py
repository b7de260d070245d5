"""The planner's page in a browser: sliders, fields, links, the frontier, by keyboard; axe, and a phone."""

import pytest
from drawing_page import element

from dualpipe_lab.viz.planner_page import PlannerPage

pytestmark = pytest.mark.browser


@pytest.fixture
def shown(page):
    page.show(PlannerPage().to_html())
    ready(page)
    return page


def ready(page):
    page.wait_for_function("document.querySelector('dp-planner').isDone")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def verdict(page):
    return page.locator("dp-planner .verdict").inner_text()


def test_keyboard_chooses_a_plan_and_its_link_brings_it_back(shown):
    assert verdict(shown).startswith("Fits: 5.87 s per step; rank 0 of the pipeline needs 70.6 of 85.5 GB")
    for label, keys in (
        ("pp: ", ["Home"]),
        ("tp: ", ["ArrowRight", "ArrowRight"]),
        ("batch: sequences of a step", ["ArrowLeft"]),
    ):
        for key in keys:
            shown.get_by_label(label).press(key)
    shown.get_by_label("ZeRO", exact=True).select_option("1")
    shown.get_by_label("recompute the layers").press("Space")
    ready(shown)
    chosen = PlannerPage(pp=1, tp=4, batch=32, zero=1, recompute=True)
    assert element(shown, "e.choice", "dp-planner") == chosen.start
    most = chosen.memory.largest.total.num_bytes / 1e9
    assert verdict(shown).startswith(f"Fits: {chosen.time.seconds:.2f} s per step; a GPU needs {most:.1f} of 85.5 GB")
    shown.get_by_role("link", name="Link to this plan").press("Enter")
    shown.reload()
    ready(shown)
    assert element(shown, "e.choice", "dp-planner") == chosen.start
    shown.get_by_label("tp: ").press("End")
    shown.get_by_label("pp: ").press("End")
    ready(shown)
    assert verdict(shown) == (
        "Not a plan: pp 16 x cp 1 x tp 8 are 128 ranks, and there are 8 GPUs; use smaller axes or more GPUs."
    )
    shown.locator("dp-planner .frontier button").last.press("Enter")  # the legal plans around it are still there
    ready(shown)
    assert verdict(shown).startswith("Fits: ")
    shown.evaluate("location.hash = '#plan&model=llama3-70b&tp=0'")
    shown.wait_for_function("document.querySelector('dp-planner').choice.model === 'llama3-70b'")
    assert (
        shown.locator("dp-planner .share .note").inner_text() == "The address has what this page does not offer: tp=0."
    )


def test_a_plan_of_the_frontier_can_be_taken(shown):
    first = shown.locator("dp-planner .frontier button").first
    assert first.inner_text() == "4.58 s, 76.9 GB: pp 1, tp 1, ZeRO 3"
    first.press("Enter")
    ready(shown)
    assert verdict(shown).startswith("Fits: 4.58 s per step")
    assert element(shown, "e.shadowRoot.activeElement.getAttribute('aria-pressed')", "dp-planner") == "true"
    shown.get_by_label("model").select_option("llama3-70b")
    ready(shown)
    assert "Does not fit: a GPU needs" in verdict(shown)


def test_a_field_takes_any_number_and_refuses_what_is_none(shown):
    field, slider = shown.get_by_label("tp, any number"), shown.get_by_label("tp: ")
    field.fill("3")
    field.press("Enter")
    ready(shown)
    assert element(shown, "e.choice.tp", "dp-planner") == 3
    assert (slider.input_value(), slider.get_attribute("aria-valuetext")) == ("1", "3")  # at 2, the mark below
    assert verdict(shown).startswith("Not a plan: pp 8 x cp 1 x tp 3 are 24 ranks, and there are 8 GPUs")
    for text, taken in (("0", 1), ("1000", 128), ("2.4", 2), ("", 2)):  # rounded and limited; without a number the last
        field.fill(text)
        field.press("Enter")
        ready(shown)
        assert (element(shown, "e.choice.tp", "dp-planner"), field.input_value()) == (taken, str(taken))


def test_experts_are_shared_out_and_overlapped_by_controls(page):
    start = {"model": "qwen3-30b-a3b", "gpu": "h200", "gpus": 16, "pp": 2, "zero": 1, "sequence": 2048, "batch": 128}
    start |= {"schedule": "dualpipe"}
    page.show(PlannerPage(**start).to_html())
    ready(page)
    slider, box = page.get_by_label("ep: "), page.get_by_label("overlap experts")
    for _ in range(3):
        slider.press("ArrowRight")
    box.press("Space")
    ready(page)
    chosen = PlannerPage(**start, ep=8, overlap=True)
    assert (element(page, "e.choice", "dp-planner"), box.is_checked()) == (chosen.start, True)
    assert verdict(page).startswith(f"Fits: {chosen.time.seconds:.2f} s per step; rank ")
    assert f" needs {chosen.memory.largest.total.num_bytes / 1e9:.1f} of " in verdict(page)
    page.get_by_label("recompute the layers").press("Space")
    ready(page)
    again = PlannerPage(**start, ep=8, overlap=True, recompute=True)
    assert f" needs {again.memory.largest.total.num_bytes / 1e9:.1f} of " in verdict(page)
    page.get_by_label("schedule").select_option("1f1b")
    assert verdict(page).startswith("Not a plan: overlap needs pairs of a forward and a backward")
    box.press("Space")
    slider.press("End")
    ready(page)
    assert verdict(page) == (
        "Not a plan: ep shares the experts out among the 8 ranks of dp and cp, and must divide them, got ep 64."
    )
    page.get_by_label("model").select_option("llama3-8b")  # which has no experts
    assert element(page, "[e.choice.ep, e.choice.overlap]", "dp-planner") == [1, False]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_a_phone_need_not_scroll_sideways(page, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.show(PlannerPage(gpus=16, pp=4, cp=2, zero=1).to_html(), theme)
    ready(page)
    page.locator("dp-planner summary").first.click()
    found = axe.Axe().run(page).response["violations"]
    assert [v for v in found if v["impact"] in ("serious", "critical")] == []
    page.set_viewport_size({"width": 390, "height": 800})
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
