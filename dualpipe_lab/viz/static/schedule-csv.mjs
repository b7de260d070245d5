// A schedule as the CSV of torch.distributed.pipelining, and back; the page's half of dualpipe_lab/pp/torch_csv.py.
//
// One row per rank, no header, an empty cell for an idle slot.  Form "compute_only" has F, B, I, W and pairs: torch
// adds its sends and receives when it loads the file.  "compute_comms" has those too, and the reductions of gradients.

import { check } from "./schedule-check.mjs";
import { loweredRows } from "./schedule-lower.mjs";
import { checkRanks, checkSize, MOST_STEPS, parseStep, pythonQuoted, SPACE, stepText, stripped, takeSteps, trimEnd,
  trimSpace } from "./schedule-rows.mjs";

const NO_STEP = /^[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)$/;
const MOST_IN_CELL = 131_072; // the limit of Python's csv module
const SPACED = new RegExp(`${SPACE}*([(;)])${SPACE}*`, "g");
const MOST_SPACED = 1000; // a longer cell is no action, with or without spaces
const CSV_LINE = /[^\r\n]*(?:\r\n|\r|\n|$)/g;

// The CSV of a valid schedule; an Error for an invalid one and for one that torch cannot express.
export function writeCsv(program, form = "compute_only") {
  if (form !== "compute_only" && form !== "compute_comms") {
    throw new Error(`there is no CSV form ${pythonQuoted(String(form))}; use 'compute_only' or 'compute_comms'`);
  }
  const { isValid, flat, text } = check(program);
  if (!isValid) throw new Error(text);
  checkHomes(program, flat);
  for (const row of program.ranks) {
    const split = row.find((step) => step.backward?.kind === "I");
    if (!split) continue;
    throw new Error(`torch overlaps a forward with a whole backward only, not ${stepText(split)}; use B in the pair`);
  }
  const rows = form === "compute_only" ? program.ranks.map((row) => row.map(stepText)) : loweredRows(program, flat);
  return rows.map((row) => `${row.join(",")}\n`).join("");
}

function checkHomes({ name }, { numParts, kind, stage, stepOf, rankOf }) {
  const home = new Map();
  for (let part = 0; part < numParts; part++) {
    if (kind[part] !== 0) continue;
    const rank = rankOf[stepOf[part]];
    if (!home.has(stage[part])) home.set(stage[part], rank);
    if (home.get(stage[part]) === rank) continue;
    throw new Error(`torch keeps a stage on one rank, but ${pythonQuoted(name)} has stage ${stage[part]} on ranks ` +
      `${home.get(stage[part])} and ${rank}; export a schedule with one rank per stage, such as DualPipeV`);
  }
}

// The schedule of a CSV text, each stage on one rank, without its sends and receives; it may be one that cannot run.
export function readCsv(text, name = "CSV") {
  checkSize(text.length);
  const rows = csvRows(trimEnd(text.replace(/^\ufeff/, "")));
  const budget = { steps: MOST_STEPS };
  return stripped(name, rows.map((cells, rank) => stepsOfCells(cells, rank, budget)), 1);
}

function stepsOfCells(cells, rank, budget) {
  const steps = [];
  cells.forEach((cell, place) => {
    let token = trimSpace(cell);
    if (token.length < MOST_SPACED) token = token.replace(SPACED, "$1"); // torch allows spaces inside a pair
    if (!token || NO_STEP.test(token)) return;
    steps.push(parseStep(token, () => `row ${rank + 1} (rank ${rank}), cell ${place + 1}: `));
  });
  takeSteps(budget, steps.length);
  return steps;
}

// The cells of CSV, as Python's csv.reader finds them: quotes may hold commas, line ends and doubled quotes.
function csvRows(text) {
  const rows = [];
  let cells = [], cell = "", state = "start"; // of a cell: start, plain, quoted, or behind a quote
  const endCell = () => {
    cells.push(cell);
    [cell, state] = ["", "start"];
  };
  for (const [line] of text.matchAll(CSV_LINE)) {
    if (!line) break;
    const isBlank = !cells.length && state === "start" && /^[\r\n]/.test(line);
    for (const letter of line) {
      if (state === "quoted") {
        if (letter === '"') state = "behind";
        else cell += letter;
      } else if (letter === '"' && (state === "start" || state === "behind")) {
        if (state === "behind") cell += letter; // a doubled quote is one
        state = "quoted";
      } else if (letter === ",") endCell();
      else if (letter !== "\r" && letter !== "\n") [cell, state] = [cell + letter, "plain"];
      if (cell.length > MOST_IN_CELL) throw new Error(NOT_CSV);
    }
    if (state === "quoted") continue; // the cell goes on in the next line
    if (!isBlank) endCell();
    checkRanks(rows.push(cells));
    cells = [];
  }
  if (cells.length || state !== "start") rows.push([...cells, cell]);
  return rows;
}

const NOT_CSV = `this is not CSV (field larger than field limit (${MOST_IN_CELL})); ` +
  "write one row per rank, with commas between its actions";
