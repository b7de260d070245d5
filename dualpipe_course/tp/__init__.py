"""Checks of the tensor-parallel chapters."""
