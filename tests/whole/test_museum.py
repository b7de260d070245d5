"""The museum: a sound run shows no symptom, each defect shows its own, and none is invisible."""

import pytest
import torch

from dualpipe_course.whole import defects
from dualpipe_course.whole.defects import DEFECTS
from dualpipe_course.whole.torch_defects import TORCH_DEFECTS, TorchDefect
from dualpipe_course.whole.training_log import symptoms

SOUND = list(dict.fromkeys(defect.sound for defect in DEFECTS))
RUNS = [*SOUND, *(defect.run for defect in DEFECTS)]


@pytest.fixture(scope="module")
def logs():
    """The log of every run by its class; all on the same two ranks."""
    return dict(zip(RUNS, defects.train(RUNS), strict=True))


@pytest.mark.on_gloo("the virtual clock emulates links of GLOO")
class TestMuseum:
    def test_sound_runs_of_one_model_have_one_curve(self, logs):
        """The same Llama by data, context and pipeline parallelism: any difference would hide a defect."""
        first, *others = (logs[run] for run in SOUND if run.__name__ in ("DataParallel", "ContextParallel", "Pipeline"))
        assert len(others) == 2
        for other in others:
            assert other.losses == pytest.approx(first.losses, rel=1e-10)
            assert other.norms == pytest.approx(first.norms, rel=1e-10)

    def test_a_sound_run_has_equal_copies_and_learns(self, logs):
        for run in SOUND:
            assert logs[run].spread == 0, run
            assert logs[run].losses[-1] < 0.75 * logs[run].losses[0], run

    def test_a_sound_run_shows_nothing_beside_itself_on_other_ranks_and_again(self, logs):
        again = defects.train([SOUND[0], SOUND[-1]])
        assert [symptoms(logs[SOUND[0]], again[0]), symptoms(logs[SOUND[-1]], again[1])] == [set(), set()]

    @pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.run.__name__)
    def test_a_defect_shows_exactly_its_symptoms(self, logs, defect):
        assert defect.shows
        assert symptoms(logs[defect.sound], logs[defect.run]) == defect.shows


QUOTIENTS = {  # on the torch that is pinned
    "experts_beside_ddp": {"dense layer": 1, "expert": 2},
    "clip_a_pipeline": {"norm on rank 0": 0.738271, "norm on rank 1": 0.674505},
    "accumulate_pipeline_steps": {"stage of rank 0": 5 / 8, "stage of rank 1": 5 / 8},
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="which defects a torch has depends on its version")
@pytest.mark.parametrize("defect", TORCH_DEFECTS, ids=lambda defect: defect.run.__name__)
def test_the_pinned_torch_has_the_defects_that_the_page_runs(defect):
    assert defect.quotients() == pytest.approx(QUOTIENTS[defect.run.__name__], rel=1e-5)


def test_a_torch_in_which_a_defect_has_ended_says_so(monkeypatch):
    for quotient, has_ended in ((1 + 1e-9, True), (2.0, False)):
        monkeypatch.setattr(TorchDefect, "quotients", lambda _, found=quotient: {"expert": 1.0, "norm": found})
        assert ("this torch has the defect no longer" in TORCH_DEFECTS[0].look()) == has_ended
