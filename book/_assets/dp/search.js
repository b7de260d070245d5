// What the search shows: definitions, then chapters, then the rest, the reference last; one hit for a page.
// In: Sphinx's search, and SEARCH_NOTES, which dp_weight wrote: {page or page#term: [title or "", words]}.

{
  const GROUPS = [
    ["Definitions", /^book\/appendix\/glossary#term-/],
    ["Chapters", /^book\/(intro|paths|start|dp|tp|cp|pp|ep|whole|hosts)\b/],
    ["Exercises", /^exercises\//],
    ["Working with the course", /^book\/(?!appendix\/(api|glossary))/],
    ["Reference", /^book\/appendix\/api/],
  ];
  const MOST = 30; // hits of a group

  function entry([page, title, anchor, what]) {
    const [ownTitle, words] = SEARCH_NOTES[page + anchor] ?? SEARCH_NOTES[page] ?? [];
    const link = Object.assign(document.createElement("a"), { href: page + DOCUMENTATION_OPTIONS.LINK_SUFFIX + anchor });
    link.innerHTML = ownTitle || title;
    const context = Object.assign(document.createElement("p"), { className: "context", textContent: what ?? words ?? "" });
    const item = document.createElement("li");
    item.append(link, context);
    return item;
  }

  Search.query = (query) => {
    const hits = Search._performSearch(...Search._parseQuery(query)).reverse(); // the best one was the last
    let found = 0;
    for (const [name, belongs] of GROUPS) {
      const first = new Map(); // of a page, or of a name of the library
      for (const hit of hits) {
        const key = hit[0] + (name === "Definitions" || name === "Reference" ? hit[2] : "");
        if (belongs.test(hit[0] + hit[2]) && !first.has(key)) first.set(key, hit);
      }
      if (!first.size) continue;
      found += first.size;
      const heading = Object.assign(document.createElement("h3"), { textContent: name });
      const list = Object.assign(document.createElement("ul"), { className: "search" });
      list.append(...[...first.values()].slice(0, MOST).map(entry));
      Search.output.before(heading, list);
    }
    _finishSearch(found);
  };
}
