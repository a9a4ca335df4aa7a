// Zeros: in all, and of each weight that has some; which are stored behind masks, and why others are not.

import { el, table } from "./dom.js";
import { data } from "./state.js";
import { inBytes, inCount, inPercent } from "./units.js";

export function sparsity() {
  const weights = data.sparsity;
  if (!weights.length) return null;
  return [
    el("h2", {}, "Sparsity"),
    el("p", { class: "lead" }, lead(weights)),
    el("div", { class: "figures" }, cards(weights)),
    list(weights),
  ];
}

function lead(weights) {
  const chosen = weights.filter((weight) => weight.error !== null);
  if (!chosen.length) return "The zeros came with the checkpoint.";
  const where = chosen.every((weight) => weight.is_output_error) ? "each product's output on calibration text" : "each weight";
  return `Errors are relative root mean squares of ${where}. Gains are those of decoding, from the bytes that are read.`;
}

function cards(weights) {
  const card = (label, value, note) => el("div", { class: "card" }, el("span", { class: "label" }, label), el("strong", {}, value), el("small", {}, note));
  const elements = (some, share) => some.reduce((sum, weight) => sum + weight.rows * weight.columns * share(weight), 0);
  const all = elements(weights, () => 1), masked = weights.filter((weight) => weight.bits !== null);
  const found = [card("Zeros", inPercent(elements(weights, (weight) => weight.zeros) / all), `of ${inCount(weights.length)} weights`)];
  if (masked.length) {
    const bits = elements(masked, (weight) => weight.bits), dense = elements(masked, (weight) => weight.dense_bits);
    found.push(
      card("Behind masks", inBytes(bits / 8), `${(bits / elements(masked, () => 1)).toFixed(2)} bits per weight`),
      card("Predicted gain", `${(dense / bits).toFixed(2)} ×`, `compared with ${inBytes(dense / 8)} with their zeros`));
  }
  if (masked.length < weights.length)
    found.push(card("Dense", inCount(weights.length - masked.length), "weights keep their zeros; the table gives the reasons"));
  return found;
}

function list(weights) {
  const reasons = weights.some((weight) => weight.reason);
  const rows = weights.map((weight) => [
    el("code", {}, weight.module), weight.scheme, inPercent(weight.zeros),
    weight.bits === null ? "dense" : weight.bits.toFixed(2), weight.gain === null ? "" : `${weight.gain.toFixed(2)} ×`,
    weight.error === null ? "as stored" : inPercent(weight.error), ...(reasons ? [weight.reason ?? ""] : []),
  ]);
  const columns = [["Weight", "wide"], ["Zeros by", ""], ["Zeros", "num"], ["Bits", "num"], ["Gain", "num"], ["Error", "num"], ...(reasons ? [["Why dense", "wide"]] : [])];
  const summary = el("summary", {}, "Every weight ", el("small", {}, inCount(weights.length)));
  return el("details", { class: "quiet", open: weights.length <= 24 }, summary, table(columns, rows, { class: "quantized" }));
}
