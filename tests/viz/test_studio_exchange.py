"""What goes into the studio and comes out of it: text, CSV, links, files, scripts, and what attackers paste."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from studio_page import READY, act, connect, message, open_studio, rows, studio, verdict

from dualpipe_lab import pp
from dualpipe_lab.pp import Cost, Program, schedules

pytestmark = pytest.mark.browser


def test_a_link_opens_the_schedule_in_a_fresh_browser(page, browser):
    open_studio(page, ("dualpipe", 4, 8))
    act(page, "cost", {"key": "latency", "value": 3})
    act(page, "limit", 6)
    act(page, "link")
    page.wait_for_function("document.querySelector('dp-studio').exporting.link.href")
    address = studio(page, "e.exporting.link.href")
    assert len(address) < 2000
    fresh = browser.new_context().new_page()
    connect(fresh)
    fresh.goto(address)
    fresh.wait_for_function(READY)
    assert verdict(fresh) == "The verdict comes with your first edit or click."
    assert rows(fresh) == rows(page)
    act(fresh, "point", {"rank": 0, "position": 0})
    assert studio(fresh, "[e.result.figures.makespan, e.session.limit, e.session.program.numDirections]") == [
        pp.simulate(schedules.build("dualpipe", 4, 8), Cost(latency=3)).makespan,
        6,
        2,
    ]
    fresh.context.close()


def test_hostile_input_gets_a_sentence_and_nothing_is_lost(page):
    open_studio(page, ("1f1b", 2, 2))
    before = rows(page)
    act(page, "readText", "0F0 " * 2_500_000)
    assert message(page) == "the text has 10000000 characters; the studio reads at most 1000000"
    act(page, "readText", "<img src=x onerror=alert(1)>")
    assert message(page).startswith("rank 0, position 0: '<img' is not an action")
    act(page, "readText", "0F99999999999999999999 0B0")
    assert message(page) == "the studio reads at most 1024 ranks, 4096 stages and 4096 microbatches"
    act(page, "insert", "1F" + "9" * 12)
    assert message(page).startswith("'1F999999999999' is not an action")
    act(page, "insert", "999999F999999")  # too many cells to draw
    assert "999999F999999 has stage 999999, out of range 0..1" in studio(page, "e.result.problems.join()")
    act(page, "undo")
    assert rows(page) == before
    page.evaluate("location.hash = '#schedule=AAAA'")
    page.wait_for_function("document.querySelector('dp-studio').message.textContent.includes('link')")
    assert message(page) == "the link is damaged or was cut; copy the whole link again"
    act(page, "readText", "# <b onclick=alert(1)>bold</b>: 1 ranks, 1 stages, 1 microbatches\nrank 0: 0F0 0B0")
    assert page.locator("dp-studio b").count() == 0
    assert page.locator("dp-studio .title").inner_text() == "<b onclick=alert(1)>bold</b>"
    act(page, "undo")
    assert rows(page) == before


def saved(page, name):
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).click()
    return Path(waiting.value.path()), waiting.value.suggested_filename


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_every_export_is_read_back(page, name, tmp_path):
    open_studio(page, (name, 2, 4))
    act(page, "cost", {"key": "F", "value": 2})
    program, cost = schedules.build(name, 2, 4), Cost(F=2)
    page.locator("dp-studio summary", has_text="Text, link, files").click()
    # the text is written when the box has opened
    page.wait_for_function("document.querySelector('dp-studio').exporting.area.value")
    assert Program.parse("again", studio(page, "e.exporting.area.value")).ranks == program.ranks
    path, file_name = saved(page, "Save trace for Perfetto")
    assert file_name.endswith(".trace.json")
    assert path.read_text() == pp.simulate(program, cost).to_perfetto()
    path, file_name = saved(page, "Save file")
    kept = path.rename(tmp_path / file_name)
    act(page, "start", {"name": "gpipe", "ranks": 3, "microbatches": 2})
    page.locator("dp-studio input[type=file]").set_input_files(str(kept))
    page.wait_for_function("document.querySelector('dp-studio').session.costs.F === 2")
    assert rows(page) == program.rows()
    if name == "zbv":
        path, _ = saved(page, "Save CSV")
        assert path.read_text() == pp.to_torch_csv(program)
        act(page, "readText", path.read_text())
        assert rows(page) == program.rows()
    assert studio(page, "e.timeline.toSvg()").startswith("<svg xmlns")
    assert page.evaluate("document.querySelector('dp-studio').timeline.toPng().then(blob => blob.size)") > 5000
    page.get_by_label("Form").select_option("python")
    script = tmp_path / "run.py"
    page.wait_for_function("document.querySelector('dp-studio').exporting.area.value.startsWith('import torch')")
    script.write_text(studio(page, "e.exporting.area.value"))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert f"{pp.simulate(program, cost).makespan} ticks\n" in ran.stdout
    losses = re.findall(r"(\d+): (\d\.\d+)", ran.stdout.splitlines()[-1])
    assert sorted(int(microbatch) for microbatch, _ in losses) == [0, 1, 2, 3]
