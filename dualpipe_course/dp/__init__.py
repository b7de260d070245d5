"""Checks of the data-parallel chapters."""
