"""SimuMax's measured steps on 8 B200: dense models, three of 31 rows as calibration points; `pytest -s` prints all."""

from statistics import median

from dualpipe_course.whole.published import simumax, sizes_of


def test_simumax_s_measured_steps_are_predicted_from_three_of_them():
    print(f"\n{ {name: round(part, 3) for name, part in simumax.machine().items()} }")
    rows = list(simumax.steps())
    for pair, theirs in rows:
        mark = "calibration" if pair.is_point else f"{pair.error:+.1%}, SimuMax {theirs:.2%}"
        print(f"{pair.name}: measured {pair.published} ms, {mark}")
    assert all(abs(pair.error) < 0.002 for pair, _ in rows if pair.is_point)
    count, middle, worst = sizes_of(pair for pair, _ in rows)
    theirs = median(theirs for pair, theirs in rows if not pair.is_point)
    print(f"{count} rows: median {middle:.2%} (SimuMax {theirs:.2%}), worst {worst:.1%}")
    assert count == 28
    assert worst < 0.12
    assert middle < 0.037 < theirs
