"""Models that the course trains, each the same under every topology."""
