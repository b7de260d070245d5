"""Expert parallelism, from an all-to-all by hand to a V3-style layer whose exchange is hidden: one file per topic."""
