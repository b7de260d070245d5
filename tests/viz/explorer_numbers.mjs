// The explorer's numbers in node: one line {titles, packed, choices} in, one line of results for every choice out.

import { createInterface } from "node:readline";

import { explore, unpack } from "../../dualpipe_lab/viz/static/explorer-data.mjs";

for await (const line of createInterface({ input: process.stdin })) {
  const { titles, twins, packed, choices } = JSON.parse(line);
  const programs = await unpack(packed);
  const shown = new Set(Object.keys(titles));
  for (const choice of choices) {
    const { fine, ranked, refused } = explore(titles, twins, programs, { ...choice, shown });
    const rows = ranked.map((e) => [e.key, e.step, e.bubble, e.peak, e.messages, e.weights, e.local, e.fits]);
    console.log(JSON.stringify({ fine, rows, refused: refused.map(({ name }) => name) }));
  }
}
