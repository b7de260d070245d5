"""Restricted unpickling: data of a rank is rebuilt from a fixed table of types, and no code that it names is called.

The grader opens what ranks of a submission send with this module.  Elsewhere: `torch.load(weights_only=True)`.
"""

import io
import pickle
import sys
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, ClassVar

from dualpipe_lab._private import REBUILDERS, PythonUnpickler

LAUNCH = "dualpipe_lab.launch"

# Records: made without their constructor, then given their fields.
RECORDS = {
    f"{LAUNCH}.record.rank_status": ("StackFrame", "Blocked", "RankStatus"),
    f"{LAUNCH}.record.operation": ("Communicator",),
    f"{LAUNCH}.record.ledger": ("Entry", "RankLedger", "Ledger"),
    f"{LAUNCH}.record.trace": ("RankTrace", "Sent", "Received"),
    "dualpipe_lab.timeline.spans": ("Span", "Message"),
    "dualpipe_lab.timeline.model": ("Timeline",),
    "dualpipe_lab.pp.program": ("Action", "Overlap", "Program"),
    "dualpipe_lab.dp.hybrid": ("NodeBytes", "NodeLedger"),
}
COURSE = "dualpipe_course."  # here every named tuple and dataclass is a record: what a check's own function returns
# Called with what the pickle holds: they build a value and do nothing else.
BUILDERS = {
    f"{LAUNCH}.payload": ("_rebuild", "_rebuild_array", "_rebuild_scalar"),
    **REBUILDERS,
    "torch": ("Size", "device"),
    "builtins": ("complex", "range", "slice", "set", "frozenset"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "fractions": ("Fraction",),
}
# Handed over as they are, never called.
VALUES = {"builtins": ("Ellipsis", "bool", "dict", "float", "int", "list", "str", "tuple")}

RULE = "return numbers, text, tensors, numpy arrays, or lists, tuples, sets and dicts of them"


class Refused(TypeError):  # noqa: N818 - it is a verdict
    """A rank sent something that is no data."""


def loads(data: bytes) -> Any:
    """Rebuild what `payload.dumps` or a rank's channel packed.

    Raises:
        Refused: it names something outside of the tables, or it is no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"what a rank sent cannot be read as data ({type(error).__name__}: {error}); {RULE}") from None


class _Unpickler(PythonUnpickler):
    """Python's own unpickler, which lets every opcode that calls or sets something be replaced; C's does not."""

    dispatch: ClassVar[dict[int, Any]] = dict(PythonUnpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if any(name in table.get(module, ()) for table in (RECORDS, BUILDERS, VALUES)):
            return getattr(import_module(module), name)
        if module.startswith(COURSE) and _is_record(found := getattr(sys.modules.get(module), name, None)):
            return found
        if module == "torch" and type(value := getattr(import_module("torch"), name, None)).__name__ == "dtype":
            return value
        raise Refused(f"a rank sent {module}.{name}, which is no data; {RULE}")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        self.stack[-1] = _one_of(BUILDERS, function)(*arguments)

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack[-1]
        self.stack[-1] = _record(cls).__new__(cls, *arguments)

    def load_newobj_ex(self) -> None:
        named, arguments, cls = self.stack.pop(), self.stack.pop(), self.stack[-1]
        self.stack[-1] = _record(cls).__new__(cls, *arguments, **named)

    def load_build(self) -> None:
        """Give a record its fields; the unpickler's own would also set attributes of classes."""
        state, record = self.stack.pop(), self.stack[-1]
        _record(type(record))
        parts = state if isinstance(state, tuple) else (state,)
        for fields in parts:
            for name, value in (fields or {}).items():
                object.__setattr__(record, name, value)


_Unpickler.dispatch |= {
    pickle.REDUCE[0]: _Unpickler.load_reduce,
    pickle.NEWOBJ[0]: _Unpickler.load_newobj,
    pickle.NEWOBJ_EX[0]: _Unpickler.load_newobj_ex,
    pickle.BUILD[0]: _Unpickler.load_build,
}
for _opcode in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.BINPERSID):
    del _Unpickler.dispatch[_opcode[0]]  # other ways to call or to look up, which nothing here writes


def _record(cls: Any) -> Any:
    return cls if _is_record(cls) else _one_of(RECORDS, cls)


def _is_record(found: Any) -> bool:
    if not isinstance(found, type) or not found.__module__.startswith(COURSE):
        return False
    return is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))


def _one_of(table: dict[str, tuple[str, ...]], found: Any) -> Any:
    module, name = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
    names = table.get(module, ()) if isinstance(module, str) else ()
    if name in names and getattr(import_module(module), name) is found:
        return found
    raise Refused(f"a rank sent something that calls {module}.{name}; {RULE}")
