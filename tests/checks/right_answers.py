"""Per exercise: right answers in another style than the solution's, each of which must pass with the full score.

An answer is the text of the answer cell, or replacements in the solution.  Every `right_<topic>.py` here is one table.
"""

from importlib import import_module
from pathlib import Path

_TOPICS = [
    import_module(path.stem) for path in sorted(Path(__file__).parent.glob("right_*.py")) if path.stem != __name__
]

RIGHT = {name: answers for topic in _TOPICS for name, answers in topic.RIGHT.items()}
