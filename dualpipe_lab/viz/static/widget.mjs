// The same elements as an anywidget: what Python sets is shown, what the reader does is told to Python.

import { register } from "./register.mjs";

const SHARED = ["time", "costs", "selection", "playing"];
const FOLLOWED = new Set(["time", "playing"]);

export function render({ model, el }) {
  register();
  const element = document.createElement(model.get("element"));
  element.spec = model.get("spec");
  const tell = (name, value) => {
    if (JSON.stringify(model.get(name)) === JSON.stringify(value)) return;
    model.set(name, value);
    model.save_changes();
  };
  const show = (name) => () => {
    const value = model.get(name);
    if (value == null || JSON.stringify(element[name]) === JSON.stringify(value)) return;
    element[name] = value;
    tell(name, element[name]); // what it came to: a time within the makespan, all costs
  };
  // While it plays, Python hears of it ten times a second, and the page is the clock: a slider that is linked to the
  // time rounds it and sends it back, which must not stop the play.  Python stops it first, then sets a time.
  let heard = 0, told;
  const listen = () => {
    const now = performance.now();
    tell("playing", element.playing);
    if (element.playing && now - heard < 100) return;
    [heard, told] = [now, element.time];
    tell("time", told);
  };
  const follow = (name) => () => {
    const isAsked = model.get("playing"), time = model.get("time");
    if (element.playing && isAsked) return;
    if (element.playing && time !== told) element.time = time;
    else show(name)();
  };
  element.addEventListener("dp-time", listen);
  element.addEventListener("dp-costs", (event) => tell("costs", event.detail));
  element.addEventListener("dp-selection", (event) => tell("selection", event.detail));
  const shown = SHARED.map((name) => [`change:${name}`, FOLLOWED.has(name) ? follow(name) : show(name)]);
  const replace = () => {
    element.spec = model.get("spec");
    for (const name of SHARED) tell(name, element[name]);
  };
  for (const [event, handler] of [...shown, ["change:spec", replace]]) model.on(event, handler);
  el.append(element);
  for (const [, handler] of shown) handler();
  return () => {
    for (const [event, handler] of [...shown, ["change:spec", replace]]) model.off(event, handler);
  };
}
