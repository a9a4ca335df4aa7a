// The passes in order, and the graph before and after each.

import { append, el, replace, svg, tip } from "./dom.js";
import { compareGraphs, graphRows, nodesOf } from "./graph_rows.js";
import { data } from "./state.js";
import { inCount, plural } from "./units.js";

const HEIGHT = 92;
const view = { pass: 0, expanded: false, list: null };

// graphs[i] came out of pass graphs[i].pass; passes without one changed nothing.
const graphAfter = (number) => data.graphs.findLast((graph) => graph.pass <= number);
const working = (graph) => nodesOf(graph).working.length;

export function pipeline() {
  if (!data.graphs.length) return [el("h2", {}, "Pipeline"), el("p", { class: "empty" }, "This engine has no graphs; builds of newer versions of llmc write them.")];
  const strip = el("div", { class: "timeline" }), detail = el("div", {});
  view.pass = mostTelling();
  const select = (pass, focus = false) => {
    view.pass = Math.min(data.passes.length - 1, Math.max(0, pass));
    view.list = null;
    draw();
    if (focus) strip.querySelector("[aria-current]")?.focus();
  };
  const draw = () => { replace(strip, timeline(select)); replace(detail, passDetail(select, draw)); };
  draw();
  pipeline.step = (by) => select(nextChanged(by));
  return [
    el("h2", {}, "Pipeline"),
    el("p", { class: "lead" }, "Each bar is a pass; its height is the number of operations in the graph after it. ",
      el("span", { class: "hint" }, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " step through the passes that changed something.")),
    strip, detail,
  ];
}

// Where to begin: the fusion that saves the most operations says the most about a pipeline.
function mostTelling() {
  const saved = (i) => working(graphAfter(i)) - working(graphAfter(i + 1));
  return data.passes.reduce((best, each, i) => (/^fuse/.test(each.name) && saved(i) > saved(best) ? i : best), Math.max(0, data.passes.findIndex((each) => each.rewrites.length)));
}

function nextChanged(by) {
  for (let i = view.pass + by; i >= 0 && i < data.passes.length; i += by) if (data.passes[i].rewrites.length) return i;
  return view.pass;
}

function timeline(select) {
  const most = Math.max(...data.graphs.map(working));
  const bars = data.passes.map((each, i) => {
    const graph = graphAfter(i + 1), height = Math.max(3, (working(graph) / most) * HEIGHT);
    const bar = el("button", {
      type: "button", class: `bar stage-${each.stage} ${each.rewrites.length ? "" : "idle"}`, "aria-current": i === view.pass ? "step" : null,
      "aria-label": `pass ${i + 1}, ${each.name}: ${plural(each.rewrites.length, "rewrite")}`, onclick: () => select(i),
    }, el("span", { style: `height:${height.toFixed(1)}px` }), each.refusals.length ? el("i", { class: "refused" }) : null);
    return tip(bar, () => `${i + 1} ${each.name}\n${plural(each.rewrites.length, "rewrite")}, ${each.refusals.length} refused\n${working(graph)} operations, stage ${each.stage}`);
  });
  const stages = [];
  data.passes.forEach((each) => {
    if (stages.at(-1)?.stage === each.stage) stages.at(-1).count++;
    else stages.push({ stage: each.stage, count: 1 });
  });
  return [
    el("div", { class: "bars", role: "group", "aria-label": "Passes" }, bars),
    el("div", { class: "stages", "aria-hidden": "true" }, stages.map(({ stage, count }) => el("span", { class: `stage-${stage}`, style: `flex:${count}` }, stage))),
  ];
}

function passDetail(select, draw) {
  const each = data.passes[view.pass], number = view.pass + 1;
  const before = graphAfter(number - 1), after = graphAfter(number);
  const head = el("div", { class: "pass-head" },
    el("button", { type: "button", class: "arrow", "aria-label": "pass before", onclick: () => select(nextChanged(-1)) }, "←"),
    el("div", {}, el("h3", {}, each.name), el("p", { class: "facts" },
      el("span", { class: "chip" }, `pass ${number} of ${data.passes.length}`),
      el("span", { class: "chip" }, each.numerics),
      el("span", { class: `chip stage-${each.stage}` }, each.stage),
      `${inCount(working(before))} → ${inCount(working(after))} operations`)),
    el("button", { type: "button", class: "arrow", "aria-label": "next pass", onclick: () => select(nextChanged(1)) }, "→"));
  const tabs = el("div", { class: "tabs" },
    listButton("rewrites", plural(each.rewrites.length, "rewrite"), each.rewrites.length, draw),
    listButton("refusals", `${each.refusals.length} refused`, each.refusals.length, draw),
    el("label", { class: "check" }, el("input", { type: "checkbox", checked: view.expanded, onchange: (event) => { view.expanded = event.target.checked; draw(); } }), "every layer"));
  const lists = el("div", {});
  if (view.list === "rewrites") append(lists, [rewriteList(each)]);
  if (view.list === "refusals") append(lists, [refusalList(each)]);
  if (before === after) return [head, tabs, lists, el("p", { class: "empty" }, "This pass found nothing to rewrite.")];
  const marks = compareGraphs(before, after), info = el("div", { class: "node-info", "aria-live": "polite" });
  const onPick = (node) => replace(info, nodeInfo(node));
  const side = (title, graph, own) => el("section", { class: "side-pane", "aria-label": title },
    el("h4", {}, title, el("small", {}, summary(own))), graphRows(graph, own, { expanded: view.expanded, onPick }));
  replace(info, el("p", { class: "hint" }, "Select a node to see its origin."));
  return [head, tabs, lists, el("div", { class: "panes" }, side("before", before, marks.before), side("after", after, marks.after)), info];
}

function listButton(name, label, count, draw) {
  return el("button", {
    type: "button", class: "tab", disabled: !count, "aria-expanded": String(view.list === name),
    onclick: () => { view.list = view.list === name ? null : name; draw(); },
  }, label);
}

function summary(marks) {
  const counts = {};
  for (const kind of marks.values()) counts[kind] = (counts[kind] ?? 0) + 1;
  return Object.entries(counts).map(([kind, count]) => el("span", { class: `count ${kind}` }, `${inCount(count)} ${kind}`));
}

export function nodeInfo(node) {
  const [source, rewrite] = data.provenance.nodes[node.name] ?? [null, null];
  return [
    el("code", { class: "line" }, node.line),
    el("dl", {},
      el("dt", {}, "made by"), el("dd", {}, rewrite ?? (node.op === null ? "the model's inputs and weights" : "capture")),
      el("dt", {}, "source"), el("dd", {}, source === null || source === undefined ? "not from a line of the model" : el("code", {}, data.provenance.sources[source]))),
  ];
}

// Rewrites that differ only in numbers, as one line.
function rewriteList(each) {
  const groups = new Map();
  for (const rewrite of each.rewrites) {
    const key = `${rewrite.description.replace(/\d+/g, "#")}|${rewrite.source}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(rewrite);
  }
  return el("ul", { class: "records" }, [...groups.values()].map((group) => el("li", {},
    el("b", {}, group.length === 1 ? `#${group[0].number}` : `#${group[0].number} … #${group.at(-1).number}`),
    el("span", {}, group[0].description, group.length > 1 ? el("em", {}, ` and ${group.length - 1} alike`) : null),
    group[0].source ? el("code", {}, group[0].source) : null)));
}

function refusalList(each) {
  return el("ul", { class: "records refusals" }, each.refusals.map((refusal) => el("li", {},
    el("b", {}, refusal.node), el("span", {}, refusal.reason), refusal.source ? el("code", {}, refusal.source) : null)));
}
