// Schedules as values: read from text, written as text; the page's half of dualpipe_lab/pp/program.py.
//
// A program is {name, ranks, numStages, numMicrobatches, numDirections, notes}: `ranks` has an array of steps per rank.
// A step is {stage, kind, microbatch}, or an overlapped pair {forward, backward} of two of these; kinds are F, B, I, W.
// Programs and steps are values: an edit makes a new program that shares the unchanged rows, and nothing is changed in
// place.  `numDirections` is null for any number of routes, as in Python.  `notes` says what reading left out.

const MOST_CHARACTERS = 4_000_000;
export const MOST_STEPS = 2 ** 18;
const MOST_RANKS = 1024;
const MOST_DIGITS = 15; // of an index: such numbers are exact, four times as large too

const MESSAGE_WORDS = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"];
const KIND_WORDS = ["F", "B", "I", "W", ...MESSAGE_WORDS].join(" ");
const ACTION_TEXT = /^([0-9]+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]+)$/;
const PAIR_TEXT = /^\(([0-9]+)F([0-9]+);([0-9]+)([BI])([0-9]+)\)OVERLAP_F_B$/;
// What Python's str.split, str.strip and \s take for white space; JavaScript's set differs.
export const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const TOKEN_TEXT = new RegExp(`[^${SPACE.slice(1)}+`, "g");
const ONE_SPACE = new RegExp(SPACE);
const LEADING = new RegExp(`^${SPACE}+`);
const ROW_LABEL = new RegExp(`^${SPACE}*rank${SPACE}+([0-9]+)${SPACE}*:`);
const FULL_LINE = /[^\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+/g; // not empty; ends where Python's str.splitlines ends it
const HEADER_LINE = /^# (.*): \d+ ranks, \d+ stages, \d+ microbatches$/;

// A program from its rows of steps.  Counts default to one more than the largest index, as in Python.
export function makeProgram(name, ranks, counts = {}) {
  const isStated = counts.numStages != null && counts.numMicrobatches != null;
  const [stage, microbatch] = isStated ? [] : largestIndexes(ranks);
  return Object.freeze({
    name, ranks,
    numStages: counts.numStages ?? stage + 1,
    numMicrobatches: counts.numMicrobatches ?? microbatch + 1,
    numDirections: counts.numDirections ?? null,
    notes: counts.notes ?? [],
  });
}

// The same name, counts and directions with other rows.
export const withRanks = (program, ranks) => makeProgram(program.name, ranks, { ...program, notes: [] });

export const isPair = (step) => step.forward !== undefined;

// The action of a step, or both of a pair, forward first.
export const stepActions = (step) => (step.forward === undefined ? [step] : [step.forward, step.backward]);

function largestIndexes(ranks) {
  let stage = -1, microbatch = -1;
  for (const row of ranks) {
    for (const step of row) {
      for (const action of stepActions(step)) {
        if (action.stage > stage) stage = action.stage;
        if (action.microbatch > microbatch) microbatch = action.microbatch;
      }
    }
  }
  return [stage, microbatch];
}

export const stepText = (step) =>
  step.forward === undefined
    ? `${step.stage}${step.kind}${step.microbatch}`
    : `(${stepText(step.forward)};${stepText(step.backward)})OVERLAP_F_B`;

// One line of text per rank, without labels.
export const programRows = (program) => program.ranks.map((row) => row.map(stepText).join(" "));

// The text that Python's str(program) prints, which `parseProgram` reads again.
export function programText(program) {
  const { name, ranks, numStages, numMicrobatches } = program;
  const header = `# ${name}: ${ranks.length} ranks, ${numStages} stages, ${numMicrobatches} microbatches`;
  return [header, ...programRows(program).map((row, rank) => trimEnd(`rank ${rank}: ${row}`))].join("\n");
}

// A loop: a regular expression for the end takes quadratic time where a text has many spaces inside.
export function trimEnd(text) {
  let end = text.length;
  while (end && ONE_SPACE.test(text[end - 1])) end--;
  return text.slice(0, end);
}

export const trimSpace = (text) => trimEnd(text.replace(LEADING, ""));

// A program from its full text or from one row per rank; an Error with Python's sentence for what is not a program.
// Without a name it takes that of the header, if the text has one.  Sends and receives are left out, as `strip` does.
export function parseProgram(text, name) {
  checkSize(typeof text === "string" ? text.length : text.reduce((sum, row) => sum + row.length, 0));
  const { rows, header } = typeof text === "string" ? linesOfText(text) : { rows: text, header: "" };
  const budget = { steps: MOST_STEPS };
  checkRanks(rows.length);
  const named = name ?? HEADER_LINE.exec(header)?.[1] ?? "schedule";
  return stripped(named, rows.map((row, rank) => parseRow(rank, row, budget)));
}

// The lines that are rows, and the first of all lines.
function linesOfText(text) {
  const rows = [];
  let header = null;
  for (const [line] of text.matchAll(FULL_LINE)) {
    const row = line.replace(LEADING, "");
    if (!row) continue;
    header ??= line;
    if (row[0] !== "#") checkRanks(rows.push(row));
  }
  return { rows, header };
}

export function checkRanks(number) {
  if (number > MOST_RANKS) throw new Error(`it has more than ${MOST_RANKS} ranks, the most that the studio reads`);
}

export function checkSize(length) {
  if (length <= MOST_CHARACTERS) return;
  throw new Error(`the text has ${length} characters; the studio reads at most ${MOST_CHARACTERS}, use a smaller size`);
}

// A program of these rows without its messages; they count for the numbers of stages and microbatches, as in Python.
export function stripped(name, rows, numDirections = null) {
  const program = makeProgram(name, rows, { numDirections });
  let left = 0;
  const kept = rows.map((row) => {
    const work = row.filter((step) => step.forward !== undefined || step.kind.length === 1);
    left += row.length - work.length;
    return work.length < row.length ? work : row;
  });
  if (!left) return program;
  const notes = [`${left} sends and receives are left out: the page places the messages itself`];
  return makeProgram(name, kept, { ...program, notes });
}

// One rank's row of text, with or without its label.
export function parseRow(rank, row, budget = { steps: MOST_STEPS }) {
  const label = ROW_LABEL.exec(row);
  if (label) {
    if (Number(label[1]) !== rank) {
      throw new Error(`row ${rank} is labelled rank ${cutText(label[1])}; list the rows in rank order, from 0`);
    }
    row = row.slice(label[0].length);
  }
  const steps = [];
  for (let at = 0; at < row.length;) {
    at = readQuickly(row, at, steps);
    TOKEN_TEXT.lastIndex = at;
    const token = TOKEN_TEXT.exec(row);
    if (!token) break;
    steps.push(parseStep(token[0], () => `rank ${rank}, position ${steps.length}: `));
    at = TOKEN_TEXT.lastIndex;
  }
  takeSteps(budget, steps.length);
  return steps;
}

export function takeSteps(budget, number) {
  budget.steps -= number;
  if (budget.steps < 0) throw new Error(`it has more than ${MOST_STEPS} steps; use fewer ranks or microbatches`);
}

// A step from its text.  `where()`: what an Error's text begins with.
export function parseStep(token, where = () => "") {
  const action = ACTION_TEXT.exec(token);
  if (action) return { stage: readIndex(action[1], where), kind: action[2], microbatch: readIndex(action[3], where) };
  const match = PAIR_TEXT.exec(token);
  if (match) {
    const [stage, microbatch, otherStage, other] = [1, 2, 3, 5].map((at) => readIndex(match[at], where));
    const backward = { stage: otherStage, kind: match[4], microbatch: other };
    return { forward: { stage, kind: "F", microbatch }, backward };
  }
  throw new Error(
    `${where()}${pythonQuoted(token)} is not an action; write stage, kind and microbatch, such as 2F0 or 1RECV_F3 ` +
    `(kinds ${KIND_WORDS}), or an overlapped pair, such as (0F7;7B3)OVERLAP_F_B`,
  );
}

const PLAIN_KINDS = { 70: "F", 66: "B", 73: "I", 87: "W" }; // by the code of the letter

// Read plain actions with short indexes, nearly all of a program's text, without a regular expression.  Returns the
// place of the first token that is something else, or the end.
function readQuickly(row, at, steps) {
  const { length } = row;
  while (at < length) {
    let code = row.charCodeAt(at), next = at, stage = 0, microbatch = 0;
    if (code === 32) {
      at++;
      continue;
    }
    for (; code >= 48 && code <= 57; code = row.charCodeAt(++next)) stage = stage * 10 + code - 48;
    const kind = PLAIN_KINDS[code], middle = next + 1;
    if (kind === undefined || next === at || next - at > 9) return at;
    for (code = row.charCodeAt(++next); code >= 48 && code <= 57; code = row.charCodeAt(++next)) {
      microbatch = microbatch * 10 + code - 48;
    }
    if (next === middle || next - middle > 9 || (next < length && code !== 32)) return at;
    steps.push({ stage, kind, microbatch });
    at = next;
  }
  return at;
}

function readIndex(digits, where) {
  const plainDigits = digits.replace(/^0+(?=\d)/, "");
  if (plainDigits.length <= MOST_DIGITS) return Number(plainDigits);
  throw new Error(
    `${where()}the index ${cutText(digits)} has ${plainDigits.length} digits; number stages and microbatches from 0 ` +
    `without gaps, with at most ${MOST_DIGITS} digits`,
  );
}

const cutText = (text) => (text.length > 120 ? `${text.slice(0, 100)}...` : text);

const PYTHON_ESCAPES = { "\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r" };

// A text as Python's repr writes it; a long one is cut.
export function pythonQuoted(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = Array.from(cutText(text), (letter) => {
    if (letter === quote) return `\\${letter}`;
    if (PYTHON_ESCAPES[letter]) return PYTHON_ESCAPES[letter];
    if (letter === " " || !/[\p{C}\p{Z}]/u.test(letter)) return letter;
    const code = letter.codePointAt(0), hex = code.toString(16);
    if (code < 0x100) return `\\x${hex.padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
  });
  return quote + escaped.join("") + quote;
}
