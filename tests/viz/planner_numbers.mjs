// The planner's numbers in node: one line {facts, choice} in, one line of numbers or of the broken rule out.

import { createInterface } from "node:readline";

import { memoryOfRanks } from "../../dualpipe_lab/viz/static/plan-memory.mjs";
import { planOf } from "../../dualpipe_lab/viz/static/plan-model.mjs";
import { rowsOf, stepsOf } from "../../dualpipe_lab/viz/static/plan-schedules.mjs";
import { stepOf } from "../../dualpipe_lab/viz/static/plan-time.mjs";
import { trafficOf } from "../../dualpipe_lab/viz/static/plan-traffic.mjs";

function numbersOfPlan(facts, choice) {
  const plan = planOf(facts, choice);
  if (plan.problem) return { problem: plan.problem };
  const ranks = stepsOf(plan.schedule, plan.pp, plan.count);
  const traffic = Object.entries(trafficOf(plan, ranks)).map(([axis, bytes]) => [axis, bytes.map(String)]);
  return { layers: plan.layers, rows: rowsOf(ranks), memory: memoryOfRanks(facts, plan, ranks),
    step: stepOf(facts, plan, ranks), traffic: Object.fromEntries(traffic) };
}

let facts;
for await (const line of createInterface({ input: process.stdin })) {
  const given = JSON.parse(line);
  if (given.models) facts = given; // the first line has the facts
  if (given.programs) console.log(JSON.stringify(given.programs.map((sizes) => rowsOf(stepsOf(...sizes)))));
  else console.log(JSON.stringify(given.models ? {} : numbersOfPlan(facts, given)));
}
