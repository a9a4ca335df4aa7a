// The sidebar, the theme, and the keys.

import { el, replace } from "./dom.js";
import { pipeline } from "./pipeline.js";

const KEYS = [
  ["1, 2, …", "go to a section"],
  ["← →", "the pass before, the next pass"],
  ["t", "light or dark"],
  ["?", "these keys"],
];

export function navigation(sections) {
  const links = sections.map(({ id, title }, i) => el("a", { href: `#${id}` }, title, el("kbd", { "aria-hidden": "true" }, String(i + 1))));
  replace(document.getElementById("sections"), links.map((link) => el("li", {}, link)));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((link) => link.toggleAttribute("aria-current", link.hash === `#${entry.target.id}`));
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  sections.forEach(({ id }) => seen.observe(document.getElementById(id)));
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  addEventListener("keydown", (event) => onKey(event, links));
}

function onKey(event, links) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (/^[1-9]$/.test(event.key)) links[Number(event.key) - 1]?.click();
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    if (!pipeline.step) return;
    pipeline.step(event.key === "ArrowRight" ? 1 : -1);
  } else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
  else return;
  event.preventDefault();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function showKeys() {
  const dialog = document.getElementById("keys");
  replace(dialog, el("h3", {}, "Keys"), el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("form", { method: "dialog" }, el("button", {}, "Close")));
  dialog.showModal();
}
