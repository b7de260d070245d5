"""vTrain's measured plans of four GPTs on 64 to 512 A100, beside estimates by a machine of three numbers.

Chapter: book/whole/predictions.  Of vTrain's runs on many nodes, 58 of 109: Megatron-DeepSpeed, 1F1B, full
recomputation.  Three numbers of the machine are fitted to 60 of its runs on one node.  What many nodes add to all of
the runs is one factor: the median of measured over estimated of the other sizes.
  regret    seconds of the plan that the estimate likes best, over those of the best one, less 1
The estimates take some seconds, so they are stored here; `tests/plan/test_published_plans.py` computes them again.
Source: github.com/VIA-Research/vTrain, commit f8dda847 (2024-09-26), data/ground_truth_multi.csv.
"""

from math import exp, log
from statistics import mean, median
from typing import NamedTuple

from dualpipe_course.whole.published import Pair
from dualpipe_course.whole.published.fits import rank_correlation

MODELS = {  # by 10^9 parameters: hidden size, attention heads, layers; sequences of 2,048 tokens
    3.6: (3072, 32, 30), 18.4: (6144, 48, 40), 39.1: (8192, 64, 48), 175.0: (12288, 96, 96),
}  # fmt: skip
SIZES = tuple(MODELS)
ROWS = [  # 10^9 parameters, tp, dp, pp, microbatches, sequences of a step, ms measured and estimated before the factor
    (3.6, 2, 32, 1, 2, 512, 3975.2, 2750.3),
    (3.6, 1, 64, 1, 4, 512, 3700.5, 2681.6),
    (3.6, 2, 32, 1, 4, 512, 4078.2, 2917.6),
    (3.6, 4, 16, 1, 2, 512, 4492.1, 3243.8),
    (3.6, 1, 32, 2, 4, 512, 4382.1, 2928.2),
    (3.6, 1, 32, 2, 8, 512, 4034.9, 2863.0),
    (3.6, 4, 16, 1, 16, 512, 6228.3, 4464.5),
    (3.6, 1, 32, 2, 2, 512, 5045.6, 3292.2),
    (3.6, 8, 8, 1, 8, 512, 5178.0, 4786.7),
    (3.6, 8, 8, 1, 32, 512, 8880.9, 6972.5),
    (3.6, 16, 4, 1, 16, 512, 10894.0, 10975.5),
    (3.6, 16, 4, 1, 64, 512, 13472.2, 16194.9),
    (18.4, 8, 32, 1, 2, 1024, 10506.6, 9034.7),
    (18.4, 8, 32, 1, 16, 1024, 10453.3, 10719.6),
    (18.4, 4, 32, 2, 8, 1024, 10950.4, 7984.5),
    (18.4, 2, 32, 4, 8, 1024, 10825.0, 8033.5),
    (18.4, 1, 32, 8, 8, 1024, 12379.0, 9945.0),
    (18.4, 8, 16, 2, 32, 1024, 10434.8, 10324.2),
    (18.4, 8, 4, 8, 32, 1024, 11026.1, 10719.3),
    (39.1, 4, 32, 4, 24, 1536, 13875.5, 11862.8),
    (39.1, 4, 32, 4, 16, 1536, 16185.5, 12136.6),
    (39.1, 4, 32, 4, 12, 1536, 15625.6, 12549.9),
    (39.1, 4, 16, 8, 48, 1536, 16070.6, 11943.9),
    (39.1, 4, 8, 16, 96, 1536, 14529.6, 12485.2),
    (39.1, 2, 16, 16, 32, 1536, 26188.8, 13388.4),
    (39.1, 4, 32, 4, 8, 1536, 18532.1, 13523.4),
    (39.1, 8, 32, 2, 8, 1536, 14915.5, 14146.2),
    (39.1, 8, 32, 2, 6, 1536, 15212.8, 14430.2),
    (39.1, 8, 32, 2, 4, 1536, 17126.8, 15150.7),
    (39.1, 8, 16, 4, 32, 1536, 14833.8, 13877.5),
    (39.1, 8, 16, 4, 24, 1536, 14750.7, 13923.1),
    (39.1, 8, 16, 4, 16, 1536, 15249.4, 14298.4),
    (39.1, 8, 8, 8, 64, 1536, 15270.7, 14258.2),
    (39.1, 8, 8, 8, 48, 1536, 14967.1, 14380.6),
    (39.1, 4, 8, 16, 32, 1536, 20044.1, 14968.2),
    (39.1, 8, 8, 8, 32, 1536, 15775.3, 14909.7),
    (39.1, 8, 16, 4, 8, 1536, 17182.4, 16013.1),
    (39.1, 8, 4, 16, 192, 1536, 15639.4, 15509.5),
    (39.1, 8, 8, 8, 24, 1536, 16413.4, 15584.2),
    (39.1, 2, 16, 16, 16, 1536, 27228.4, 17170.8),
    (39.1, 8, 8, 8, 16, 1536, 17999.5, 17086.6),
    (39.1, 4, 16, 8, 8, 1536, 20614.8, 17934.6),
    (39.1, 8, 4, 16, 48, 1536, 16877.1, 17108.6),
    (39.1, 4, 8, 16, 16, 1536, 27810.3, 19400.0),
    (39.1, 8, 8, 8, 8, 1536, 23171.1, 21880.2),
    (175.0, 4, 8, 16, 96, 1536, 54255.9, 46697.9),
    (175.0, 4, 8, 16, 64, 1536, 55236.0, 49113.7),
    (175.0, 4, 4, 32, 192, 1536, 53909.6, 48390.3),
    (175.0, 4, 4, 32, 128, 1536, 56297.2, 51042.3),
    (175.0, 2, 8, 32, 96, 1536, 57411.2, 49790.1),
    (175.0, 4, 8, 16, 48, 1536, 57720.0, 51801.5),
    (175.0, 8, 8, 8, 48, 1536, 58240.3, 52647.3),
    (175.0, 8, 4, 16, 128, 1536, 55677.5, 52950.3),
    (175.0, 8, 4, 16, 96, 1536, 57504.3, 54101.0),
    (175.0, 8, 2, 32, 384, 1536, 58555.4, 55729.0),
    (175.0, 2, 8, 32, 64, 1536, 64296.3, 55227.9),
    (175.0, 8, 2, 32, 192, 1536, 59147.5, 57824.0),
    (175.0, 8, 2, 32, 128, 1536, 62636.8, 61112.2),
]


class Ranking(NamedTuple):
    """How well the estimates of one size of model rank its plans."""

    factor: float
    pairs: list[Pair]
    regret: float
    order: float
    error: float


def ranking(size: float) -> Ranking:
    """The plans of a size with the factor of the other sizes; regret, rank correlation, mean size of the errors."""
    factor = exp(median(log(row[6] / row[7]) for row in ROWS if row[0] != size))
    pairs = [
        Pair(f"tp {tp} dp {dp} pp {pp} m {count}", measured, found * factor)
        for billions, tp, dp, pp, count, _, measured, found in ROWS
        if billions == size
    ]
    times, estimates = [pair.published for pair in pairs], [pair.estimated for pair in pairs]
    regret = times[estimates.index(min(estimates))] / min(times) - 1
    error = mean(abs(pair.error) for pair in pairs)
    return Ranking(factor, pairs, regret, rank_correlation(estimates, times), error)
