"""Right answers of another style to the exercises on DualPipe's overlap."""

RIGHT = {}
