"""Checkpoints that survive a crash and load on another number of ranks.

Chapter: book/dp/io.  In: an optimizer on N ranks.  Out: a folder; the same state on any number of ranks.
  shape of it     step-00000010/index.json and one rank-00000.safetensors per rank; no pickle anywhere
  bytes written   every element once: replicas are left to their lowest rank
"""

from dualpipe_lab.dp.checkpoint.drawing import ReadsDrawing
from dualpipe_lab.dp.checkpoint.folder import latest, saved_steps
from dualpipe_lab.dp.checkpoint.index import CheckpointError
from dualpipe_lab.dp.checkpoint.reader import Checkpoint, Read
from dualpipe_lab.dp.checkpoint.session import Restored, load, save
from dualpipe_lab.dp.checkpoint.state import Place

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Place",
    "Read",
    "ReadsDrawing",
    "Restored",
    "latest",
    "load",
    "save",
    "saved_steps",
]
