"""The cells of solutions and exercises, as the tests of checks use them."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("checks_book", Path(__file__).parents[1] / "checks" / "conftest.py")
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
book = _MODULE.book
