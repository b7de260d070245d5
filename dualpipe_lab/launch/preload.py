"""What the fork server imports once, so that no rank has to: a rank of a training would take most of a second for it.

Only the fork server imports this module.  It computes nothing, so no thread is running when ranks are forked from it.
"""

import contextlib
import gc
import importlib
import pkgutil

WINGS = ("comm", "tp", "cp", "ep", "dp", "pp", "models", "plan", "train")


def _import_all() -> None:
    for name in ("torch", "torch.distributed", "dualpipe_lab.launch.rank"):
        importlib.import_module(name)
    for wing in WINGS:
        package = importlib.import_module(f"dualpipe_lab.{wing}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # it needs something optional, which a rank would name
                importlib.import_module(module.name)
    gc.freeze()  # what is here stays: a rank's collector would visit it, and so copy its memory


_import_all()
