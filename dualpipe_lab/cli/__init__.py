"""The command line: `python -m dualpipe_lab`, one file per command; no command imports torch before it needs it."""
