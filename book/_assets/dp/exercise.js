// Exercises that are answered in their page: an editor in place of the answer cell, hints, and a check in place of its
// call.  In: the page's cells, and the JSON that dp_exercises wrote: {NAME: {before, starter, check, hints, variants}}.
// Answers stay in this browser, and so does the seed that draws the numbers of exercises with variants; 0 is the book.
// Cells that a chapter asks to change have the same editor, and a "Run".  In: [{before, source}], one for each.
// Python (python.js) starts with the first check or run.

(() => {
  // Every failure to answer is a text, too, in the place of the verdict.
  async function judge(cells, answer, say) {
    try {
      return await dualpipePython.ask("judge", [cells.before, answer, cells.check], say);
    } catch ({ message }) {
      if (message.startsWith("no result")) return `${message}: the answer was stopped; does one of its loops never end?`;
      return `${message} Check your answer in the notebook.`;
    }
  }

  const key = (name) => `dualpipe-lab:answer:${name}`;

  const SEED = "dualpipe-lab:seed";
  if (localStorage.getItem(SEED) === null) localStorage.setItem(SEED, 1 + Math.floor(Math.random() * 999_999));
  const seed = Number(localStorage.getItem(SEED));

  const withSeed = (call) => call.replace(/,?\s*\)\s*$/, `, seed=${seed})`);

  // Puts the seed's numbers into a sentence, number by number: there may be markup between them.
  function renumber(section, book, own) {
    const nodes = [];
    let text = "";
    const walker = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      nodes.push({ node: walker.currentNode, start: text.length });
      text += walker.currentNode.data;
    }
    const at = text.indexOf(book);
    if (at < 0) return;
    const [old, fresh] = [book, own].map((sentence) => [...sentence.matchAll(/\d[\d.,]*\d|\d/g)]);
    old.toReversed().forEach((found, place) => {
      const start = at + found.index;
      const holder = nodes.findLast((one) => one.start <= start);
      holder.node.replaceData(start - holder.start, found[0].length, fresh[fresh.length - 1 - place][0]);
    });
  }

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // Gives an exercise the numbers of the seed: its text, its check and what its hints are about.
  function personal(cells, section) {
    const { book, drawn, about } = cells.variants;
    cells.sentences = drawn[seed % drawn.length].map((own, place) => [book[place], own]);
    for (const [old, own] of cells.sentences) renumber(section, old, own);
    cells.check = withSeed(cells.check);
    cells.hints = cells.hints.map((hint) => `${about}: ${hint}`);
  }

  function editorOf(label, value, go) {
    const editor = make("textarea", { value, spellcheck: false });
    editor.setAttribute("aria-label", `${label}; Escape, then Tab leaves the field`);
    editor.autocapitalize = "off";
    const fit = () => (editor.rows = Math.min(40, Math.max(2, editor.value.split("\n").length + 1)));
    let leaves = false;
    editor.addEventListener("input", fit);
    editor.addEventListener("keydown", (event) => {
      if (event.key === "Tab" && !event.shiftKey && !leaves) {
        event.preventDefault();
        editor.setRangeText("    ", editor.selectionStart, editor.selectionEnd, "end");
        editor.dispatchEvent(new Event("input"));
      } else if (event.key === "Enter" && (event.ctrlKey || event.shiftKey)) {
        event.preventDefault();
        go.click();
      }
      leaves = event.key === "Escape";
    });
    fit();
    return { editor, fit };
  }

  function spoken() {
    const verdict = make("pre", { className: "dp-verdict" });
    verdict.setAttribute("aria-live", "polite");
    return verdict;
  }

  // Puts an editor in place of a cell's code, and what it gives in place of its output.
  function runnable({ before, source }, cell) {
    const run = make("button", { type: "button", textContent: "Run" });
    const { editor, fit } = editorOf("The code of this cell", source, run);
    const said = spoken(), drawn = make("div");
    const [code, book] = [".cell_input", ".cell_output"].map((kind) => cell.querySelector(kind));
    const show = (text, drawing = "", isOwn = true) => {
      said.textContent = text;
      drawn.innerHTML = drawing;
      if (book) book.hidden = isOwn;
    };
    run.addEventListener("click", async () => {
      run.disabled = true;
      try {
        const { text, drawing } = JSON.parse(await dualpipePython.ask("run", [before, editor.value], (words) => show(words)));
        show(text.trimEnd() || (drawing ? "" : "no output"), drawing);
      } catch ({ message }) {
        show(message);
      }
      run.disabled = false;
    });
    const reset = make("button", { type: "button", textContent: "Reset" });
    reset.addEventListener("click", () => {
      editor.value = source;
      fit();
      show("", "", false);
    });
    const row = make("div", { className: "dp-buttons" }, run, reset);
    code.replaceWith(make("div", { className: "dp-exercise" }, editor, row));
    cell.append(said, drawn);
  }

  function exercise(name, cells, answerCell, checkCell) {
    if (cells.variants && seed) personal(cells, answerCell.closest("section"));
    const check = make("button", { type: "button", textContent: "Check" });
    const { editor, fit } = editorOf(`Your answer to ${name}`, localStorage.getItem(key(name)) ?? cells.starter, check);
    editor.addEventListener("input", () => localStorage.setItem(key(name), editor.value));
    const verdict = spoken();
    const say = (text) => {
      verdict.textContent = text.trim();
      verdict.classList.toggle("solved", text.startsWith(`${name} solved`));
    };
    check.addEventListener("click", async () => {
      check.disabled = true;
      say(await judge(cells, editor.value, say));
      check.disabled = false;
    });
    let shown = 0;
    const hints = make("ol", { className: "dp-hints", hidden: true });
    const hint = make("button", { type: "button", textContent: `Hint 1 of ${cells.hints.length}` });
    hint.addEventListener("click", () => {
      hints.hidden = false;
      hints.append(make("li", { textContent: cells.hints[shown++] }));
      if (shown === cells.hints.length) hint.remove();
      else hint.textContent = `Hint ${shown + 1} of ${cells.hints.length}`;
    });
    const again = make("button", { type: "button", textContent: "Start again" });
    again.addEventListener("click", () => {
      localStorage.removeItem(key(name));
      editor.value = cells.starter;
      fit();
      say("");
    });
    const row = make("div", { className: "dp-buttons" }, check, hint, again);
    answerCell.replaceChildren(make("div", { className: "dp-exercise" }, editor, row, hints, verdict));
    checkCell.remove();
  }

  // The page's notebook with these answers in it, for JupyterLab and for graders.
  async function download(address, exercises) {
    const notebook = await (await fetch(address)).json();
    const own = Object.values(exercises).filter((cells) => cells.sentences);
    if (own.length) (notebook.metadata.dualpipe_lab ??= {}).seed = seed;
    for (const cell of notebook.cells) {
      for (const tag of cell.metadata.tags ?? []) {
        const [kind, name] = [tag.split("-", 1)[0], tag.slice(tag.indexOf("-") + 1)];
        const answer = kind === "answer" && name in exercises && localStorage.getItem(key(name));
        if (answer) cell.source = answer;
        if (kind === "check" && exercises[name]?.sentences) cell.source = exercises[name].check;
      }
      if (cell.cell_type === "markdown") {
        cell.source = [cell.source].flat().join("");
        for (const { sentences } of own) for (const [old, fresh] of sentences) cell.source = cell.source.replace(old, () => fresh);
      }
    }
    const blob = new Blob([JSON.stringify(notebook, null, 1)], { type: "application/x-ipynb+json" });
    const link = make("a", { href: URL.createObjectURL(blob), download: address.split("/").pop() });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const runs = JSON.parse(document.getElementById("dp-runs")?.textContent ?? "[]");
  document.querySelectorAll(".cell.tag_run").forEach((cell, place) => runnable(runs[place], cell));

  const data = document.getElementById("dp-exercises");
  if (data) {
    const { exercises, notebook } = JSON.parse(data.textContent);
    const names = Object.keys(exercises);
    for (const name of names) {
      const [answer, check] = ["answer", "check"].map((kind) => document.querySelector(`.cell[class~="tag_${kind}-${name}"]`));
      if (answer && check) exercise(name, exercises[name], answer, check);
    }
    const save = make("button", { type: "button", textContent: "Download as notebook" });
    save.addEventListener("click", () => download(notebook, exercises));
    const all = document.querySelectorAll('.cell[class*="tag_answer-"]').length;
    const which = names.length === all ? "The exercises" : `${names.length} of ${all} exercises`;
    const drawn = seed && Object.values(exercises).some((cells) => cells.sentences);
    const whose = drawn ? "The numbers of predict exercises are drawn for you. " : "";
    const text = `${which} can be answered here. ${whose}`;
    const where = location.protocol === "file:" ? " Opened as a file, this page cannot start Python: use make serve." : "";
    document.querySelector(".dp-in-page")?.prepend(text, save, `${where} `);
  }
})();
