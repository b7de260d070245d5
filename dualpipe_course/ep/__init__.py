"""Checks of the expert-parallel chapters."""
