"use strict";
// The interactive parts of the report. No libraries, no network.
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);

function element(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function create(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function number(value) {
  return Math.abs(value) >= 1e7 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(Number(value.toPrecision(Math.abs(value) >= 1e4 ? 7 : 4)));
}

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// Color scheme: the system's, or the one of the switch.
const theme = document.getElementById("theme");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  theme.textContent = name === "dark" ? "Light mode" : "Dark mode";
}
const systemDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(systemDark.matches ? "dark" : "light");
systemDark.addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
theme.addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => {
    const code = button.parentNode.querySelector("code");
    getSelection().selectAllChildren(code);  // stays selected where copying is not allowed
    const done = () => { button.textContent = "Copied"; };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, () => {});
    else if (document.execCommand("copy")) done();
  });
}

// Verdicts: what each object and each detection is at a score threshold. TIDE's kinds, IoU 0.5.
const KINDS = {
  right: "correct", missed: "missed", class: "wrong class", duplicate: "duplicate",
  background: "background", box: "inexact box", both: "wrong class and box",
};
const TIDE = { Cls: "class", Loc: "box", Both: "both", Dupe: "duplicate", Bkg: "background", Miss: "missed" };
const IOU_FOUND = 0.5, IOU_BACKGROUND = 0.1;

function overlap(a, b) {
  const width = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
  const height = Math.min(a[4], b[4]) - Math.max(a[2], b[2]);
  return width <= 0 || height <= 0 ? 0 : width * height;
}
const area = box => (box[3] - box[1]) * (box[4] - box[2]);
function iou(a, b) {
  const common = overlap(a, b);
  return common ? common / (area(a) + area(b) - common) : 0;
}

// Return the verdicts of an image: {kind, truth, found, box, score} with numbers of classes.
function judge(image, threshold) {
  const objects = image.truth.filter(box => !box[5]), crowds = image.truth.filter(box => box[5]);
  const detections = image.detections.filter(box => box[5] >= threshold);
  const owner = objects.map(() => false);
  const right = detections.map(box => {
    let best = -1, most = IOU_FOUND;
    objects.forEach((object, i) => {
      const value = iou(object, box);
      if (!owner[i] && object[0] === box[0] && value >= most) { best = i; most = value; }
    });
    if (best >= 0) owner[best] = true;
    return best >= 0;
  });
  const verdicts = objects.map((box, i) => ({
    isObject: true, kind: owner[i] ? "right" : "missed", truth: box[0], found: -1, box,
  }));
  for (const box of crowds) verdicts.push({ isObject: true, kind: "crowd", truth: box[0], found: -1, box });
  detections.forEach((box, i) => {
    const verdict = { kind: "right", truth: box[0], found: box[0], box, score: box[5] };
    if (!right[i]) {
      const nearest = isSame => objects.filter(o => (o[0] === box[0]) === isSame)
        .map(o => [iou(o, box), o[0]]).reduce((a, b) => b[0] > a[0] ? b : a, [0, -1]);
      const [same, other] = [nearest(true), nearest(false)];
      const inCrowd = crowds.some(c => c[0] === box[0] && overlap(c, box) >= IOU_FOUND * area(box));
      if (same[0] >= IOU_FOUND) verdict.kind = "duplicate";
      else if (inCrowd) verdict.kind = "crowd";
      else if (other[0] >= IOU_FOUND) Object.assign(verdict, { kind: "class", truth: other[1] });
      else if (same[0] >= IOU_BACKGROUND) verdict.kind = "box";
      else if (other[0] >= IOU_BACKGROUND) Object.assign(verdict, { kind: "both", truth: other[1] });
      else Object.assign(verdict, { kind: "background", truth: -1 });
    }
    verdicts.push(verdict);
  });
  return verdicts;
}

const measure = document.createElement("canvas").getContext("2d");

// Draw boxes, then labels where they are free: above, inside, below. In a small image a label
// without a place is left out.
function drawBoxes(svg, verdicts, { width, height, size, textOf, colorOf, inkOf, isDimmed }) {
  svg.replaceChildren();
  const layers = [element("g", {}), element("g", {})];
  svg.append(...layers);
  measure.font = `600 ${size}px system-ui, sans-serif`;
  const placed = [];
  for (const verdict of [...verdicts].reverse()) {  // the first one on top
    const [, left, top, right, bottom] = verdict.box;
    const at = { x: left, y: top, width: Math.max(right - left, 1), height: Math.max(bottom - top, 1), rx: size / 6 };
    const kind = verdict.kind === "right" ? "hit" : verdict.kind === "crowd" || verdict.kind === "missed" ? verdict.kind : "wrong";
    const dim = isDimmed(verdict) ? " dim" : "";
    layers[0].append(
      element("rect", { ...at, class: `halo${dim}` }),
      element("rect", { ...at, class: `edge ${kind}${dim}`, style: `stroke:${colorOf(verdict)}` }));
  }
  for (const verdict of verdicts) {
    const text = textOf(verdict);
    if (!text || isDimmed(verdict)) continue;
    const [, left, top, right, bottom] = verdict.box;
    const w = measure.measureText(text).width + size * 0.6, h = size * 1.3;
    const inside = x => Math.min(Math.max(x, 0), Math.max(width - w, 0));
    const free = [[left, top - h], [left, top], [left, bottom], [right - w, top - h], [left, bottom - h],
      [right - w, bottom], [right, top], [left - w, top]]
      .map(([x, y]) => [inside(x), y])
      .find(([x, y]) => y >= 0 && y + h <= height &&
        placed.every(p => x >= p[0] + p[2] || p[0] >= x + w || y >= p[1] + p[3] || p[1] >= y + h));
    if (!free) continue;
    placed.push([...free, w, h]);
    layers[1].append(
      element("rect", { x: free[0], y: free[1], width: w, height: h, rx: size / 6, class: "tag", style: `fill:${colorOf(verdict)}` }),
      element("text", { x: free[0] + size * 0.3, y: free[1] + size, "font-size": size, fill: inkOf(verdict) }, text));
  }
}

const zoom = document.getElementById("zoom");
const zoomPanes = [...zoom.querySelectorAll(".pane")];
let zoomed = null;  // {gallery, place}

// One run's samples: chips, class, threshold, and the images that they leave.
class Gallery {
  constructor(section, run) {
    this.section = section;
    this.run = run;
    this.kind = "";
    this.pair = null;  // [true class, predicted class] of a confusion; -1: background
    [this.select, this.slider, this.output] = ["select", "input", "output"].map(n => section.querySelector(`.controls ${n}`));
    this.chips = section.querySelector(".chips");
    this.shown = section.querySelector(".shown");
    this.figures = [...section.querySelectorAll("figure")];
    this.select.addEventListener("change", () => this.update());
    this.slider.addEventListener("input", () => this.update());
    this.figures.forEach((figure, place) =>
      figure.querySelector("button").addEventListener("click", () => this.open(place)));
    this.chipOf = Object.fromEntries(["", ...Object.keys(KINDS).slice(1)].map(kind => [kind, this.chip(kind)]));
    this.pairChip = create("button", { type: "button", hidden: true });
    this.pairChip.setAttribute("aria-pressed", "true");
    this.pairChip.addEventListener("click", () => { this.pair = null; this.update(); });
    this.chips.append(this.pairChip);
    new ResizeObserver(() => this.draw()).observe(section);
    this.update();
  }

  chip(kind) {
    const mark = create("i"), total = create("small");
    mark.style.setProperty("--k", `var(--${kind})`);
    const button = create("button", { type: "button" }, ...kind ? [mark] : [], KINDS[kind] ?? "all", total);
    button.dataset.kind = kind;
    button.addEventListener("click", () => {
      this.kind = kind === this.kind ? "" : kind;
      if (!kind) this.pair = null;
      this.update();
    });
    this.chips.append(button);
    return button;
  }

  name(label) { return label < 0 ? "background" : this.run.classes[label] ?? "?"; }

  isWanted(verdict, kind = this.kind) {
    const label = Number(this.select.value);
    if (kind && verdict.kind !== kind) return false;
    if (label >= 0 && verdict.truth !== label && verdict.found !== label) return false;
    if (!this.pair) return true;
    const [truth, found] = this.pair;
    if (found < 0) return verdict.kind === "missed" && verdict.truth === truth;
    if (truth < 0) return verdict.found === found && !["right", "class", "crowd"].includes(verdict.kind);
    return verdict.found === found && verdict.truth === truth && ["right", "class"].includes(verdict.kind);
  }

  get isFiltered() { return Boolean(this.kind || this.pair || Number(this.select.value) >= 0); }

  filter({ kind = "", pair = null }) {
    Object.assign(this, { kind, pair });
    this.select.value = "-1";
    this.update();
    this.section.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  update() {
    const threshold = Number(this.slider.value);
    this.output.textContent = threshold.toFixed(2);
    this.verdicts = this.run.images.map(image => judge(image, threshold));
    for (const [kind, button] of Object.entries(this.chipOf)) {
      const total = this.verdicts.filter(all => !kind || all.some(v => this.isWanted(v, kind))).length;
      button.querySelector("small").textContent = total;
      button.setAttribute("aria-pressed", String(kind === this.kind && !(this.pair && !kind)));
      button.disabled = total === 0 && kind !== this.kind;
    }
    this.pairChip.hidden = !this.pair;
    if (this.pair) this.pairChip.textContent = `${this.name(this.pair[0])} detected as ${this.name(this.pair[1])} \u00d7`;
    this.visible = [];
    this.figures.forEach((figure, place) => {
      figure.hidden = this.isFiltered && !this.verdicts[place].some(v => this.isWanted(v));
      if (!figure.hidden) this.visible.push(place);
      figure.querySelector(".counts").textContent = this.summary(place);
    });
    for (const group of this.section.querySelectorAll("[data-group]"))
      group.hidden = !group.querySelector("figure:not([hidden])");
    this.shown.textContent = `${this.visible.length} of ${count(this.figures.length, "image")}`;
    this.draw();
  }

  summary(place) {
    const objects = this.verdicts[place].filter(v => v.isObject && v.kind !== "crowd");
    const detections = this.verdicts[place].filter(v => !v.isObject);
    const wrong = detections.filter(v => !["right", "crowd"].includes(v.kind)).length;
    const missed = objects.filter(v => v.kind === "missed").length;
    return `${count(objects.length, "object")}, ${missed} missed \u00b7 ${count(detections.length, "prediction")}, ${wrong} wrong`;
  }

  // Draw verdicts over the image of a pane. `byClass`: in the colors of the classes.
  paint(pane, place, verdicts, pixels, byClass) {
    const svg = pane.querySelector("svg"), image = pane.querySelector("img");
    const [width, height] = [image.getAttribute("width"), image.getAttribute("height")].map(Number);
    if (!svg.clientWidth) return;
    const label = v => v.isObject ? v.truth : v.found;
    const isError = v => v.kind !== "right" && v.kind !== "crowd";
    drawBoxes(svg, verdicts, {
      width, height, size: pixels * Math.max(width / svg.clientWidth, height / svg.clientHeight),
      textOf: v => v.kind === "crowd" ? "" : v.isObject ? this.name(v.truth) :
        `${this.name(v.found)} ${v.score.toFixed(2)}${v.kind === "class" && pixels > 11 ? ` (${this.name(v.truth)})` : ""}`,
      colorOf: v => v.kind === "missed" ? "var(--missed)" : v.kind === "crowd" ? "#8a94a0"
        : byClass ? this.run.colors[label(v)] ?? "#8a94a0" : `var(--${v.kind})`,
      inkOf: v => byClass && v.kind !== "missed" ? this.run.inks[label(v)] ?? "#000" : v.kind === "missed" ? "#fff" : "#0e1116",
      isDimmed: v => this.isFiltered && !this.isWanted(v) && (isError(v) || !byClass),
    });
  }

  draw() {
    for (const place of this.visible) {
      const verdicts = this.verdicts[place].filter(v => !v.isObject || v.kind === "missed");
      const order = v => v.kind === "right" ? 2 : v.isObject ? 1 : 0;
      this.paint(this.figures[place].querySelector(".pane"), place, verdicts.sort((a, b) => order(a) - order(b)), 11, false);
    }
    if (zoomed?.gallery === this && zoom.open) this.show();
  }

  open(place) {
    zoomed = { gallery: this, place };
    if (!zoom.open) zoom.showModal();
    this.show();
  }

  show() {
    const { place } = zoomed, verdicts = this.verdicts[place];
    const figure = this.figures[place], source = figure.querySelector("img");
    zoomPanes.forEach((pane, i) => {
      const image = pane.querySelector("img");
      if (image.src !== source.src) image.src = source.src;
      for (const side of ["width", "height"]) image.setAttribute(side, source.getAttribute(side));
      pane.querySelector("svg").setAttribute("viewBox", `0 0 ${source.getAttribute("width")} ${source.getAttribute("height")}`);
      this.paint(pane, place, verdicts.filter(v => Boolean(v.isObject) === (i === 0)), 13, i === 0);
    });
    const position = this.visible.indexOf(place) + 1;
    zoom.querySelector("p").textContent = `${source.alt}: ${this.summary(place)} (${position} of ${this.visible.length})`;
  }

  move(step) {
    const at = this.visible.indexOf(zoomed.place) + step;
    this.open(this.visible[(at + this.visible.length) % this.visible.length]);
  }
}

const galleries = {};
for (const section of document.querySelectorAll("[data-samples]"))
  galleries[section.dataset.samples] = new Gallery(section, data.runs[section.dataset.samples]);

zoom.addEventListener("keydown", event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  zoomed.gallery.move(step);
});
zoom.addEventListener("click", event => {
  if (event.target === zoom || event.target.closest("[data-close]")) zoom.close();
  const button = event.target.closest("[data-move]");
  if (button) zoomed.gallery.move(Number(button.dataset.move));
});
addEventListener("resize", () => zoom.open && zoomed.gallery.show());

// Rows of errors and confusions filter the samples.
for (const button of document.querySelectorAll("[data-filter]")) {
  const gallery = galleries[button.dataset.filter], { kind, truth, found } = button.dataset;
  button.disabled = !gallery;
  if (!gallery) continue;
  const { classes } = gallery.run;
  button.closest("tr").addEventListener("click", () =>
    gallery.filter(kind ? { kind: TIDE[kind] } : { pair: [classes.indexOf(truth), classes.indexOf(found)] }));
}

// Tables: sort by the column of a heading's button.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), table = heading.closest("table");
    const column = [...heading.parentNode.children].indexOf(heading);
    const isText = !heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const order = before === "descending" || (isText && !before) ? "ascending" : "descending";
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const value = row => row.children[column].textContent.trim();
    const score = row => value(row) === "\u2013" ? -Infinity : parseFloat(value(row));
    const compare = isText ? (a, b) => value(a).localeCompare(value(b)) : (a, b) => score(a) - score(b);
    const sign = order === "ascending" ? 1 : -1;
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => sign * compare(a, b) || 0));
  });
}

// Classes: a selected one stands out in the curves of its section.
for (const section of document.querySelectorAll("[data-classes]")) {
  const run = data.runs[section.dataset.classes];
  for (const swatch of section.querySelectorAll("[data-color]"))
    swatch.style.background = run.colors[swatch.dataset.color];
  for (const row of section.querySelectorAll("tr.pick")) {
    const button = row.querySelector("button");
    row.addEventListener("click", () => {
      const isOn = button.getAttribute("aria-pressed") !== "true";
      for (const other of section.querySelectorAll("[aria-pressed]")) other.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", String(isOn));
      for (const chart of section.querySelectorAll(".chart")) {
        chart.classList.toggle("selecting", isOn);
        for (const line of chart.querySelectorAll(".line[data-class]"))
          line.classList.toggle("selected", isOn && line.dataset.class === row.dataset.class);
        chart.dataset.selected = isOn ? run.classes[row.dataset.class] : "";
      }
    });
  }
}

// Charts: the values at the pointer, or at the arrow keys' position.
for (const chart of document.querySelectorAll("[data-chart]")) {
  const { x, area: [left, top, width, height], scale: [x0, x1, y0, y1], lines } = data.charts[chart.dataset.chart];
  const svg = chart.querySelector(":scope > svg"), tip = chart.querySelector(".tip");
  const places = [...new Set(lines.flatMap(line => line.x))].sort((a, b) => a - b);
  if (!places.length) continue;
  const toX = value => left + (value - x0) / (x1 - x0) * width;
  const toY = value => top + height - (value - y0) / (y1 - y0) * height;
  const guide = element("g", { class: "guide", visibility: "hidden" });
  svg.append(guide);
  let place = places.length - 1;
  const show = () => {
    const at = places[place], selected = chart.dataset.selected;
    guide.replaceChildren(element("line", { x1: toX(at), x2: toX(at), y1: top, y2: top + height }));
    tip.replaceChildren(create("b", {}, `${x} ${number(at)}`));
    for (const line of lines) {
      if (selected ? line.number >= 0 && line.name !== selected : line.faint) continue;
      const nearest = line.x.reduce((a, b, i) => Math.abs(b - at) < Math.abs(line.x[a] - at) ? i : a, 0);
      if (Math.abs(toX(line.x[nearest]) - toX(at)) > width / 20) continue;
      const mark = create("i"), dot = element("circle", { cx: toX(line.x[nearest]), cy: toY(line.y[nearest]), r: 3 });
      dot.style.fill = mark.style.background = line.color;
      guide.append(dot);
      tip.append(create("div", {}, mark, `${line.name} ${number(line.y[nearest])}`));
    }
    guide.setAttribute("visibility", "visible");
    tip.hidden = false;
    const share = toX(at) / svg.viewBox.baseVal.width, isRight = share > 0.55;
    tip.style.left = isRight ? "auto" : `${100 * share + 2}%`;
    tip.style.right = isRight ? `${100 - 100 * share + 2}%` : "auto";
  };
  const hide = () => { guide.setAttribute("visibility", "hidden"); tip.hidden = true; };
  chart.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    place = places.reduce((a, p, i) => Math.abs(toX(p) - at) < Math.abs(toX(places[a]) - at) ? i : a, 0);
    show();
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", show);
  chart.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    place = Math.min(Math.max(place + move, 0), places.length - 1);
    show();
  });
}

// Confusion matrix: rows are the true classes, columns what they were detected as.
for (const map of document.querySelectorAll("[data-confusion]")) {
  const { classes, confusion } = data.runs[map.dataset.confusion];
  const gallery = galleries[map.dataset.confusion];
  const names = [...classes, "background"], total = names.length;
  const isLabeled = total <= 26, cell = total <= 8 ? 30 : 20, longest = Math.max(...names.map(name => name.length));
  const margin = isLabeled ? Math.min(7 * longest, 140) + 10 : 4;
  const size = margin + cell * total;
  const svg = element("svg", {
    viewBox: `0 0 ${size} ${size}`, tabindex: 0, role: "img",
    "aria-label": "Confusion matrix. The arrow keys move between its cells, Enter filters the samples.",
  });
  svg.style.maxWidth = `${Math.max(size * 1.4, 280)}px`;
  svg.append(element("rect", { x: margin, y: margin, width: cell * total, height: cell * total, class: "ground" }));
  if (isLabeled) names.forEach((name, i) => {
    const short = name.length > 18 ? `${name.slice(0, 17)}\u2026` : name;
    const middle = margin + cell * (i + 0.5), kind = i === classes.length ? "axis-name" : "";
    svg.append(
      element("text", { x: margin - 5, y: middle + 4, "text-anchor": "end", class: kind }, short),
      element("text", { transform: `translate(${middle + 4} ${margin - 5}) rotate(-90)`, class: kind }, short));
  });
  confusion.forEach((row, r) => {
    const sum = row.reduce((a, b) => a + b, 0);
    row.forEach((value, c) => {
      if (!value) return;
      const at = { x: margin + cell * c, y: margin + cell * r, width: cell, height: cell };
      svg.append(element("rect", { ...at, class: r === c ? "right" : "confused", "fill-opacity": 0.12 + 0.88 * value / sum }));
      if (isLabeled && value < 10 ** (cell / 7)) svg.append(element("text", {
        x: at.x + cell / 2, y: at.y + cell / 2 + 4, "text-anchor": "middle",
        class: value / sum > 0.55 ? "on-dark" : "",
      }, value));
    });
  });
  const cursor = element("rect", { width: cell, height: cell, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  const output = map.querySelector("output");
  let row = 0, column = 0;
  const show = () => {
    cursor.setAttribute("x", margin + cell * column);
    cursor.setAttribute("y", margin + cell * row);
    cursor.setAttribute("visibility", "visible");
    const sum = confusion[row].reduce((a, b) => a + b, 0);
    const share = sum ? ` (${Math.round(100 * confusion[row][column] / sum)}% of the row)` : "";
    output.textContent = `${names[row]} detected as ${names[column]}: ${confusion[row][column]}${share}`;
  };
  const filter = () => {
    const label = i => i === classes.length ? -1 : i;
    if (gallery && confusion[row][column]) gallery.filter({ pair: [label(row), label(column)] });
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const index = offset => Math.floor((offset * size / box.width - margin) / cell);
    const [c, r] = [index(event.clientX - box.left), index(event.clientY - box.top)];
    if (c >= 0 && r >= 0 && c < total && r < total) { row = r; column = c; show(); }
  });
  svg.addEventListener("click", filter);
  svg.addEventListener("focus", show);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter") filter();
    if (!move) return;
    event.preventDefault();
    row = Math.min(Math.max(row + move[0], 0), total - 1);
    column = Math.min(Math.max(column + move[1], 0), total - 1);
    show();
  });
  map.prepend(svg);
}
