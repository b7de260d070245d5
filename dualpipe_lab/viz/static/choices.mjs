// What the reader chooses about a drawing: what colours mean, the memory bands, the streams.

import { waysOf } from "./colours.mjs";
import { make, textButton } from "./dom.mjs";
import { hasLanes } from "./lanes.mjs";

const COLOUR_WORDS = { kind: "kind of work", direction: "direction", stage: "stage", microbatch: "microbatch" };
const MEMORY_WORDS = { none: "no band", rank: "chosen rank", all: "every rank" };
const FEW_RANKS = 4; // so many bands fit below the rows

// The view that a specification asks for; what it leaves open stays as it was.
export function viewOf(spec, tracks, before = {}) {
  const by = spec.colour_by ?? before.by ?? "kind", memory = spec.memory ?? before.memory ?? "none";
  const streams = spec.streams ?? tracks.some((track) => track.streams.length > 0);
  return { by: waysOf(tracks).includes(by) ? by : "kind", memory: memoryOf(memory, tracks), lanes: streams && tracks.some(hasLanes) };
}

// true: bands of every rank if there are few, otherwise of the chosen one.
export function memoryOf(memory, tracks) {
  if (memory === true) return Math.max(...tracks.map((track) => track.numRanks)) > FEW_RANKS ? "rank" : "all";
  return memory in MEMORY_WORDS ? memory : "none";
}

export const coloursText = (by) => `Colours show the ${COLOUR_WORDS[by]}.`;
export const memoryWords = (memory) => `Memory: ${MEMORY_WORDS[memory]}.`;

const next = (values, value) => values[(values.indexOf(value) + 1) % values.length];

// Returns {items, update, keys}; `change(part)` is called with what is chosen.
export function choices(tracks, view, change) {
  const ways = waysOf(tracks), memories = tracks.some((track) => Math.max(...track.peak) > 0) ? Object.keys(MEMORY_WORDS) : ["none"];
  const colours = chooser("Colour by", ways.map((by) => [by, COLOUR_WORDS[by]]), (by) => change({ by }));
  const memory = chooser("Memory", memories.map((kind) => [kind, MEMORY_WORDS[kind]]), (kind) => change({ memory: kind }));
  const streams = textButton("Streams", () => change({ lanes: !view().lanes }), view().lanes);
  const keys = { c: () => ways.length > 1 && change({ by: next(ways, view().by) }),
    m: () => memories.length > 1 && change({ memory: next(memories, view().memory) }),
    s: () => tracks.some(hasLanes) && change({ lanes: !view().lanes }) };
  const items = [...(ways.length > 1 ? [colours.label] : []), ...(memories.length > 1 ? [memory.label] : []),
    ...(tracks.some(hasLanes) ? [streams] : [])];
  const update = () => {
    colours.select.value = view().by;
    memory.select.value = view().memory;
    streams.setAttribute("aria-pressed", String(view().lanes));
  };
  return { items, update, keys };
}

function chooser(words, options, change) {
  const select = make("select", { onchange: () => change(select.value) },
    ...options.map(([value, text]) => make("option", { value }, text)));
  return { select, label: make("label", { class: "choice" }, make("span", {}, words), select) };
}
