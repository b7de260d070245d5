"""Ranks on many hosts: who started this process, which interface reaches the others, how they join and are watched."""
