"""Collectives and peer messages over `torch.distributed`, with a ledger, a trace, emulated links and deadlock reports.

Chapter: book/start/ranks-and-messages.  In: contiguous tensors of this rank.  Out: the same tensors, filled.
Each function has the arguments and the meaning of torch's function of that name (the newest name where torch has two).
It returns a `Work` if `async_op=True`, and always for `isend` and `irecv`; otherwise it returns None after completion.
A path from a call to torch is one function: it describes the operation, issues it in a `with` block and waits
(`comm/call.py`).
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
