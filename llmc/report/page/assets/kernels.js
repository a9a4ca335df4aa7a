// The kernels of the chosen step, and everything about the one that the reader picks.

import { classCosts, launchCost, runs, totals } from "./cost.js";
import { el, replace, table, tip } from "./dom.js";
import { code } from "./highlight.js";
import { change, chosen, data, onChange, shape } from "./state.js";
import { inBytes, inCount, inFlops, inPercent, inRate, inSeconds, plural } from "./units.js";

export function kernels(bar) {
  if (!data.kernels.launches.length) {
    return [el("h2", {}, "Kernels"), el("p", { class: "empty" }, "A reference engine runs its graph in torch: there are no kernels.")];
  }
  const list = el("div", {}), detail = el("div", { class: "kernel", "aria-live": "polite" });
  const drawList = () => replace(list, kernelTable());
  const drawDetail = () => replace(detail, kernelDetail());
  onChange((patch) => { drawList(); if (!("kernel" in patch)) refreshNumbers(); else { drawDetail(); detail.scrollIntoView({ block: "nearest" }); } });
  const refreshNumbers = () => { const at = detail.querySelector(".numbers"); if (at) at.replaceWith(numbers(data.kernels.classes[chosen.kernel])); };
  chosen.kernel = classCosts()[0]?.index ?? 0;
  drawList();
  drawDetail();
  return [
    el("h2", {}, "Kernels"),
    el("p", { class: "lead" }, "The launches of a step, and their time on the machine. Select one to see its code."),
    bar, list, detail,
  ];
}

function kernelTable() {
  const rows = classCosts(), all = totals(rows), measured = all.measured !== null;
  const time = (row) => (measured ? row.measured : row.seconds), whole = time(all);
  const cells = (row, name, share) => [
    name, inCount(row.count), inSeconds(row.seconds),
    ...(measured ? [inSeconds(row.measured), row.seconds ? (row.measured / row.seconds).toFixed(2) : ""] : []),
    share, inBytes(row.bytes), inFlops(row.flops), (row.flops / Math.max(row.bytes, 1)).toFixed(row.flops < 10 * row.bytes ? 2 : 0),
  ];
  const columns = [
    ["Kernel", "wide"], ["Launches", "num"], ["Predicted", "num"], ...(measured ? [["Measured", "num"], ["Ratio", "num"]] : []),
    ["Share", "bar-cell"], ["Bytes", "num"], ["Operations", "num"], ["FLOP/B", "num"], ["Bound", ""],
  ];
  const body = rows.map((row) => {
    const button = el("button", {
      type: "button", class: "link", "aria-pressed": String(row.index === chosen.kernel), "data-kernel": row.kernel.name,
      onclick: () => change({ kernel: row.index }),
    }, row.kernel.name);
    const share = whole ? time(row) / whole : 0;
    return [...cells(row, button, el("span", { class: "meter", style: `--share:${(share * 100).toFixed(2)}%` }, inPercent(share))), el("span", { class: `bound ${row.bound}` }, row.bound)];
  });
  const element = table(columns, [...body, [...cells(all, "the whole step", ""), ""]], { class: "kernels" });
  element.querySelector("tbody").lastChild.classList.add("total");
  rows.forEach((row, i) => { if (row.index === chosen.kernel) element.querySelectorAll("tbody tr")[i].classList.add("picked"); });
  return element;
}

function kernelDetail() {
  const kernel = data.kernels.classes[chosen.kernel];
  if (!kernel) return [];
  const launches = data.kernels.launches.map((launch, i) => ({ ...launch, i })).filter((launch) => launch.class === chosen.kernel);
  return [
    el("h3", {}, kernel.name),
    numbers(kernel),
    kernel.device ? device(kernel.device) : null,
    kernel.budgets ? budgets(kernel.budgets) : null,
    el("div", { class: "kernel-grid" },
      el("section", {}, el("h4", {}, "Origin", el("small", {}, plural(launches.length, "launch").replace("launchs", "launches"))), origins(launches)),
      el("section", {}, el("h4", {}, "Its call"), code(launches[0].call, "cpp", "the call"), kernelCode(kernel))),
  ];
}

function numbers(kernel) {
  const values = shape(), launch = data.kernels.launches.find((each) => data.kernels.classes[each.class] === kernel && runs(each, values));
  if (!launch) return el("p", { class: "numbers hint" }, "The selected step does not launch it.");
  const cost = launchCost(launch, values), row = classCosts().find((each) => each.kernel === kernel);
  const measured = row.measured === null ? null : row.measured / row.count;
  const fact = (label, value) => el("div", {}, el("dt", {}, label), el("dd", {}, value));
  return el("dl", { class: "numbers" },
    fact("predicted per launch", inSeconds(cost.seconds)),
    measured === null ? null : fact("measured per launch", inSeconds(measured)),
    fact("bytes", tip(el("span", {}, inBytes(cost.bytes)), launch.bytes)),
    fact("operations", tip(el("span", {}, inFlops(cost.flops)), launch.flops)),
    fact("intensity", `${(cost.flops / Math.max(cost.bytes, 1)).toPrecision(3)} FLOP/B`),
    fact("bound by", cost.bound),
    fact("reaches", inRate(cost.flops / (measured || cost.seconds))),
    el("div", { class: "formula" }, el("dt", {}, "as expressions"), el("dd", {}, el("code", {}, `bytes = ${launch.bytes}`), el("code", {}, `flops = ${launch.flops}`))));
}

function device(found) {
  const rows = Object.entries(found.binaries).map(([arch, b]) => [arch, inCount(b.threads), inCount(b.registers), inBytes(b.spills), inBytes(b.shared)]);
  const constants = Object.entries(found.constants).map(([name, value]) => `${name}=${value}`).join(", ");
  return el("div", {},
    table([["Instruction set", ""], ["Threads", "num"], ["Registers", "num"], ["Spilled", "num"], ["Shared memory", "num"]], rows, { class: "plain" }),
    el("p", { class: "hint" }, `${found.function}: ${plural(found.warps, "warp")}, ${plural(found.stages, "stage")}. ${constants}`));
}

function budgets(found) {
  const rows = Object.entries(found).flatMap(([arch, limits]) => limits.map((each) => ({ arch, ...each })));
  const missed = rows.filter((each) => !each.is_met), met = rows.filter((each) => each.is_met);
  const columns = [["Instruction set", ""], ["Figure", ""], ["Value", "num"], ["Budget", "num"], ["Why", "wide"]];
  const shown = (some) => table(columns, some.map((each) => [
    each.arch, each.figure, each.value === null ? "not visible" : inCount(Number(each.value.toPrecision(4))), each.bound, each.reason,
  ]), { class: "plain budgets" });
  return el("section", {},
    el("h4", {}, "Machine code", el("small", {}, `${missed.length} of ${rows.length} figures miss their budgets`)),
    missed.length ? shown(missed) : null,
    met.length ? el("details", { class: "quiet" }, el("summary", {}, `${met.length} within their budgets`), shown(met)) : null);
}

function origins(launches) {
  const rows = launches.map((launch) => el("li", {},
    el("b", {}, `${launch.i}`), el("span", {}, launch.nodes.join(", "), launch.rewrite ? el("em", {}, ` ${launch.rewrite}`) : null),
    launch.source ? el("code", {}, launch.source) : null));
  const first = rows.slice(0, 3), rest = rows.slice(3);
  return el("div", {}, el("ul", { class: "records" }, first),
    rest.length ? el("details", { class: "quiet" }, el("summary", {}, `${rest.length} more`), el("ul", { class: "records" }, rest)) : null);
}

function kernelCode(kernel) {
  if (kernel.text) return el("div", {}, el("h4", {}, "Its loop, as generated"), code(kernel.text, kernel.language, "the loop"));
  if (!kernel.file) return null;
  const details = el("details", { class: "quiet", open: kernel.language === "python" }, el("summary", {}, "Its kernel ", el("small", {}, kernel.file)));
  const fill = () => { if (details.open && !details.querySelector("pre")) details.append(code(data.kernels.code[kernel.file], kernel.language, kernel.file)); };
  details.addEventListener("toggle", fill);
  fill();
  return details;
}
