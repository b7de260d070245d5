"""Tensor parallelism, from two conjugate operators to a transformer block; every backward is written out."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
