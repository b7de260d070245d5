"""The status of a rank is read by a second thread, while the main thread goes on."""

import subprocess
import sys

COLLECTS_WHILE_IT_READS = """
import gc, random, threading, time
from dualpipe_lab.launch.record.rank_status import StatusTracker

class SleepsAtItsEnd:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.0005)

def narrow(depth):
    return go_deeper(depth)

def wide(depth):
    a = b = c = d = e = f = g = 1_000
    return go_deeper(depth) + a + b + c + d + e + f + g

def go_deeper(depth):
    if depth:
        return random.choice((narrow, wide, go_deeper))(depth - 1)
    time.sleep(0)
    return 0

def read():
    while not over.is_set():
        for _ in range(random.randrange(1, 12)):
            SleepsAtItsEnd()
        gc.set_threshold(gc.get_count()[0] + random.randrange(1, 16))  # somewhere inside of the reading
        frames = StatusTracker(0).snapshot().frames
        gc.set_threshold(700)
        assert frames[0].function == "<module>", frames

over = threading.Event()
reader = threading.Thread(target=read)
reader.start()
end = time.monotonic() + 2
while time.monotonic() < end and reader.is_alive():
    go_deeper(random.randrange(30))
died_early = not reader.is_alive()
over.set()
reader.join()
print("collects:", gc.isenabled(), "died early:", died_early)
"""


def test_a_collection_while_the_frames_of_the_main_thread_are_read_crashes_nothing():
    """In Python 3.11 it may come in the midst of a frame, and what it ends may let the main thread run."""
    command = [sys.executable, "-X", "faulthandler", "-c", COLLECTS_WHILE_IT_READS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "collects: True died early: False\n"), done.stderr
