"""Ranks under torchrun's agents, on one host or on many: what tests of the watchdog, of bytes and drills share.

agents.py        starts agents that fork their ranks, and returns what they printed
kinds.py         what the ranks do: a function for each way to fail, and some that do not
trainings.py     a training that is hit at a moment of its own
collectives.py   one call of every collective
crossing.py      what crosses between hosts in the parts of one launch
"""
