"""What the tests of `world` share: a real kernel, and a look at what a launch leaves behind."""

import os
import queue
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

import dualpipe_lab as lab
from dualpipe_lab.launch.folder import PREFIX

PATIENCE = 60  # seconds; what takes one where nothing else runs may take many on a busy machine


@pytest.fixture(scope="session", autouse=True)
def warm_server():
    lab.start_fork_server()


@dataclass
class Leftovers:
    """Counts descriptors, threads, processes and folders, and finds what is new."""

    before: dict[str, object] = field(default_factory=dict)

    def count(self) -> dict[str, object]:
        me = psutil.Process()
        return {
            "descriptors": me.num_fds(),
            "threads": threading.active_count(),
            "children": len(me.children(recursive=True)),
            "folders": sorted(path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*")),
        }

    def new(self) -> dict[str, object]:
        """What is there now and was not before; what an earlier test left dying may have gone meanwhile."""
        now = self.count()
        folders = set(now.pop("folders")) - set(self.before["folders"])
        return {name: number for name, number in now.items() if number > self.before[name]} | (
            {"folders": sorted(folders)} if folders else {}
        )

    def check(self) -> None:
        deadline = time.monotonic() + PATIENCE  # the fork server collects its dead within moments
        while self.new() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.new() == {}


@pytest.fixture
def leftovers():
    lab.launch(lambda rank, world_size: None, 1)
    found = Leftovers()
    found.before = found.count()
    return found


class Kernel:
    """A real ipykernel that runs cells."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code: str, watched: bool = False) -> str:
        return self.client.execute(code, allow_stdin=watched)

    def finish(self, request: str, timeout: float = 60) -> tuple[str, str, str]:
        """Wait for a cell; return its text output, error name and error text."""
        text, name, value = [], "", ""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text.append(content["text"])
            elif message["msg_type"] == "execute_result":
                text.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                name, value, self.shown = content["ename"], content["evalue"], "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(text), name, value
        raise TimeoutError(f"the cell ran longer than {timeout} s")

    def run(self, code: str, timeout: float = 60) -> tuple[str, str, str]:
        return self.finish(self.start(code), timeout)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel():
    started = Kernel()
    yield started
    started.stop()
