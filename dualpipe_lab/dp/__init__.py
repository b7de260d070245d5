"""Data parallelism, from one all-reduce to ZeRO-3: one file per topic."""
