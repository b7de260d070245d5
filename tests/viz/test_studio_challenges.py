"""The studio's challenges in a browser: judged as in the notebook, with the same stars."""

import pytest
from studio_answers import ANSWERS
from studio_page import act, retype, studio, verdict, with_challenges

from dualpipe_course import check
from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_course.pp.studio import judge
from dualpipe_course.registry import topic
from dualpipe_lab import pp

pytestmark = pytest.mark.browser


def test_a_deadlock_is_drawn_told_and_mended(page):
    with_challenges(page)
    page.get_by_role("button", name="Mend the deadlock").click()
    program = CHALLENGES[0].program(CHALLENGES[0].start)
    with pytest.raises(pp.InvalidProgram) as refused:
        pp.validate(program)
    assert studio(page, "e.result.problems") == list(refused.value.problems)
    assert studio(page, "e.timeline.view.marks.circle.length") == 2
    assert studio(page, "e.timeline.tracks[0].stop") == 2
    assert "never runs" in studio(page, "e.timeline.toSvg()")
    page.locator("dp-studio .mend").click()
    assert verdict(page).startswith("Valid: 12 ticks")
    assert page.locator("dp-studio .judgement").inner_text() == "Solved, with the star of memory."


def test_the_challenges_are_solved_with_all_stars_and_the_notebook_accepts_them(page):
    with_challenges(page)
    checks = {one.about.title: one for one in topic("studio")}
    for index, challenge in enumerate(CHALLENGES):
        for star in ("time", "memory"):
            act(page, "challenge", index)
            answer = ANSWERS[challenge.name][star]
            retype(page, answer)
            found = judge(challenge, answer)
            assert studio(page, "e.result.figures.makespan") == found.timeline.makespan
            words = page.locator("dp-studio .judgement").inner_text()
            assert words.startswith("Solved, with the star") == (found.time or found.memory)
            assert getattr(found, star)
            text = page.evaluate("document.querySelector('dp-studio').actions.answer()")
            pasted = eval(f"[{text}]")  # what a learner pastes into the answer's list
            assert checks[challenge.title].verdict(pasted).passed
    stars = page.locator("dp-studio .challenges .stars").all_inner_texts()
    assert stars == ["★★★"] * 10
    page.reload()
    page.wait_for_function("document.querySelector('dp-studio')?.timeline?.tracks")
    assert page.locator("dp-studio .challenges .stars").all_inner_texts() == ["★★★"] * 10
    assert check.studio.mend.about.kind == "puzzle"


def test_no_challenge_starts_solved(page):
    with_challenges(page)
    for index in range(len(CHALLENGES)):
        act(page, "challenge", index)
        assert page.locator("dp-studio .judgement").inner_text().startswith("Not yet: ")
