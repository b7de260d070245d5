// The sends and receives of a valid schedule, placed as in dualpipe_lab/pp/lowering.py: rows of text for torch.
//
// A message has one time, the end of the step that makes it with F = I = W = 1.  Every rank lists its steps and
// messages by these times, messages first; of several at one time forward ones first, those of later stages before.

import { simulate } from "./simulate.mjs";
import { stepActions, stepText } from "./schedule-rows.mjs";

const COSTS_OF_ORDER = { F: 1, I: 1, W: 1, B: null, overlap: null, latency: 0, transfer: 0 };

// For each rank the texts of its steps, sends and receives, with REDUCE_GRAD after the last gradient of each stage.
export function loweredRows(program, flat) {
  const { numParts, rankStart, rankOf, stepOf, stage, kind, microbatch, link, consumer } = flat;
  const { start, end } = simulate(flat, COSTS_OF_ORDER);
  const rows = program.ranks.map((row, rank) =>
    row.map((step, position) => ({ key: [start[rankStart[rank] + position], 1], step })));
  for (let part = 0; part < numParts; part++) {
    if (link[part] < 0) continue;
    const used = consumer[part], isForward = kind[part] === 0, letter = isForward ? "F" : "B";
    const key = [end[stepOf[part]], 0, Number(!isForward), isForward ? -stage[part] : stage[part], microbatch[part]];
    rows[rankOf[stepOf[part]]].push({ key, text: `${stage[part]}SEND_${letter}${microbatch[part]}` });
    rows[rankOf[stepOf[used]]].push({ key, text: `${stage[used]}RECV_${letter}${microbatch[part]}` });
  }
  return rows.map((row) => reduced(row.sort(byKey)));
}

function byKey({ key: one }, { key: other }) {
  for (let at = 0; at < one.length && at < other.length; at++) if (one[at] !== other[at]) return one[at] - other[at];
  return 0;
}

function reduced(row) {
  const last = new Map(); // stage -> where its last gradient is made
  const gradients = ({ step }) => (step ? stepActions(step) : []).filter(({ kind }) => kind === "B" || kind === "W");
  row.forEach((entry, at) => gradients(entry).forEach(({ stage }) => last.set(stage, at)));
  return row.flatMap((entry, at) => [entry.text ?? stepText(entry.step),
    ...gradients(entry).filter(({ stage }) => last.get(stage) === at).map(({ stage }) => `${stage}REDUCE_GRAD`)]);
}
