"""What judging raises where an answer does not pass."""

from dualpipe_lab.timeline import Timeline


class Wrong(Exception):  # noqa: N818 - it is a verdict, not an accident
    """Raised while judging: why the answer does not pass, its share of the points, and a picture."""

    stopped = False

    def __init__(self, message: str, score: float = 0.0, picture: Timeline | None = None) -> None:
        super().__init__(message)
        self.message, self.score, self.picture = message, score, picture


class OutOfTime(Wrong):
    """The answer was stopped at its limit of time."""

    stopped = True
