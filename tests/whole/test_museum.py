"""The museum: a sound run shows no symptom, each defect shows its own, and none is invisible."""

import pytest

from dualpipe_course.whole import defects
from dualpipe_course.whole.defects import DEFECTS
from dualpipe_course.whole.training_log import SYMPTOMS, symptoms

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

    @pytest.mark.parametrize(
        ("name", "factor"),
        [("ClipScaled", 2.0**16), ("UndividedPipeline", 65.0), ("ExpertsTimesRanks", None)],
    )
    def test_a_wrong_scale_is_the_scale(self, logs, name, factor):
        """The loss scale, the number of targets, and for the experts the number of ranks."""
        run = getattr(defects, name)
        mine, theirs = logs[run].ranks[0], logs[run.__bases__[0]].ranks[0]
        if factor is None:
            assert mine.expert_norms[0] == pytest.approx(2 * theirs.expert_norms[0], rel=1e-12)
        else:
            assert mine.norms[0] == pytest.approx(factor * theirs.norms[0], rel=1e-12)

    def test_twice_the_bytes_of_gradients_in_two_microbatches(self, logs):
        sound, mine = logs[defects.DataParallel], logs[defects.SumEveryMicrobatch]
        assert mine.sent - sound.sent == pytest.approx(sound.sent, rel=1e-3)  # all but the count of targets

    def test_kept_units_are_the_whole_model(self, logs):
        sound, mine = logs[defects.FullySharded], logs[defects.KeptUnits]
        assert mine.peak > 1.3 * sound.peak
        assert mine.sent < sound.sent  # it is not gathered again


def test_twelve_defects_with_a_source_and_a_sentence_each():
    assert len({defect.run for defect in DEFECTS}) == 12
    assert all(source.startswith("https://github.com/") for defect in DEFECTS for source in defect.sources)
    assert all(defect.run.__doc__ and defect.sources for defect in DEFECTS)
    assert set().union(*(defect.shows for defect in DEFECTS)) == set(SYMPTOMS)
