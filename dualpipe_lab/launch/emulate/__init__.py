"""Emulated time: links that delay messages, and a model clock that is the same on every machine."""
