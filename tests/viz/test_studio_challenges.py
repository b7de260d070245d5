"""The studio's challenges in a browser: judged as in the notebook, with the same stars."""

import pytest
from studio_answers import ANSWERS
from studio_page import act, retype, studio, with_challenges

from dualpipe_course import check
from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_course.pp.studio import judge
from dualpipe_course.registry import topic

pytestmark = pytest.mark.browser


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
