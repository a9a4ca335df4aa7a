// Where intermediates lie in the arena and when, and what weights and the KV cache take.

import { el, replace, svg, table, tip } from "./dom.js";
import { bounds, chosen, data, onChange } from "./state.js";
import { inBytes, inCount, plural } from "./units.js";

const WIDTH = 860, HEIGHT = 300, LEFT = 74, BOTTOM = 30, TOP = 8;
const SIZES = { F32: 4, BF16: 2, F16: 2, I32: 4, I8: 1, U8: 1 };

export function memory() {
  const cache = el("div", {});
  const draw = () => replace(cache, cacheTable());
  onChange(draw);
  draw();
  return [
    el("h2", {}, "Memory"),
    data.memory.buffers.length ? [
      el("p", { class: "lead" }, "The arena in the largest step. Each block is an intermediate value: from the launch that writes it to the last one that reads it, at its offset."),
      el("div", { class: "plot" }, arena()),
    ] : null,
    el("h3", {}, "KV cache"), cache,
    el("h3", {}, "Weights", el("small", {}, inBytes(data.engine.memory.weights ?? 0))), weightTable(),
  ];
}

function arena() {
  const limits = data.engine.limits;
  const at = (affine) => affine.constant + affine.tokens * limits.max_batch_tokens + affine.logit_rows * limits.max_logit_rows;
  const rows = { T: limits.max_batch_tokens, L: limits.max_logit_rows, 1: 1 };
  const launches = Math.max(data.kernels.launches.length, 1), total = Math.max(at(data.memory.arena), 1);
  const x = (launch) => LEFT + (launch / launches) * (WIDTH - LEFT - 10), y = (byte) => HEIGHT - BOTTOM - (byte / total) * (HEIGHT - BOTTOM - TOP);
  const blocks = data.memory.buffers.map((buffer, i) => {
    const offset = at(buffer.offset), bytes = rows[buffer.rows] * buffer.columns * (SIZES[buffer.dtype] ?? 4);
    const title = `${buffer.name}\n${buffer.dtype} [${buffer.rows}, ${buffer.columns}]: ${inBytes(bytes)} at ${inBytes(offset)}\nlaunches ${buffer.first} to ${buffer.last}`;
    return tip(svg("rect", {
      class: `buffer tone-${i % 5}`, x: x(buffer.first), y: y(offset + bytes), width: Math.max(1.5, x(buffer.last + 1) - x(buffer.first) - 1),
      height: Math.max(1, y(offset) - y(offset + bytes) - 1), rx: 1.5, "aria-label": title,
    }), title);
  });
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => [
    svg("path", { class: "grid", d: `M${LEFT} ${y(share * total)}H${WIDTH - 10}` }),
    svg("text", { x: LEFT - 8, y: y(share * total) + 4, "text-anchor": "end" }, inBytes(share * total)),
  ]);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Memory plan: ${plural(blocks.length, "buffer")} in ${inBytes(total)}` },
    marks, blocks, svg("text", { class: "axis", x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, `launches 0 to ${launches - 1}`));
}

function cacheTable() {
  const cache = data.memory.cache, limits = data.engine.limits;
  const context = Math.min(chosen.context, limits.max_model_len);
  const held = (blocks) => cache.groups.reduce((sum, group) => sum + group.block_bytes * Math.min(blocks, group.blocks), 0);
  const others = cache.groups.filter((group) => group.policy !== null);
  const under = (kind) => kind.group ? ` under ${cache.groups[kind.group].policy}` : "";
  return [
    table([["", "label"], ["Bytes", "num"]], [
      ["one token", inBytes(cache.token_bytes)],
      ...others.map((group) => [`of which ${group.policy} keeps`, inBytes(group.block_bytes / limits.block_size)]),
      [`a block of ${limits.block_size} positions`, inBytes(held(1))],
      [`a sequence of ${inCount(limits.max_model_len)} tokens, the maximum`, inBytes(held(Infinity))],
      ...(others.length ? [["the same for a single sequence, with a step's tokens and drafts in each group", inBytes(cache.sequence_bytes)]] : []),
      [`the largest batch, ${inCount(bounds.batch)} sequences of ${inCount(context)} tokens`, inBytes(held(Math.ceil(context / limits.block_size)) * bounds.batch)],
      [`the largest batch at full length`, inBytes(held(Infinity) * bounds.batch)],
    ], { class: "plain" }),
    el("p", { class: "hint" }, cache.kinds.map((kind) => `${plural(kind.layers, "layer")}${under(kind)}: ${kind.kv_heads} heads of ${kind.head_dim} keys and ${kind.value_dim} values, ${kind.dtype}`).join("; ")),
  ];
}

function weightTable() {
  return table([["Weight", "wide"], ["Tensors", "num"], ["Shape", ""], ["Dtype", ""], ["Layout", ""], ["Bytes", "num"]],
    data.memory.weights.map((row) => [el("code", {}, row.name), inCount(row.count), row.shape.join(" × "), row.dtype, row.layout.replace("_", " "), inBytes(row.bytes)]), { class: "weights" });
}
