"""Checkpoints that survive a crash and load on another number of ranks.

Chapter: book/dp/io.  In: an optimizer on N ranks.  Out: a folder; the same state on any number of ranks.
  files           step-00000010/index.json and one rank-00000.safetensors per rank; no pickle
  bytes written   every element once: of several replicas, the lowest rank writes
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
