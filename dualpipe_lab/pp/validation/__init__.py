"""Why a program cannot run: missing work, unmatched messages, deadlocks, each with a fix that was tried."""
