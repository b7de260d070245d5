"""Validation of programs: complete work, matched messages, no deadlock; a deadlock is reported with a tried fix."""
