// A schedule in the fragment of an address, and in a file: the same JSON, compressed in the one, plain in the other.
//
// {version, program, costs, limit}; what is read is data, checked piece by piece, and nothing of it is executed.

import { MOST_COUNT, packProgram, unpackProgram } from "./schedule-rows.mjs";
import { UNIT_TICKS } from "./studio-track.mjs";

const VERSION = 2, MARK = "#schedule=", MOST_UNPACKED = 4_000_000;
export const MOST_TICKS = 1e6;
const COST_KEYS = ["F", "I", "W", "B", "overlap", "latency", "transfer"];

export const packSession = ({ program, costs, limit }) =>
  JSON.stringify({ version: VERSION, program: packProgram(program), costs, limit });

// {program, costs, limit}; an Error with a sentence for anything else.
export function unpackSession(json) {
  const refuse = (why) => { throw new Error(`this is not a file of the studio: ${why}; save one with 'Save file'`); };
  const isCount = (value) => Number.isInteger(value) && value > 0 && value <= MOST_COUNT;
  let found;
  try {
    found = JSON.parse(json);
  } catch {
    refuse("it is no JSON");
  }
  const { name, rows, stages, microbatches, directions } = found?.program ?? {};
  if (found?.version !== VERSION || typeof name !== "string") refuse(`it is not of version ${VERSION}`);
  if (!Array.isArray(rows) || rows.length > MOST_COUNT || !rows.every((row) => typeof row === "string")) refuse("it has no rows");
  if (!isCount(stages) || !isCount(microbatches)) refuse("its counts are not whole numbers");
  const program = unpackProgram({ name, rows, stages, microbatches, directions: isCount(directions) ? directions : null });
  return { program, costs: checkedCosts(found.costs, stages), limit: isCount(found.limit) ? found.limit : null };
}

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
