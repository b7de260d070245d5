"""Timelines: the spans and messages of a run, simulated, on a virtual clock, or measured.

Chapter: book/start/time.  In: spans and messages.  Out: one `Timeline` that prints, draws and exports.
"""

from dualpipe_lab.timeline.model import Timeline
from dualpipe_lab.timeline.spans import COMMUNICATION, WORK, Message, Span, Time

__all__ = ["COMMUNICATION", "WORK", "Message", "Span", "Time", "Timeline"]
