"""The exercise of "Distributed Adam": three numbers.

Chapter: book/dp/distributed-adam.
"""

import math

from dualpipe_course.declared import Predict

numbers = Predict(
    "distributed_adam-1",
    "Bytes, a norm, and a clipped shard",
    ("state bytes", "norm", "clipped norm of the third shard"),
    lambda n, a, b, c, to: (8 * -(-n // 3), math.hypot(a, b, c), to / math.hypot(a, b, c) * c),
    "the model has {n:,} weights",
    "the norms {a}, {b} and {c}.",
    "clipped to {to}.",
    minutes=5,
    points=1,
    hints=(
        "1,000 weights do not divide by 3: each shard is padded to the same length. Two float32 per weight.",
        "Square the three norms before you add them.",
        "Every shard is multiplied by the same factor, the largest norm over the norm of the whole.",
    ),
    slips=(
        {8000: "that is all of the state", 1336: "there are two moments per weight", 2664: "round up: 3 x 333 is 999"},
        {11: "norms do not add up, their squares do", 49: "that is the square of the norm"},
        {
            6: "the norm of the whole is above the largest, so every shard shrinks",
            4: "4 is what may be left of the whole; this shard is a part of it",
        },
    ),
    n=(1000, 1300, 1600, 1900, 2200, 2500, 2800, 3100),
    a=(2, 1, 3),
    b=(3, 4, 5),
    c=(6, 8, 12, 14),
    to=(3.5, 4.5, 6.5, 7.5),
    called={"n": "weights", "a": "norms", "b": "", "c": "", "to": "clipped to"},
)
