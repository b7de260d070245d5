// A schedule in the fragment of an address, and in a file: the same JSON, compressed in the one, plain in the other.
//
// {version, text, directions, costs, limit}; what is read is data, checked piece by piece, and nothing of it is executed.

import { parseProgram, programText, makeProgram } from "./schedule-rows.mjs";

const VERSION = 1, MARK = "#schedule=", MOST_UNPACKED = 8_000_000;
export const MOST_TICKS = 1e6;
const COST_KEYS = ["F", "I", "W", "B", "overlap", "latency", "transfer"];

export function packSession({ program, costs, limit }) {
  return JSON.stringify({ version: VERSION, text: programText(program), stages: program.numStages,
    microbatches: program.numMicrobatches, directions: program.numDirections, costs, limit });
}

// {program, costs, limit}; an Error with a sentence for anything else.
export function unpackSession(json) {
  let found;
  try {
    found = JSON.parse(json);
  } catch {
    throw new Error("this is not a file of the studio: it is no JSON; save one with 'File'");
  }
  if (found?.version !== VERSION || typeof found.text !== "string") {
    throw new Error("this is not a file of the studio: it has no version or no text; save one with 'File'");
  }
  const read = parseProgram(found.text), counts = { stages: read.numStages, microbatches: read.numMicrobatches, ...whole(found) };
  const program = makeProgram(read.name, read.ranks, { numStages: Math.max(counts.stages, read.numStages),
    numMicrobatches: Math.max(counts.microbatches, read.numMicrobatches), numDirections: counts.directions ?? null });
  return { program, costs: checkedCosts(found.costs, program.numStages), limit: counts.limit ?? null };
}

function whole(found) {
  const keys = ["stages", "microbatches", "directions", "limit"];
  return Object.fromEntries(keys.filter((key) => Number.isInteger(found[key]) && found[key] > 0 && found[key] <= 2 ** 20)
    .map((key) => [key, found[key]]));
}

export const UNIT_TICKS = { F: 1, I: 1, W: 1, B: null, overlap: null, latency: 0, transfer: 0 };

function checkedCosts(costs, numStages) {
  const isTicks = (value) => Number.isInteger(value) && value >= 0 && value <= MOST_TICKS;
  const isFine = (value) => isTicks(value) || (Array.isArray(value) && value.length === numStages && value.every(isTicks));
  const given = Object.entries(costs ?? {}).filter(([key, value]) => COST_KEYS.includes(key) && isFine(value));
  return { ...UNIT_TICKS, ...Object.fromEntries(given) };
}

const through = (bytes, stream) => new Response(new Blob([bytes]).stream().pipeThrough(stream));

export async function linkOf(session, address) {
  const bytes = new Uint8Array(await through(packSession(session), new CompressionStream("deflate-raw")).arrayBuffer());
  let letters = "";
  for (let at = 0; at < bytes.length; at += 8192) letters += String.fromCharCode(...bytes.subarray(at, at + 8192));
  const text = btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return address.replace(/#.*$/s, "") + MARK + text;
}

// What an address holds, or null where it holds no schedule.
export async function sessionOfLink(fragment) {
  if (!fragment.startsWith(MARK)) return null;
  let json;
  try {
    const letters = atob(fragment.slice(MARK.length).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    json = await limitedText(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")));
  } catch {
    throw new Error("the link is damaged or was cut; copy the whole link again");
  }
  return unpackSession(json);
}

// A few bytes can unpack to gigabytes: no more than a schedule needs is read.
async function limitedText(stream) {
  const reader = stream.getReader(), parts = [];
  for (let size = 0; ; ) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts).text();
    size += value.length;
    parts.push(value);
    if (size > MOST_UNPACKED) {
      await reader.cancel();
      throw new Error("too large");
    }
  }
}
