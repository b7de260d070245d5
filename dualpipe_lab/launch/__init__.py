"""Processes, messages and time: everything that starts ranks, lets them talk and explains what went wrong."""
