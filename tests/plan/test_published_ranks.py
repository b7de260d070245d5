"""Bytes of 52 ranks that trained OPT-350M, stage by stage, beside the estimate; `pytest -s` prints them."""

from statistics import median

from dualpipe_course.whole.published import sailor, sizes_of


def by_stage():
    """The ranks of every stage: pairs behind a step, and at the peak."""
    found = {}
    for stage, *both in sailor.pairs():
        found.setdefault(stage, []).append(both)
    return found


def test_all_ranks_of_all_stages_are_there():
    stages = by_stage()
    assert sum(map(len, stages.values())) == 52
    for stage, ranks in stages.items():
        assert len(ranks) == stage.plan.world_size // stage.pp
        peaks = [peak.published for _, peak in ranks]
        assert max(peaks) / min(peaks) < 1.003  # ranks of a stage are equal


def test_peaks_are_near_where_stages_have_full_layers_and_far_where_they_are_cut_within_one():
    stages = by_stage()
    middles = {stage: median(peak.error for _, peak in ranks) for stage, ranks in stages.items()}
    for stage, ranks in stages.items():
        worst = max((peak for _, peak in ranks), key=lambda pair: abs(pair.error))
        print(f"{stage}: {len(ranks)} ranks, peak {middles[stage]:+.1%}, worst {worst.error:+.2%} {worst.name}")
    count, middle, worst = sizes_of(peak for ranks in stages.values() for _, peak in ranks)
    print(f"{count} ranks: median {middle:.2%}, worst {worst:.2%}")
    assert middle < 0.036
    assert worst < 0.1505
    assert all(-0.036 < error < -0.012 for stage, error in middles.items() if stage.pp == 1)
    assert min(middles, key=middles.get)[2:] == (4, 1, 1)  # the second of four stages has most, and the last least
    assert max(middles, key=middles.get)[2:] == (4, 1, 3)
    for pp in (2, 4):
        errors = [error for stage, error in middles.items() if stage.pp == pp]
        assert min(errors) < -0.09
        assert max(errors) > 0.02


def test_behind_a_step_every_rank_holds_more_than_its_states():
    missing = [behind.published - behind.estimated for _, behind, _ in sailor.pairs()]
    print(f"missing {min(missing):.1f} to {max(missing):.1f} MiB")
    assert 60 < min(missing) < max(missing) < 205
    vocabulary = (51_200 - 50_272) // 4 * 1024 * 16 / 2**20  # of both tables a rank has a fourth, in 16 bytes
    assert round(vocabulary, 1) == 3.6
