// A model that is cut for several ranks: which part of each weight a rank has and why, and what ranks tell each other.

import { el, table } from "./dom.js";
import { data } from "./state.js";
import { inBytes, inCount } from "./units.js";

export function ranks() {
  if (!data.ranks) return null;
  const { ranks: tensor, weights, collectives, stages, agreement } = data.ranks;
  const inStages = stages.length > 1;
  return [
    el("h2", {}, "Ranks"),
    ...(tensor > 1 ? [el("p", { class: "lead" }, `${tensor} ranks${inStages ? " of each stage" : ""} run the same step, each with its part of the weights and of the cache.`)] : []),
    ...(agreement ? [el("p", { class: "lead" }, `Compared with Hugging Face's plan: ${agreement[1]} of ${agreement[0]} matrices are split alike.`)] : []),
    el("h3", {}, inStages ? "Stages" : "Memory of a rank"),
    filled([["Stage", "num"], ["Ranks", ""], ["Weights", "num"], ["KV cache per token", "num"], ["Arena", "num"], ["Hands over per token", "num"]],
      stages.map(({ first, last, memory, token_bytes }, number) => [inStages ? inCount(number) : "", first === last ? `${first}` : `${first}–${last}`, inBytes(memory.weights), inBytes(memory.kv_token), inBytes(memory.arena), token_bytes ? inBytes(token_bytes) : ""])),
    ...(tensor > 1 ? divided(weights, collectives, inStages) : []),
  ];
}

function divided(weights, collectives, inStages) {
  const cut = weights.filter((weight) => weight.axis !== null), whole = weights.filter((weight) => weight.axis === null);
  const exchanged = collectives.reduce((total, each) => total + each.count * each.token_bytes, 0);
  return [
    el("h3", {}, "Cut", el("small", {}, `${inBytes(bytes(cut))} on each${inStages ? ", all stages together" : ""}`)), list(cut),
    ...(whole.length ? [el("h3", {}, "Whole on every rank", el("small", {}, inBytes(bytes(whole)))), list(whole)] : []),
    el("h3", {}, "Exchanged", el("small", {}, `${inBytes(exchanged)} per token`)),
    filled([["Collective", ""], ["Of", "wide"], ["Count", "num"], ["A token", "num"], ["On CPUs, if only tokens are needed", "num"]],
      collectives.map((each) => [el("code", {}, each.op), each.of, inCount(each.count), inBytes(each.token_bytes), each.chosen_bytes ? inBytes(each.chosen_bytes) : ""])),
  ];
}

function list(weights) {
  return filled([["Weight", "wide"], ["Count", "num"], ["Shape", "short"], ["On a rank", "phrase"], ["Bytes", "num"], ["Why", "phrase"], ["Hugging Face", "phrase"]],
    weights.map((weight) => [el("code", {}, weight.name), inCount(weight.count), weight.shape.join(" × "), part(weight), inBytes(weight.nbytes), weight.why, weight.shape.length > 1 ? weight.beside ?? "" : ""]));
}

// Without columns that say nothing in any row.
function filled(columns, rows) {
  const says = columns.map((_, i) => rows.some((cells) => cells[i] !== ""));
  const kept = (cells) => cells.filter((_, i) => says[i]);
  return table(kept(columns), rows.map(kept));
}

function part(weight) {
  if (weight.axis === null) return "all";
  const axis = weight.shape.length === 1 ? "elements" : ["rows", "columns"][weight.axis];
  const parts = [...new Set(weight.parts)].sort((a, b) => b - a);
  return `${parts.map(inCount).join(" or ")} ${axis}${parts[0] < weight.length ? `, padded to ${inCount(weight.length)}` : ""}`;
}

const bytes = (weights) => weights.reduce((total, weight) => total + weight.count * weight.nbytes, 0);
