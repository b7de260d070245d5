// What the search shows: definitions, then chapters, then the rest, the reference last; one hit for a page.
// In: Sphinx's search, and SEARCH_NOTES, which dp_weight wrote: {page or page#term: [title or "", words]}.

{
  const GROUPS = [
    ["Definitions", /^book\/appendix\/glossary#term-/],
    ["Chapters", /^book\/(intro|paths|start|dp|tp|cp|pp|ep|whole|hosts)\b/],
    ["Exercises", /^exercises\//],
    ["Working with the course", /^book\/(?!appendix\/(api|glossary)\b)/],
    ["Reference", /^book\/appendix\/api/],
  ];
  const MOST = 30; // hits of a group

  function entry([page, title, anchor, what]) {
    const [ownTitle, words] = SEARCH_NOTES[page + anchor] ?? SEARCH_NOTES[page] ?? [];
    const link = Object.assign(document.createElement("a"), { href: page + DOCUMENTATION_OPTIONS.LINK_SUFFIX + anchor });
    link.innerHTML = ownTitle || title;
    const context = Object.assign(document.createElement("p"), { className: "context", textContent: words ?? "" });
    if (what) context.innerHTML = what; // of a name of the library: what it is, and where
    const item = document.createElement("li");
    item.append(link, context);
    return item;
  }

  Search.query = (query) => {
    const hits = Search._performSearch(...Search._parseQuery(query)).reverse(); // the best one was the last
    const found = GROUPS.map(() => new Map()); // of each group: definition, or name of the library, or page, to hit
    for (const hit of hits) {
      const place = hit[0] + hit[2];
      const group = GROUPS.findIndex(([, pages]) => pages.test(place));
      const key = [SEARCH_NOTES[place]?.[1], hit[0], hit[0], hit[0], place][group];
      if (group >= 0 && !found[group].has(key)) found[group].set(key, hit);
    }
    found.forEach((group, index) => {
      if (!group.size) return;
      const heading = Object.assign(document.createElement("h2"), { textContent: GROUPS[index][0] });
      const list = Object.assign(document.createElement("ul"), { className: "search" });
      list.append(...[...group.values()].slice(0, MOST).map(entry));
      Search.output.before(heading, list);
    });
    _finishSearch(found.reduce((sum, group) => sum + group.size, 0));
  };
}
