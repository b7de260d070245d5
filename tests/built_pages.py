"""The pages of the built book, for the tests that open them: which there are, and one visit with its complaints."""

from pathlib import Path

import yaml

from dualpipe_lab.viz.embed import has_elements

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
NARROW = {"width": 1024, "height": 768}  # no right column yet, and the theme's widest cells
LOOKS = [(PHONE, "dark"), (PHONE, "light"), (NARROW, "light"), (DESK, "light"), (DESK, "dark")]
OWN = ("data:", "blob:", "file:")
BEYOND = {"label-content-name-mismatch": {"enabled": True}}  # axe leaves it out unless it is asked


def toc_pages():
    """Every page of the table of contents but those below the reference, as its path without the suffix."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    chapters = [chapter for part in toc["parts"] for chapter in part["chapters"]]
    below = [section["file"] for chapter in chapters for section in chapter.get("sections", [])]
    exercises = [file for file in below if file.startswith("exercises/")]
    return [file.removesuffix(".md") for file in (toc["root"], *(entry["file"] for entry in chapters), *exercises)]


def drawn_pages():
    """The pages that hold drawings; a page that is not built yet counts as one, so that its test says so."""
    files = {path: HTML / f"{path}.html" for path in toc_pages()}
    return [path for path, file in files.items() if not file.exists() or has_elements(file.read_text("utf-8"))]


def serious_defects(page, **options):
    """What axe calls serious: the rule, how often, and the first place."""
    from axe_playwright_python.sync_playwright import Axe

    # a colour that fades has too little contrast on its way
    page.evaluate("Promise.allSettled(document.getAnimations().filter(a => a.transitionProperty).map(a => a.finished))")
    # highlighted code and set formulas are an element for every word, not ours, and would take axe a minute
    context = {"exclude": [["pre"], ["mjx-container"]]}
    options = {"resultTypes": ["violations"], **(options or {"rules": BEYOND})}
    found = Axe().run(page, context=context, options=options).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    return [(v["id"], len(v["nodes"]), v["nodes"][0]["html"][:200]) for v in serious]


READS = "try { localStorage.setItem('dualpipe-lab:reading', 'yes') } catch {}"


class Visit:
    """One browser page and everything it complains about; `look` changes its width and theme without a reload.

    Its reader reads: folds and predictions are open, unless `is_reading` is False.
    """

    def __init__(self, browser, site, is_reading=True):
        self.context = browser.new_context()
        if is_reading:
            self.context.add_init_script(READS)
        self.page, self.site, self.complaints = self.context.new_page(), site, []
        self.page.on("request", lambda r: self.complain(not r.url.startswith((site, *OWN)), f"fetched {r.url}"))
        self.page.on("requestfailed", lambda r: self.complain(True, f"failed {r.url}: {r.failure}"))
        self.page.on("response", lambda r: self.complain(r.status >= 400, f"{r.status} {r.url}"))
        self.page.on("pageerror", lambda error: self.complain(True, f"script error: {error}"))
        self.page.on("console", lambda m: self.complain(m.type == "error", f"console: {m.text}"))

    def complain(self, is_wrong, words):
        if is_wrong:
            self.complaints.append(words)

    def open(self, path, viewport=DESK, scheme="light"):
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=scheme, media="screen")
        response = self.page.goto(f"{self.site}{path}.html", wait_until="networkidle")
        assert response is None or response.ok, f"{path} is not built: make book"
        return self

    def look(self, viewport, scheme):
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=scheme)
        self.page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        self.settle()

    def settle(self):
        """Wait until what was asked for is drawn: a change is noticed in one frame and drawn in the next."""
        self.page.evaluate("async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); }")

    def sticking_out(self):
        """What stays wider than the window: the page's own width and the first elements behind it.

        A drawing follows its box a frame or two later, and on a busy machine later than that.
        """
        for _ in range(20):
            if not (found := self._wider()):
                break
            self.page.wait_for_timeout(100)
        return found

    def _wider(self):
        return self.page.evaluate(
            """() => { const width = innerWidth, root = document.documentElement;
            if (root.scrollWidth <= width) return [];
            const boxed = e => e && (getComputedStyle(e).overflowX !== "visible" || boxed(e.parentElement));
            const all = [...document.querySelectorAll("main *")];
            const wide = all.filter(e => e.getBoundingClientRect().right > width + 1 && !boxed(e.parentElement));
            return [root.scrollWidth, ...wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120))]; }"""
        )
