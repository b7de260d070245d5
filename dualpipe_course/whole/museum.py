"""Exercises of "The museum of defects": quotients to predict, and runs without a name.

Chapter: book/whole/museum.  The runs without a name are those of the chapter on other data.
"""

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.wrong import Wrong

NAMES = ("clipped with the scale", "undivided pipeline", "experts averaged over copies", "bytes of gradients")
_SLIPS = (
    {1: "the norm in the log has the loss scale in it", 10: "this is the logarithm of the loss scale"},
    {
        120: "this is the share of one data rank; every rank divides by the targets of the step",
        40: "these are the targets of one microbatch; every microbatch is divided by the targets of the step",
        12: "these are the microbatches of all ranks; the loss is divided by targets",
        3: "these are the microbatches of a rank; the loss is divided by targets",
    },
    {
        2: "this is the number of copies; they are averaged over 2 where everything else is averaged over 16",
        16: "this is the number of data ranks; the copies are divided by 2 and not by 1",
        1: "sums over 2 copies are divided by 2, all others by 16",
    },
    {
        1: "a gradient that travels after each microbatch travels more than once",
        12: "the ranks share each sum; a rank sends its gradients once per microbatch",
        6: "both runs use the same collective",
    },
)
UNNAMED = ("MeanOfMeans", "SumEveryMicrobatch", "OwnKeysAgain", "ClipScaled", "SameBatches")
FIRST_SEED = 500


def unnamed() -> None:
    """Train the runs without a name beside their sound runs, and print the logs of both."""
    from dualpipe_course.whole import defects
    from dualpipe_course.whole.training_log import beside

    runs = [getattr(defects, name) for name in UNNAMED]
    logs = defects.train([each for run in runs for each in (run.__bases__[0], run)], FIRST_SEED)
    for number, (sound, suspect) in enumerate(zip(logs[::2], logs[1::2], strict=True), 1):
        print(f"run {number}, beside a sound {runs[number - 1].__bases__[0].__name__} run")
        print(beside(sound, suspect, steps=3), end="\n\n")


def _judge_five_runs(answer: object) -> str:
    from dualpipe_course.whole.defects import DEFECTS

    by_name = {defect.run.__name__: defect for defect in DEFECTS}
    if not isinstance(answer, (list, tuple)) or len(answer) != len(UNNAMED):
        raise Wrong(f"expected a list of {len(UNNAMED)} names, such as ['KeptUnits', ...]")
    right = 0
    problems = []
    for number, (name, expected) in enumerate(zip(answer, UNNAMED, strict=True), 1):
        if type(name) is not str or name not in by_name:
            raise Wrong(f"run {number}: {name!r} is none of {', '.join(by_name)}")
        if name == expected:
            right += 1
            continue
        mine, true = by_name[name], by_name[expected]
        if mine.sound is not true.sound:
            problems.append(f"run {number} is {true.sound.__name__}, and {name} is a defect of {mine.sound.__name__}")
        elif mine.shows != true.shows:
            shown = ", ".join(sorted(mine.shows - true.shows)) or "less"
            problems.append(f"run {number}: {name} would show {shown}")
        else:
            problems.append(f"run {number}: {name} shows the same symptoms; look at the quotients")
    if problems:
        raise Wrong("; ".join(problems), score=right / len(UNNAMED))
    return "five of five, from their logs alone"


quotients = Predict(
    "museum-1",
    "Four quotients",
    NAMES,
    lambda scale, m, targets, **_: (scale, targets, 8, m),
    "a loss scale of {scale:,}.",
    "read {m} microbatches each; the step has {targets} targets, {each} on each rank",
    minutes=8,
    points=1,
    hints=(
        "A scale that is still in the gradient is in its norm too.",
        "The summand of every microbatch is to be divided by all targets of the step.",
        "Sums are alike in both runs. One divides them by 2, the other by 16.",
    ),
    slips=_SLIPS,
    scale=(1024, 512, 2048, 4096),
    m=(3, 2, 4, 5),
    targets=(480, 240, 360, 600),
    each=lambda targets, **_: targets // 4,
    called={"m": "microbatches", "scale": "loss scale", "each": "on each rank"},
)


five_runs = Puzzle(
    "museum-3",
    "Five runs without a name",
    "Name the defects of five runs.",
    judge=_judge_five_runs,
    minutes=25,
    points=3,
    hints=(
        "Each run stands beside a sound one of its kind; only defects of that kind come into question.",
        "Divide the first norms. Is the quotient a number that you know?",
        "Of two defects that change the first loss, one makes the ranks' own sums equal.",
    ),
)
