"""Right answers of another style to the exercises on Easy-DualPipe."""

RIGHT = {}
