"""Pipeline parallelism: programs as data, what they cost, and the runtime that executes them on real ranks."""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
