"""Exercises of "Easy-DualPipe": its numbers where microbatches are few.

Chapter: book/pp/easy-dualpipe.
"""

from dualpipe_course.declared import Predict

NUMBERS = ("bubble per rank", "makespan", "peak of rank 0", "peak of rank 2")
_BUBBLES = {
    12: "this is (p - 2) max(t_F, t_B), for m = p; two microbatches fewer leave gaps in the middle, (p - m) min each",
    25: "this is 1F1B's (p - 1)(t_F + t_B); here a first input passes half of the ranks",
    20: "(p - 2)(t_F + t_B) counts the way of a first input and of a last gradient twice",
    18: "each missing microbatch leaves a gap as long as the shorter of F and B, not the longer",
}


numbers = Predict(
    "easy_dualpipe-1",
    "Fewer microbatches than ranks",
    NUMBERS,
    lambda p, m, f, b: (wait := (p - 2) * b + (p - m) * f, m * (f + b) + wait, m // 2 + 1, m),
    "on {p} ranks with {m} microbatches; F takes {f} ticks, B takes {b},",
    minutes=5,
    points=1,
    hints=(
        "At m = p a rank waits (p - 2) max(t_F, t_B). What is added where m is smaller?",
        "Every rank works on all m microbatches, half of them on each of its two stages.",
        "Each direction alone is 1F1B with m/2 microbatches: on p - s ranks to its end, stage s holds min(p - s, m/2).",
    ),
    slips=(_BUBBLES, {}, {2: "it holds min(6, 2) of direction 0 on stage 0; and of direction 1, stage 5?"}, {}),
    p=(6, 8, 10),
    m=(4,),
    f=(2, 3),
    b=(3, 4, 5, 6, 7),
    called={"p": "ranks", "m": "microbatches", "f": "F", "b": "B"},
)
