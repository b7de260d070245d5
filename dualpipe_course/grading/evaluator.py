"""The evaluator: runs pristine checks on answers, one process per exercise.

In: one task per line (JSON).  Out: one verdict per line, on a pipe that the fork server, the worker and the ranks do
not inherit.  Standard output belongs to the learner's code and is not read.
The process that reads the tasks imports all checks and then only forks, so one exercise cannot change the evaluator of
the next.  Neither process runs the learner's code: answers arrive as JSON (`protocol`), and messages of ranks are
unpickled as data (`world.restricted`).
"""

import ast
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from dualpipe_course.exercise import Verdict
from dualpipe_course.grading import protocol, worker
from dualpipe_course.grading.pristine import close_path
from dualpipe_course.own.part import Part
from dualpipe_course.own.runs import RunCheck, find
from dualpipe_lab._private import assume_fork_server, fork_server_pid
from dualpipe_lab.launch import payload, server
from dualpipe_lab.launch.launcher import launch

UNKNOWN_EXIT = 255  # what `multiprocessing` reports when the fork server is gone and nobody knows how its child ended


class ForkServerLostError(EOFError):
    """The fork server ended while its worker ran; it may still be listed as alive, but starts no more processes."""


def main() -> None:
    """Evaluate tasks until the pipe of tasks is closed; `sys.argv` names the two pipes."""
    tasks, verdicts = os.fdopen(int(sys.argv[1]), errors="replace"), os.fdopen(int(sys.argv[2]), "w")
    os.set_inheritable(tasks.fileno(), False)
    os.set_inheritable(verdicts.fileno(), False)
    close_path()
    server.start_fork_server()
    find("")  # imports every check
    launch(_nothing, 1)  # the fork server has imported torch when this returns
    fork_server = fork_server_pid()
    print(json.dumps({"ready": True}), file=verdicts, flush=True)
    for task in _tasks(tasks):
        verdict = evaluate_in_fork(task, (tasks, verdicts))
        if not _is_alive(fork_server):  # a new one imports torch first: that must not cost the next exercise its time
            verdict["retire"] = True
        print(json.dumps(verdict | {"token": task["token"]}), file=verdicts, flush=True)


def evaluate_in_fork(task: dict[str, Any], private: tuple[TextIO, ...] = ()) -> dict[str, Any]:
    """Evaluate one task in a forked process, which first closes the pipes in `private`."""
    near, far = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_evaluate_and_send, args=(task, far, private))
    process.start()
    far.close()
    try:
        verdict: dict[str, Any] = json.loads(near.recv_bytes())
    except (EOFError, OSError, ValueError):
        process.join(1)
        verdict = _verdict("stopped", 0, f"the process that evaluated it ended, exit code {process.exitcode}")
    near.close()
    process.kill()
    process.join()
    return verdict


def _evaluate_and_send(task: dict[str, Any], channel: "Connection[Any, Any]", private: tuple[TextIO, ...]) -> None:
    for pipe in private:
        os.close(pipe.fileno())
    assume_fork_server()
    try:
        worker.enter(task["folders"])
        with payload.data_only():
            verdict = evaluate(task)
    except Exception as error:  # whatever the learner did to the scratch folder or the fork server
        message = f"it broke what runs it: {type(error).__name__}: {error}"
        verdict = _verdict("stopped", 0, message) | {"retire": True}
    channel.send_bytes(protocol.encode(verdict))
    os._exit(0)  # what libraries do at exit is the first process's business


def _tasks(lines: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the tasks; skip lines of another form, because every process of this user can write into the pipe."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            task = json.loads(line)
            if isinstance(task, dict) and {"name", "given", "answer", "check", "folders", "token"} <= task.keys():
                yield task


def evaluate(task: dict[str, Any]) -> dict[str, Any]:
    """Return status, score and message of one task."""
    check = find(task["name"])
    assert check is not None, task["name"]
    if isinstance(check, Part | RunCheck):  # a text is judged, which runs on ranks alone
        found = check.verdict("\n\n".join(task["answer"]))
        return _verdict(_status(found), found.score, found.message) | {"refused": []}
    arguments = arguments_of(task["check"])
    names = sorted({node.id for part in arguments for node in ast.walk(part) if isinstance(node, ast.Name)})
    try:
        answers, problem, refused = _answers(task, names)
    except (EOFError, OSError, ValueError) as error:
        verdict = _verdict("error", 0, f"the process that ran the answer cell ended without an answer: {error}")
        return verdict | {"retire": isinstance(error, ForkServerLostError)}
    if missing := [name for name in names if name not in answers]:
        verdict = _verdict("error", 0, problem or f"the answer cell does not define {missing[0]}")
        return verdict | {"refused": refused}
    Path(task["folders"]["work"]).mkdir(exist_ok=True)  # the answer cell may have removed it
    os.chdir(task["folders"]["work"])
    values = [eval(compile(ast.Expression(part), "check", "eval"), {}, answers) for part in arguments]  # noqa: S307
    found = check.verdict(*values, seed=seed_in(task["check"]))
    message = found.message if found.passed or not problem else f"{found.message}\n(the answer cell raised: {problem})"
    return _verdict(_status(found), found.score, message) | {"refused": refused}


def _status(found: Verdict) -> str:
    return "right" if found.passed else "stopped" if found.stopped else "wrong"


def arguments_of(source: str) -> list[ast.expr]:
    """Return the arguments of a check cell."""
    return _call(source).args


def seed_in(source: str) -> int | None:
    """Return the seed of a learner's own numbers in a check cell, if there is one."""
    return next((ast.literal_eval(one.value) for one in _call(source).keywords if one.arg == "seed"), None)


def _call(source: str) -> ast.Call:
    """Return the one call of which a check cell consists."""
    (statement,) = ast.parse(source).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    return statement.value


def _answers(task: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Run the cells in a worker; return the values of `names`, the error of the answer cell and what it was refused."""
    cells = [(f"given cell {number}", source) for number, source in enumerate(task["given"], 1)]
    for number, source in enumerate(task["answer"], 1):
        cells.append((f"answer-{task['name']}" + f", cell {number}" * (number > 1), source))
        worker.remember(*cells[-1])  # errors on ranks then show the learner's line
    near, far = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=worker.main, args=(far, cells, names, task["folders"]))
    process.start()
    far.close()
    try:
        reply = _receive(near, process)
        answers = {name: protocol.unpack(value) for name, value in reply["answers"].items() if "error" not in value}
        errors = [value["error"] for value in reply["answers"].values() if "error" in value]
        refused = [str(what)[:200] for what in reply.get("refused") or ()]
        return answers, str((errors or [reply["problem"]])[0]), refused
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _receive(near: "Connection[Any, Any]", process: Any) -> dict[str, Any]:
    try:
        reply = json.loads(near.recv_bytes(protocol.MAX_BYTES))
    except EOFError:
        process.join(1)
        kind = ForkServerLostError if process.exitcode == UNKNOWN_EXIT else EOFError
        raise kind(f"it died, exit code {process.exitcode}") from None
    if not isinstance(reply, dict) or not isinstance(reply.get("answers"), dict):
        raise ValueError("it sent something else")
    return reply


def _verdict(status: str, score: float, message: str) -> dict[str, Any]:
    return {"status": status, "score": score, "message": message[:4000]}


def _is_alive(pid: int | None) -> bool:
    """Whether this is still the fork server, and it has not ended."""
    try:
        return (
            pid is not None
            and pid == fork_server_pid()
            and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )
    except ChildProcessError:
        return False


def _nothing(rank: int, world_size: int) -> None:
    """Start a rank and end it."""
