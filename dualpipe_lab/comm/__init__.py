"""Collectives and peer messages, thin over `torch.distributed`: counted, traced, timed and explained when they hang.

Chapter: book/start/ranks-and-messages.  In: contiguous tensors of this rank.  Out: the same tensors, filled.
Every function takes and means what its namesake in `torch.distributed` does, under torch's newest names.  A call
returns a `Work` when `async_op=True` (and always for `isend`, `irecv`); otherwise it returns when it is done.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
