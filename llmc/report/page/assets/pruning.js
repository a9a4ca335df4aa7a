// What was taken out of the model: in all, and of each part the channels, heads or layer that went.

import { el, table } from "./dom.js";
import { data } from "./state.js";
import { inCount, inPercent } from "./units.js";

export function pruning() {
  const parts = data.pruning;
  if (!parts.length) return null;
  const sum = (name) => parts.reduce((total, part) => total + part[name], 0);
  const before = sum("parameters"), left = sum("parameters_left");
  return [
    el("h2", {}, "Pruning"),
    el("p", { class: "lead" }, `What adds least on calibration text went: ${inPercent(left / before)} of ${inCount(before)} parameters of these parts are left. Errors are root mean squares of what is missing from each part's output, over that of the output; of a layer, of what it added.`),
    table(
      [["Part", "wide"], ["Taken out", ""], ["Which", "wide"], ["Error", "num"], ["Parameters", "num"], ["Left", "num"]],
      parts.map((part) => [
        el("code", {}, part.module), part.kind === "layer" ? "the layer" : `${inCount(part.removed.length)} of ${inCount(part.of)} ${part.kind}`,
        part.runs, inPercent(part.error), inCount(part.parameters), inCount(part.parameters_left),
      ]), { class: "quantized" }),
  ];
}
