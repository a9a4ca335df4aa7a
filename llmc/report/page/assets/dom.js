// Elements from plain values. Text is only ever set as text: nothing from a model is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

// A table with a head; columns: [label, class]; rows: arrays of cells, each a value or an element.
export function table(columns, rows, attributes = {}) {
  const head = el("tr", {}, columns.map(([label, kind]) => el("th", { scope: "col", class: kind }, label)));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, i) => el("td", { class: columns[i][1] }, cell))));
  return el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, head), el("tbody", {}, body)));
}

// The tooltip next to the pointer.
export function tip(element, text) {
  const box = document.getElementById("tooltip");
  const show = (event) => {
    box.textContent = typeof text === "function" ? text() : text;
    box.hidden = false;
    const x = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 12);
    const y = Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 12);
    box.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
  };
  element.addEventListener("pointermove", show);
  element.addEventListener("pointerleave", () => { box.hidden = true; });
  return element;
}
