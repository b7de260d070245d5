"""Answers to the studio's challenges: one that earns the star of time, one that earns that of memory."""

from dualpipe_lab.pp import schedules

ROOM = [
    "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0F4 0W3 0F5 0I4 0W4 0I5 0W5",
    "1F0 1F1 1I0 1W0 1I1 1W1 1F2 1F3 1I2 1W2 1I3 1W3 1F4 1F5 1I4 1W4 1I5 1W5",
    "2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2F3 2I3 2W2 2W3 2F4 2I4 2F5 2I5 2W4 2W5",
]
ANSWERS = {
    "mend": {
        "time": schedules.build("1f1b", 2, 2).rows(),
        "memory": [
            "0F0 0B0 0F1 0B1",
            "1F0 1B0 1F1 1B1",
        ],
    },
    "once": {
        "time": schedules.build("1f1b", 2, 3).rows(),
        "memory": [
            "0F0 0B0 0F1 0B1 0F2 0B2",
            "1F0 1B0 1F1 1B1 1F2 1B2",
        ],
    },
    "nothing": {
        "time": [
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3",
            "2F0 2I0 2F1 2I1 2W0 2F2 2I2 2F3 2I3 2W2 2W3 2W1",
        ],
        "memory": [
            "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1W0 1I1 1W1 1F2 1F3 1I2 1W2 1I3 1W3",
            "2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2F3 2I3 2W2 2W3",
        ],
    },
    "less": {
        "time": [
            "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0F5 0I2 0W1 0I3 0W2 0I4 0W3 0W4 0I5 0W5",
            "1F0 1F1 1F2 1F3 1F4 1I0 1W0 1I1 1W1 1I2 1F5 1I3 1W2 1I4 1W3 1W4 1I5 1W5",
            "2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2W0 2I3 2F5 2I4 2W1 2W2 2I5 2W3 2W4 2W5",
            "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3W0 3F5 3I5 3W1 3W2 3W3 3W4 3W5",
        ],
        "memory": [
            "0F0 0F1 0F2 0I0 0W0 0I1 0F3 0I2 0W1 0F4 0W2 0F5 0I3 0W3 0I4 0W4 0I5 0W5",
            "1F0 1F1 1F2 1I0 1I1 1W1 1I2 1F3 1W2 1W0 1F4 1F5 1I3 1W3 1I4 1W4 1I5 1W5",
            "2F0 2F1 2F2 2I0 2I1 2W1 2I2 2F3 2W2 2W0 2F4 2I3 2F5 2I4 2W4 2I5 2W3 2W5",
            "3F0 3I0 3F1 3I1 3F2 3I2 3W0 3W1 3W2 3F3 3I3 3W3 3F4 3I4 3F5 3I5 3W4 3W5",
        ],
    },
    "room": {"time": ROOM, "memory": ROOM},
    "split": {
        "time": schedules.build("zero_bubble_h1", 4, 6).rows(),
        "memory": [
            "0F0 0F1 0F2 0I0 0W0 0I1 0F3 0I2 0W1 0F4 0W2 0F5 0I3 0W3 0I4 0W4 0I5 0W5",
            "1F0 1F1 1F2 1I0 1I1 1W1 1I2 1F3 1W2 1W0 1F4 1F5 1I3 1W3 1I4 1W4 1I5 1W5",
            "2F0 2F1 2F2 2I0 2I1 2W1 2I2 2F3 2W2 2W0 2F4 2I3 2F5 2I4 2W4 2I5 2W3 2W5",
            "3F0 3I0 3F1 3I1 3F2 3I2 3W0 3W1 3W2 3F3 3I3 3W3 3F4 3I4 3F5 3I5 3W4 3W5",
        ],
    },
    "copies": dict.fromkeys(("time", "memory"), schedules.build("easy_dualpipe", 2, 4).rows()),
    "turn": {
        "time": schedules.build("zbv", 2, 4).rows(),
        "memory": [
            "0F0 0F1 3F0 3I0 3W0 0F2 0I0 0W0 3F1 3I1 3W1 0F3 0I1 0W1 3F2 3I2 3W2 0I2 0W2 3F3 3I3 3W3 0I3 0W3",
            "1F0 2F0 1F1 2I0 1I0 2W0 2F1 1W0 2I1 1I1 2W1 1F2 2F2 1W1 1F3 2I2 1I2 2W2 2F3 1W2 2I3 1I3 2W3 1W3",
        ],
    },
    "links": {
        "time": [
            "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
            "1F0 1F1 1F2 1F3 1F4 1I0 1W0 1I1 1W1 1I2 1W2 1I3 1W3 1I4 1W4",
            "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
        ],
        "memory": [
            "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
            "1F0 1F1 1F2 1I0 1W0 1I1 1F3 1W1 1F4 1I2 1W2 1I3 1W3 1I4 1W4",
            "2F0 2I0 2F1 2I1 2W0 2F2 2I2 2W1 2W2 2F3 2I3 2W3 2F4 2I4 2W4",
        ],
    },
    "dualpipe": dict.fromkeys(("time", "memory"), schedules.build("zbv", 4, 8).rows()),
}
