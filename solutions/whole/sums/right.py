"""Right answers of another style to the exercises on who sums what with whom."""

RIGHT = {}
