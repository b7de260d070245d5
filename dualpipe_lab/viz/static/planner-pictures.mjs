// The planner's pictures as SVG at the width of their box: memory of every rank of pp as stacked bars, and the frontier.

import { axisStep } from "./scale.mjs";

export const GB = 1e9;
// What a bar is made of: label, colour, the fields of a rank's memory that it adds up.
export const MEMORY_PARTS = [
  ["weights", "#0072b2", ["parameters"]],
  ["gradients", "#e69f00", ["gradients"]],
  ["Adam's state", "#009e73", ["masters", "moments"]],
  ["activations", "#56b4e9", ["layers", "ends"]],
  ["logits", "#d55e00", ["logits"]],
  ["working and buffers", "#cc79a7", ["working", "received", "buffers"]],
  ["reserve", "#8492a2", ["reserve"]],
];
export const partBytes = (memory, fields) => fields.reduce((sum, field) => sum + memory[field], 0);
export const gigabytes = (bytes) => (bytes / GB).toFixed(1);

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function picture(width, height, label) {
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

const words = (x, y, text, attributes = {}) => shape("text", { x, y, "font-size": 12, ...attributes }, text);

export function memoryBars({ memory, plan }, width, theme, label) {
  const left = 56, right = width - 62, top = 22, pitch = memory.length > 8 ? 18 : 24, limit = plan.card.memory;
  const svg = picture(width, top + pitch * memory.length + 22, label);
  const most = Math.max(limit, ...memory.map((one) => one.total)), at = (bytes) => left + (bytes / most) * (right - left);
  memory.forEach((one, rank) => {
    const y = top + rank * pitch, over = one.total > limit, ink = over ? theme.text : theme.muted;
    svg.append(words(0, y + pitch / 2 + 3, plan.pp > 1 ? `rank ${rank}` : "GPU", { fill: ink }));
    let from = 0;
    for (const [, colour, fields] of MEMORY_PARTS) {
      const size = partBytes(one, fields), x = at(from), end = at(from + size);
      if (end - x > 0.2) svg.append(shape("rect", { x, y: y + 2, width: Math.max(end - x - 1, 0.5), height: pitch - 5, fill: colour }));
      from += size;
    }
    const end = at(from) + 6, line = at(limit), isOnLine = end - 4 < line && line < end + 34;
    svg.append(words(isOnLine ? line + 6 : end, y + pitch / 2 + 3, gigabytes(one.total), { fill: ink, "font-weight": over ? 700 : 400 }));
  });
  const x = at(limit), bottom = top + pitch * memory.length;
  svg.append(shape("path", { d: `M${x} ${top - 4}V${bottom + 2}`, stroke: theme.text, "stroke-width": 1.6, "stroke-dasharray": "5 3" }));
  const anchor = x > width - 90 ? "end" : "middle";
  svg.append(words(x, 12, `the GPU has ${gigabytes(limit)} GB`, { fill: theme.text, "text-anchor": anchor, "font-weight": 600 }));
  const step = axisStep(most / GB, (right - left) / 60);
  for (let mark = 0; mark * GB <= most; mark += step) {
    svg.append(words(at(mark * GB), bottom + 16, String(mark), { fill: theme.muted, "text-anchor": "middle" }));
  }
  svg.append(words(width, bottom + 16, "GB", { fill: theme.muted, "text-anchor": "end" }));
  return svg;
}

// Marks of a logarithmic axis: 1, 2 and 5 times powers of ten, or every digit where these are few.
function logMarks(low, high) {
  const powers = Array.from({ length: 26 }, (_, place) => 10 ** (place - 10));
  const marks = (factors) => powers.flatMap((power) => factors.map((factor) => factor * power)).filter((mark) => mark >= low && mark <= high);
  const few = marks([1, 2, 5]);
  return few.length > 2 ? few : marks([1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

function logAxis(values, from, to) {
  const low = Math.min(...values) / 1.15, high = Math.max(...values) * 1.15;
  return { at: (value) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from), marks: logMarks(low, high) };
}

const plain = (value) => String(Number(value.toPrecision(3)));

// Points of plans, those that fit filled; the frontier as steps; the chosen plan in a ring.
export function frontierPicture(points, frontier, chosen, limit, width, theme, label) {
  const height = 270, left = 46, bottom = height - 38, svg = picture(width, height, label);
  const x = logAxis(points.map((one) => one.seconds), left, width - 14);
  const y = logAxis([...points.map((one) => one.bytes / GB), limit / GB], bottom, 22);
  for (const mark of x.marks) {
    svg.append(shape("path", { d: `M${x.at(mark)} 18V${bottom}`, stroke: theme.grid }));
    svg.append(words(x.at(mark), bottom + 16, plain(mark), { fill: theme.muted, "text-anchor": "middle" }));
  }
  for (const mark of y.marks) {
    svg.append(shape("path", { d: `M${left} ${y.at(mark)}H${width - 10}`, stroke: theme.grid }));
    svg.append(words(left - 6, y.at(mark) + 4, plain(mark), { fill: theme.muted, "text-anchor": "end" }));
  }
  const line = y.at(limit / GB);
  svg.append(shape("path", { d: `M${left} ${line}H${width - 10}`, stroke: theme.text, "stroke-width": 1.4, "stroke-dasharray": "5 3" }));
  svg.append(words(width - 12, line - 5, "the GPU's memory", { fill: theme.text, "text-anchor": "end" }));
  svg.append(words(0, 12, "GB of the fullest GPU", { fill: theme.muted }));
  svg.append(words(width - 12, height - 6, "seconds per step (assumed)", { fill: theme.muted, "text-anchor": "end" }));
  for (const one of points) {
    const place = { cx: x.at(one.seconds), cy: y.at(one.bytes / GB) };
    const colours = one.fits ? { fill: theme.forward, stroke: theme.page } : { fill: "none", stroke: theme.live };
    svg.append(shape("circle", { ...place, r: 3.2, ...colours, "stroke-width": 1 }));
  }
  const path = frontier.map((one, i) => `${i ? `H${x.at(one.seconds)}V` : `M${x.at(one.seconds)} `}${y.at(one.bytes / GB)}`).join("");
  if (path) svg.append(shape("path", { d: path, fill: "none", stroke: theme.backward, "stroke-width": 2 }));
  if (chosen) {
    const place = { cx: x.at(chosen.seconds), cy: y.at(chosen.bytes / GB) };
    svg.append(shape("circle", { ...place, r: 8, fill: "none", stroke: theme.accent, "stroke-width": 3 }));
  }
  return svg;
}
