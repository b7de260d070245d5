"""Checkpoints of torch: chunks of several ranks become one tensor, and nothing in a pickle runs."""

import io
import pickle
import warnings
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

import dualpipe_lab as lab
from dualpipe_lab.dp import checkpoint


def left(folder):
    """What lies in a folder, or beside it."""
    return sorted(path.name for path in folder.iterdir())


def saved_on_ranks(rank, world_size, folder):
    """torch's own checkpoint of a tensor that two ranks share by rows."""
    import torch.distributed.tensor

    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    full = torch.arange(35.0).view(7, 5)
    shared = torch.distributed.tensor.distribute_tensor(full, mesh, [torch.distributed.tensor.Shard(0)])
    torch.distributed.checkpoint.save({"w": shared, "step": 3}, checkpoint_id=str(folder))


class Pickler(pickle.Pickler):
    """Writes a member of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_chunks_of_several_ranks_are_read_as_one_tensor_also_by_the_index_of_an_older_python(tmp_path):
    lab.launch(saved_on_ranks, 2, tmp_path / "theirs")
    index, older = tmp_path / "theirs" / ".metadata", io.BytesIO()
    Pickler(older).dump(pickle.loads(index.read_bytes()))
    assert b"getattr" in older.getvalue()
    for step, content in enumerate((index.read_bytes(), older.getvalue())):
        index.write_bytes(content)
        found = checkpoint.from_torch(tmp_path / "theirs", tmp_path / "ours", step, lambda name: f"parameter/{name}")
        assert torch.equal(checkpoint.Checkpoint(found).read("parameter/w"), torch.arange(35.0).view(7, 5))
    with pytest.raises(checkpoint.CheckpointError, match="theirs is there already, and nothing is overwritten"):
        checkpoint.to_torch(found, tmp_path / "theirs")
    file = tmp_path / "theirs" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(checkpoint.CheckpointError, match=r"theirs: tensor w cannot be read \("):
        checkpoint.from_torch(tmp_path / "theirs", tmp_path / "none", 3)
    assert left(tmp_path) == ["ours", "theirs"]


class Method:
    """An attacker's way to what a record can do."""

    def __reduce__(self):
        return getattr, (Path, "unlink")


class Order:
    """What an attacker puts into a pickle: a call that leaves a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_no_code_of_a_torch_checkpoint_runs(tmp_path):
    folder, full = tmp_path / "torch", torch.arange(35.0).view(7, 5)
    with warnings.catch_warnings(action="ignore"):
        torch.distributed.checkpoint.save({"w": full}, checkpoint_id=str(folder), no_dist=True)
    harmless, data = (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()
    for spoil, message in (
        (
            pickle.dumps(Order(tmp_path / "run")),
            r"\.metadata is a pickle that cannot be trusted: it asks for _?io.open",
        ),
        (pickle.dumps(Method()), r"it asks for unlink of <class 'pathlib.*Path'>, which is no enumeration"),
        (harmless[:-20], r"\.metadata is damaged"),
        (pickle.dumps([1, 2]), r"\.metadata is damaged"),
        (b"", r"\.metadata is damaged"),
    ):
        (folder / ".metadata").write_bytes(spoil)
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.from_torch(folder, tmp_path / "target", 0)
    (folder / ".metadata").write_bytes(harmless)
    (folder / "__0_0.distcp").write_bytes(bytes(len(data)))
    with pytest.raises(checkpoint.CheckpointError, match=r"torch: tensor w cannot be read \("):
        checkpoint.from_torch(folder, tmp_path / "target", 0)
    file = io.BytesIO()
    torch.save(Order(tmp_path / "run"), file)  # in the place of a tensor
    (folder / "__0_0.distcp").write_bytes(file.getvalue() + bytes(len(data) - len(file.getvalue())))
    with pytest.raises(checkpoint.CheckpointError, match=r"torch: tensor w cannot be read \("):
        checkpoint.from_torch(folder, tmp_path / "target", 0)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"tensor w cannot be read .*No such file.*__0_0.distcp"):
        checkpoint.from_torch(folder, tmp_path / "target", 0)
    assert left(tmp_path) == ["torch"]
