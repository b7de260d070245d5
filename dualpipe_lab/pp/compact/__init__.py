"""Compact programs: the steps of every rank as integer arrays, for searches over costs and for huge schedules."""
