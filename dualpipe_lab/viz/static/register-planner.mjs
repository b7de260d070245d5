// Defines the planner, in a script of its own: only pages that have a planner carry it, after the script of all drawings.

import { PlannerElement } from "./planner.mjs";

export function registerPlanner() {
  if (!customElements.get("dp-planner")) customElements.define("dp-planner", PlannerElement);
}
