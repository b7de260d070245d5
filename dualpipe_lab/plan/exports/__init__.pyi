# What is handed out
from .export import Export as Export

# Frameworks
from .megatron import megatron as megatron
from .torchtitan import torchtitan as torchtitan
from .deepspeed import deepspeed as deepspeed

# This library
from .lab import lab as lab
