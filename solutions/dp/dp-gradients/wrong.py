"""Typical wrong answers and lazy cheats of the exercises on gradients of data parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "dp_gradients-5": {
        "in every microbatch": Bad(
            [("len(bucket) * self.num_backwards for", "len(bucket) for")], "bytes left in the backward of microbatch 0"
        ),
        "all at the end": Bad(
            [("        if self.missing[number] == 0:\n            self._start(number)\n", "")],
            "when the backward of layer 3 began, 0 bytes had left",
        ),
        "waits in the hook": Bad(
            [
                (
                    "        self.started[number] = ",
                    "        [work.wait() for work in works]\n        self.started[number] = ",
                )
            ],
            "the hook has waited",
        ),
        "nothing for the unused": Bad(
            [
                (
                    "            if number not in self.started:\n                self._start(number)\n",
                    "            pass\n",
                )
            ],
            "no progress",
        ),
    },
    "dp_gradients-4": {
        "halves": Bad("layers_per_bucket = [4, 4]", "103 ticks"),
        "one each": Bad("layers_per_bucket = [1] * 8", "109 ticks"),
        "the other way round": Bad("layers_per_bucket = [4, 2, 1, 1]", "busy from 33 to 71, 71 to 84"),
    },
}

CHEATS = {
    "dp_gradients-5": {
        "the library's own": Bad(
            "from dualpipe_lab.dp import GradientReducer as Buckets", "dualpipe_lab.dp.GradientReducer is the library's"
        ),
        "after the backward": Bad(
            """
from mine.data import sum_gradients


class Buckets:
    def __init__(self, parameters, ranks, num_bytes, num_backwards=1):
        self.parameters, self.ranks = parameters, ranks

    def finish(self):
        sum_gradients(self.parameters, self.ranks)
""",
            "0 bytes had left",
        ),
    },
    "dp_gradients-4": {
        "equal to everything": Bad(EQUAL_TO_ALL + "layers_per_bucket = [Anything()]", "1 layer at least"),
    },
}
