"""Scripts that live outside the package, as modules."""

import importlib.util


def load(path):
    """Import a script that lives outside the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
