"""What `pytest` and `pytest --nbval` do here without being told: nbval's options, and a time limit for tests.

No plugin's option stands in `pyproject.toml`: pytest refuses it where the plugin is missing, as some are for graders.
"""

from pathlib import Path

import pytest

collect_ignore_glob = ["solutions/*.py"]  # answers that tests/checks runs; they import names of its own
SANITIZE = Path(__file__).parent / "dualpipe_course" / "sanitize.cfg"
CELL_SECONDS = 120
TEST_SECONDS = 600  # the longest test takes a minute on a quiet machine
EVERY_SECONDS = 3600  # with all cases of each test


@pytest.hookimpl(tryfirst=True)  # before the plugins read their options
def pytest_configure(config: pytest.Config) -> None:
    """Set what was not typed."""
    option = config.option
    if getattr(option, "nbval", False) or getattr(option, "nbval_lax", False):
        option.nbval_sanitize_with = option.nbval_sanitize_with or str(SANITIZE)
        if not any(arg.startswith("--nbval-cell-timeout") for arg in config.invocation_params.args):
            option.nbval_cell_timeout = CELL_SECONDS
        config.addinivalue_line("filterwarnings", "default")  # a kernel's sockets are no failure of a cell
    elif config.pluginmanager.hasplugin("timeout") and option.timeout is None:
        option.timeout = EVERY_SECONDS if getattr(option, "every", False) else TEST_SECONDS
        option.timeout_method = option.timeout_method or "signal"  # raises in the test: fixtures end, and so do ranks
