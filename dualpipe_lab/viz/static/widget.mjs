// The same elements as an anywidget: what Python sets is shown, what the reader does is told to Python.

import { register } from "./register.mjs";

const SHARED = ["time", "costs", "selection", "playing"];

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
  // While it plays, Python hears of it ten times a second.
  let heard = 0;
  const listen = () => {
    const now = performance.now();
    tell("playing", element.playing);
    if (element.playing && now - heard < 100) return;
    heard = now;
    tell("time", element.time);
  };
  element.addEventListener("dp-time", listen);
  element.addEventListener("dp-costs", (event) => tell("costs", event.detail));
  element.addEventListener("dp-selection", (event) => tell("selection", event.detail));
  const shown = SHARED.map((name) => [`change:${name}`, show(name)]);
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
