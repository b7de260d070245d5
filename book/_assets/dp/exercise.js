// Exercises that are answered in their page: an editor in place of the answer cell, hints, a check in place of its
// call, and a solution once it is solved.  In: the page's cells, and the JSON that dp_exercises wrote:
// {NAME: {before, starter, check, hints, solution, variants}}.
// Answers stay in this browser, and so does the seed that draws the numbers of exercises with variants; 0 is the book.
// Cells that a chapter asks to change have the same editor, and a "Run".  In: [{before, source}], one for each.
// Python (python.js) starts when an editor is entered.

(() => {
  const store = dualpipeStore, keepsNothing = store.keepsNothing();

  // Every failure to answer is a verdict, too.
  async function judge(cells, answer, say) {
    try {
      return JSON.parse(await dualpipePython.ask("judge", [cells.before, answer, cells.check], say));
    } catch ({ message }) {
      const why = message.startsWith("no result") ? ": the answer was stopped; does one of its loops never end?" :
        " Check your answer in the notebook.";
      return { verdict: message + why, text: "" };
    }
  }

  const key = (name) => `dualpipe-lab:answer:${name}`;
  const lastKey = (name) => `dualpipe-lab:last:${name}`; // the answer that another one took the place of

  const SEED = "dualpipe-lab:seed", MAX_SEED = 999_999; // as in dualpipe_course.record
  const isSeed = (text) => /^\d{1,6}$/.test(text);
  if (!isSeed(store.get(SEED))) store.set(SEED, String(1 + Math.floor(Math.random() * MAX_SEED)));
  const seed = Number(store.get(SEED));

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

  function editorOf(label, value, go, does) {
    const editor = dualpipeEditor(label, value, { go, does });
    editor.field.addEventListener("focus", () => dualpipePython.warm().catch(() => {})); // who asks is told why
    return editor;
  }

  const button = (text, onclick, more = {}) => make("button", { type: "button", textContent: text, onclick, ...more });

  function spoken(tag, className) {
    const element = make(tag, { className });
    element.setAttribute("aria-live", "polite");
    return element;
  }

  // Puts an editor in place of a cell's code, and what it gives in place of its output.
  function runnable({ before, source }, cell) {
    const run = button("Run", async () => {
      run.disabled = true;
      try {
        const { text, drawing } = JSON.parse(await dualpipePython.ask("run", [before, editor.field.value], (words) => show(words)));
        show(text.trimEnd() || (drawing ? "" : "no output"), drawing);
      } catch ({ message }) {
        show(message);
      }
      run.disabled = false;
    });
    const editor = editorOf("The code of this cell", source, run, "runs");
    const said = spoken("pre", "dp-verdict dp-printed"), drawn = make("div");
    const [code, book] = [".cell_input", ".cell_output"].map((kind) => cell.querySelector(kind));
    const show = (text, drawing = "", isOwn = true) => {
      said.textContent = text;
      drawn.innerHTML = drawing;
      if (book) book.hidden = isOwn;
    };
    const reset = button("Reset", () => {
      editor.put(source);
      show("", "", false);
    });
    code.replaceWith(make("div", { className: "dp-exercise" }, editor.box, make("div", { className: "dp-buttons" }, run, reset)));
    cell.append(said, drawn);
  }

  // Keeps an answer in this browser while it is written, and never writes over what another tab has written.
  function keeping(name, starter, { field, put }, note) {
    const read = () => store.get(key(name)) ?? starter;
    let known = read(); // what is kept, as far as this tab knows
    const say = (text, ...buttons) => note.replaceChildren(text, ...buttons);
    function keep() {
      if (read() !== known) return compare();
      known = field.value;
      if (known === starter) store.remove(key(name));
      const isKept = known === starter || store.set(key(name), known);
      say(isKept || keepsNothing ? "" : "Not kept: this browser has no room left for this answer.");
    }
    function compare() {
      const other = read(), isMine = field.value === known;
      if (other === known) return;
      if (isMine || other === field.value) {
        known = other;
        (other === starter ? replace : put)(other);
        if (isMine) say("This is now the text of another tab.");
        return;
      }
      say("Another tab has another answer, and this one is not kept. ",
        button("Take the other", () => ((known = other), replace(other))),
        button("Keep this one", () => ((known = read()), store.set(lastKey(name), known), keep(), undo.show())));
    }
    // Another text in the editor; the one that was there can be had back.
    function replace(text) {
      if (field.value !== starter && field.value !== text) store.set(lastKey(name), field.value);
      put(text);
      undo.show();
    }
    const undo = button("Undo", () => {
      const last = store.get(lastKey(name));
      if (last !== null) replace(last);
    });
    undo.show = () => (undo.hidden = [null, field.value].includes(store.get(lastKey(name))));
    undo.show();
    field.addEventListener("input", () => (keep(), undo.show()));
    window.addEventListener("storage", compare);
    window.addEventListener("pageshow", compare); // a page that comes back from the browser's cache was told nothing
    return { replace, undo };
  }

  const isRight = (words) => /^(part )?[\w-]+ solved: /.test(words);
  const replacers = {}; // of the exercises of this page, what puts another answer into their editors

  function exercise(name, cells, answerCell, checkCell) {
    if (cells.variants && seed) personal(cells, answerCell.closest("section"));
    const check = button("Check", async () => {
      check.disabled = true;
      const { verdict, text } = await judge(cells, editor.field.value, (words) => say(words));
      say(verdict, text);
      if (isRight(verdict)) {
        dualpipeProgress.note([name]);
        solution.hidden = false;
      }
      check.disabled = false;
    });
    const editor = editorOf(`Your answer to ${name}`, store.get(key(name)) ?? cells.starter, check, "checks");
    const note = spoken("p", "dp-note"), { replace, undo } = keeping(name, cells.starter, editor, note);
    replacers[name] = (text) => text !== cells.starter && replace(text);
    const verdict = spoken("pre", "dp-verdict"), printed = make("pre", { className: "dp-verdict dp-printed", tabIndex: 0 });
    const say = (words, text = "") => {
      verdict.textContent = words.trim();
      verdict.classList.toggle("solved", isRight(words));
      printed.textContent = text && `printed:\n${text}`;
    };
    const ofBook = cells.sentences ? ", whose numbers are the book's" : "";
    const solution = make("details", { className: "dp-solution", hidden: !dualpipeProgress.solved().includes(name) },
      make("summary", { textContent: `One solution${ofBook}` }), make("pre", { textContent: cells.solution, tabIndex: 0 }));
    let shown = 0;
    const hints = make("ol", { className: "dp-hints", hidden: true });
    const hint = button(`Hint 1 of ${cells.hints.length}`, () => {
      hints.hidden = false;
      hints.append(make("li", { textContent: cells.hints[shown++] }));
      if (shown === cells.hints.length) hint.remove();
      else hint.textContent = `Hint ${shown + 1} of ${cells.hints.length}`;
    });
    const again = button("Start again", () => {
      replace(cells.starter);
      say("");
    });
    const row = make("div", { className: "dp-buttons" }, check, hint, again, undo);
    answerCell.replaceChildren(make("div", { className: "dp-exercise" }, editor.box, row, note, hints, verdict, printed, solution));
    checkCell.remove();
  }

  // The page's notebook with these answers and what is solved in it, for JupyterLab, graders and other browsers.
  async function download(address, exercises) {
    const notebook = await (await fetch(address)).json();
    const own = Object.values(exercises).filter((cells) => cells.sentences);
    const about = (notebook.metadata.dualpipe_lab ??= {});
    about.solved = dualpipeProgress.solved();
    if (own.length) about.seed = seed;
    for (const [cell, name, kind] of named(notebook)) {
      const answer = kind === "answer" && name in exercises && store.get(key(name));
      if (answer) cell.source = answer;
      if (kind === "check" && exercises[name]?.sentences) cell.source = exercises[name].check;
    }
    for (const cell of notebook.cells.filter((one) => one.cell_type === "markdown")) {
      cell.source = [cell.source].flat().join("");
      for (const { sentences } of own) for (const [old, fresh] of sentences) cell.source = cell.source.replace(old, () => fresh);
    }
    const blob = new Blob([JSON.stringify(notebook, null, 1)], { type: "application/x-ipynb+json" });
    const link = make("a", { href: URL.createObjectURL(blob), download: address.split("/").pop() });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // A notebook's cells of exercises: [cell, name, "answer" or "check"].
  const named = ({ cells }) => cells.flatMap((cell) => (cell.metadata?.tags ?? []).map((tag) =>
    [cell, tag.slice(tag.indexOf("-") + 1), tag.split("-", 1)[0]])).filter(([, , kind]) => ["answer", "check"].includes(kind));

  // Takes over the answers to this page's exercises, and what is solved; the numbers, too, where nothing is solved yet.
  async function open(file) {
    const notebook = JSON.parse(await file.text()), { solved = [], seed: other } = notebook.metadata?.dualpipe_lab ?? {};
    const answers = {};
    for (const [{ source }, name, kind] of named(notebook)) {
      if (kind === "answer" && name in replacers) (answers[name] ??= []).push([source].flat().join(""));
    }
    for (const [name, texts] of Object.entries(answers)) replacers[name](texts.join("\n"));
    const hasOther = isSeed(other) && Number(other) !== seed, takes = hasOther && !dualpipeProgress.solved().length;
    dualpipeProgress.note(solved);
    if (takes && store.set(SEED, String(other))) location.reload();
    const found = `${Object.keys(answers).length} answers to exercises of this page, ${solved.length} exercises solved`;
    return `${file.name}: ${found}. ${hasOther ? "Numbers to predict were others there. " : ""}`;
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
    const all = document.querySelectorAll('.cell[class*="tag_answer-"]').length;
    const isFile = location.protocol === "file:";
    const drawn = seed && Object.values(exercises).some((cells) => cells.sentences);
    const text = [
      `${names.length === all ? "The exercises" : `${names.length} of ${all} exercises`} can be answered here.`,
      drawn ? "The numbers of predict exercises are drawn for you." : "",
      keepsNothing ? "This browser keeps nothing: your answers are gone with this page, so download them." : "",
      isFile ? "Opened as a file, this page cannot start Python: use make serve." : "",
    ].filter(Boolean).join(" ");
    const told = spoken("span", ""), chosen = make("input", { type: "file", accept: ".ipynb", hidden: true });
    chosen.addEventListener("change", async () => {
      const [file] = chosen.files;
      told.textContent = await open(file).catch(() => `${file.name} is no notebook.`);
      chosen.value = "";
    });
    const save = button("Download as notebook", () => download(notebook, exercises), { hidden: isFile });
    const row = make("span", { className: "dp-buttons" }, save, button("Open a notebook", () => chosen.click()), chosen, told);
    document.querySelector(".dp-in-page")?.prepend(`${text} `, row);
  }
})();
