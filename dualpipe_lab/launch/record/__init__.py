"""The record of a running rank: the ledger of its messages, the trace of its time, and its status."""
