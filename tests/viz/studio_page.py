"""What the browser tests do with a studio: its page asks the Python of the tests."""

from drawing_page import document

from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_lab.pp.studio import answer
from dualpipe_lab.viz import Studio

STEP = "(s => s.forward ? `(${s.forward.stage}F${s.forward.microbatch};${s.backward.stage}${s.backward.kind}${s.backward.microbatch})OVERLAP_F_B` : `${s.stage}${s.kind}${s.microbatch}`)"  # noqa: E501
READY = "document.querySelector('dp-studio')?.timeline?.tracks"


PYTHON = "globalThis.dualpipePython = { isStarted: true, ask: (call, [question]) => askPython(question) }"


def connect(context):
    """Let the pages of a browser context, or one page, ask `answer`."""
    context.expose_function("askPython", answer)
    context.add_init_script(PYTHON)


def small_page(folder):
    """The address of a page with 1F1B on 2 ranks."""
    (folder / "page.html").write_text(document(Studio(("1f1b", 2, 2), ranks=(2,), microbatches=(2,)).to_html()))
    return (folder / "page.html").as_uri()


def open_studio(page, start=("1f1b", 4, 8), theme="light", challenges=(), python=True):
    if python:
        connect(page)
    page.show(Studio(start, challenges, ranks=(2, 3, 4), microbatches=(2, 4, 8)).to_html(), theme)
    page.wait_for_function(READY)
    return page


def with_challenges(page, theme="light"):
    return open_studio(page, theme=theme, challenges=CHALLENGES)


def studio(page, expression):
    """The value of a JavaScript expression, in which e is the studio, when Python has answered."""
    settled = "const e = document.querySelector('dp-studio'); await e.settled; await e.waiting"
    return page.evaluate(f"async () => {{ {settled}; return {expression}; }}")


def act(page, name, detail=None):
    page.evaluate("([name, detail]) => document.querySelector('dp-studio').act(name, detail)", [name, detail])
    studio(page, "null")


def retype(page, lines):
    """Replace every row."""
    for rank, row in enumerate(lines):
        act(page, "point", {"rank": rank, "position": 0})
        act(page, "retype", row)


def verdict(page):
    studio(page, "null")
    return page.locator("dp-studio .verdict").inner_text()


def message(page):
    return studio(page, "e.message.textContent")


def rows(page):
    return studio(page, "e.session.program.ranks.map((row) => row.map(stepName).join(' '))".replace("stepName", STEP))


def board(page):
    return page.locator("dp-studio .scroll")


def press(page, *keys):
    for key in keys:
        board(page).press(key)


def cell(page, rank, position):
    """The middle of a cell on the screen."""
    return page.evaluate(
        """([rank, position]) => {
            const e = document.querySelector('dp-studio').timeline, [track] = e.tracks, { layout } = e.screen;
            const span = track.rankStart[rank] + position, box = e.canvas.getBoundingClientRect();
            const time = (track.start[span] + track.end[span]) / 2;
            const top = layout.tracks[0].top + rank * layout.tracks[0].pitch;
            return [box.x + layout.left + time * layout.perTime - layout.scroll, box.y + top + layout.row.cell / 2];
        }""",
        [rank, position],
    )
