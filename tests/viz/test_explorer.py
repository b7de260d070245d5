"""The explorer: its numbers are the simulator's for every schedule and size, and it works by keyboard in Chromium."""

from fractions import Fraction

import pytest
from drawing_page import check_accessibility, element

from dualpipe_lab import Cost, schedules, simulate
from dualpipe_lab.pp.ranking import score
from dualpipe_lab.viz import Explorer

COSTS = [
    {"F": 1, "I": 1, "W": 1, "B": None, "overlap": None, "latency": 0, "transfer": 0},
    {"F": 2, "I": 3, "W": 1, "B": None, "overlap": 5, "latency": 1, "transfer": 2},
    {"F": 4, "I": 1, "W": 0, "B": None, "overlap": None, "latency": 7, "transfer": 0},
]


def expected(program, costs, limit, barrier):
    """The library's numbers, with exact fractions for the stages' shares; overlap None is the rule without pairs."""
    share = Fraction(program.num_ranks, program.num_stages)
    scaled = {k: v if v is None or k in ("latency", "transfer") else v * share for k, v in costs.items()}
    timeline = simulate(program, Cost(**scaled))
    ranks = range(program.num_ranks)
    peak = max(map(timeline.peak_activations, ranks)) * share
    own = [{stage for span in row for stage, _, _ in span.actions} for row in timeline.spans_by_rank]
    weights = max(map(len, own)) * share
    fits = int(limit is None or peak <= limit)
    lengths = [last - first for first, last in map(timeline.window, ranks)]
    step = timeline.makespan if barrier else max(lengths)
    busy = [timeline.busy_time(rank) for rank in ranks]
    bubble = 1 - Fraction(sum(busy)) / (step * len(ranks))
    local = max(length - time for length, time in zip(lengths, busy, strict=True))
    return [step, bubble, peak, len(timeline.messages), weights, local, fits]


def built(name, p, m):
    try:
        return schedules.build(name, p, m)
    except ValueError:
        return None


STARTING = [program for name in schedules.names(synchronous=True, pairs=False) if (program := built(name, 4, 8))]


EXPLORE = """async ({ titles, twins, programs, choices }) => {
  const unpacked = await unpack(programs), shown = new Set(Object.keys(titles));
  return choices.map((choice) => {
    const { ranked, refused } = explore(titles, twins, unpacked, { ...choice, shown });
    const rows = ranked.map((e) => [e.key, e.step, e.bubble, e.peak, e.messages, e.weights, e.local, e.fits]);
    return { rows, refused: refused.map(({ reason }) => reason) };
  });
}"""


def expected_of(program, choice):
    costs = choice["costs"] if choice["pairs"] else choice["costs"] | {"overlap": None}
    return expected(program, costs, choice["limit"], choice["barrier"])


@pytest.mark.browser
def test_every_schedule_at_every_size_has_the_simulator_s_numbers(modules):
    explorer = Explorer()
    assert list(explorer.variants) == schedules.names(synchronous=True)
    choices = [
        {"ranks": p, "microbatches": m, "limit": limit, "costs": costs, "barrier": m % 2 == 0, "pairs": m % 3 != 1}
        for p in explorer.ranks
        for m in (1, 2, 3, 8, 17, 32)
        for costs, limit in zip(COSTS, (None, 4, 1), strict=True)
    ]
    answers = modules("explorer-data").evaluate(EXPLORE, explorer.spec | {"choices": choices})
    for choice, found in zip(choices, answers, strict=True):
        left_out = explorer.twins if choice["pairs"] else explorer.twins.values()
        names = [name for name in explorer.variants if name not in left_out]
        programs = {name: built(name, choice["ranks"], choice["microbatches"]) for name in names}
        assert sorted(row[0] for row in found["rows"]) == sorted(n for n, program in programs.items() if program)
        assert len(found["refused"]) == sum(program is None for program in programs.values())
        assert all(isinstance(reason, str) for reason in found["refused"])
        for key, *numbers in found["rows"]:
            assert numbers == [pytest.approx(float(x), abs=1e-12) for x in expected_of(programs[key], choice)]
        ranking = [(-row[-1], row[1], row[3], row[4]) for row in found["rows"]]
        assert ranking == sorted(ranking)


def test_the_page_stays_small_and_has_words_without_scripts():
    html = Explorer().to_html(script=False)
    assert len(html) < 300_000
    assert "<td>1F1B</td><td>33</td><td>27.3%</td><td>9</td><td>4</td>" in html


def test_the_table_without_scripts_has_the_page_s_numbers():
    rows = {row.name: row for row in Explorer().rows()}
    for program in STARTING:
        makespan, bubble, peak, messages, weights, local, _ = expected(program, COSTS[0], None, barrier=True)
        row = rows[program.name]
        assert (row.makespan, row.bubble, row.local_bubble) == (makespan, pytest.approx(float(bubble)), local)
        assert (row.peak, row.messages, row.weights) == (peak, messages, weights)


def test_a_start_outside_the_sizes_is_refused():
    with pytest.raises(ValueError, match=r"start=\(3, 4\) is not among the sizes"):
        Explorer(ranks=[2, 4], microbatches=[4], start=(3, 4))


@pytest.fixture
def shown(page):
    page.show(Explorer().to_html())
    page.wait_for_function("document.querySelector('dp-explorer').results")
    return page


def settled(page):
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.browser
def test_keyboard_chooses_sizes_costs_memory_and_a_timeline(shown):
    for label, presses in (("ranks: ", 1), ("microb.: ", 8), ("latency: ", 2), ("W: ", 1)):
        for _ in range(presses):
            shown.get_by_label(label).first.press("ArrowRight")
    settled(shown)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(schedules.build(name, 8, 16), Cost(W=2, latency=2))
        entry = element(shown, f"e.results.ranked.find(r => r.key === '{name}')", "dp-explorer")
        assert (entry["makespan"], entry["messages"]) == (timeline.makespan, len(timeline.messages))
    shown.get_by_label("barrier after each step").press("Space")
    settled(shown)
    for entry in element(shown, "e.results.ranked.map(r => [r.key, r.step])", "dp-explorer"):
        program = schedules.build(entry[0], 8, 16)
        assert entry[1] == score(program, Cost(W=2, latency=2)).window
    shown.get_by_label("memory: ").press("Home")
    settled(shown)
    assert "no schedule fits into 1 live activation." in shown.locator("dp-explorer .found").inner_text()
    shown.get_by_role("button", name="Reset all").press("Enter")
    settled(shown)
    quickest = Explorer().rows()[0].name
    assert shown.locator("dp-explorer .found").inner_text().startswith(f"4 ranks, 8 microbatches: {quickest} is")
    shown.get_by_role("button", name="Open the timeline of GPipe").press("Enter")
    assert element(shown, "e.timeline.name", "dp-explorer") == "GPipe"
    assert shown.locator("dp-timeline .status").inner_text() == "t = 33 of 33 ticks: all done"
    shown.get_by_label("F&B: ").first.press("Home")  # an F&B of 1: from now on all schedules have pairs
    settled(shown)
    assert shown.get_by_label("overlapped pairs, for all that have them").is_checked()
    keys = element(shown, "e.results.ranked.map(r => r.key)", "dp-explorer")
    assert sorted(keys) == sorted(name for name in schedules.names(synchronous=True, pairs=True) if built(name, 4, 8))
    shown.get_by_label("1F1B", exact=True).press("Space")
    settled(shown)
    assert "paired_1f1b" not in element(shown, "e.results.ranked.map(r => r.key)", "dp-explorer")
    shown.get_by_label("GPipe", exact=True).press("Space")
    settled(shown)
    assert "GPipe" not in element(shown, "e.results.ranked.map(r => r.name)", "dp-explorer")


@pytest.mark.browser
def test_a_timeline_opens_in_its_row_and_the_row_stays_where_it_is(shown):
    button = shown.get_by_role("button", name="Open the timeline of GPipe")
    button.scroll_into_view_if_needed()
    top = button.bounding_box()["y"]
    button.click()
    settled(shown)
    assert button.bounding_box()["y"] == pytest.approx(top, abs=1)
    assert shown.locator("dp-explorer .card", has=button).locator("dp-timeline").is_visible()
    assert shown.locator("dp-explorer dp-timeline").count() == 1


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_as_many_cells_as_actions_and_nothing_sticks_out(shown, width):
    shown.set_viewport_size({"width": width, "height": 900})
    settled(shown)
    cells = element(shown, "Object.fromEntries([...e.cards].map(([key, card]) => [key, card.cells]))", "dp-explorer")
    assert cells == {
        name: len(list(program))
        for name in schedules.names(synchronous=True, pairs=False)
        if (program := built(name, 4, 8))
    }
    assert shown.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, theme):
    page.show(Explorer().to_html(), theme)
    page.wait_for_function("document.querySelector('dp-explorer').results")
    check_accessibility(page)
