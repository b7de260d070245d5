"""Data parallelism, from one all-reduce to ZeRO-3, with checkpoints that load on another number of ranks."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
