// What is solved in this browser: a tick beside each exercise, "2 of 3" beside its page in the sidebar, "7 of 134" on the
// home page.  In: dualpipeStore, and EXERCISES, {page: names of those that are answered in it}; dp_exercises writes all
// three into one script.  globalThis.dualpipeProgress: note(names), solved().

(() => {
  const store = dualpipeStore, SOLVED = "dualpipe-lab:solved:";
  const all = Object.values(EXERCISES).flat();
  const isSolved = (name) => store.get(SOLVED + name) !== null;
  const solved = () => all.filter(isSolved);
  const root = new URL(document.documentElement.dataset.content_root, location.href).href;
  const pageOf = (link) => decodeURI(link.href.split(/[?#]/)[0].slice(root.length)).replace(/\.html$/, "");
  const countOf = (names) => `${names.filter(isSolved).length} of ${names.length}`;

  function badge(link, names) {
    link.querySelector(".dp-count")?.remove();
    if (!names.some(isSolved)) return;
    const count = Object.assign(document.createElement("span"), { className: "dp-count", textContent: countOf(names) });
    link.append(Object.assign(count, { title: "exercises solved" }));
  }

  function show() {
    for (const tick of document.querySelectorAll("[data-exercise]")) tick.hidden = !isSolved(tick.dataset.exercise);
    for (const link of document.querySelectorAll(".bd-sidebar-primary a.internal")) {
      const names = EXERCISES[pageOf(link)], chapter = link.closest(".toctree-l1")?.querySelector("a");
      if (names) new Set([link, chapter]).forEach((one) => badge(one, names)); // the chapter's pages may be folded
    }
    const home = document.querySelector(".dp-progress");
    if (home) home.textContent = solved().length ? `${countOf(all)} exercises solved in this browser.` : "";
  }

  function note(names) {
    for (const name of all.filter((one) => names.includes(one))) store.set(SOLVED + name, "1");
    show();
  }

  globalThis.dualpipeProgress = { note, solved };
  window.addEventListener("storage", show);
  window.addEventListener("pageshow", show);
  show();
})();
