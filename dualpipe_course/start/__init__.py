"""Checks of the first chapters."""
