"""The sidebar's marks, and the way along the trail: the trail's pages have their numbers, the lecture's say so.

In: `meta` of _toc.yml, which lists both.  Out: in the sidebar a number before each page of the trail, the word
"lecture" after each of the lecture's; at the foot of a page of the trail, *Next* and *Previous* follow the numbers,
past the exercises, whose own lead back to their page and on to the next one.
"""

from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx

from dualpipe_course.workspace.contents import chapter_of, listed

LEGEND = (
    '<p class="dp-legend"><span class="dp-number">1</span> to <span class="dp-number">{last}</span> the trail, in this '
    "order</p>"
)


def mark(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Put the marks into a page's sidebar, and the numbers' order at its foot."""
    table = {"meta": app.env.external_site_map.meta}  # type: ignore[attr-defined]
    trail, lecture = listed(table, "trail"), listed(table, "lecture")
    addresses = {context["pathto"](name): name for name in {*trail, *lecture}}
    plain = context.get("generate_toctree_html")

    def marked(*args: Any, **kwargs: Any) -> Any:
        html = plain(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("kind") != "sidebar":
            return html
        soup = html if isinstance(html, BeautifulSoup) else BeautifulSoup(html, "html.parser")
        for link in soup.select("li.toctree-l1 > a"):
            name = page if link["href"] == "#" else addresses.get(link["href"], "")
            if name in trail:
                number = trail.index(name) + 1
                link.insert(0, _span(soup, "dp-number", str(number), f"page {number} of the trail"))
            if name in lecture:
                link.append(_span(soup, "dp-lecture", "lecture", f"one of the lecture's {len(lecture)} pages"))
        return LEGEND.format(last=len(trail)) + str(soup)

    if plain:
        context["generate_toctree_html"] = marked
    chapter = chapter_of(page) or page
    if chapter in trail:
        here = trail.index(chapter)
        before = chapter if page != chapter else trail[here - 1] if here else str(app.config.root_doc)
        context["prev"] = _way(app, context, before)
        if here + 1 < len(trail):
            context["next"] = _way(app, context, trail[here + 1])


def _span(soup: BeautifulSoup, name: str, text: str, title: str) -> Any:
    span = soup.new_tag("span", attrs={"class": name, "title": title})
    span.string = text
    return span


def _way(app: Sphinx, context: dict[str, Any], name: str) -> dict[str, str]:
    return {"link": context["pathto"](name), "title": app.env.titles[name].astext()}


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler; it runs after the theme has made the sidebar."""
    app.connect("html-page-context", mark, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
