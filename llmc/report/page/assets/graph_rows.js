// A graph as rows, one a node in order of execution, with rails at the side that lead each value to its users.
// Stretches that repeat (layers) are drawn once.

import { el, replace, svg } from "./dom.js";
import { data } from "./state.js";
import { plural } from "./units.js";

const ROW = 25, LANE = 11, MOST_LANES = 14;
const CALL = /^([\w.<>]+)\(([\s\S]*)\)$/;
const parsed = [];

// The node of a line: name, type, op (null for an input or a weight), arguments, inputs.
export function nodeOf(number) {
  if (parsed[number]) return parsed[number];
  const line = data.lines[number];
  const equals = line.indexOf(" = ");
  const [name, type] = split(line.slice(1, equals), ": ");
  const body = line.slice(equals + 3), call = CALL.exec(body);
  const inputs = call ? [...call[2].matchAll(/%(\w+)/g)].map((match) => match[1]) : [];
  const leaf = /^(input|weight |constant )/.test(body) || !call || (!inputs.length && /weight ['"]|constant /.test(body));
  parsed[number] = { number, line, name, type, op: leaf ? null : call[1], arguments: leaf ? body : call[2], inputs: leaf ? [] : inputs };
  return parsed[number];
}

function split(text, at) {
  const i = text.indexOf(at);
  return [text.slice(0, i), text.slice(i + at.length)];
}

export function nodesOf(graph) {
  const all = graph.nodes.map(nodeOf);
  return { leaves: all.filter((node) => node.op === null), working: all.filter((node) => node.op !== null) };
}

// marks: for a node's name "added", "removed" or "changed". onPick: called with a node.
export function graphRows(graph, marks, { expanded, onPick }) {
  const { leaves, working } = nodesOf(graph);
  const index = new Map(working.map((node, i) => [node.name, i]));
  const repeats = expanded ? [] : graph.repeats.map(([start, period, count]) => ({ start, period, count }));
  const shown = shownRows(working, repeats);
  const rowOf = rowLookup(shown, repeats);
  const rails = layRails(shown, working, index, rowOf, repeats);
  const body = el("div", { class: "rows", role: "list" });
  const elements = new Map();
  let block = null;
  shown.forEach((i, row) => {
    const node = working[i];
    const repeat = repeats.find((r) => i >= r.start && i < r.start + r.period);
    if (repeat && i === repeat.start) {
      block = el("div", { class: "layer", role: "group", "aria-label": `${repeat.count} identical layers` },
        el("div", { class: "layer-head" }, `${repeat.count} × identical`, el("small", {}, `${plural(repeat.period, "node")} each`)));
      body.append(block);
    }
    const element = nodeRow(node, rails[row], rails.width, markOf(working, i, repeat, marks), onPick);
    elements.set(row, element);
    (repeat ? block : body).append(element);
  });
  linkRows(elements, shown, working, index, rowOf);
  return el("div", { class: "graph" }, leafList(leaves, marks, onPick), body);
}

function shownRows(working, repeats) {
  const shown = [];
  for (let i = 0; i < working.length; i++) {
    const repeat = repeats.find((r) => i >= r.start + r.period && i < r.start + r.period * r.count);
    if (repeat) i = repeat.start + repeat.period * repeat.count - 1;
    else shown.push(i);
  }
  return shown;
}

// From a node's index to the row that stands for it.
function rowLookup(shown, repeats) {
  const rows = new Map(shown.map((i, row) => [i, row]));
  return (i) => {
    const repeat = repeats.find((r) => i >= r.start && i < r.start + r.period * r.count);
    return rows.get(repeat ? repeat.start + ((i - repeat.start) % repeat.period) : i);
  };
}

// A repeated node's mark, and in how many of the stretches it has one.
function markOf(working, i, repeat, marks) {
  if (!repeat) return { kind: marks.get(working[i].name) ?? null, share: null };
  const kinds = [];
  for (let k = 0; k < repeat.count; k++) kinds.push(marks.get(working[i + k * repeat.period].name) ?? null);
  const marked = kinds.filter((kind) => kind !== null);
  return { kind: marked[0] ?? null, share: marked.length && marked.length < repeat.count ? `${marked.length} of ${repeat.count}` : null };
}

// For each row: which lanes pass by, which end in it, and its own.
function layRails(shown, working, index, rowOf, repeats) {
  const sources = shown.map((i) => [...new Set(working[i].inputs.filter((name) => index.has(name)).map((name) => rowOf(index.get(name))))]);
  const last = shown.map((_, row) => row);
  sources.forEach((from, row) => from.forEach((source) => { if (source < row) last[source] = Math.max(last[source], row); }));
  for (const repeat of repeats) {
    const first = rowOf(repeat.start), end = first + repeat.period - 1;
    for (let i = repeat.start + repeat.period; i < repeat.start + 2 * repeat.period; i++) {
      for (const name of working[i].inputs) {
        const source = index.get(name);
        if (source >= repeat.start && source < repeat.start + repeat.period) last[rowOf(source)] = Math.max(last[rowOf(source)], end);
      }
    }
  }
  const lanes = [], rails = [];
  let width = 1;
  shown.forEach((_, row) => {
    const before = lanes.slice();
    const ends = sources[row].filter((source) => source < row).map((source) => lanes.indexOf(source)).filter((lane) => lane >= 0);
    lanes.forEach((source, lane) => { if (source !== null && last[source] <= row) lanes[lane] = null; });
    let own = ends.find((lane) => lanes[lane] === null) ?? lanes.indexOf(null);
    if (own === -1) own = lanes.length;
    if (last[row] > row) lanes[own] = row;
    while (lanes.length && lanes[lanes.length - 1] === null) lanes.pop();
    rails.push({ before, after: lanes.slice(), ends, own });
    width = Math.max(width, before.length, lanes.length, own + 1);
  });
  rails.width = Math.min(width, MOST_LANES);
  return rails;
}

function drawRails(rail, width) {
  const x = (lane) => Math.min(lane, width - 1) * LANE + LANE / 2, middle = ROW / 2;
  const lines = [];
  rail.before.forEach((source, lane) => {
    if (source === null) return;
    if (rail.after[lane] === source) lines.push(svg("path", { d: `M${x(lane)} 0V${ROW}` }));
    if (rail.ends.includes(lane)) {
      lines.push(svg("path", { class: "in", d: `M${x(lane)} 0C${x(lane)} ${middle} ${x(rail.own)} 2 ${x(rail.own)} ${middle}` }));
    } else if (rail.after[lane] !== source) lines.push(svg("path", { d: `M${x(lane)} 0V${middle}` }));
  });
  if (rail.after[rail.own] !== undefined && rail.after[rail.own] !== rail.before[rail.own]) {
    lines.push(svg("path", { d: `M${x(rail.own)} ${middle}V${ROW}` }));
  }
  const dot = svg("circle", { cx: x(rail.own), cy: middle, r: 3.5 });
  return svg("svg", { class: "rails", width: width * LANE, height: ROW, "aria-hidden": "true" }, lines, dot);
}

function nodeRow(node, rail, width, mark, onPick) {
  const [space, ...rest] = node.op.split(".");
  return el("button", {
    type: "button", role: "listitem", class: `row ${mark.kind ?? ""}`, "data-node": node.name,
    "aria-label": `${node.op} ${node.name} ${node.type}${mark.kind ? `, ${mark.kind}` : ""}`, onclick: () => onPick(node),
  },
  drawRails(rail, width),
  el("span", { class: `op ${space}` }, rest.length ? rest.join(".") : space),
  el("span", { class: "name" }, node.name),
  mark.share && el("span", { class: "share" }, mark.share),
  el("span", { class: "type" }, node.type));
}

// While a row is pointed at, what it takes and who takes it stand out.
function linkRows(elements, shown, working, index, rowOf) {
  const related = new Map(shown.map((_, row) => [row, new Set()]));
  shown.forEach((i, row) => {
    for (const name of working[i].inputs) {
      const source = index.has(name) ? rowOf(index.get(name)) : undefined;
      if (source === undefined || source === row) continue;
      related.get(row).add([elements.get(source), "input"]);
      related.get(source).add([elements.get(row), "user"]);
    }
  });
  for (const [row, element] of elements) {
    const mark = (on) => () => related.get(row).forEach(([other, kind]) => other.classList.toggle(`is-${kind}`, on));
    for (const event of ["pointerenter", "focus"]) element.addEventListener(event, mark(true));
    for (const event of ["pointerleave", "blur"]) element.addEventListener(event, mark(false));
  }
}

function leafList(leaves, marks, onPick) {
  const changed = leaves.filter((node) => marks.has(node.name));
  const weights = leaves.filter((node) => node.arguments !== "input").length;
  const summary = el("summary", {}, `${plural(leaves.length - weights, "input")}, ${plural(weights, "weight")}`,
    changed.length ? el("span", { class: "share" }, `${changed.length} changed`) : null);
  const details = el("details", { class: "leaves" }, summary);
  const list = el("div", {});
  details.append(list);
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    replace(list, leaves.map((node) => el("button", {
      type: "button", class: `row ${marks.get(node.name) ?? ""}`, onclick: () => onPick(node),
    }, el("span", { class: "name" }, node.name), el("span", { class: "type" }, node.type))));
  });
  return details;
}

// What became of the nodes of one graph in the next.
export function compareGraphs(before, after) {
  const old = new Map(before.nodes.map((number) => [nodeOf(number).name, number]));
  const now = new Map(after.nodes.map((number) => [nodeOf(number).name, number]));
  const marks = { before: new Map(), after: new Map() };
  for (const [name, number] of old) {
    if (!now.has(name)) marks.before.set(name, "removed");
    else if (now.get(name) !== number) { marks.before.set(name, "changed"); marks.after.set(name, "changed"); }
  }
  for (const name of now.keys()) if (!old.has(name)) marks.after.set(name, "added");
  return marks;
}
