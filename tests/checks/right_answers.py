"""Per exercise: right answers in another style than the solution's, each of which must pass with the full score.

An answer is the text of the answer cell, or replacements in the solution.  `solutions/<part>/<topic>/right.py` is one
table.
"""

from pathlib import Path

from scripts import load

_TOPICS = [load(path) for path in sorted((Path(__file__).parents[2] / "solutions").glob("*/*/right.py"))]

RIGHT = {name: answers for topic in _TOPICS for name, answers in topic.RIGHT.items()}
