// The schedule as text, as torch's CSV, as Python, as a trace, as a link and as a file; and read from each of them.

import { fileName } from "./chrome.mjs";
import { download, make, textButton } from "./dom.mjs";
import { menu } from "./studio-controls.mjs";
import { packSession } from "./studio-link.mjs";
import { perfettoTrace } from "./studio-perfetto.mjs";
import { writeCsv } from "./schedule-csv.mjs";
import { programRows, programText } from "./schedule-rows.mjs";

const FORMS = [["text", "text"], ["csv", "CSV of torch"], ["comms", "CSV with sends and receives"], ["python", "Python"]];

const quoted = (text) => JSON.stringify(text).replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");

const pythonValue = (value) => (value == null ? "None" : Array.isArray(value) ? `[${value.join(", ")}]` : String(value));

// A script that builds the program, simulates it with these costs, and runs it on one process per rank.
function pythonText({ program, costs }) {
  const { numStages, numMicrobatches, numDirections } = program;
  const rows = programRows(program).map((row) => `    ${quoted(row)},`).join("\n");
  const given = Object.entries(costs).filter(([, value]) => value != null).map(([key, value]) => `${key}=${pythonValue(value)}`);
  return [
    "import torch",
    "from torch.nn.functional import mse_loss",
    "",
    "import dualpipe_lab as lab",
    "from dualpipe_lab import pp",
    "",
    "ROWS = [",
    rows,
    "]",
    `steps = pp.Program.parse(${quoted(program.name)}, ROWS).ranks`,
    `program = pp.Program(${quoted(program.name)}, steps, num_stages=${numStages}, num_microbatches=${numMicrobatches}, num_directions=${pythonValue(numDirections)})`,
    `print(pp.simulate(program, pp.Cost(${given.join(", ")})))`,
    "",
    "",
    "def train(rank, world_size):",
    "    torch.manual_seed(0)  # the same model and data on every rank",
    "    model = [torch.nn.Linear(8, 8).double() for _ in range(program.num_stages)]",
    "    inputs, targets = torch.randn(2, program.num_microbatches, 4, 8, dtype=torch.float64)",
    "    mine = {action.stage: model[action.stage] for action in program.actions(rank)}",
    "    runtime = lab.PipelineRuntime(program, mine, mse_loss, sum_copies=True)",
    "    result = runtime.step(list(inputs), list(targets))",
    "    return {microbatch: float(loss) for microbatch, loss in result.losses.items()}",
    "",
    "",
    "if __name__ == \"__main__\":",
    "    print(lab.launch(train, program.num_ranks))  # the losses by microbatch, on the ranks that have them",
    "",
  ].join("\n");
}

// A form that a program does not have is told in its place.
function written(form, session) {
  try {
    return { text: programText, csv: writeCsv, comms: (program) => writeCsv(program, "compute_comms"), python: () => pythonText(session) }[form](session.program);
  } catch (error) {
    return error.message;
  }
}

export function exportPanel(act) {
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
  const save = (ending, text, type) => download(fileName(session.program.name, ending), new Blob([text()], { type }));
  const show = () => { // writing a large schedule takes time, so it is written where it can be seen
    isTyped = false;
    if (session && panel.closest("details")?.open) area.value = written(form.select.value, session);
  };
  const panel = make("div", {}, make("div", { class: "row" }, form.select,
    textButton("Read this text", () => act("readText", area.value)), textButton("Copy", () => act("copy", area.value))), area,
    make("div", { class: "files" },
      textButton("Open a file", () => file.click()),
      textButton("Save file", () => save("json", () => packSession(session), "application/json")),
      textButton("Save CSV", () => save("csv", () => writeCsv(session.program), "text/csv")),
      textButton("Save trace for Perfetto", () => save("trace.json", () => perfettoTrace(session), "application/json")),
      textButton("Make a link", () => act("link")), link, file));
  const update = (now) => {
    session = now;
    link.hidden = true;
    if (!isTyped) show();
  };
  return { panel, update, area, link, form, show };
}
