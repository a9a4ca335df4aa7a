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
    el("p", { class: "lead" }, `The parts that contribute least on calibration text were removed: ${inPercent(left / before)} of ${inCount(before)} parameters of these parts remain. Errors are the root mean square of the missing part of the output, divided by that of the output; for a layer, by that of its contribution. Those of values are of the values themselves.`),
    table(
      [["Part", "wide"], ["Taken out", ""], ["Which", "wide"], ["Error", "num"], ["Parameters", "num"], ["Left", "num"]],
      parts.map((part) => [
        el("code", {}, part.module), part.kind === "layer" ? "the layer" : `${inCount(part.removed.length)} of ${inCount(part.of)} ${part.kind}`,
        part.runs, inPercent(part.error), inCount(part.parameters), inCount(part.parameters_left),
      ]), { class: "quantized" }),
  ];
}
