"""The handle of results that are on their way."""

import pytest

from dualpipe_lab.comm import Pending


class Message:
    """A message that notes when it is waited for."""

    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def wait(self):
        self.seen.append(self.name)


def test_messages_are_completed_in_order_and_once():
    seen = []
    pending = Pending([Message(seen, "a"), None, Message(seen, "b")], lambda: seen.append("made"))
    assert seen == []
    assert [pending.wait(), pending.wait()] == [None, None]
    assert seen == ["a", "b", "made"]


def test_a_failed_message_is_told_every_time():
    class Broken:
        def wait(self):
            raise RuntimeError("closed by peer")

    pending = Pending([Broken()], lambda: 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            pending.wait()
