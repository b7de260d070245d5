"""Right answers of another style to the exercises on V-shapes."""

RIGHT = {
    "v_shapes-2": {
        "B where W follows at once": [("0I0 0W0", "0B0"), ("0I2 0W2", "0B2")],
        "one text of three lines": [
            ("rows = [\n", "rows = '''\n"),
            ('    "', ""),
            ('",\n', "\n"),
            ("\n]", "\n'''"),
        ],
    },
}
