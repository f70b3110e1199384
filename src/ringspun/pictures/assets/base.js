// What every picture is made with. Numbers come from the element `data`; nothing is counted here that is not in it.
const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["full", "causal", "anticausal", "band"]; // in the order of the figures' own list
const KIND_WORDS = {
  full: "full: every pair", causal: "causal: up to a diagonal", anticausal: "anticausal: from a diagonal on",
  band: "band: between two diagonals", mixed: "of several kinds", idle: "idle",
};
const data = JSON.parse(document.getElementById("data").textContent);
const calm = matchMedia("(prefers-reduced-motion: reduce)"), narrow = matchMedia("(max-width: 560px)");

// An element with attributes and children; a child that is no element is text.
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

const number = value => value.toLocaleString("en-US", {maximumFractionDigits: 3});
const counted = (n, one, many = one + "s") => `${number(n)} ${n === 1 ? one : many}`;
const sum = values => values.reduce((a, b) => a + b, 0);
const most = values => values.reduce((a, b) => Math.max(a, b), 0);
const range = n => Array.from({length: n}, (_, i) => i);

function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  }
  return `${n} B`;
}

function seconds(s) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (Math.abs(s) >= size) return `${number(Number((s / size).toPrecision(3)))} ${unit}`;
  }
  return `${number(Number((s * 1e9).toPrecision(3)))} ns`;
}

// Of the block that a rank owns, round the circle of colours; neighbours of a long ring differ little, numbers tell.
const hue = (rank, size) => 255 + (360 * rank) / Math.max(size, 3);

// Rounds up to 1, 2 or 5 times a power of ten: between two marks of an axis.
function stride(length, marks) {
  const least = length / marks, power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map(n => n * power).find(n => n >= least * (1 - 1e-9));
}

// A table; cells that are numbers stand at the right. `keep`: its caption is for all, not for screen readers alone.
function table(caption, heads, rows) {
  const isNumber = heads.map((_, i) => rows.every(row => typeof row[i] === "number"));
  const cell = (value, i) => el(i ? "td" : "th", {class: isNumber[i] ? "number" : null, scope: i ? null : "row"},
    typeof value === "number" ? number(value) : value);
  return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption},
    el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head, i) =>
        el("th", {scope: "col", class: isNumber[i] ? "number" : null}, head)))),
      el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map(cell))))));
}

// A table that is made when it is asked for: there may be thousands of rows.
function folded(words, make) {
  const details = el("details", {}, el("summary", {}, words));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(make()); });
  return details;
}

// A choice of one among several; `changed` is told of the value.
function choice(legend, name, values, changed, chosen = values[0]) {
  const inputs = values.map(value => {
    const input = el("input", {type: "radio", name, value, checked: value === chosen});
    input.addEventListener("change", () => changed(value));
    return el("label", {}, input, el("span", {}, value));
  });
  return el("fieldset", {class: "choice"}, el("legend", {}, legend), ...inputs);
}

function legend(items) {
  return el("ul", {class: "legend"}, ...items.map(([icon, words]) => el("li", {}, icon, words)));
}

const swatch = (className, style = null) =>
  svg("svg", {viewBox: "0 0 10 10", "aria-hidden": "true"}, svg("rect", {width: 10, height: 10, rx: 2, class: className, style}));

const notes = figure => figure.notes.map(note => el("p", {class: "note"}, note + "."));
