"""Right answers of another style to the exercises on axes and links."""

RIGHT = {}
