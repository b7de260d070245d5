"""Live cells: a drawing with its numbers, which sliders and drop-downs recompute while a kernel runs.

controls   what a reader may change: ranges, choices, boxes, texts
play       `play`, and `Play`: what is shown for the current values, as HTML that also works without a kernel
pipeline   schedules by name and programs by text: their drawing, numbers, closed forms and the validator's verdict
widget     the ipywidgets that a running notebook puts into the HTML
"""
