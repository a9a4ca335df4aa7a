// Quantities as people write them.

function scaled(value, units, base) {
  let i = 0;
  while (Math.abs(value) >= base && i < units.length - 1) { value /= base; i++; }
  const digits = i === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[i]}`;
}

export const inBytes = (count) => scaled(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);

export const inFlops = (count) => scaled(count, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"], 1000);

export const inRate = (rate) => scaled(rate, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"], 1000);

export const inBandwidth = (rate) => scaled(rate, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);

export function inSeconds(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1e-6) return `${(seconds * 1e9).toFixed(0)} ns`;
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(seconds < 1e-5 ? 2 : 1)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(2)} ms` : `${seconds.toFixed(2)} s`;
}

export const inCount = (count) => count.toLocaleString("en");

export const inPercent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${(share * 100).toFixed(1)}%`);

export const plural = (count, word) => `${inCount(count)} ${word}${count === 1 ? "" : "s"}`;
