"""Checks of the part about runs on many hosts."""
