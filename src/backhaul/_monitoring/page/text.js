// Elements and numbers as text. All text goes into text nodes: no name can act as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const find = (id) => document.getElementById(id);

function bytesText(count) {
  if (count < 1000) return `${Math.round(count)} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    count /= 1000;
    if (count < 999.5 || unit === "GB") return `${count.toFixed(count < 10 ? 1 : 0)} ${unit}`;
  }
}
function rateText(rate) {
  return rate === 0 ? "0" : rate < 10 ? rate.toFixed(1) : String(Math.round(rate));
}
function secondsText(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 90 ? `${seconds.toFixed(1)} s` : durationText(seconds);
}
function durationText(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const SIGNS = { up: "✓", joined: "✓", new: "…", silent: "!", suspected: "!", lost: "✕", left: "–" };
const stateBadge = (state, text = state) => make("span", { class: "state", "data-state": state }, `${SIGNS[state] ?? ""} ${text}`);

// A table. A column is [title, function of a row that returns text or a node, whether it is a number].
function table(columns, rows, none) {
  if (!rows.length) return make("p", { class: "empty" }, none);
  const head = columns.map(([title, , number]) =>
    make("th", { scope: "col", class: number ? "number" : title === "" ? "bar" : undefined }, title));
  const body = rows.map((row) =>
    make("tr", {}, columns.map(([title, cell, number]) =>
      make("td", { class: number ? "number" : title === "" ? "bar" : undefined }, cell(row)))));
  return make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}
// A bar beside a number that says the same, so that it needs no text of its own.
function bar(share) {
  const shown = make("i", { "aria-hidden": "true" });
  shown.style.width = `${Math.max(share * 100, 0.5)}%`;
  return shown;
}
