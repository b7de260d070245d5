"""Pictures that the library draws from what really happened.

Chapter: book/start/time.  In: timelines and step logs.  Out: drawings for pages, notebooks and papers.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
