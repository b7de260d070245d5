"""Where `mine.<part>` comes from: the text that somebody names, executed under that name.

In: a function from a part to its text.  Out: modules.  The course's own parts are texts, too, so that under the name
`mine` they import the learner's.  Nothing is cached on disk, and a new finder takes the place of the one before.
"""

import linecache
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.resources import files
from types import ModuleType

from dualpipe_course.own.parts import PARTS

PACKAGE = "mine"


class Finder(MetaPathFinder, Loader):
    """Finds `mine` and its parts."""

    def __init__(self, text_of: Callable[[str], str]) -> None:
        self.text_of = text_of

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how a module of the package is made; of other packages nothing.

        Raises:
            ImportError: there is no such part.
        """
        package, _, part = name.partition(".")
        if package != PACKAGE:
            return None
        if part and part not in PARTS:
            raise ImportError(f"there is no part {part}; the parts are {', '.join(PARTS)}")
        return ModuleSpec(name, self, origin=_place(part), is_package=not part)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the text of a part."""
        part = module.__name__.partition(".")[2]
        if part:
            text, place = self.text_of(part), _place(part)
            linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
            module.__file__ = place
            exec(compile(text, place, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        elif "ipykernel" in sys.modules:  # ranks get what a cell holds of the package, as they get its other functions
            import cloudpickle

            cloudpickle.register_pickle_by_value(module)


def install(text_of: Callable[[str], str], is_importing: bool = False) -> None:
    """Let the package come from here, in place of the finder before, and forget what was imported.

    Args:
        text_of: the text of a part; raises ImportError where a part is closed.
        is_importing: the package itself calls, from its `__init__.py`.
    """
    sys.meta_path[:] = [Finder(text_of), *(one for one in sys.meta_path if not isinstance(one, Finder))]
    if not is_importing:
        forget()


def forget() -> None:
    """Let the next import execute the texts anew: of the package and of all its parts, one alone is not enough."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def official(part: str) -> str:
    """The course's text of a part."""
    return files("dualpipe_ours").joinpath(f"{part}.py").read_text(encoding="utf-8")


def _place(part: str) -> str:
    return f"{PACKAGE}/{part or '__init__'}.py"
