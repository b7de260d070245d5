"""Private interfaces of torch and CPython: each test says what of the library breaks when one changes."""

import ast
import gc
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualpipe_lab as lab
from dualpipe_lab import _private

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "dualpipe_lab").rglob("*.py"))
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames"}  # by Python, despite their names


def leaf(*shape):
    return torch.ones(*shape, requires_grad=True)


def test_a_parameter_s_node_is_the_leaf_of_the_graph():
    """Else `pp.runtime.split_backward` finds no parameters, and W computes no gradient."""
    ((node, _),) = leaf(2).exp().grad_fn.next_functions
    assert type(node) is _private.accumulate_grad_node()
    assert node.variable.requires_grad


def test_a_reentrant_checkpoint_is_seen_in_the_graph():
    """Else `pp.runtime.split_backward` splits a region that starts a backward of its own, and gradients are lost."""
    out = checkpoint(torch.exp, leaf(2), use_reentrant=True)
    assert isinstance(out.grad_fn, _private.reentrant_checkpoint_node())
    assert not isinstance(leaf(2).exp().grad_fn, _private.reentrant_checkpoint_node())


def test_what_a_node_has_saved_is_found_and_can_be_dropped():
    """Else the split backward keeps every activation until W, or frees what W needs.

    And `recompute` cannot tell its own saved tensors from those that somebody else recomputes.
    """
    x = leaf(3)
    y = x.exp()
    (saved,) = _private.saved_tensors(y.grad_fn)
    assert saved.unpack_hook is None
    assert torch.equal(saved.data, y)
    saved.register_hooks(lambda tensor: None, lambda nothing: pytest.fail("dropped"))
    assert saved.unpack_hook is not None
    assert list(_private.saved_tensors(y.grad_fn)) == []
    with pytest.raises(RuntimeError, match="already been set"):
        saved.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", lambda packed: torch.ones(3)):
        y = leaf(3).exp()
    (saved,) = _private.saved_tensors(y.grad_fn)
    assert (saved.data, saved.unpack_hook is None) == ("packed", False)


def test_lists_of_saved_tensors_are_found_too():
    """Else a concatenation's inputs stay in memory between I and W."""
    parts = [leaf(2), leaf(2)]
    stacked = torch.einsum("ij,jk->ik", torch.stack(parts), torch.stack(parts))
    nodes, found = [stacked.grad_fn], 0
    while nodes:
        node = nodes.pop()
        found += len(list(_private.saved_tensors(node)))
        nodes += [below for below, _ in node.next_functions if below is not None]
    assert found >= 2


def test_hooks_and_changes_in_place_are_counted():
    """Else a split backward calls hooks of activations twice, copies of a stage train on other statistics, and weights
    that are loaded into a 16-bit model are overwritten by their older fp32 masters.
    """
    x, before = leaf(2).exp(), _private.num_hooks()
    x.register_hook(lambda grad: grad)
    x.grad_fn.register_hook(lambda *grads: None)
    x.grad_fn.register_prehook(lambda grads: None)
    torch.nn.Linear(1, 1).register_full_backward_hook(lambda *grads: None)
    assert _private.num_hooks() - before == 4
    before = _private.version_of(x)
    x.detach().add_(1)
    assert _private.version_of(x) == before + 1
    x.data = torch.ones(2)  # a new memory is no change of the old one
    assert _private.version_of(x) == before + 1


def test_a_mode_below_autograd_is_told_from_a_user():
    """Else a step under FlopCounterMode is refused as if the user had touched a sealed gradient."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return _private.run_kernel(func, args, kwargs or {})

    with Mode():
        torch.ones(2).add_(1)
    assert all(map(_private.is_kernel, seen))
    assert len(seen) == 2
    assert not _private.is_kernel(torch.Tensor.add_)


def test_accumulation_hooks_can_be_listed():
    """Else the pipeline runtime does not find who reduces a gradient, and W's hooks run at the wrong time."""
    x, calls = leaf(2), []
    assert _private.post_accumulate_grad_hooks(x) == []
    handle = x.register_post_accumulate_grad_hook(calls.append)
    assert [hook.__self__ for hook in _private.post_accumulate_grad_hooks(x)] == [calls]
    handle.remove()
    assert _private.post_accumulate_grad_hooks(x) == []


def test_a_callback_runs_after_all_gradients_of_a_backward():
    """Else ZeRO-2 and ZeRO-3 reduce their last buckets too early, or never."""
    order, x = [], leaf(2)
    y = x.exp()
    y.register_hook(lambda grad: _private.call_after_backward(lambda: order.append("callback")))
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y.sum().backward()
    assert order == ["gradient", "callback"]
    with pytest.raises(RuntimeError):
        _private.call_after_backward(lambda: None)


def test_two_backwards_have_different_numbers():
    """Else a check cannot tell one backward over two stages from two backwards."""
    seen = []
    for _ in range(2):
        y = leaf(2).exp()
        y.register_hook(lambda grad: seen.append(_private.backward_id()))
        y.sum().backward()
    assert len(set(seen)) == 2
    assert _private.backward_id() == -1


def test_every_operation_passes_a_dispatch_mode():
    """Else the checks of the exercises count no products and see no sizes."""
    seen = []

    class Watch(_private.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        leaf(2, 2) @ leaf(2, 2)
    assert "mm" in seen


def test_leaves_of_nested_outputs():
    """Else ZeRO-3 does not hook the outputs of a unit that returns a dict or a tuple."""
    assert _private.tree_leaves({"a": [1, (2, 3)], "b": 4}) == [1, 2, 3, 4]


def test_names_of_compiled_modules():
    """Else checkpoints of a compiled model and of the same model as it is have other names."""
    inner = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    compiled = torch.compile(torch.nn.Sequential(inner), backend="eager")
    names = list(compiled.state_dict())
    assert names == ["_orig_mod.0._orig_mod.weight", "_orig_mod.0._orig_mod.bias"]
    assert [_private.plain_name(name) for name in names] == ["0.weight", "0.bias"]


def who_sent(rank, world_size):
    message = torch.zeros(1)
    if rank == 1:
        return torch.distributed.send(message, 0)
    work = torch.distributed.irecv(message)
    work.wait()
    return _private.source_rank(work)


def test_a_receive_from_anyone_tells_who_sent():
    """Else `comm.recv(src=None)` cannot return the sender, and the ledger books the bytes under nobody."""
    assert lab.launch(who_sent, 2)[0] == 1


def imported_late(rank, world_size):
    parts = ("dp.zero3", "tp.linear", "cp.ring_attention", "ep.moe", "pp.runtime", "models.llama", "train.trainer")
    missing = [part for part in parts if f"dualpipe_lab.{part}" not in sys.modules]
    return missing, _private.LATE_IMPORT in sys.modules, gc.get_freeze_count() > 10_000


def test_the_fork_server_has_imported_what_torch_imports_late():
    """Else the first optimizer step of every rank takes seconds, and the library's own modules most of one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("this platform has no fork server")
    assert lab.launch(imported_late, 1)[0] == ([], True, True)


def test_what_the_fork_server_imports_starts_no_thread():
    """Else it could fork a rank that waits for a lock for ever; torch's numpy has threads that know of forks."""
    code = "import {}, os; print(len(os.listdir('/proc/self/task')))"
    for_torch, for_all = (
        subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True).stdout
        for name in ("torch", "dualpipe_lab.launch.preload")
    )
    assert int(for_all) == int(for_torch)


def test_parameters_are_rebuilt_by_the_functions_of_the_table():
    """Else the grader refuses a rank that returns an `nn.Parameter`, or one with attributes."""
    plain, marked = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    marked.mark = 1
    names = {parameter.__reduce_ex__(2)[0].__name__ for parameter in (plain, marked)}
    assert names == set(_private.REBUILDERS["torch._utils"])


def test_how_tensors_are_printed_can_be_asked_and_set_again():
    """Else a rank prints other digits than the cell that launches it."""
    before = _private.print_options()
    try:
        torch.set_printoptions(precision=7, sci_mode=True)
        assert {"precision": 7, "sci_mode": True}.items() <= _private.print_options().items()
    finally:
        torch.set_printoptions(**before)
    assert _private.print_options() == before


FORK_SERVER = """
import os, time
from multiprocessing import forkserver, get_context
from dualpipe_lab import _private
if __name__ == "__main__":
    assert _private.fork_server_pid() is None
    forkserver.ensure_running()
    first = _private.fork_server_pid()
    os.kill(first, 0)
    _private.stop_fork_server()
    assert _private.fork_server_pid() is None
    forkserver.ensure_running()
    second = _private.fork_server_pid()
    assert second not in (None, first)
    if os.fork() == 0:
        _private.assume_fork_server()
        process = get_context("forkserver").Process(target=os.getpid)
        process.start()
        process.join()
        shared = _private.fork_server_pid() == second
        _private.stop_fork_server()
        forkserver.ensure_running()
        os._exit(0 if shared and _private.fork_server_pid() not in (None, second) else 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    os.kill(second, 0)
    end = _private.release_fork_server()
    assert _private.release_fork_server() is None
    os.close(end)
    assert os.waitpid(second, 0)[0] == second, "the server ends with the last end of its pipe"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork server")
def test_the_fork_server_can_be_found_stopped_shared_and_released(tmp_path):
    """Else a restarted fork server keeps stale modules, the grader's fork waits, and ranks outlive their kernel."""
    script = tmp_path / "drill.py"
    script.write_text(FORK_SERVER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_opcode_of_python_s_unpickler_can_be_replaced():
    """Else a pickle from a submission calls what it names inside the grader."""

    opcodes = _private.PythonUnpickler.dispatch
    deaf = type("Deaf", (_private.PythonUnpickler,), {"dispatch": dict(opcodes)})
    deaf.dispatch[pickle.REDUCE[0]] = lambda self: (_ for _ in ()).throw(LookupError("replaced"))
    stream = io.BytesIO(pickle.dumps(complex(1, 2)))
    with pytest.raises(LookupError, match="replaced"):
        deaf(stream).load()


# ---- no other module


def private_uses(tree, own):
    """Private names that a module takes from elsewhere: imports, attributes, strings outside of docstrings."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not (getattr(node, "module", "") or "").startswith("dual"):
            path = f"{getattr(node, 'module', '') or ''}." + ".".join(alias.name for alias in node.names)
            yield from re.findall(r"(?:^|\.)(_[a-z]\w*)", path.replace("__future__", ""))
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from re.findall(
                r"^(?:torch|multiprocessing)[\w.]*\.(_\w+)|^(_raw_saved\w*|_post_accum\w*)", node.value
            )


def own_names(tree):
    """Every private name that a module defines: functions, classes, variables, attributes, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.fixture(scope="module")
def trees():
    return {file: ast.parse(file.read_text()) for file in LIBRARY}


@pytest.fixture(scope="module")
def own(trees):
    names = {name for file, tree in trees.items() if file.name != "_private.py" for name in own_names(tree)}
    return DOCUMENTED | names


def test_no_other_module_uses_a_private_name(trees, own):
    used = {file.relative_to(ROOT).as_posix(): list(private_uses(tree, own)) for file, tree in trees.items()}
    assert len(used.pop("dualpipe_lab/_private.py")) >= 12
    found = {file: names for file, names in used.items() if names}
    assert found == {}, "put them into dualpipe_lab/_private.py, with tests here"
