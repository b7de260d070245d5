"""The exercise of "A run on many hosts": five numbers.

Chapter: book/hosts/many-hosts.
"""

from dualpipe_course.declared import Predict

NAMES = ("RANK", "offset in us", "its bound in us", "us that tell which was first", "seconds of drift")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        11: "ranks are numbered host by host, so that three whole hosts come before: 3 * 4",
        15: "local ranks count from 0, as hosts do",
        10: "hosts count from 0: before host 3 there are three, with 4 ranks each",
        5: "a number of its own in the whole run: the hosts before have ranks as well",
    },
    {
        -4_050: "the other clock is ahead, and the offset is what it shows more than mine",
        4_200: "the other clock was read at some moment after 5,000; half way is the best guess",
        3_900: "the other clock was read before the answer arrived; half way is the best guess",
    },
    {
        300: "s was read between t0 and t1, and the guess is half way: the error is at most half of it",
        75: "half of 300 us, not a quarter",
    },
    {
        150: "the time of the other event has an error too",
        90: "the time of the other event has an error too",
        120: "both may be wrong in opposite directions at once",
        60: "both may be wrong, and in opposite directions: the bounds add up",
        480: "each bound counts once: it is the largest error to either side",
    },
    {
        20: "20 us are added in each second; how many seconds make 1,000 us?",
        50_000: "20 millionths of a second are 20 us, not 20 ns",
        100: "two clocks differ by 20 us per second in all, not each of them",
    },
)


numbers = Predict(
    "many_hosts-1",
    "Ranks and clocks",
    NAMES,
    lambda n, back, says, other, drift: (
        3 * n + 2,
        says - (5000 + back) / 2,
        (back - 5000) / 2,
        (back - 5000) / 2 + other,
        1000 / drift,
    ),
    "starts {n} ranks",
    "arrives at {back:,} us; the answer says {says:,} us",
    "within {other} us",
    "by {drift} millionths",
    minutes=8,
    points=2,
    hints=(
        "Host 3 is the fourth one. How many ranks do the hosts before it have?",
        "The page has the formula of the offset and of its bound.",
        "Two times with an error each: how far apart can they seem if both events were at the same moment?",
    ),
    slips=_SLIPS,
    n=(4, 8, 6),
    back=(5300, 5200, 5400),
    says=(9200, 8900, 9600),
    other=(90, 60, 110),
    drift=(20, 10, 25, 40),
    called={"n": "ranks", "back": "arrives at", "says": "the answer says", "other": "within", "drift": "drift"},
)
