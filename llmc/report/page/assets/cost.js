// What launches cost in the chosen step: the prediction of llmc/prediction/launch_time.py.

import { expression } from "./expression.js";
import { chosen, data, measuredStep, shape } from "./state.js";

export function runs(launch, values) {
  if (!launch.only) return true;
  const count = { T: values.T, L: values.L, 1: 1 }[launch.only.rows];
  return launch.only.first <= count && (launch.only.last === null || count <= launch.only.last);
}

// A kind without measurements is assumed to multiply as fast as the fastest one.
export function kindRates(kind, rates = chosen.rates) {
  const fastest = Math.max(...Object.values(rates.kinds).map((each) => each.multiply));
  return rates.kinds[kind] ?? { multiply: fastest, reach: [], pack: null, serial: 0, bandwidth: null };
}

// Of a kernel's best rate with so many rows: KindRates.share.
function share(reach, rows) {
  if (!reach.length) return 1;
  const first = reach[0], last = reach.at(-1);
  const next = reach.findIndex((each, i) => i > 0 && reach[i - 1].rows <= rows && rows <= each.rows);
  if (next > 0) {
    const few = reach[next - 1], many = reach[next], part = (rows - few.rows) / (many.rows - few.rows);
    return rows / (((1 - part) * few.rows) / few.share + (part * many.rows) / many.share);
  }
  return rows > last.rows ? last.share : (first.share * rows) / first.rows;
}

// bytes, flops, seconds, and what the time goes to: memory, arithmetic or packing.
export function launchCost(launch, values, rates = chosen.rates) {
  const bytes = expression(launch.bytes)(values), flops = expression(launch.flops)(values);
  const kind = kindRates(launch.kind, rates), parts = expression(launch.parts)(values);
  const rows = expression(launch.rows)(values) / parts, depth = expression(launch.depth)(values) / parts;
  const wholeTiles = (Math.ceil(depth / launch.depth_tile) * launch.depth_tile) / depth;
  const transfer = bytes / (kind.bandwidth ?? rates.bandwidth);
  const arithmetic = flops > 0 ? (flops * wholeTiles) / (kind.multiply * share(kind.reach, rows)) : 0;
  const packing = kind.pack === null ? 0 : expression(launch.packed)(values) / kind.pack;
  const longer = Math.max(transfer, arithmetic), shorter = Math.min(transfer, arithmetic);
  const shared = launch.shared || values.T > 1 ? rates.launch : 0;
  const seconds = shared + packing + longer + kind.serial * shorter;
  const bound = packing > longer ? "packing" : transfer >= arithmetic ? "memory" : "compute";
  return { bytes, flops, seconds, bound };
}

// One row a class of launches, the longest first; classes that the step does not launch are left out.
export function classCosts() {
  const values = shape(), measured = measuredStep();
  const seconds = new Map(measured?.launches.map((each) => [each.launch, each.seconds]));
  const rows = data.kernels.classes.map((kernel, index) => (
    { kernel, index, count: 0, bytes: 0, flops: 0, seconds: 0, measured: measured ? 0 : null, bound: "memory" }
  ));
  data.kernels.launches.forEach((launch, i) => {
    if (!runs(launch, values)) return;
    const row = rows[launch.class], cost = launchCost(launch, values);
    row.count++;
    row.bytes += cost.bytes;
    row.flops += cost.flops;
    row.seconds += cost.seconds;
    // Launches of a class can differ in their rows: the one that takes longest speaks for all.
    if (!(cost.seconds <= row.longest)) Object.assign(row, { longest: cost.seconds, bound: cost.bound, kind: launch.kind });
    if (measured) row.measured += seconds.get(i) ?? 0;
  });
  return rows.filter((row) => row.count).sort((a, b) => (b.measured ?? b.seconds) - (a.measured ?? a.seconds));
}

export function totals(rows) {
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  return {
    count: sum("count"), bytes: sum("bytes"), flops: sum("flops"), seconds: sum("seconds"),
    measured: rows.length && rows[0].measured !== null ? sum("measured") : null,
  };
}
