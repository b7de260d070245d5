// What the page draws of a track's streams, colours and memory.  In node: one specification per line in, one line out.

import { heldBy } from "../../dualpipe_lab/viz/static/bands.mjs";
import { colourOfBar, colourOfPart } from "../../dualpipe_lab/viz/static/colours.mjs";
import { endOf, lanesOf, startOf } from "../../dualpipe_lab/viz/static/lanes.mjs";
import { layoutOf, placeOf } from "../../dualpipe_lab/viz/static/layout.mjs";
import { WAYS } from "../../dualpipe_lab/viz/static/colours.mjs";
import { makeTrack } from "../../dualpipe_lab/viz/static/track.mjs";
import { createInterface } from "node:readline";

export function drawn(spec) {
  const track = makeTrack(spec), lanes = lanesOf(track);
  const layout = layoutOf([track], 1280, 1, 0, { lanes: true, memory: "rank" });
  const ids = lanes.flatMap(({ ranks }) => ranks.flatMap((lines) => lines.flat()));
  const parts = Array.from(track.stage, (_, part) => part);
  return {
    lanes: lanes.map(({ name, ranks }) => [name, ranks.map((lines) => lines.map((line) => line.map((id) => [startOf(track, id), endOf(track, id)])))]),
    colours: WAYS.map((by) => [parts.map((part) => colourOfPart(track, part, by)[0]), ids.map((id) => colourOfBar(track, id, by)[0])]),
    held: track.live.map((_, rank) => heldBy(track, rank)).map(({ times, counts }) => times.map((time, i) => [time, counts[i]])),
    // no two bars cover each other, and none covers work or another rank
    places: ids.map((id) => [...placeOf(layout, track, 0, id), startOf(track, id), endOf(track, id)]),
    rows: layout.tracks[0].rows,
  };
}

for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(drawn(JSON.parse(line))));
