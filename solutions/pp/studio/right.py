"""Right answers of another style to the exercises on the schedule studio."""

LIBRARY = "from dualpipe_lab import pp\nrows = pp.schedules.{}.rows()"
LABELS = [('    "0F0', '    "rank 0: 0F0'), ('    "1F0', '    "rank 1: 1F0')]
ONE_TEXT = [("rows = [\n", "rows = '''\n"), ('    "', ""), ('",\n', "\n"), ("\n]", "\n'''")]

RIGHT = {
    "studio-1": {
        "one microbatch after the other": 'rows = ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]',
        "as one text": 'rows = "0F0 0F1 0B0 0B1\\n1F0 1F1 1B0 1B1"',
    },
    "studio-2": {
        "GPipe": 'rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]',
        "in another order of microbatches": 'rows = ["0F2 0F0 0B2 0F1 0B0 0B1", "1F2 1B2 1F0 1B0 1F1 1B1"]',
    },
    "studio-3": {"1F1B": LIBRARY.format("one_f_one_b(3, 4)"), "ZB-H1": LIBRARY.format("zero_bubble_h1(3, 4)")},
    "studio-4": {"1F1B": LIBRARY.format("one_f_one_b(4, 6)"), "ZB-H1": LIBRARY.format("zero_bubble_h1(4, 6)")},
    "studio-5": {"labelled rows": LABELS, "as one text": ONE_TEXT},
    "studio-6": {"labelled rows": LABELS, "as one text": ONE_TEXT},
    "studio-7": {
        "DualPipe": LIBRARY.format("dualpipe(2, 4)"),
        "the other way round": [("rows = [", "rows = list(reversed(["), ("\n]", "\n]))")],
    },
    "studio-8": {"V-Half": LIBRARY.format("v_half(2, 4)"), "ZBV": LIBRARY.format("zbv(2, 4)")},
    "studio-9": {"GPipe": LIBRARY.format("gpipe(3, 5)"), "ZB-H2": LIBRARY.format("zero_bubble_h2(3, 5)")},
    "studio-10": {"ZBV": LIBRARY.format("zbv(4, 8)"), "as one text": ONE_TEXT},
}
