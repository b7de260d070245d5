"""Context parallelism, from a ring all-reduce by hand to a balanced ring attention: one file per topic."""
