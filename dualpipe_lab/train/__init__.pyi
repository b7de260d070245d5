# Train, from a cell, a script or under torchrun
from .run import run as run
from .options import TrainOptions as TrainOptions
from .result import Result as Result
from .reference import reference as reference

# From a checkpoint, without ranks and plan; `generate` takes a trainer too
from .generate import generate as generate
from .saved_model import read_model as read_model

# Weights of other programs
from .convert import convert as convert

# Inside a rank
from .trainer import Trainer as Trainer

# What each submodule of any model keeps, and how long it takes
from .profile import profile_modules as profile_modules

# Data and learning rate as functions of the step
from .sampler import Sampler as Sampler
from .sampler import LengthSampler as LengthSampler
from .sampler import Batch as Batch
from .schedule import LRSchedule as LRSchedule
