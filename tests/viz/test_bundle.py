"""The script that pages carry: one text, no name twice, no import left; and the book's pages share it."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab import Cost, Timeline, schedules, simulate
from dualpipe_lab.timeline import Span
from dualpipe_lab.viz import bundle
from dualpipe_lab.viz.embed import (
    compare,
    has_elements,
    image,
    inline_script,
    timeline_html,
    timeline_spec,
    without_scripts,
)

STATIC = Path(bundle.__file__).parent / "static"
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:const|let|function\*?|class) (\w+)", re.MULTILINE)


def tiny(**options):
    return simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2), **options)


def test_no_two_modules_define_the_same_name():
    modules = [path for path in STATIC.iterdir() if path.suffix == ".mjs"]
    names = Counter(name for path in modules for name in TOP_LEVEL.findall(path.read_text(encoding="utf-8")))
    assert [name for name, count in names.items() if count > 1] == []
    assert {"simulate", "criticalPath", "TimelineElement"} <= set(names)


def test_only_a_page_with_a_studio_carries_its_script():
    both = inline_script("studio")
    assert both.startswith(inline_script())
    assert "StudioElement" in both
    assert "StudioElement" not in inline_script()


def test_modules_join_into_one_text():
    text = bundle.classic_script()
    assert text.count("class TimelineElement extends TimelineView") == 1
    assert not re.search(r"^import |^export (?!default)|</script", text, re.MULTILINE)


def test_files_are_pages():
    assert {path.name: n for path in STATIC.iterdir() if (n := len(path.read_text().splitlines())) > 250} == {}


def test_both_forms_are_javascript(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("there is no node (Debian: apt-get install nodejs); Chromium runs the same text")
    scripts = {
        "classic.js": bundle.classic_script(),
        "studio.js": bundle.element_script("studio"),
    }
    for name, text in (scripts | {"live.mjs": bundle.live_module()}).items():
        (tmp_path / name).write_text(text)
        subprocess.run(["node", "--check", str(tmp_path / name)], check=True, timeout=30)


def test_the_shared_script_is_named_by_its_text(monkeypatch):
    before = bundle.script_name()
    monkeypatch.setattr(bundle, "classic_script", lambda: "changed")
    assert bundle.script_name() != before


def test_a_page_without_its_scripts_keeps_everything_else():
    html = timeline_html(tiny())
    assert without_scripts(f"<p>a</p>{html}<script>own()</script>{html}") == (
        f"<p>a</p>{timeline_html(tiny(), script=False)}<script>own()</script>{timeline_html(tiny(), script=False)}"
    )
    assert has_elements(html)
    assert not has_elements("<p>dp-timeline</p>")


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "dualpipe"])
def test_twenty_timelines_on_a_page_weigh_less_than_a_megabyte(name):
    timeline = simulate(schedules.build(name, num_ranks=8, num_microbatches=20))
    page = timeline_html(timeline, script=False) * 20 + inline_script()
    assert len(page.encode()) < 1_000_000


def test_one_axis_needs_one_unit_and_few_timelines():
    with pytest.raises(ValueError, match=r"need one unit, got ns and ticks; simulate with .* unit=\"ns\""):
        compare(tiny(), tiny(unit="ns"))
    with pytest.raises(ValueError, match="1 to 3 timelines, got 4"):
        timeline_spec([tiny()] * 4)


@given(st.text(max_size=20))
def test_any_name_stays_inside_its_attribute(name):
    html = timeline_html(Timeline(name, [[Span(0, 0, 1, "F", 0, 0, "0F0")]]), script=False)
    assert re.fullmatch(r"<dp-timeline data-spec='[^'<]*'><img [^<>]*></dp-timeline>\n", html)


def test_a_picture_survives_as_an_address():
    from html import unescape
    from urllib.parse import unquote

    svg = tiny().to_svg()
    source = unescape(re.search(r'src="data:image/svg\+xml,([^"]*)"', image(svg, "words"))[1])
    assert unquote(source).replace("'", '"').startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_a_saved_comparison_is_one_file(tmp_path):
    compare(tiny(), tiny(cost=Cost(latency=2)), time=3).save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<dp-timeline ") == text.count("<script") == 1
    assert "<title>1F1B</title>" in text


def test_sphinx_pages_share_one_copy(tmp_path):
    application = pytest.importorskip("sphinx.application")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["dualpipe_lab.viz.sphinx"]\nhtml_theme = "basic"\n')
    drawing = "\n".join(f"   {line}" for line in timeline_html(tiny()).splitlines())
    raw = f".. raw:: html\n\n{drawing}\n\n"
    (source / "index.rst").write_text(f"Drawings\n========\n\n{raw}{raw}.. toctree::\n\n   plain\n")
    (source / "plain.rst").write_text("Plain\n=====\n\nNothing to draw.\n")
    application.Sphinx(source, source, out, out / "doctrees", "html", status=None, freshenv=True).build()
    page, plain = ((out / name).read_text(encoding="utf-8") for name in ("index.html", "plain.html"))
    assert page.count("<dp-timeline ") == 2
    assert bundle.element_script_name("studio") not in page
    assert "data-dualpipe-lab" not in page
    assert page.count(bundle.script_name()) == 1
    assert bundle.script_name() not in plain
    assert (out / "_static" / bundle.script_name()).read_text(encoding="utf-8") == bundle.classic_script()
