"""Watching over the ranks of a launch: their output, their failures, and why nothing moves."""
