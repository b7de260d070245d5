"""Live cells: a drawing with its numbers, which sliders and drop-downs recompute while a kernel runs."""
