"""Checks of the pipeline chapters."""
