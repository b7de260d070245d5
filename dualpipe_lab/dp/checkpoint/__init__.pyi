# Written by all ranks, read by any number of ranks
from .session import save as save
from .session import load as load
from .folder import latest as latest
from .folder import saved_steps as saved_steps
from .reader import Checkpoint as Checkpoint
from .reader import CheckpointError as CheckpointError
from .state import ShardSpec as ShardSpec
from .torch_format import to_torch as to_torch
from .torch_format import from_torch as from_torch
