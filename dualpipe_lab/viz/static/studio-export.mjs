// The schedule as text, as torch's CSV, as Python, as a trace, as a link and as a file; and read from each of them.

import { fileName } from "./chrome.mjs";
import { download, make, textButton } from "./dom.mjs";
import { menu } from "./studio-controls.mjs";
import { packSession } from "./studio-link.mjs";
import { packProgram } from "./schedule-rows.mjs";

const FORMS = [["text", "text"], ["csv", "CSV of torch"], ["comms", "CSV with sends and receives"], ["python", "Python"]];

// `ask` is Python, which writes all forms but the studio's own file.
export function exportPanel(act, ask) {
  let session = null, isTyped = false;
  const form = menu("Form", FORMS, () => show());
  const area = make("textarea", { "aria-label": "The schedule as text", spellcheck: "false", autocomplete: "off" });
  area.addEventListener("input", () => (isTyped = true));
  const file = make("input", { type: "file", class: "hidden", accept: ".json,.txt,.csv", tabindex: -1, "aria-label": "Open a file" });
  file.addEventListener("change", async () => {
    if (file.files[0]) act("openFile", file.files[0]);
    file.value = "";
  });
  const link = make("a", { hidden: true });
  const save = (ending, text, type) => download(fileName(session.program.name, ending), new Blob([text], { type }));
  const write = (form) => ask({ ask: "write", form, program: packProgram(session.program), costs: session.costs }).then(({ text }) => text);
  const saveAs = (form, ending, type) => act("later", write(form).then((text) => save(ending, text, type)));
  const show = async () => { // only where it can be seen; a form that the program does not have is told in its place
    isTyped = false;
    if (!session || !panel.closest("details")?.open) return;
    const { program } = session, text = await write(form.select.value).catch((error) => error.message);
    if (!isTyped && program === session.program) area.value = text;
  };
  const panel = make("div", {}, make("div", { class: "row" }, form.select,
    textButton("Read this text", () => act("readText", area.value)), textButton("Copy", () => act("copy", area.value))), area,
    make("div", { class: "files" },
      textButton("Open a file", () => file.click()),
      textButton("Save file", () => save("json", packSession(session), "application/json")),
      textButton("Save CSV", () => saveAs("csv", "csv", "text/csv")),
      textButton("Save trace for Perfetto", () => saveAs("trace", "trace.json", "application/json")),
      textButton("Make a link", () => act("link")), link, file));
  const update = (now) => {
    session = now;
    link.hidden = true;
    if (!isTyped) show();
  };
  return { panel, update, area, link, form, show };
}
