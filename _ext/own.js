// What the reader opens on a page: the course's own texts (.dp-ours) and predictions (.dp-lock), whose next cell is folded
// until a guess; of a live cell the controls wait, and the drawing is there.  One switch for all pages, "I am reading",
// stands before the first of them.  Guesses stay in this browser, and nothing counts them.
// In: dualpipeStore, which dp_own writes into the same file.  Without this script everything is open.

(() => {
  const store = dualpipeStore, READING = "dualpipe-lab:reading", GUESS = "dualpipe-lab:guess:";
  const folds = [...document.querySelectorAll("details.dp-ours")], cells = [...document.querySelectorAll("div.cell")];
  const isReading = () => store.get(READING) === "yes";

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const button = (textContent, onclick, more = {}) => make("button", { type: "button", textContent, onclick, ...more });

  // A drawing's controls, and those of the drawing inside of it.
  const controlsOf = (live) => [live, ...live.querySelectorAll("*")].flatMap(({ shadowRoot }) => [...(shadowRoot?.querySelectorAll(".costs") ?? [])]);

  function lockOf(box) {
    const key = GUESS + box.id.replace("lock-", "");
    const cell = cells.find((one) => box.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING);
    const output = cell?.querySelector(".cell_output"), live = cell?.querySelector("dp-live");
    const field = make("input", { type: "text", id: `${box.id}-guess`, required: true, maxLength: 80, autocomplete: "off" });
    const skip = button("Skip", () => decide(""), { className: "dp-quiet" });
    const form = make("form", { className: "dp-buttons" }, make("label", { htmlFor: field.id, textContent: "Your guess" }), field,
      make("button", { textContent: "Guess" }), skip);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      decide(field.value.trim());
    });
    const said = make("p", { className: "dp-guess", tabIndex: -1 });
    box.append(form);
    output?.before(said); // beside the figure

    function decide(guess) {
      store.set(key, guess);
      show();
      said.focus({ preventScroll: true });
    }

    function show() {
      const guess = store.get(key), isOpen = guess !== null || isReading();
      form.hidden = isOpen;
      said.hidden = guess === null;
      said.textContent = guess ? `You guessed ${guess}` : "You skipped the guess.";
      if (!live) cell?.classList.toggle("dp-folded", !isOpen);
      else for (const panel of controlsOf(live)) Object.assign(panel, { inert: !isOpen }).style.opacity = isOpen ? "" : 0.5;
    }

    if (live) customElements.whenDefined("dp-live").then(show);
    return show;
  }

  const locks = [...document.querySelectorAll(".dp-lock")].map(lockOf);
  const words = make("span"), choices = [["I am reading", "yes"], ["I write myself", "no"]].map(([text, value]) =>
    button(text, () => {
      store.set(READING, value);
      for (const fold of folds) fold.open = isReading();
      show();
    }, { value }));

  function show() {
    const kept = store.get(READING);
    words.textContent = kept === null ? "Open all folds and predictions?" :
      isReading() ? "All folds and predictions are open." : "Folds and predictions open one by one.";
    for (const choice of choices) choice.setAttribute("aria-pressed", choice.value === kept);
    for (const lock of locks) lock();
  }

  const choose = make("div", { className: "dp-reading dp-buttons" }, words, ...choices);
  choose.setAttribute("role", "group");
  choose.setAttribute("aria-label", "Reading or writing");
  document.querySelector(".dp-ours, .dp-lock").before(choose);
  window.addEventListener("storage", show);
  if (isReading()) for (const fold of folds) fold.open = true;
  show();
})();
