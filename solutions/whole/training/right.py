"""Right answers of another style to the exercises on training."""

RIGHT = {}
