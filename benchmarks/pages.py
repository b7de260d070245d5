"""How much each page of the built book weighs, and when its first text is on the screen.

Weight: the bytes of everything that the browser asks for, for a reader who comes with an empty cache; nothing is
compressed on the way.  First paint: from the request to the first content in the window, `first-contentful-paint` of
the browser, with the page's files in its cache ("warm") and without them ("cold"); medians over the rounds.

    python benchmarks/pages.py [--rounds 5] [--rows 10]        make book comes first
"""

import argparse
import functools
import http.server
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.table import Table
from viz import CHROMIUM, FLAGS

HTML = Path("_build/html")
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"


class Found(NamedTuple):
    """One page: bytes in total and of the page's own file, milliseconds to the first content."""

    page: str
    weight: int
    own: int
    cold: float
    warm: float


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the book on this machine and yield its address."""
    handler = functools.partial(_Quiet, directory=HTML)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def measure(browser: Browser, site: str, page: str, rounds: int) -> Found:
    """Visit a page `rounds` times with an empty cache, each time followed by a second visit."""
    cold, warm, weight = [], [], 0
    for _ in range(rounds):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        tab, bodies = context.new_page(), []
        tab.on("response", lambda response, found=bodies: found.append(response))  # playwright marks the function
        for times in (cold, warm):
            tab.goto(f"{site}{page}.html", wait_until="load")
            tab.wait_for_timeout(100)
            times.append(tab.evaluate(PAINT))
            weight = weight or sum(len(response.body()) for response in bodies if response.status == 200)
        context.close()
    own = (HTML / f"{page}.html").stat().st_size
    return Found(page, weight, own, statistics.median(cold), statistics.median(warm))


def pages() -> list[str]:
    """Return the home page, the chapters, doors and appendices of _toc.yml, without exercises and reference."""
    toc = yaml.safe_load(Path("_toc.yml").read_text("utf-8"))
    files = [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]
    return [file.removesuffix(".md") for file in files]


def main() -> None:
    """Print the heaviest and the slowest pages, and the medians of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10)
    options = parser.parse_args()
    if not (HTML / "index.html").exists():
        print("the book is not built (make book): its pages are not measured")
        return
    with served() as site, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        found = [measure(browser, site, page, options.rounds) for page in pages()]
        browser.close()
    title = f"{len(found)} pages, {options.rounds} rounds"
    table = Table("page", "kB", "own kB", "cold ms", "warm ms", title=title)
    for row in sorted(found, key=lambda row: -row.weight)[: options.rows]:
        table.add_row(row.page, *(f"{value:.0f}" for value in (row.weight / 1e3, row.own / 1e3, row.cold, row.warm)))
    table.add_section()
    for name, choose in (("median", statistics.median), ("most", max)):
        cells = [choose(column) for column in zip(*(row[1:] for row in found), strict=True)]
        table.add_row(name, *(f"{x:.0f}" for x in (cells[0] / 1e3, cells[1] / 1e3, *cells[2:])))
    Console(width=100).print(table)
    heavy, slow = sum(row.weight > 1e6 for row in found), sum(row.cold > 1e3 for row in found)
    print(f"pages over 1 MB: {heavy}; with a first paint after more than 1 s: {slow}")


if __name__ == "__main__":
    main()
