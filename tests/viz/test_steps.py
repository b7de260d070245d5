"""Steps: what ranks hold follows from the messages, a run gives its rounds, and the page plays them."""

from itertools import product

import pytest
from drawing_page import check_accessibility, element
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.timeline import Message, Timeline
from dualpipe_lab.viz import Steps


def ring(num_ranks):
    """Every rank's value goes all the way around."""
    log = [
        (
            f"hop {k}",
            [(r, (r + 1) % num_ranks, (f"x{(r - k) % num_ranks}", (r - k) % num_ranks)) for r in range(num_ranks)],
        )
        for k in range(num_ranks - 1)
    ]
    return Steps("ring", [[(f"x{r}", r)] for r in range(num_ranks)], log)


@given(st.integers(2, 9))
def test_after_a_turn_every_rank_holds_every_value(num_ranks):
    drawing = ring(num_ranks)
    everything = sorted((f"x{r}", r) for r in range(num_ranks))
    assert [sorted(held) for held in drawing.states[-1]] == [everything] * num_ranks
    assert [len(held) for held in drawing.states[1]] == [2] * num_ranks


def test_a_log_may_say_what_is_held():
    drawing = Steps("sum", [["1"], ["2"]], [("add", [(0, 1, "1")], [["1"], ["3"]])])
    assert drawing.states == [[[("1", None)], [("2", None)]], [[("1", None)], [("3", None)]]]
    assert drawing.to_spec()["steps"] == [{"title": "add", "messages": [(0, 1, "1", None)], "holds": drawing.states[1]}]


@pytest.mark.parametrize(
    ("start", "step", "words"),
    [
        ([["a"], []], ("s", [(0, 0, "a")]), "'a' goes from rank 0 to rank 0; a message needs two different ranks"),
        ([["a"], []], ("s", [(0, 2, "a")]), "to rank 2; a message needs two different ranks from 0 to 1"),
        ([["a"], []], ("s", [], [["a"]]), "states what 1 ranks hold, there are 2; give one list per rank"),
    ],
)
def test_a_log_that_cannot_be_drawn_is_refused(start, step, words):
    with pytest.raises(ValueError, match=words):
        Steps("wrong", start, [step])


def test_a_run_is_drawn_in_rounds_of_messages_that_did_not_wait_for_each_other():
    messages = [
        Message(0, 1, 0, 5, "a"),
        Message(2, 0, 0, 9, "b"),
        Message(1, 2, 5, 8),
        Message(1, 0, 4, 6, num_bytes=8),
    ]
    drawing = Steps.of_run(Timeline("run", [[], [], []], messages, source="measured"))
    assert [[(src, dst, cell[0]) for src, dst, cell in step.messages] for step in drawing.log] == [
        [(0, 1, "a"), (1, 0, "8 B"), (2, 0, "b")],
        [(1, 2, "message")],
    ]


def test_a_run_is_replayed_over_what_the_ranks_held_at_first():
    """x goes round three ranks; each message carries what its sender holds under the label by then."""
    hops = [Message(rank, (rank + 1) % 3, 10 * rank, 10 * rank + 5, "x 7") for rank in range(3)]
    run = Timeline("run", [[], [], []], hops)

    def receive(held, label, value, number):
        held["own"] = (*held["own"], value, number)
        held[label] = value + 1

    start = [{"x 7": 1.5, "own": ()}, {"own": ()}, {"own": ()}]
    drawing = Steps.of_run(run, "replay", start, receive, ["first"], moves=True)
    assert [step.title for step in drawing.log] == ["first", "sent after round 1 arrived", "sent after round 2 arrived"]
    assert [step.messages[0][2] for step in drawing.log] == [("1.5", 7), ("2.5", 7), ("3.5", 7)]
    assert drawing.states[0] == [[("1.5", 7), ("-", None)], [("-", None)], [("-", None)]]
    assert drawing.states[-1] == [[("3.5,3", None), ("4.5", 7)], [("1.5,1", None)], [("2.5,2", None)]]
    with pytest.raises(ValueError, match="start states what 2 ranks hold, the run has 3; give one dictionary per rank"):
        Steps.of_run(run, start=start[:2])


def test_names_stay_inside_the_picture(tmp_path):
    drawing = Steps("<b>'x'", [["<i>"], []], [("<u>", [(0, 1, "<i>")])])
    assert "<b>" not in drawing.to_html(script=False).replace("%3C", "<").split("<img")[0]
    assert "<i>" not in drawing.to_svg()
    drawing.save(tmp_path / "page.html")
    assert "<title>&lt;b&gt;" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.browser
def test_cards_do_not_cover_each_other(page, subtests):
    for width, num_ranks in product([390, 1280], [2, 4, 8, 12]):
        with subtests.test(width=width, num_ranks=num_ranks):
            page.set_viewport_size({"width": width, "height": 800})
            page.show(ring(num_ranks).to_html())
            card, places = element(page, "[e.layout.card, e.layout.places]", "dp-steps")
            for i, (x1, y1) in enumerate(places):
                assert card["width"] / 2 <= x1 <= element(page, "e.layout.width", "dp-steps") - card["width"] / 2
                for x2, y2 in places[:i]:
                    assert abs(x1 - x2) >= card["width"] or abs(y1 - y2) >= card["height"]
            assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_keys_step_and_the_status_says_what_is_held(page):
    page.emulate_media(reduced_motion="reduce")
    page.show(ring(3).to_html())
    page.locator("dp-steps .scroll").focus()
    page.keyboard.press("ArrowRight")
    assert element(page, "e.time", "dp-steps") == 1
    text = page.locator("dp-steps .status").inner_text()
    assert text == "Step 1 of 2: hop 0. rank 0: x0 x2; rank 1: x1 x0; rank 2: x2 x1"
    page.keyboard.press("End")
    assert element(page, "e.time", "dp-steps") == 2
    page.locator("dp-steps summary").click()
    assert page.locator("dp-steps tbody tr").count() == 6


@pytest.mark.browser
def test_a_step_is_played_and_then_waits(page):
    page.show(ring(3).to_html())
    page.get_by_role("button", name="Step", exact=True).click()
    page.wait_for_function("0 < document.querySelector('dp-steps').time && document.querySelector('dp-steps').time < 1")
    page.wait_for_function("!document.querySelector('dp-steps').playing")
    assert element(page, "e.time", "dp-steps") == 1


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_steps(page, theme):
    page.show(ring(4).to_html(), theme)
    check_accessibility(page)
