// Code with its comments, strings, numbers and keywords marked, and numbered lines.

import { el } from "./dom.js";

const WORDS = {
  cpp: "alignas|auto|bool|break|case|char|class|const|constexpr|continue|double|else|enum|extern|false|float|for|if|" +
    "inline|int|int32_t|int64_t|namespace|nullptr|return|sizeof|static|static_cast|reinterpret_cast|struct|switch|" +
    "template|true|typename|uint16_t|uint32_t|uint64_t|unsigned|using|void|while",
  python: "and|as|assert|break|class|continue|def|elif|else|False|for|from|if|import|in|is|lambda|None|not|or|pass|" +
    "raise|return|True|while|with|yield",
};
const COMMENT = { cpp: "//[^\\n]*|/\\*[\\s\\S]*?\\*/|^#[^\\n]*", python: '#[^\\n]*|"""[\\s\\S]*?"""' };

function pattern(language) {
  return new RegExp(
    `(?<comment>${COMMENT[language]})|(?<string>"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*')|` +
    `(?<number>\\b\\d[\\w.]*)|(?<word>\\b(?:${WORDS[language]})\\b)|(?<call>\\b\\w+(?=\\())`, "gm");
}

export function code(text, language, label) {
  const block = el("code", {});
  let at = 0;
  for (const match of text.matchAll(pattern(language))) {
    if (match.index > at) block.append(text.slice(at, match.index));
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    block.append(el("span", { class: `c-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  block.append(text.slice(at));
  return el("pre", { class: "code", tabindex: "0", "aria-label": label }, block);
}
