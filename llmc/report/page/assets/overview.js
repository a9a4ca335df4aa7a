// What the engine is, in a few numbers.

import { classCosts, totals } from "./cost.js";
import { el, replace, table } from "./dom.js";
import { chosen, data, onChange, shape } from "./state.js";
import { inBytes, inCount, inSeconds, plural } from "./units.js";

export function overview() {
  const { model, target, version, limits, memory, options } = data.engine;
  const figures = el("div", { class: "figures" });
  const draw = () => replace(figures, cards());
  onChange(draw);
  draw();
  const rewrites = data.passes.reduce((total, each) => total + each.rewrites.length, 0);
  const refusals = data.passes.reduce((total, each) => total + each.refusals.length, 0);
  const optionRows = Object.entries(options).filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length));
  return [
    el("header", { class: "hero" },
      el("p", { class: "eyebrow" }, `${model.family} · ${model.dtype} · ${target}`),
      el("h1", {}, model.name),
      el("p", { class: "lead" },
        `${inCount(+(model.parameters / 1e6).toPrecision(3))} M parameters, compiled by llmc ${version} in ` +
        `${plural(data.passes.length, "pass").replace("passs", "passes")}: ${plural(rewrites, "rewrite")}, ${plural(refusals, "near-miss").replace("misss", "misses")}.`)),
    figures,
    el("details", { class: "quiet" }, el("summary", {}, "Limits and options"),
      table([["", "label"], ["", ""]], [
        ["maximum sequence", `${inCount(limits.max_model_len)} tokens`],
        ["maximum step", `${inCount(limits.max_batch_tokens)} tokens, ${inCount(limits.max_sequences)} requests, ${inCount(limits.max_logit_rows)} rows of logits`],
        ["KV block", `${limits.block_size} positions`],
        ["vocabulary", inCount(model.vocab_size)],
        ...optionRows.map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]),
      ], { class: "plain" })),
  ];

  function cards() {
    const card = (label, value, note) => el("div", { class: "card" },
      el("span", { class: "label" }, label), el("strong", {}, value), el("small", {}, note));
    const list = [
      card("Weights", inBytes(memory.weights), plural(data.memory.weights.reduce((n, w) => n + w.count, 0), "tensor")),
      card("KV cache", `${inBytes(data.memory.cache.token_bytes)}`, `per token; ${inBytes(data.memory.cache.sequence_bytes)} per full sequence`),
    ];
    if (data.kernels.launches.length) {
      const all = totals(classCosts()), values = shape();
      const what = chosen.kind === "decode" ? `batch ${chosen.batch}, context ${inCount(chosen.context)}` : `${inCount(chosen.tokens)} tokens`;
      const rate = values.T / (all.measured ?? all.seconds);
      list.push(
        card("Activations", inBytes(memory.arena), memory.arena_unplanned ? `${Math.round((100 * memory.arena) / memory.arena_unplanned)}% of ${inBytes(memory.arena_unplanned)} unshared` : "planned"),
        card(`${chosen.kind === "decode" ? "Decode" : "Prefill"} step, ${all.measured === null ? "predicted" : "measured"}`, inSeconds(all.measured ?? all.seconds), `${what}: ${rate < 100 ? rate.toFixed(1) : inCount(Math.round(rate))} tokens/s`),
        card("Launches", inCount(all.count), `${plural(data.kernels.classes.length, "kernel")} with their shapes`));
    }
    return list;
  }
}
