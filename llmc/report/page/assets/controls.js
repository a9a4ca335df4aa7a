// The bar with which the reader chooses a step and a machine.

import { el, replace } from "./dom.js";
import { bounds, change, chooseMeasured, chosen, data, measuredStep, onChange } from "./state.js";
import { inCount } from "./units.js";

export function controls() {
  const bar = el("div", { class: "controls", role: "group", "aria-label": "Step and machine" });
  const draw = () => replace(bar, kinds(), sliders(), machine(), measured());
  // A slider that is being dragged must stay the element that it is.
  onChange((patch) => { if ("kind" in patch || "rates" in patch) draw(); });
  draw();
  return bar;
}

function kinds() {
  const button = (kind, label) => el("button", {
    type: "button", "aria-pressed": String(chosen.kind === kind), onclick: () => change({ kind }),
  }, label);
  return el("div", { class: "segments", role: "group", "aria-label": "Kind of step" },
    button("decode", "Decode"), button("prefill", "Prefill"));
}

function sliders() {
  if (chosen.kind === "prefill") return [slider("tokens", "Prompt tokens", bounds.tokens)];
  return [slider("batch", "Batch", bounds.batch), slider("context", "Context", bounds.context)];
}

// Positions are spread evenly over the logarithm.
function slider(name, label, most) {
  const steps = 200, id = `slider-${name}`;
  const toValue = (position) => Math.max(1, Math.round(most ** (position / steps)));
  const toPosition = (value) => (most > 1 ? (Math.log(value) / Math.log(most)) * steps : 0);
  const number = el("input", { type: "number", min: 1, max: most, value: chosen[name], "aria-label": `${label}, exactly` });
  const range = el("input", { id, type: "range", min: 0, max: steps, value: toPosition(chosen[name]), "aria-valuetext": inCount(chosen[name]) });
  range.addEventListener("input", () => {
    number.value = toValue(Number(range.value));
    range.setAttribute("aria-valuetext", number.value);
    change({ [name]: Number(number.value) });
  });
  number.addEventListener("change", () => {
    const value = Math.min(most, Math.max(1, Math.round(Number(number.value) || 1)));
    number.value = value;
    range.value = toPosition(value);
    change({ [name]: value });
  });
  return el("div", { class: "field" }, el("label", { for: id }, label), range, number);
}

function machine() {
  const rates = chosen.rates;
  const note = data.engine.kind === "gpu" ? "data sheet; gaps between launches are not counted" : rates.measured ? "measured" : "nominal, not measured: run llmc report on the machine";
  const field = (label, value, unit, set) => {
    const input = el("input", { type: "number", min: 0.1, step: "any", value: +(value / 1e9).toPrecision(4), "aria-label": `${label} in ${unit}` });
    input.addEventListener("change", () => {
      const number = Number(input.value);
      if (number > 0) { set(number * 1e9); change({ rates: { ...rates, measured: false } }); }
    });
    return el("label", { class: "rate" }, label, input, el("small", {}, unit));
  };
  return el("details", { class: "machine" }, el("summary", {}, "Machine ", el("small", {}, note)),
    el("div", { class: "rates" },
      field("Memory", rates.bandwidth, "GB/s", (value) => { rates.bandwidth = value; }),
      Object.entries(rates.kinds).map(([name, kind]) =>
        field(name, kind.multiply, "GFLOP/s", (value) => { kind.multiply = value; }))));
}

function measured() {
  if (!data.profile) return null;
  const current = measuredStep();
  return el("div", { class: "segments measured", role: "group", "aria-label": "Measured steps" },
    data.profile.steps.map((step) => el("button", {
      type: "button", "aria-pressed": String(step === current), onclick: () => chooseMeasured(step),
    }, step.name)));
}
