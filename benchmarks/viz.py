"""How long the page takes from a slider to the redrawn timeline, and how much a page of 20 timelines weighs."""

import statistics
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from dualpipe_lab import schedules, simulate
from dualpipe_lab.viz import inline_script, timeline_html

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
SIZES = ((8, 20), (16, 64), (64, 512))
REPETITIONS = 41

# From each input event until the drawing is done: its handlers draw, and reading one pixel waits for the canvas.
SLIDE = """async (repetitions) => {
  const element = document.querySelector("dp-timeline"), slider = element.shadowRoot.querySelector(".costs input");
  const canvas = element.shadowRoot.querySelector("canvas"), times = [];
  for (let i = 0; i < repetitions; i++) {
    await new Promise(requestAnimationFrame);
    const before = performance.now();
    slider.value = 1 + (i % 3);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    canvas.getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - before);
  }
  return times;
}"""
PLAY = """async () => {
  const element = document.querySelector("dp-timeline"), times = [];
  element.playing = true;
  let before = performance.now();
  while (element.playing && times.length < 120) {
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - before);
    before = performance.now();
  }
  return times;
}"""


def document(body: str) -> str:
    """A page of its own."""
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>Timelines</title><body>{body}{inline_script()}"


def drawing(num_ranks: int, num_microbatches: int, name: str = "1f1b") -> str:
    """The HTML of one timeline, without its script."""
    timeline = simulate(schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    return timeline_html(timeline, script=False)


def measure(page: Page, num_ranks: int, num_microbatches: int) -> None:
    """Print one row: median, fastest and slowest redraw, and the frames while it plays."""
    page.set_content(document(drawing(num_ranks, num_microbatches)))
    redraw = sorted(page.evaluate(SLIDE, REPETITIONS))
    frames = page.evaluate(PLAY)
    size, actions = f"{num_ranks} x {num_microbatches}", 2 * num_ranks * num_microbatches
    numbers = f"{statistics.median(redraw):8.1f} {redraw[0]:8.1f} {redraw[-1]:8.1f}"
    print(f"{size:>9} {actions:>8} {numbers} {1000 / statistics.median(frames):7.0f}")


def main() -> None:
    """Measure every size in one browser."""
    if not Path(CHROMIUM).exists():
        sys.exit(f"there is no {CHROMIUM}; install chromium to measure drawing")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        print(
            f"slider to redrawn timeline, ms, {REPETITIONS} repetitions, Chromium {browser.version}, software rendering"
        )
        print(f"{'size':>9} {'actions':>8} {'median':>8} {'fastest':>8} {'slowest':>8} {'play fps':>7}")
        for size in SIZES:
            measure(page, *size)
        browser.close()
    print(f"page with 20 timelines of 8 x 20, KB, of which script {len(inline_script()) / 1000:.0f}")
    for name in ("1f1b", "dualpipe", "zbv", "dualpipev"):
        print(f"{name:>9} {len(document(drawing(8, 20, name) * 20).encode()) / 1000:8.0f}")


if __name__ == "__main__":
    main()
