// The results of quantization: in total, and for each weight in a row per layer; and the engine's perplexity.

import { el, table, tip } from "./dom.js";
import { data } from "./state.js";
import { inBytes, inCount, inPercent, plural } from "./units.js";

export function quantization() {
  const { weights, perplexity } = data.quantization;
  if (!isQuantized() && !perplexity) return null;
  return [
    el("h2", {}, qualityTitle()),
    weights.length ? el("p", { class: "lead" }, lead(weights)) : null,
    el("div", { class: "figures" }, cards()),
    weights.length ? [layers(weights), list(weights)] : null,
  ];
}

// Of an engine without codes only its quality is shown, if that was measured.
export function qualityTitle() {
  return isQuantized() ? "Quantization" : "Quality";
}

function isQuantized() {
  return data.quantization.weights.length > 0 || data.quantization.cache !== null;
}

function lead(weights) {
  const measured = weights.filter((weight) => weight.error !== null), stored = weights.length - measured.length;
  if (!measured.length) return "The checkpoint is quantized; nothing was quantized again.";
  const where = measured.every((weight) => weight.is_output_error)
    ? "of each product's output on calibration text"
    : measured.some((weight) => weight.is_output_error) ? "of the product's output if calibration text reached it, and otherwise of the weight" : "of each weight (no calibration text was given)";
  return `Errors are relative root mean squares ${where}.${stored ? ` ${plural(stored, "weight")} ${stored === 1 ? "was" : "were"} stored as codes in the checkpoint.` : ""}`;
}

function cards() {
  const { weights, cache, plain_bits, perplexity } = data.quantization;
  const card = (label, value, note) => el("div", { class: "card" }, el("span", { class: "label" }, label), el("strong", {}, value), el("small", {}, note));
  const found = [];
  if (weights.length) {
    const elements = weights.reduce((sum, weight) => sum + weight.rows * weight.columns, 0);
    const bits = weights.reduce((sum, weight) => sum + weight.bits * weight.rows * weight.columns, 0);
    const schemes = [...new Set(weights.map((weight) => weight.scheme))].join(", ");
    found.push(
      card("Bits per weight", (bits / elements).toFixed(2), `scales included: ${schemes}`),
      card("Quantized weights", inBytes(bits / 8), `${(plain_bits * elements / bits).toFixed(2)} × smaller than ${inBytes(elements * plain_bits / 8)}; ${inBytes(data.engine.memory.weights)} with the rest`));
  }
  found.push(card("KV cache", inBytes(data.memory.cache.token_bytes), cache
    ? `per token as ${cache.formats.join(", ")}: ${(cache.plain_bytes / cache.token_bytes).toFixed(2)} × smaller than ${inBytes(cache.plain_bytes)}`
    : "per token, not quantized"));
  found.push(perplexity
    ? card("Perplexity", perplexity.perplexity.toFixed(3), `${perplexity.ratio.toFixed(4)} × the ${perplexity.reference.toFixed(3)} of the ${perplexity.dtype} model, over ${inCount(perplexity.tokens)} tokens of ${perplexity.text}`)
    : card("Perplexity", "not measured", "llmc verify --perplexity TEXT --json FILE, then llmc report --perplexity FILE"));
  return found;
}

// A row a layer, a column a kind of weight; the deeper the colour, the larger the error.
function layers(weights) {
  const inside = weights.filter((weight) => weight.layer !== null);
  if (!inside.length) return null;
  const parts = [...new Set(inside.map((weight) => weight.part))];
  const numbers = [...new Set(inside.map((weight) => weight.layer))].sort((a, b) => a - b);
  const worst = Math.max(...inside.map((weight) => weight.error ?? 0));
  const mixed = new Set(inside.map((weight) => weight.scheme)).size > 1;
  const at = new Map(inside.map((weight) => [`${weight.layer} ${weight.part}`, weight]));
  return [
    el("h3", {}, "Layers", el("small", {}, worst ? `errors up to ${inPercent(worst)}` : "")),
    el("div", { class: "heat" }, table(
      [["Layer", "num"], ...parts.map((part) => [part.replace(/^(self_)?(attn|mlp|attention)\./, ""), "cell"])],
      numbers.map((number) => [String(number), ...parts.map((part) => cell(at.get(`${number} ${part}`), worst, mixed))]))),
  ];
}

function cell(weight, worst, mixed) {
  if (!weight) return tip(el("span", { class: "heat-cell none" }, "—"), "not quantized");
  const share = worst && weight.error !== null ? Math.round(100 * weight.error / worst) : 0;
  const text = weight.error === null ? weight.scheme : inPercent(weight.error);
  return tip(el("span", { class: "heat-cell", style: `--share: ${share}%` }, text, mixed ? el("small", {}, `${+weight.bits.toFixed(2)} bits`) : null), describe(weight));
}

function describe(weight) {
  const error = weight.error === null ? "as stored in the checkpoint" : `${inPercent(weight.error)} error of the ${weight.is_output_error ? "output" : "weight"}`;
  return `${weight.module}: ${inCount(weight.rows)} × ${inCount(weight.columns)}\n${weight.scheme}, ${weight.bits.toFixed(3)} bits, ${error}${weight.reason ? `\n${weight.reason}` : ""}`;
}

function list(weights) {
  const inside = weights.some((weight) => weight.layer !== null), reasons = weights.some((weight) => weight.reason);
  const rows = weights.map((weight) => [
    el("code", {}, weight.module), weight.scheme, weight.bits.toFixed(3), weight.error === null ? "as stored" : inPercent(weight.error),
    weight.error === null ? "" : weight.is_output_error ? "output" : "weight", ...(reasons ? [weight.reason ?? ""] : []),
  ]);
  const columns = [["Weight", "wide"], ["Scheme", ""], ["Bits", "num"], ["Error", "num"], ["of the", ""], ...(reasons ? [["Why", "wide"]] : [])];
  return el("details", { class: "quiet", open: !inside }, el("summary", {}, "Every weight ", el("small", {}, inCount(weights.length))), table(columns, rows, { class: "quantized" }));
}
