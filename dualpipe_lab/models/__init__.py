"""Whole models: as one process has them, and spread over the axes of a topology."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
