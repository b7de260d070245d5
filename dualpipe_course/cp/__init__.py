"""Checks of the context-parallel chapters."""
