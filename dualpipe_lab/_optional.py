"""Packages that only some of the library needs: a missing one is named with the extra that brings it.

In: the extra of pyproject.toml and what needs it.  Out: the import, or one sentence that says what to install.
  notebook   widgets and matplotlib's figures
  grading    the processes that judge submissions
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ModuleNotFoundError):  # noqa: N818 - it is the advice
    """A package is missing that one of the extras brings."""


@contextmanager
def extra(name: str, feature: str) -> Iterator[None]:
    """Turn a failed import inside into one sentence.

    >>> with extra("notebook", "a widget"):
    ...     import no_such_package
    Traceback (most recent call last):
    dualpipe_lab._optional.MissingExtra: a widget needs no_such_package; run: pip install "dualpipe-lab[notebook]"
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if (error.name or "dualpipe_lab").startswith("dualpipe_lab"):
            raise
        advice = f'{feature} needs {error.name}; run: pip install "dualpipe-lab[{name}]"'
        raise MissingExtra(advice, name=error.name) from None
