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

// Return a data value from a coordinate of the SVG, which has 6 decimals.
function unscaled(at, offset, unit) {
  const value = (at - offset) / unit;
  return Math.abs(value) < Math.abs(1e-5 / unit) ? 0 : value;
}

function number(value) {
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Colour scheme: the system's, or the one of the switch.
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

// Sample pictures: boxes from a score threshold on.
function iou(a, b) {
  const width = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
  const height = Math.min(a[4], b[4]) - Math.max(a[2], b[2]);
  if (width <= 0 || height <= 0) return 0;
  const area = box => (box[3] - box[1]) * (box[4] - box[2]);
  return width * height / (area(a) + area(b) - width * height);
}

// Return which objects and which detections are matched: same class, IoU 0.5, best scores first.
function match(truth, detections) {
  const owner = truth.map(() => false);
  const right = detections.map(detection => {
    let best = -1, overlap = 0.5;
    truth.forEach((object, i) => {
      const value = iou(object, detection);
      if (!owner[i] && object[0] === detection[0] && value >= overlap) { best = i; overlap = value; }
    });
    if (best >= 0) owner[best] = true;
    return best >= 0;
  });
  return [owner, right];
}

function drawBox(svg, box, colour, label, kind) {
  const [, left, top, right, bottom] = box;
  svg.append(element("rect", {
    x: left, y: top, width: Math.max(right - left, 1), height: Math.max(bottom - top, 1),
    stroke: colour, class: kind,
  }));
  const width = svg.viewBox.baseVal.width, room = width - 7.7 * label.length;
  svg.append(element("text", { x: Math.max(Math.min(left + 2, room), 2), y: Math.max(top - 4, 11) }, label));
}

function drawPicture(figure, run, picture, threshold) {
  const detections = picture.detections.filter(d => d[5] >= threshold);
  const [found, right] = match(picture.truth, detections);
  const name = box => run.classes[box[0]] ?? "?";
  const colour = box => run.colours[box[0]] ?? "#57606a";
  const [left, other] = figure.querySelectorAll("svg");
  left.replaceChildren();
  other.replaceChildren();
  picture.truth.forEach((box, i) => found[i]
    ? drawBox(left, box, colour(box), name(box), "hit")
    : drawBox(left, box, "#e5484d", `missed: ${name(box)}`, "missed"));
  detections.map((box, i) => [box, right[i]]).reverse().forEach(([box, isRight]) =>
    drawBox(other, box, colour(box), `${name(box)} ${box[5].toFixed(2)}`, isRight ? "hit" : "wrong"));
  const missed = found.filter(f => !f).length, wrong = right.filter(r => !r).length;
  figure.querySelector(".counts").textContent =
    `${found.length} ground truth (${missed} missed), ${right.length} detections (${wrong} wrong)`;
}

for (const section of document.querySelectorAll("[data-samples]")) {
  const run = data[section.dataset.samples];
  const slider = section.querySelector("input"), output = section.querySelector("output");
  const figures = section.querySelectorAll("figure");
  const draw = () => {
    const threshold = Number(slider.value);
    output.textContent = threshold.toFixed(2);
    figures.forEach((figure, i) => drawPicture(figure, run, run.pictures[i], threshold));
  };
  for (const figure of figures) {
    const [first, second] = figure.querySelectorAll("img");
    second.src = first.src;
  }
  slider.addEventListener("input", draw);
  draw();
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
    const figure = row => value(row) === "-" ? -Infinity : Number(value(row));
    const compare = isText ? (a, b) => value(a).localeCompare(value(b)) : (a, b) => figure(a) - figure(b);
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].filter(row => row.cells[0].tagName === "TD");
    rows.sort((a, b) => sign * compare(a, b) || 0);
    table.tBodies[0].append(...rows);
  });
}

// Curves: the values at the pointer, or at the arrow keys' position.
function readLine(svg, i) {
  const path = svg.querySelector(`#curve-${i} > path`);
  const numbers = path ? path.getAttribute("d").match(/-?[\d.]+(?:e-?\d+)?/g).map(Number) : [];
  return numbers.flatMap((x, k) => k % 2 ? [] : [[x, numbers[k + 1]]]);
}

for (const chart of document.querySelectorAll("[data-hover]")) {
  const { x, labels, colours, scale, area } = JSON.parse(chart.dataset.hover);
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip");
  const lines = labels.map((_, i) => readLine(svg, i));
  const places = [...new Set(lines.flat().map(point => point[0]))].sort((a, b) => a - b);
  if (!places.length) continue;
  const guide = element("g", { class: "guide", visibility: "hidden" });
  svg.append(guide);
  let place = places.length - 1;
  const show = () => {
    const at = places[place];
    guide.replaceChildren(element("line", { x1: at, x2: at, y1: area[1], y2: area[1] + area[3] }));
    tip.replaceChildren();
    const heading = document.createElement("b");
    heading.textContent = `${x} ${number(unscaled(at, scale[0], scale[1]))}`;
    tip.append(heading);
    lines.forEach((line, i) => {
      if (!line.length) return;
      const point = line.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      if (Math.abs(point[0] - at) > area[2] / 20) return;
      guide.append(element("circle", { cx: point[0], cy: point[1], r: 2.5, fill: colours[i] }));
      const row = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = colours[i];
      const label = labels[i].startsWith("_") ? "" : `${labels[i]} `;
      row.append(mark, `${label}${number(unscaled(point[1], scale[2], scale[3]))}`);
      tip.append(row);
    });
    guide.setAttribute("visibility", "visible");
    tip.hidden = false;
    tip.style.left = at > area[0] + area[2] / 2 ? "auto" : `${100 * (at + 8) / svg.viewBox.baseVal.width}%`;
    tip.style.right = at > area[0] + area[2] / 2 ? `${100 - 100 * (at - 8) / svg.viewBox.baseVal.width}%` : "auto";
  };
  const hide = () => { guide.setAttribute("visibility", "hidden"); tip.hidden = true; };
  chart.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    place = places.reduce((a, p, i) => Math.abs(p - at) < Math.abs(places[a] - at) ? i : a, 0);
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

// Confusion matrix: rows are the ground truth, columns what it was detected as.
for (const map of document.querySelectorAll("[data-confusion]")) {
  const { classes, confusion } = data[map.dataset.confusion];
  const names = [...classes, "background"], count = names.length;
  const isLabelled = count <= 26, cell = 20, longest = Math.max(...names.map(name => name.length));
  const margin = isLabelled ? Math.min(8 * longest, 150) + 8 : 4;
  const size = margin + cell * count;
  const svg = element("svg", {
    viewBox: `0 0 ${size} ${size}`, tabindex: 0, role: "img",
    "aria-label": "confusion matrix; the arrow keys move between its cells",
  });
  svg.style.maxWidth = `${Math.max(size * 1.4, 280)}px`;
  svg.append(element("rect", { x: margin, y: margin, width: cell * count, height: cell * count, class: "ground" }));
  if (isLabelled) names.forEach((name, i) => {
    const short = name.length > 18 ? `${name.slice(0, 17)}\u2026` : name;
    const middle = margin + cell * (i + 0.5);
    svg.append(
      element("text", { x: margin - 5, y: middle + 4, "text-anchor": "end" }, short),
      element("text", { transform: `translate(${middle + 4} ${margin - 5}) rotate(-90)` }, short));
  });
  confusion.forEach((row, r) => {
    const total = row.reduce((a, b) => a + b, 0);
    row.forEach((value, c) => {
      if (!value) return;
      const at = { x: margin + cell * c, y: margin + cell * r, width: cell, height: cell };
      svg.append(element("rect", { ...at, class: r === c ? "right" : "confused", "fill-opacity": 0.12 + 0.88 * value / total }));
      if (isLabelled && value < 1000) svg.append(element("text", {
        x: at.x + cell / 2, y: at.y + cell / 2 + 3, "text-anchor": "middle",
        class: value / total > 0.55 ? "on-dark" : "",
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
    const total = confusion[row].reduce((a, b) => a + b, 0);
    const share = total ? ` (${Math.round(100 * confusion[row][column] / total)}% of the row)` : "";
    output.textContent = `${names[row]} detected as ${names[column]}: ${confusion[row][column]}${share}`;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const index = offset => Math.floor((offset * size / box.width - margin) / cell);
    const [c, r] = [index(event.clientX - box.left), index(event.clientY - box.top)];
    if (c >= 0 && r >= 0 && c < count && r < count) { row = r; column = c; show(); }
  });
  svg.addEventListener("focus", show);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    row = Math.min(Math.max(row + move[0], 0), count - 1);
    column = Math.min(Math.max(column + move[1], 0), count - 1);
    show();
  });
  map.prepend(svg);
}
