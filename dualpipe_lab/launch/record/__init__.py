"""What a rank writes down while it runs: the ledger of its messages, the trace of its time, and where it stands."""
