// An editor for Python in a page: a textarea over a copy of its text.  The copy has the numbers and colours of the lines, and
// it is the copy that makes both as high as the text, lines that are broken in two included.
// globalThis.dualpipeEditor(label, text, {go, does}): {box, field, put(text)}; `go` is Ctrl+Enter's button, `does` what it does.

(() => {
  const KEYWORDS = "and as assert async await break class continue def del elif else except finally for from global if import in is " +
    "lambda nonlocal not or pass raise return try while with yield";
  const KINDS = {
    c1: "#.*",
    s2: String.raw`(?:\b[rbfRBF]{1,2})?(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)`,
    k: String.raw`\b(?:${KEYWORDS.replaceAll(" ", "|")})\b`,
    kc: String.raw`\b(?:True|False|None)\b`,
    mi: String.raw`\b\d[\w.]*`,
  };
  const TOKEN = new RegExp(Object.entries(KINDS).map(([kind, form]) => `(?<${kind}>${form})`).join("|"), "g");
  const STEP = 4;
  let made = 0;

  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // A text's lines as elements, with a span for each word that has a colour.
  function lines(text) {
    const found = [make("div", {})];
    const add = (piece, kind) => piece.split("\n").forEach((part, place) => {
      if (place) found.push(make("div", {}));
      if (part) found.at(-1).append(kind ? make("span", { className: kind, textContent: part }) : part);
    });
    let at = 0;
    for (const token of text.matchAll(TOKEN)) {
      add(text.slice(at, token.index));
      add(token[0], Object.keys(token.groups).find((kind) => token.groups[kind] !== undefined));
      at = token.index + token[0].length;
    }
    add(text.slice(at));
    return found;
  }

  // Writes over what is selected, as typing does, so that it can be undone.
  function write(field, text) {
    if (!text && field.selectionStart === field.selectionEnd) return;
    if (text ? document.execCommand("insertText", false, text) : document.execCommand("delete")) return;
    field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
    field.dispatchEvent(new Event("input"));
  }

  const startOf = ({ value, selectionStart }) => value.lastIndexOf("\n", selectionStart - 1) + 1;

  // Moves the selected lines, or the caret's, to the right or to the left.
  function shift(field, isOut) {
    const { value, selectionStart: from, selectionEnd: to } = field, first = startOf(field);
    if (from === to && !isOut) return write(field, " ".repeat(STEP - ((from - first) % STEP)));
    const end = value.indexOf("\n", to > from && value[to - 1] === "\n" ? to - 1 : to);
    const old = value.slice(first, end < 0 ? value.length : end);
    const moved = isOut ? old.replace(/^(?: {1,4}|\t)/gm, "") : old.replace(/^(?=.)/gm, " ".repeat(STEP));
    if (moved === old) return;
    field.setSelectionRange(first, first + old.length);
    write(field, moved);
    const ahead = moved.split("\n")[0].length - old.split("\n")[0].length;
    field.setSelectionRange(Math.max(first, from + ahead), Math.max(first, to + moved.length - old.length));
  }

  // Goes on as far to the right as the line before; behind a colon, a step further.
  function breakLine(field) {
    const before = field.value.slice(startOf(field), field.selectionStart);
    write(field, `\n${/^[ \t]*/.exec(before)[0]}${/:\s*(?:#.*)?$/.test(before) ? " ".repeat(STEP) : ""}`);
  }

  // Takes back a step of indentation; false where the caret is elsewhere.
  function stepBack(field) {
    const { selectionStart: at, selectionEnd } = field, before = field.value.slice(startOf(field), at);
    if (at !== selectionEnd || before.length < 2 || before.trim()) return false;
    field.setSelectionRange(at - 1 - ((before.length - 1) % STEP), at);
    write(field, "");
    return true;
  }

  function onKey(field, event, go) {
    const { key, shiftKey } = event, hasModifier = event.ctrlKey || event.altKey || event.metaKey;
    if (event.isComposing) return;
    if (key === "Enter" && !event.altKey && (hasModifier || shiftKey)) go.click();
    else if (hasModifier) return;
    else if (key === "Tab") shift(field, shiftKey);
    else if (key === "Enter") breakLine(field);
    else if (key !== "Backspace" || !stepBack(field)) return;
    event.preventDefault();
  }

  globalThis.dualpipeEditor = (label, text, { go, does }) => {
    const field = make("textarea", { value: text, rows: 1, spellcheck: false, autocapitalize: "off" });
    const copy = make("div", { className: "dp-copy highlight", ariaHidden: "true" });
    const ways = `Tab indents; Escape, then Tab leaves; Ctrl+Enter ${does}.`;
    const keys = make("p", { className: "dp-keys", id: `dp-keys-${++made}`, textContent: ways });
    field.setAttribute("autocorrect", "off");
    field.setAttribute("aria-label", label);
    field.setAttribute("aria-describedby", keys.id);
    const draw = () => copy.replaceChildren(...lines(field.value));
    let leaves = false; // the key before was Escape
    field.addEventListener("input", draw);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Shift") return;
      if (event.key !== "Tab" || !leaves) onKey(field, event, go);
      leaves = event.key === "Escape";
    });
    const put = (other) => {
      const before = document.activeElement;
      field.focus({ preventScroll: true });
      field.select();
      write(field, other);
      if (before !== field) field.blur();
      before?.focus({ preventScroll: true });
    };
    draw();
    return { box: make("div", { className: "dp-editor" }, make("div", { className: "dp-code" }, copy, field), keys), field, put };
  };
})();
