"""What macOS lacks, switched off on Linux one by one: each has an answer, and no other module asks for the system."""

import ctypes
import os
import re
import socket
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest

import dualpipe_lab as lab
from dualpipe_course.grading import process_tree
from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.supervise.supervisor import FailureReport

ROOT = Path(__file__).parents[2]
SOURCES = [path for part in ("dualpipe_lab", "dualpipe_course") for path in sorted((ROOT / part).rglob("*.py"))]
ASKS = re.compile(r"sys\.platform|os\.name|os\.uname|[\"']/proc|prctl|\blo0\b|SIGUSR1|platform\.system")


def code_of(path):
    """The source without comments and docstrings."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type != tokenize.COMMENT]
    return " ".join(token.string for token in tokens if not token.string.startswith(('"""', 'r"""'))).replace(
        " . ", "."
    )


def test_one_module_asks_which_system_this_is():
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if ASKS.search(path.read_text(encoding="utf-8")) and ASKS.search(code_of(path))
    }
    assert asking == {"dualpipe_lab/launch/operating_system.py"}


def test_without_proc_the_wire_is_not_counted_and_the_ledger_says_why(monkeypatch):
    monkeypatch.setattr(operating_system, "DESCRIPTORS", "/nowhere/self/fd")
    results = lab.launch(lambda rank, world_size: lab.comm.barrier(), 2, wire=True)
    assert "not counted, the wire cannot be read without /nowhere/self/fd; mount /proc" in str(results.ledger)
    assert results.ledger.on_the_wire("barrier", 0) is None


def test_sockets_are_found_among_the_descriptors():
    with socket.socket() as opened, open(os.devnull) as other:
        found = operating_system.socket_names()
        assert found[opened.fileno()].startswith("socket:[")
        assert other.fileno() not in found


@pytest.mark.parametrize(("names", "expected"), [(["lo0", "en0"], "lo0"), (["eth0", "lo"], "lo"), ([], "lo")])
def test_loopback_has_the_system_s_name(monkeypatch, names, expected):
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    assert operating_system.loopback() == expected


def test_elsewhere_than_on_linux_no_prctl_is_called(monkeypatch):
    called = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: called.append(args[:2])))

    def ask():
        operating_system.die_with_parent()
        operating_system.adopt_orphans()
        operating_system.sharpen_sleep()

    ask()
    assert called == [(1, 9), (36, 1), (29, 1_000)]
    monkeypatch.setattr(operating_system, "NAME", "darwin")
    ask()
    assert len(called) == 3


def test_without_the_signal_a_rank_that_cannot_answer_gets_none(monkeypatch, tmp_path):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    process = SimpleNamespace(process=SimpleNamespace(is_alive=lambda: True, pid=1))
    silent = SimpleNamespace(statuses=["old"], process=process)
    report = FailureReport(tmp_path, set(), 1)
    report.force_stacks([silent])
    assert (sent, silent.statuses) == ([operating_system.STACK_SIGNAL], [])
    monkeypatch.setattr(operating_system, "STACK_SIGNAL", None)
    report.force_stacks([silent])
    assert len(sent) == 1


def test_without_shared_pages_counted_apart_memory_is_each_process_s_own():
    def process(**fields):
        return SimpleNamespace(memory_full_info=lambda: SimpleNamespace(**fields))

    shared, own = process(rss=9 << 20, uss=1 << 20, pss=3 << 20), process(rss=9 << 20, uss=2 << 20)
    assert process_tree.memory_mib([shared]) == 3
    assert process_tree.memory_mib([own, own]) == 4


def test_windows_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(operating_system, "NAME", "win32")
    with pytest.raises(RuntimeError, match="ranks need Linux or macOS; on Windows use WSL2"):
        lab.launch(lambda rank, world_size: rank, 2)
