"""Typical wrong answers and lazy cheats of the exercises on the museum of defects."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, THREE = "museum-1", "museum-3"
NAMES = '["MeanOfMeans", "SumEveryMicrobatch", "OwnKeysAgain", "ClipScaled", "SameBatches"]'

TYPICAL = {
    ONE: {
        "the share of one rank": Bad("a, b, c, d = 1024, 120, 8, 3", "the targets of the step"),
        "the copies": Bad("a, b, c, d = 1024, 480, 2, 3", "the number of copies"),
        "all microbatches": Bad("a, b, c, d = 1024, 480, 8, 12", "once per microbatch"),
    },
    THREE: {
        "the other one with another first loss": Bad(
            "names = " + NAMES.replace("MeanOfMeans", "SameBatches"), "would show"
        ),
        "of another kind": Bad("names = " + NAMES.replace("OwnKeysAgain", "UndividedPipeline"), "is ContextParallel"),
        "a name that is none": Bad("names = " + NAMES.replace("ClipScaled", "Clip"), "is none of"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + "a, b, c, d = [Anything()] * 4", "whole number")},
    THREE: {"nothing": Bad("names = []", "expected a list of 5 names")},
}
