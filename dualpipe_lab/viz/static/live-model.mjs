// The half of a live cell that lives with the kernel: it starts with the model, finds the cell's elements on the page, and
// sets the views of ipywidgets into them.

import { liveCells } from "./live.mjs";
import { register } from "./register.mjs";

async function connect(model, element) {
  const follow = () => (element.state = model.get("state"));
  const place = document.createElement("div");
  place.slot = "controls";
  element.querySelector(":scope > [slot=controls]")?.remove();
  element.prepend(place);
  model.on("change:state", follow);
  const manager = model.widget_manager, view = { gone: false };
  element.bind(place, () => {
    view.gone = true;
    model.off("change:state", follow);
    place.remove();
  });
  follow();
  const box = await manager.get_model(model.get("controls").replace("IPY_MODEL_", ""));
  const shown = await manager.create_view(box, {});
  if (view.gone || !place.isConnected) return;
  const widget = shown.luminoWidget;
  widget.constructor.attach(widget, place);
  await shown.displayed;
  await new Promise(requestAnimationFrame);
  nameInputs(place);
}

// ipywidgets' sliders and number fields have no names of their own.
function nameInputs(place) {
  for (const box of place.querySelectorAll(".widget-slider")) {
    const words = box.querySelector(".widget-label")?.textContent ?? "value";
    box.querySelector(".noUi-handle")?.setAttribute("aria-label", words);
    const field = box.querySelector(".widget-readout");
    field?.setAttribute("role", "textbox");
    field?.setAttribute("aria-label", `${words} as a number`);
  }
}

function initialize({ model }) {
  register();
  const { models, elements } = liveCells(), key = model.get("key");
  const join = (element) => element.bound || connect(model, element);
  models.set(key, join);
  for (const element of elements) if (element.key === key) join(element);
  return () => models.delete(key);
}

// The view, for front ends that show widgets only.
function renderLive({ model, el }) {
  const element = document.createElement("dp-live"), place = document.createElement("div");
  place.slot = "drawing";
  element.append(place);
  element.spec = { ...model.get("state"), key: model.get("key"), how: "" };
  el.append(element);
}

export const liveCell = { initialize, render: renderLive };
