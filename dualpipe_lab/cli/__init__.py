"""The command line, `python -m dualpipe_lab`: one file per command; commands import torch only if they use it."""
