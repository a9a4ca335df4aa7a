// Every kernel against what memory and arithmetic allow: intensity across, rate upwards, both logarithmic.

import { classCosts, kindRates } from "./cost.js";
import { el, replace, svg, tip } from "./dom.js";
import { change, chosen, data, onChange } from "./state.js";
import { inBandwidth, inRate, inSeconds } from "./units.js";

const WIDTH = 860, HEIGHT = 400, LEFT = 88, RIGHT = 20, TOP = 18, BOTTOM = 46, LABEL = 14, LETTER = 6.7;

export function roofline() {
  if (!data.kernels.launches.length) return null;
  const plot = el("div", { class: "plot" });
  const draw = () => replace(plot, drawing());
  onChange(draw);
  draw();
  return [
    el("h2", {}, "Roofline"),
    el("p", { class: "lead" }, "Memory limits a kernel under the slope, and arithmetic one under the flat roof. The area is the share of the step's time."),
    plot,
  ];
}

function drawing() {
  const rows = classCosts().filter((row) => row.flops > 0 && row.bytes > 0);
  const whole = rows.reduce((total, row) => total + (row.measured ?? row.seconds), 0);
  const points = rows.map((row) => {
    const seconds = row.measured || row.seconds;
    return { row, x: row.flops / row.bytes, y: row.flops / seconds, share: seconds / whole };
  });
  const roofs = [...new Set(rows.map((row) => row.kind))].map((kind) => ({ kind, rate: kindRates(kind).multiply }));
  const bandwidth = chosen.rates.bandwidth, peak = Math.max(...roofs.map((roof) => roof.rate), 1);
  const x = scale([...points.map((p) => p.x), peak / bandwidth], LEFT, WIDTH - RIGHT);
  const y = scale([...points.map((p) => p.y), peak * 1.6], HEIGHT - BOTTOM, TOP);
  const lowest = Math.max(x.low, y.low / bandwidth), slope = lowest * ((peak / bandwidth / lowest) ** 0.2);
  roofs.sort((a, b) => b.rate - a.rate);
  const shapes = roofs.map(({ rate }) => ({ from: { x: x(lowest), y: y(lowest * bandwidth) }, bend: { x: x(rate / bandwidth), y: y(rate) } }));
  const lines = shapes.map(({ from, bend }) => svg("path", { class: "roof", d: `M${from.x} ${from.y}L${bend.x} ${bend.y}H${WIDTH - RIGHT}` }));
  const names = roofLabels(roofs, shapes, y);
  const angle = (Math.atan2(y(slope * bandwidth) - y(slope * 2 * bandwidth), x(slope * 2) - x(slope)) * 180) / Math.PI;
  const marks = points.map(({ row, x: px, y: py, share }) => tip(svg("circle", {
    class: `point ${row.bound} ${row.index === chosen.kernel ? "picked" : ""}`, cx: x(px), cy: y(py), r: radius(share),
    tabindex: "0", role: "button", "aria-label": row.kernel.name, onclick: () => change({ kernel: row.index }),
    onkeydown: (event) => { if (event.key === "Enter") change({ kernel: row.index }); },
  }), () => `${row.kernel.name}\n${px.toPrecision(3)} FLOP/B, ${inRate(py)}\n${inSeconds(row.measured || row.seconds)} per step, ${row.measured ? "measured" : "predicted"}`));
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "roofline", role: "img", "aria-label": "Roofline of all kernels" },
    grid(x, y), lines, names,
    // Lifted off the slope after the turn: before it, a steep slope would run through the text.
    svg("text", { class: "roof-label", transform: `translate(${x(slope)} ${y(slope * bandwidth)}) rotate(${-angle}) translate(0 -8)`, "text-anchor": "middle" }, inBandwidth(bandwidth)),
    marks, labels(points, shapes, x, y));
}

// The roofs' names at the right, highest first. One that a roof would run through, as there is no room over its own,
// stands above with the next higher one's.
function roofLabels(roofs, shapes, y) {
  const groups = [], named = ({ kind, rate }) => `${kind} ${inRate(rate)}`;
  const isFree = (roof) => {
    const width = LETTER * named(roof).length;
    return !shapes.some((shape) => crosses({ left: WIDTH - RIGHT - width, top: y(roof.rate) - 4 - LABEL, width }, shape));
  };
  for (const roof of roofs) {
    groups.push([roof]);
    while (groups.length > 1) {
      const above = groups.at(-2), last = groups.at(-1);
      if (y(last[0].rate) - y(above.at(-1).rate) >= LABEL * last.length + 6 && isFree(last[0])) break;
      groups.splice(-2, 2, [...above, ...last]);
    }
  }
  return groups.flatMap((group) => group.map((roof, i) => svg("text", {
    class: "roof-label", x: WIDTH - RIGHT, y: y(group[0].rate) - 7 - LABEL * (group.length - 1 - i), "text-anchor": "end",
  }, named(roof))));
}

// Names of the few kernels that take most of the time: beside their points, as near as nothing is in the way.
function labels(points, roofs, x, y) {
  const circles = points.map((point) => ({ x: x(point.x), y: y(point.y), r: radius(point.share) }));
  const most = points.map((point, i) => ({ ...point, circle: circles[i] })).sort((a, b) => b.share - a.share).slice(0, 5);
  const placed = [];
  for (const { row, circle } of most.sort((a, b) => b.y - a.y)) {
    const text = row.kernel.name, width = LETTER * text.length, right = circle.x <= 0.62 * WIDTH;
    const boxes = nearby.flatMap((down) => [right, !right].map((after) => ({
      left: after ? circle.x + circle.r + 5 : circle.x - circle.r - 5 - width, top: circle.y - LABEL / 2 + down, width, text,
    })));
    const free = boxes.find((box) => box.left > LEFT && box.left + width < WIDTH - RIGHT && box.top > TOP && box.top + LABEL < HEIGHT - BOTTOM
      && !circles.some((other) => covers(box, other)) && !placed.some((other) => overlap(box, other)) && !roofs.some((roof) => crosses(box, roof)));
    if (free) placed.push(free);
  }
  return placed.map(({ left, top, text }) => svg("text", { class: "point-label", x: left, y: top + LABEL - 3 }, text));
}

const nearby = Array.from({ length: 61 }, (_, i) => (i % 2 ? 2 : -2) * i);
const radius = (share) => 5 + 20 * Math.sqrt(share);
const overlap = (a, b) => a.left < b.left + b.width && b.left < a.left + a.width && Math.abs(a.top - b.top) < LABEL;

function covers(box, circle) {
  const dx = Math.max(box.left - circle.x, 0, circle.x - box.left - box.width), dy = Math.max(box.top - circle.y, 0, circle.y - box.top - LABEL);
  return Math.hypot(dx, dy) < circle.r + 2;
}

// A roof is straight from its beginning to its bend, and level from there.
function crosses(box, { from, bend }) {
  const rise = (bend.y - from.y) / (bend.x - from.x), at = (left) => (left < bend.x ? from.y + rise * (left - from.x) : bend.y);
  const heights = [box.left, box.left + box.width, Math.min(Math.max(bend.x, box.left), box.left + box.width)].map(at);
  return Math.min(...heights) < box.top + LABEL + 1 && Math.max(...heights) > box.top - 1;
}

function scale(values, from, to) {
  const low = 10 ** Math.floor(Math.log10(Math.min(...values)) - 0.1), high = 10 ** Math.ceil(Math.log10(Math.max(...values)) + 0.02);
  const place = (value) => from + ((Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))) * (to - from);
  return Object.assign(place, { low, high });
}

function grid(x, y) {
  const parts = [];
  for (let value = x.low; value <= x.high * 1.01; value *= 10) {
    parts.push(svg("path", { class: "grid", d: `M${x(value)} ${TOP}V${HEIGHT - BOTTOM}` }), svg("text", { x: x(value), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, `${+value.toPrecision(1)}`));
  }
  for (let value = y.low; value <= y.high * 1.01; value *= 10) {
    parts.push(svg("path", { class: "grid", d: `M${LEFT} ${y(value)}H${WIDTH - RIGHT}` }), svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, inRate(value).replace(/\.0+ /, " ")));
  }
  parts.push(svg("text", { class: "axis", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "operations per byte moved"));
  return parts;
}
