"""Tensor parallelism, from two operators to a whole block: one file per topic, every backward written out."""
