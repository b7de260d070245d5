"""Measured plans of four GPTs on 64 to 512 A100: does the estimate rank them?  `pytest -s` prints every row.

Of vTrain's runs on many nodes, 58 of 109.  The machine's three numbers come from its runs on one node
(`python tests/plan/vtrain_runs.py`); what many nodes add to all of them is one factor, taken from the other sizes.
The goals are a regret of 2%, a rank correlation of 0.9 and a mean error of 12% for every size.  Three, one and three of
the four sizes meet them.  The plans of 18.4B lie within 5% of each other, but for two, which no estimate here tells
apart; of 39.1B tp 2 and tp 4 with several stages on a node are slower than anything here explains.
"""

from vtrain_runs import estimated, many_nodes

from dualpipe_course.whole.published import vtrain

MACHINE = (0.8808800000000002, 1288868830.7542071, 5.8572800000000016e-05)
BOUNDS = {  # plans, and what is reached now: regret at most, order at least, error at most
    3.6: (12, 0.01, 0.95, 0.21),
    18.4: (7, 0.055, -0.3, 0.125),
    39.1: (26, 0.01, 0.58, 0.12),
    175.0: (13, 0.01, 0.83, 0.07),
}


def test_the_stored_estimates_are_those_of_the_library():
    runs = list(many_nodes())
    assert len(runs) == 58
    for run, row in zip(runs, vtrain.ROWS, strict=True):
        assert abs(estimated(run, MACHINE) - row[7]) < 0.06


def test_measured_plans_are_ranked():
    assert set(vtrain.SIZES) == set(BOUNDS)
    for size in vtrain.SIZES:
        found = vtrain.ranking(size)
        for pair in sorted(found.pairs, key=lambda pair: pair.published):
            print(f"{pair.name}: measured {pair.published:.0f}, predicted {pair.estimated:.0f}, {pair.error:+.1%}")
        print(f"{size}B: factor {found.factor:.3f}; {found.regret:.1%}, {found.order:.2f}, {found.error:.1%}")
        count, most_regret, least_order, most_error = BOUNDS[size]
        assert len(found.pairs) == count
        assert found.regret <= most_regret
        assert found.order >= least_order
        assert found.error <= most_error
