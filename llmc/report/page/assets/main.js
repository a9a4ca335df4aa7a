// Draw every section, then wire the keys.

import { controls } from "./controls.js";
import { append, el } from "./dom.js";
import { kernels } from "./kernels.js";
import { memory } from "./memory.js";
import { navigation } from "./navigation.js";
import { overview } from "./overview.js";
import { pipeline } from "./pipeline.js";
import { pruning } from "./pruning.js";
import { qualityTitle, quantization } from "./quantization.js";
import { ranks } from "./ranks.js";
import { roofline } from "./roofline.js";
import { sparsity } from "./sparsity.js";

function main() {
  const sections = [
    { id: "overview", title: "Overview", parts: overview() },
    { id: "pipeline", title: "Pipeline", parts: pipeline() },
    { id: "pruning", title: "Pruning", parts: pruning() },
    { id: "kernels", title: "Kernels", parts: kernels(controls()) },
    { id: "roofline", title: "Roofline", parts: roofline() },
    { id: "memory", title: "Memory", parts: memory() },
    { id: "ranks", title: "Ranks", parts: ranks() },
    { id: "quantization", title: qualityTitle(), parts: quantization() },
    { id: "sparsity", title: "Sparsity", parts: sparsity() },
  ].filter((section) => section.parts);
  for (const { id, title, parts } of sections) {
    const section = el("section", { id, "aria-label": title, tabindex: "-1" });
    append(section, [parts]);
    document.getElementById("main").append(section);
  }
  navigation(sections);
  document.documentElement.dataset.ready = "";
}

main();
