// How times are written and where an axis has its marks; the page's half of dualpipe_lab/timeline/units.py.

const NS_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

// The divisor and the name of the largest unit in which the makespan is at least 1; "ticks/4" counts quarters of a tick.
export function unitOf(unit, makespan) {
  const [whole, parts] = unit.split("/");
  if (parts) return [Number(parts), whole];
  if (unit !== "ns") return [1, unit];
  return NS_UNITS.find(([divisor]) => makespan >= divisor) ?? [1, "ns"];
}

// Whole numbers exactly, others with up to 3 digits after the point.
export const number = (time, divisor = 1) =>
  time % divisor === 0 ? String(time / divisor) : (time / divisor).toFixed(3).replace(/\.?0+$/, "");

// The same for a narrow column: a long one keeps a single digit after the point.
export function brief(time, divisor) {
  const text = number(time, divisor);
  return text.length > 5 ? String(Number((time / divisor).toFixed(1))) : text;
}

// Rounded as Python rounds: 6.25% is 6.2%.
const PERCENT = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven" });
export const percent = (share) => PERCENT.format(share);

// 1, 2 or 5 times a power of ten, so that at most `most` steps fit.
export function axisStep(span, most) {
  const smallest = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(smallest || 1));
  return power * ([1, 2, 5].find((factor) => factor * power >= smallest) ?? 10);
}
