"""Per exercise: typical wrong answers and lazy cheats, and a part of the message that each must get.

An answer is the text of the answer cell, or replacements in the solution.  Every `wrong_<topic>.py` here is one table.
"""

from importlib import import_module
from pathlib import Path

_TOPICS = [
    import_module(path.stem) for path in sorted(Path(__file__).parent.glob("wrong_*.py")) if path.stem != __name__
]

TYPICAL = {name: cases for topic in _TOPICS for name, cases in topic.TYPICAL.items()}
CHEATS = {name: cases for topic in _TOPICS for name, cases in topic.CHEATS.items()}
