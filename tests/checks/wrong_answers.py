"""Per exercise: typical wrong answers and lazy cheats, and a part of the message that each must get.

An answer is the text of the answer cell, or replacements in the solution.  `solutions/<part>/<topic>/wrong.py` is one
table.
"""

from pathlib import Path

from scripts import load

_TOPICS = [load(path) for path in sorted((Path(__file__).parents[2] / "solutions").glob("*/*/wrong.py"))]

TYPICAL = {name: cases for topic in _TOPICS for name, cases in topic.TYPICAL.items()}
CHEATS = {name: cases for topic in _TOPICS for name, cases in topic.CHEATS.items()}
