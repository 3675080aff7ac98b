// What the page of `dex analyze` draws: maps of layers and heads, charts, and the colours of a text.
//
// The words and tables stand in the page already; this adds pictures to them, from the JSON in #data (see data.py).
// Whatever can be pointed at can be reached by keyboard, and says its value in a read-out that is announced. Nothing
// is said by colour alone: every value is also a number in the read-out, and signs have a mark of their own.

const report = JSON.parse(document.getElementById("data").textContent);
const models = report.models;
const two = models.length > 1;
const DIFFERENCE = "difference";

// ---- small things -----------------------------------------------------------------------------------------------

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const present = (value) => value !== null && value !== undefined;
const range = (length) => Array.from({ length }, (_, index) => index);

/** An element with attributes and children; text goes in as text, never as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** The sign that stands for a model wherever both are drawn. */
function keyOf(which) {
  return make("span", { class: `key key-${which}`, "aria-hidden": "true" });
}

/** The same rules as written.py. */
function written(value) {
  if (!present(value)) return "no value";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && size < 1e-3) text = value.toExponential(2);
  else if (Number.isInteger(value) && size < 1e9) text = value.toLocaleString("en-US");
  else if (size < 1000) text = value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
  else if (size < 1e9) text = Math.round(value).toLocaleString("en-US");
  else text = value.toExponential(2).replace("e+", "e");
  return text.replaceAll("-", "−");
}

const withUnit = (value, unit) => (present(value) && unit ? `${written(value)} ${unit}` : written(value));

/** Round numbers between two ends, about `wanted` of them. */
function ticksBetween(low, high, wanted = 4) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.75);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-9) - first + 1).map((index) => {
    const value = (first + index) * step;
    return { value, text: tickText(value, step) };
  });
}

function tickText(value, step) {
  if (value !== 0 && (Math.abs(value) >= 1e5 || step < 1e-4)) return value.toExponential(0).replace("e+", "e").replaceAll("-", "−");
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", "−");
}

/** Every `step`-th of `count` labels, so that they are `room` pixels apart at least. */
function labelStep(count, size, room) {
  return [1, 2, 4, 5, 8, 10, 16, 20, 32, 50].find((step) => step * size >= room || step >= count) ?? 100;
}

// ---- colours ----------------------------------------------------------------------------------------------------
// Both scales lie near the page's colour where there is little, and grow darker (in the dark theme lighter) all the
// way, so that they can be read without telling hues apart. Blue and orange remain different for colour-blind eyes.

const SCALES = {
  light: {
    sequential: ["#f4f3e6", "#d0e6cc", "#8ecbbf", "#46a2b6", "#2b69a2", "#24397e", "#1a1a48"],
    diverging: ["#173f78", "#3f77b8", "#a3c3e2", "#f4f3ef", "#f2bf8a", "#cf7623", "#803b04"],
  },
  dark: {
    sequential: ["#20243a", "#25417a", "#2b6ba6", "#3f9db6", "#84c9bb", "#cfe6c4", "#fbf9e0"],
    diverging: ["#a5d0fa", "#5795d6", "#2c4f7c", "#24272d", "#774a1e", "#d28534", "#fdca8c"],
  },
};
let printing = false; // paper is white, whatever the theme

function isDark() {
  if (printing) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const anchorsOf = (diverging) => SCALES[isDark() ? "dark" : "light"][diverging ? "diverging" : "sequential"].map(channels);

const channels = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));

/** The colour at a share from 0 to 1, between the anchors. */
function colourAt(anchors, share) {
  const place = clamp(share, 0, 1) * (anchors.length - 1);
  const index = Math.min(Math.floor(place), anchors.length - 2);
  const [from, to] = [anchors[index], anchors[index + 1]];
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * (place - index)));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;
/** Black or white, whichever can be read on the colour (ITU-R BT.709 luma). */
const inkOn = ([red, green, blue]) => (0.2126 * red + 0.7152 * green + 0.0722 * blue > 140 ? "#111418" : "#ffffff");

const themeColours = new Map(); // emptied by `redraw`: asking the browser each time would lay the page out each time

/** A theme's own colour, for what is drawn on a canvas. */
function themed(name) {
  if (!themeColours.has(name)) themeColours.set(name, askColour(name));
  return themeColours.get(name);
}

function askColour(name) {
  const probe = make("span", { style: `color: var(${name}); display: none` });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/**
 * Ends of the colours for these values. One head far from all others would leave the rest in one colour: colours then
 * end at the 1st and 99th percentile of the values, and the legend says so with the ends of the values.
 */
function scaleOf(values, diverging) {
  const sorted = values.filter(present).sort((a, b) => a - b);
  if (!sorted.length) return { low: 0, high: 1, lowest: 0, highest: 1, diverging };
  const quantile = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [lowest, highest] = [sorted[0], sorted.at(-1)];
  let [low, high] = [lowest, highest];
  if (diverging) {
    const sizes = sorted.map(Math.abs).sort((a, b) => a - b);
    const usual = sizes[Math.round(0.99 * (sizes.length - 1))];
    const end = usual > 0 && sizes.at(-1) > 3 * usual ? usual : sizes.at(-1) || 1;
    [low, high] = [-end, end];
  } else {
    const usual = quantile(0.99) - quantile(0.01);
    if (usual > 0 && highest - quantile(0.99) > 2 * usual) high = quantile(0.99);
    if (usual > 0 && quantile(0.01) - lowest > 2 * usual) low = quantile(0.01);
    if (low > 0 && low < 0.02 * high) low = 0; // an end of 4.98e−13 says less than 0
    if (low === high) high = low + (Math.abs(low) || 1);
  }
  return { low, high, lowest, highest, diverging };
}

const shareOf = (scale, value) => (value - scale.low) / (scale.high - scale.low);

/** The colours of a scale with numbers under them. */
function legendOf(scale, unit, { someUndefined = false, width = 0, negative = "cells with a mark are negative" } = {}) {
  const anchors = anchorsOf(scale.diverging);
  const stops = range(13).map((index) => css(colourAt(anchors, index / 12)));
  const bar = make("div", { class: "legend-bar", style: `background: linear-gradient(90deg, ${stops.join(", ")})` });
  const before = { 0: scale.lowest < scale.low ? "≤ " : "", 1: scale.highest > scale.high ? "≥ " : "" };
  const zero = shareOf(scale, 0);
  const middle = scale.low < 0 && scale.high > 0 ? (zero > 0.25 && zero < 0.75 ? [zero] : []) : [0.5];
  const marks = [0, ...middle, 1].map((share) => {
    const value = share === zero ? 0 : scale.low + share * (scale.high - scale.low);
    return make("span", { style: `left: ${share * 100}%` }, `${before[share] ?? ""}${written(value)}`);
  });
  const legend = make("div", { class: "legend" }, bar, make("div", { class: "legend-ticks" }, ...marks));
  if (width) legend.style.width = `${Math.max(150, width)}px`;
  const notes = [];
  if (unit) notes.push(unit);
  if (scale.diverging) notes.push(negative);
  if (before[1] || before[0]) notes.push(`values from ${written(scale.lowest)} to ${written(scale.highest)}`);
  if (notes.length) legend.append(make("div", {}, notes.join("; ")));
  if (someUndefined) legend.append(make("div", {}, make("span", { class: "legend-none" }), "no value"));
  return legend;
}

// ---- what is redrawn when the theme or the width changes --------------------------------------------------------

const drawings = new Set();
let waiting = false;

// Drawing everything takes half a second for a large report. It goes from the top down in short turns, between which
// the browser shows what there is and answers the reader; then `data-drawn` is set.
const TURN = 30; // milliseconds
const tasks = [];

function drawn(draw) {
  drawings.add(draw);
  tasks.push(draw);
}

function work() {
  const until = performance.now() + TURN;
  while (tasks.length && performance.now() < until) tasks.shift()();
  if (tasks.length) {
    setTimeout(work);
    return;
  }
  followHash();
  document.documentElement.dataset.drawn = "yes";
}

function redraw() {
  themeColours.clear();
  for (const draw of drawings) draw();
}

function redrawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    redraw();
  });
}

function startTheme() {
  const button = document.getElementById("theme");
  const name = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    name();
    redraw();
  });
  name();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redrawSoon(); // a phone's address bar changes the height alone
    width = innerWidth;
  });
  for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      printing = value;
      for (const fold of document.querySelectorAll("details.by-layer")) fold.open = value || fold.dataset.open === "yes";
      redraw();
    });
  }
  for (const fold of document.querySelectorAll("details.by-layer")) {
    fold.addEventListener("toggle", () => {
      if (!printing) fold.dataset.open = fold.open ? "yes" : "no";
    });
  }
}

// ---- the tip beside what is pointed at --------------------------------------------------------------------------
// Rows of a name and a value. It is a picture for the eye: the read-out says the same to everyone.

const tip = document.getElementById("tip");

function showTip(title, rows, box) {
  const lines = rows.map(([name, value]) => make("div", {}, make("span", {}, name), make("span", {}, value)));
  tip.replaceChildren(make("strong", {}, title), ...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = box.right + 10;
  tip.style.left = `${clamp(right + width > innerWidth ? box.left - width - 10 : right, 4, Math.max(4, innerWidth - width - 4))}px`;
  const top = right + width > innerWidth && box.left < width + 14 ? box.top - height - 10 : box.top - height / 2;
  tip.style.top = `${clamp(top, 4, Math.max(4, innerHeight - height - 4))}px`;
}

const hideTip = () => {
  tip.hidden = true;
};

// ---- maps of layers and heads -----------------------------------------------------------------------------------

/** A canvas of so many CSS pixels, sharp on any screen and on paper. */
function sizedContext(canvas, width, height) {
  const density = Math.max(2, devicePixelRatio || 1);
  canvas.width = width * density;
  canvas.height = height * density;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  return context;
}

function paintCells(context, values, scale, cell, hatchColour) {
  const anchors = anchorsOf(scale.diverging);
  const gap = Math.min(cell.width, cell.height) >= 6 ? 1 : 0;
  const [width, height] = [cell.width - gap, cell.height - gap];
  values.forEach((row, layer) =>
    row.forEach((value, head) => {
      const [x, y] = [head * cell.width, layer * cell.height];
      if (!present(value)) {
        hatch(context, x, y, width, height, hatchColour);
        return;
      }
      const share = shareOf(scale, value);
      const colour = colourAt(anchors, share);
      context.fillStyle = css(colour);
      context.fillRect(x, y, width, height);
      // Blue and orange of one darkness look alike in grey: from a tenth of the scale on, a line marks the negative.
      if (scale.diverging && share < 0.45 && gap) {
        context.fillStyle = inkOn(colour);
        context.globalAlpha = 0.75;
        context.fillRect(x + width * 0.3, y + height / 2 - 0.5, width * 0.4, 1);
        context.globalAlpha = 1;
      }
    }),
  );
}

function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = -height; at < width; at += 4) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.stroke();
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.restore();
}

/** Labels of the layers on the left and of whatever is below. */
function framed(title, layers, cell, body, ticks, axis) {
  const step = labelStep(layers, cell.height, 13);
  const rows = make("div", { class: "rows", "aria-hidden": "true" }, make("span", { class: "axis" }, "layer"));
  for (let layer = 0; layer < layers; layer += step) {
    rows.append(make("span", { style: `top: ${(layer + 0.5) * cell.height}px` }, String(layer)));
  }
  const below = make("div", { class: "heads", "aria-hidden": "true" });
  for (const { at, text } of ticks) below.append(make("span", { style: `left: ${at}px` }, text));
  below.append(make("span", { class: "axis" }, axis));
  const caption = make("figcaption", { class: "map-title" }, ...title);
  return make("figure", { class: "map" }, caption, make("div", { class: "map-frame" }, rows, body, below));
}

function headTicks(heads, cell) {
  const step = labelStep(heads, cell.width, 20);
  return range(Math.ceil(heads / step)).map((index) => ({
    at: (index * step + 0.5) * cell.width,
    text: String(index * step),
  }));
}

/**
 * One map. `onPoint(layer, head, box)` is called when a cell is pointed at or reached by arrow keys, `onLeave` when
 * none is, and `onChoose` when one is clicked or reached by arrow keys. `mark` and `choose` set the two outlines.
 */
function heatMap({ values, scale, cell, title, label, onPoint, onLeave, onChoose = () => {} }) {
  const [layers, heads] = [values.length, values[0].length];
  const canvas = make("canvas", { "aria-hidden": "true" });
  paintCells(sizedContext(canvas, heads * cell.width, layers * cell.height), values, scale, cell, themed("--hatch"));
  const cursor = make("div", { class: "cursor", hidden: "" });
  const chosen = make("div", { class: "cursor chosen", hidden: "" });
  const cells = make(
    "div",
    {
      class: "cells",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "map of layers and heads",
      "aria-label": `${label}: ${layers} layers, ${heads} heads. Arrow keys move from head to head.`,
    },
    canvas,
    chosen,
    cursor,
  );
  let place = [0, 0];

  function outline(element, layer, head) {
    element.hidden = false;
    element.style.left = `${head * cell.width - 2}px`;
    element.style.top = `${layer * cell.height - 2}px`;
    element.style.width = `${cell.width + 3}px`;
    element.style.height = `${cell.height + 3}px`;
  }
  function boxOf(layer, head) {
    const { left, top } = canvas.getBoundingClientRect();
    const [x, y] = [left + head * cell.width, top + layer * cell.height];
    return { left: x, right: x + cell.width, top: y + cell.height / 2 };
  }
  function point(layer, head) {
    place = [layer, head];
    onPoint(layer, head, boxOf(layer, head));
  }
  function under(event) {
    const { left, top } = canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - top) / cell.height);
    const head = Math.floor((event.clientX - left) / cell.width);
    return [clamp(layer, 0, layers - 1), clamp(head, 0, heads - 1)];
  }

  cells.addEventListener("pointermove", (event) => point(...under(event)));
  cells.addEventListener("pointerdown", (event) => point(...under(event)));
  cells.addEventListener("pointerleave", () => onLeave());
  cells.addEventListener("click", (event) => onChoose(...under(event)));
  cells.addEventListener("focus", () => {
    if (cells.matches(":focus-visible")) point(...place);
  });
  cells.addEventListener("blur", () => onLeave());
  cells.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const moved = movedBy(event, place, layers, heads);
    if (!moved) return;
    event.preventDefault();
    point(...moved);
    onChoose(...moved);
  });

  return {
    element: framed(title, layers, cell, cells, headTicks(heads, cell), "head"),
    layers,
    heads,
    values,
    mark: (layer, head) => outline(cursor, layer, head),
    unmark: () => {
      cursor.hidden = true;
    },
    choose: (layer, head) => {
      place = [layer, head];
      outline(chosen, layer, head);
    },
    unchoose: () => {
      chosen.hidden = true;
    },
  };
}

/** Where a key leads in a grid of rows and columns; null for another key. */
function movedBy(event, [row, column], rows, columns) {
  if (event.altKey || event.metaKey) return null;
  const whole = event.ctrlKey;
  const to = {
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    Home: [whole ? 0 : row, 0],
    End: [whole ? rows - 1 : row, columns - 1],
    PageUp: [row - 10, column],
    PageDown: [row + 10, column],
  }[event.key];
  return to ? [clamp(to[0], 0, rows - 1), clamp(to[1], 0, columns - 1)] : null;
}

const GAP = 32; // pixels between maps
const MARGIN = 45; // of a map, for the layers' numbers
const PROFILE = 190; // the least width of a profile

/** Cells as large as the room for a map allows, and all layers within `height` pixels as far as they can be seen. */
function cellFor(room, layers, heads, { widest = 26, height = 420 } = {}) {
  const width = clamp(Math.floor((room - MARGIN) / heads), 7, widest);
  return { width, height: clamp(Math.round(height / layers), 7, 22) };
}

/** The room for each of a panel's maps: beside them stands the profile, except on a phone. */
function roomOfMap(room, count) {
  if (room < 640) return room;
  const across = room < 900 ? Math.min(count, 2) : count;
  const beside = room < 900 && count > 1 ? 0 : PROFILE + MARGIN + GAP;
  return (room - beside - (across - 1) * GAP) / across;
}

/** The models' maps of a statistic and their difference, as far as there are any. */
function mapsOf(measure) {
  const own = measure.of.map((values, index) => ({ which: index, values })).filter(({ values }) => values);
  return measure.difference ? [...own, { which: DIFFERENCE, values: measure.difference }] : own;
}

function nameOf(which) {
  return which === DIFFERENCE ? `${models[1].label} minus ${models[0].label}` : models[which].label;
}

const shortName = (which) => (which === DIFFERENCE ? DIFFERENCE : models[which].label);

/** Both models share the colours, so that they can be compared; a difference has its own, with 0 in the middle. */
function scalesOf(measure) {
  const own = scaleOf(measure.of.filter(present).flat(2), measure.diverging);
  const difference = measure.difference ? scaleOf(measure.difference.flat(), true) : null;
  return (which) => (which === DIFFERENCE ? difference : own);
}

const titleOf = (which) => (two ? [keyOf(which), which === DIFFERENCE ? "Difference" : models[which].label] : ["Heads"]);

/** Everything drawn of one head statistic: a map for each model, their difference, and each layer's spread. */
function drawPanel(panel, readout, measure) {
  const shown = mapsOf(measure);
  const scaleFor = scalesOf(measure);
  const room = panel.clientWidth;
  const widest = shown.length > 1 ? 26 : 40;
  const cells = shown.map(({ values }) => cellFor(roomOfMap(room, shown.length), values.length, values[0].length, { widest }));
  const maps = [];

  function leave() {
    hideTip();
    for (const { map } of maps) map.unmark();
  }
  function point(source, layer, head, box) {
    // A head has a namesake in the other model only where both have as many.
    const alike = maps.filter(({ map }) => map.heads === source.heads && map.layers === source.layers);
    for (const { map } of maps) map.unmark();
    for (const { map } of alike) map.mark(layer, head);
    const title = `layer ${layer}, head ${head}`;
    const values = alike.map(({ which, map }) => [which, withUnit(map.values[layer][head], measure.unit)]);
    if (two) {
      showTip(title, values.map(([which, value]) => [shortName(which), value]), box);
      readout.textContent = `${title}: ${values.map(([which, value]) => `${shortName(which)} ${value}`).join(", ")}`;
    } else {
      showTip(`${title}: ${values[0][1]}`, [], box);
      readout.textContent = `${title}: ${values[0][1]}`;
    }
  }

  const figures = shown.map(({ which, values }, index) => {
    const map = heatMap({
      values,
      scale: scaleFor(which),
      cell: cells[index],
      title: titleOf(which),
      label: two ? `${measure.title}, ${nameOf(which)}` : measure.title,
      onPoint: (layer, head, box) => point(map, layer, head, box),
      onLeave: leave,
    });
    maps.push({ which, map });
    const someUndefined = values.flat().some((value) => !present(value));
    map.element.append(legendOf(scaleFor(which), measure.unit, { someUndefined, width: values[0].length * cells[index].width }));
    return map.element;
  });
  const used = sum(shown.map(({ values }, index) => values[0].length * cells[index].width + MARGIN + GAP));
  const left = room - used - MARGIN;
  const width = clamp(left >= PROFILE ? left : room - MARGIN - 10, 150, 400);
  panel.replaceChildren(...figures, profileOf(measure, scaleFor(0), width));
  readout.textContent = "Point at a head, or move over them with the arrow keys.";
}

/** Each layer's heads as points on a line and their mean: what colours show, by place. Rows are those of the maps. */
function profileOf(measure, scale, width) {
  const own = measure.of.map((values, which) => ({ values, which })).filter(({ values }) => values);
  const layers = Math.max(...own.map(({ values }) => values.length));
  const cell = cellFor(width, layers, 1);
  const canvas = make("canvas", {
    role: "img",
    "aria-label": `${measure.title}: the heads of each layer as points, and their mean as a line`,
  });
  const context = sizedContext(canvas, width, layers * cell.height);
  const across = (value) => 4 + clamp(shareOf(scale, value), 0, 1) * (width - 8);
  context.fillStyle = themed("--rule");
  const ticks = ticksBetween(scale.low, scale.high, width < 240 ? 3 : 5);
  for (const { value } of ticks) context.fillRect(across(value) - 0.5, 0, 1, layers * cell.height);
  for (const { values, which } of own) paintProfile(context, values, which, across, cell);
  const marks = ticks.map(({ value, text }) => ({ at: across(value), text }));
  return framed(["Each layer’s heads, and mean"], layers, cell, make("div", { class: "profile" }, canvas), marks, measure.unit || "value");
}

function paintProfile(context, values, which, across, cell) {
  context.fillStyle = context.strokeStyle = themed(`--key-${which}`);
  context.lineWidth = 1;
  context.globalAlpha = 0.5;
  values.forEach((row, layer) => {
    for (const value of row.filter(present)) {
      const [x, y] = [across(value), (layer + 0.5) * cell.height];
      context.beginPath();
      if (which === 0) context.arc(x, y, 1.8, 0, 2 * Math.PI);
      else context.rect(x - 1.8, y - 1.8, 3.6, 3.6);
      if (which === 0) context.fill();
      else context.stroke();
    }
  });
  context.globalAlpha = 1;
  context.lineWidth = 1.8;
  context.setLineDash(which === 0 ? [] : [5, 3]);
  context.beginPath();
  let started = false;
  values.forEach((row, layer) => {
    const there = row.filter(present);
    if (!there.length) {
      started = false;
      return;
    }
    const mean = there.reduce((sum, value) => sum + value, 0) / there.length;
    const spot = [across(mean), (layer + 0.5) * cell.height];
    if (started) context.lineTo(...spot);
    else context.moveTo(...spot);
    started = true;
  });
  context.stroke();
  context.setLineDash([]);
}

/** The maps of a section: one statistic at a time, chosen by its small picture. */
function startMaps(holder) {
  const panel = holder.querySelector(".panel");
  const readout = holder.querySelector(".readout");
  const about = [...holder.querySelectorAll(".about")];
  const picks = [...holder.querySelectorAll("input[type=radio]")];
  const chosen = () => picks.find((pick) => pick.checked)?.value ?? about[0].dataset.measure;

  function draw() {
    const name = chosen();
    for (const each of about) each.hidden = each.dataset.measure !== name;
    drawPanel(panel, readout, report.measures[name]);
  }
  for (const pick of picks) pick.addEventListener("change", draw);
  drawn(draw);
}

/** A small picture of a statistic: a pixel for each head, clear where it has no value. */
function thumbnail(values, scale) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const [layers, heads] = [values.length, values[0].length];
  canvas.width = heads;
  canvas.height = layers;
  canvas.style.imageRendering = "pixelated";
  const picture = new ImageData(heads, layers);
  const anchors = anchorsOf(scale.diverging);
  values.flat().forEach((value, at) => {
    if (present(value)) picture.data.set([...colourAt(anchors, shareOf(scale, value)), 255], 4 * at);
  });
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

function startThumbnails() {
  for (const holder of document.querySelectorAll("[data-thumbnails]")) {
    drawn(() => {
      const measure = report.measures[holder.dataset.thumbnails];
      const scaleFor = scalesOf(measure);
      holder.replaceChildren(...mapsOf(measure).map(({ which, values }) => thumbnail(values, scaleFor(which))));
    });
  }
}

/** At a glance: the headline statistics, small. */
function startGlance() {
  for (const holder of document.querySelectorAll("[data-glance]")) {
    const measure = report.measures[holder.dataset.glance];
    drawn(() => (measure.over === "head" ? glanceMaps(holder, measure) : glanceLines(holder, measure)));
  }
}

function glanceMaps(holder, measure) {
  const scaleFor = scalesOf(measure);
  holder.replaceChildren(
    ...mapsOf(measure).map(({ which, values }) => {
      const picture = thumbnail(values, scaleFor(which));
      return two ? make("span", {}, picture, make("span", { class: "label" }, keyOf(which), shortName(which))) : make("span", {}, picture);
    }),
  );
}

function glanceLines(holder, measure) {
  const plot = make("span", { class: "plot" });
  holder.replaceChildren(plot);
  drawChart(plot, { ...layerChart(measure), height: 100, bare: true });
}

/** A link to a statistic chooses it, so that what it leads to is there. */
function followHash() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target?.dataset.measure) return;
  const pick = [...document.querySelectorAll(".picker input")].find(({ value }) => value === target.dataset.measure);
  if (pick && !pick.checked) {
    pick.checked = true;
    pick.dispatchEvent(new Event("change"));
  }
  (target.closest(".head-maps") ?? target).scrollIntoView();
}

// ---- charts -----------------------------------------------------------------------------------------------------

const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const FEW = 8; // lines that are told apart by hue and dash; more take the colours of a scale in their order

/** A layer statistic as lines over the layers, one for each model. */
function layerChart(measure) {
  const lines = measure.of
    .map((y, which) => ({ label: models[which].label, which, x: y ? range(y.length) : [], y }))
    .filter(({ y }) => y);
  return { lines, xLabel: "layer", yLabel: measure.unit, name: measure.title, whole: true };
}

/** The models' curves: in one chart where they are one line each, else beside each other on the same axes. */
function curveCharts(of, title) {
  const own = of.map((curve, which) => ({ curve, which })).filter(({ curve }) => curve);
  const axes = ({ curve }) => ({ xLabel: curve.xLabel, yLabel: curve.yLabel, points: curve.points, name: title });
  const linesOf = ({ curve, which }) =>
    curve.lines.map(({ label, y }) => ({ label, y, x: curve.x, which: curve.lines.length === 1 ? which : null }));
  if (own.every(({ curve }) => curve.lines.length === 1)) {
    const lines = own.map((each) => ({ ...linesOf(each)[0], label: two ? models[each.which].label : each.curve.lines[0].label }));
    return [{ ...axes(own[0]), lines }];
  }
  const all = own.flatMap(linesOf);
  return own.map((each) => ({ ...axes(each), lines: linesOf(each), model: each.which, alike: all }));
}

const powerText = (exponent) =>
  exponent < -3 || exponent > 5 ? `1e${exponent}`.replace("-", "−") : (10 ** exponent).toLocaleString("en-US");

const DECADES = 8; // of a chart by powers of ten: what is smaller is drawn at its edge

/** From values to pixels; by powers of ten where positive values span more than three of them. */
function axisOf(values, from, to) {
  const there = values.filter(present);
  let [low, high] = there.length ? [Math.min(...there), Math.max(...there)] : [0, 1];
  if (low > 0 && high / low > 1000) {
    const last = Math.ceil(Math.log10(high));
    const first = Math.max(Math.floor(Math.log10(low)), last - DECADES);
    const step = Math.ceil((last - first) / 5);
    const ticks = range(Math.floor((last - first) / step) + 1).map((index) => ({
      value: 10 ** (first + index * step),
      text: powerText(first + index * step),
    }));
    const share = (value) => Math.max(0, (Math.log10(value) - first) / (last - first));
    const edge = low < 10 ** first ? `values below ${powerText(first)} stand at the edge` : "";
    return { at: (value) => from + share(value) * (to - from), ticks, scale: "(log scale)", edge };
  }
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  return { at: (value) => from + ((value - low) / (high - low)) * (to - from), low, high, scale: "", edge: "" };
}

function strokeOf(lines, index) {
  const { which } = lines[index];
  if (present(which)) return { stroke: themed(`--key-${which}`), dash: which === 0 || lines.length === 1 ? "" : "6 3" };
  if (lines.length <= FEW) return { stroke: LINE_COLOURS[isDark() ? "dark" : "light"][index], dash: DASHES[index % 4] };
  return { stroke: css(colourAt(anchorsOf(false), 0.3 + (0.7 * index) / (lines.length - 1))), dash: "" };
}

// Okabe and Ito's colours, lightened where the page is dark.
const LINE_COLOURS = {
  light: ["#0072b2", "#d55e00", "#00805f", "#b4588f", "#9a6a00", "#2d8fc4", "#1d2126", "#7a6f00"],
  dark: ["#56b4e9", "#f08a4b", "#3cc49a", "#e29fc6", "#f0b640", "#9fd3f3", "#e6e8ea", "#f0e442"],
};

/** An SVG chart of lines or points in `holder`, with a read-out by pointer and by keys. */
function drawChart(holder, chart) {
  const { lines, points = false, height = 210, bare = false } = chart;
  const width = Math.max(160, holder.clientWidth);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height });
  const edges = bare ? { left: 2, right: 4, top: 4, bottom: 4 } : { left: 52, right: 10, top: 22, bottom: 34 };
  const ranged = chart.alike ?? lines;
  const x = axisOf(ranged.flatMap((line) => line.x), edges.left, width - edges.right);
  const y = axisOf(ranged.flatMap((line) => line.y), height - edges.bottom, edges.top);
  if (!bare) drawAxes(drawing, chart, x, y, width, height, edges);
  lines.forEach((line, index) => {
    const style = strokeOf(lines, index);
    drawing.append(...(points ? dotsOf(line, index, x, y, style) : linesOf(line, index, x, y, style, bare)));
  });
  holder.replaceChildren();
  if (two && present(chart.model)) holder.append(make("p", { class: "plot-name" }, keyOf(chart.model), models[chart.model].label));
  holder.append(drawing);
  if (bare) {
    drawing.setAttribute("aria-hidden", "true");
    return;
  }
  if (lines.length > 1 || (two && !present(chart.model))) holder.append(lineKey(lines, points));
  const edgeNote = [...new Set([x.edge, y.edge])].filter(Boolean).join("; ");
  if (edgeNote) holder.append(make("p", { class: "line-key" }, edgeNote));
  const readout = make("p", { class: "heard", "aria-live": "polite" }); // the tip is for the eye
  holder.append(readout);
  followChart(drawing, readout, chart, x, y, height - edges.bottom, edges.top);
}

function drawAxes(drawing, chart, x, y, width, height, edges) {
  for (const { value, text } of y.ticks ?? ticksBetween(y.low, y.high, 4)) {
    const at = y.at(value);
    const kind = value === 0 ? "zero" : "grid";
    drawing.append(
      svg("line", { class: kind, x1: edges.left, x2: width - edges.right, y1: at, y2: at }),
      svg("text", { x: edges.left - 7, y: at + 4, "text-anchor": "end" }, text),
    );
  }
  const wanted = Math.max(2, Math.floor(width / 90));
  for (const { value, text } of x.ticks ?? ticksBetween(x.low, x.high, chart.whole ? Math.min(wanted, Math.max(1, x.high - x.low)) : wanted)) {
    drawing.append(svg("text", { x: x.at(value), y: height - edges.bottom + 15, "text-anchor": "middle" }, text));
  }
  const names = `${chart.xLabel} ${x.scale}`.trim();
  drawing.append(svg("text", { x: width - edges.right, y: height - 4, "text-anchor": "end" }, `${names} →`));
  const upright = `${chart.yLabel} ${y.scale}`.trim();
  if (upright) drawing.append(svg("text", { x: 4, y: 11 }, `↑ ${upright}`));
}

/** A value that is not there leaves a gap. */
function linesOf(line, index, x, y, { stroke, dash }) {
  let path = "";
  let open = false;
  line.y.forEach((value, at) => {
    if (present(value)) path += `${open ? "L" : "M"}${x.at(line.x[at]).toFixed(1)} ${y.at(value).toFixed(1)}`;
    open = present(value);
  });
  const alone = line.y.flatMap((value, at) =>
    present(value) && !present(line.y[at - 1]) && !present(line.y[at + 1]) ? [[line.x[at], value]] : [],
  );
  const dots = alone.map(([at, value]) => svg("circle", { cx: x.at(at), cy: y.at(value), r: 2.5, fill: stroke }));
  return [svg("path", { class: "line", d: path, stroke, "stroke-dasharray": dash, "data-line": index }), ...dots];
}

/** Points of different lines have different shapes. */
function dotsOf(line, index, x, y, { stroke }) {
  return line.y.flatMap((value, at) =>
    present(value) ? [dot(index, x.at(line.x[at]), y.at(value), stroke)] : [],
  );
}

function dot(index, x, y, fill) {
  const shape = index % 3;
  if (shape === 0) return svg("circle", { class: "dot", cx: x, cy: y, r: 3.2, fill });
  if (shape === 1) return svg("rect", { class: "dot", x: x - 2.9, y: y - 2.9, width: 5.8, height: 5.8, fill });
  return svg("path", { class: "dot", d: `M${x} ${y - 3.9}L${x + 3.7} ${y + 2.8}L${x - 3.7} ${y + 2.8}Z`, fill });
}

function lineKey(lines, points) {
  const shown = lines.length <= FEW ? range(lines.length) : [0, Math.floor(lines.length / 2), lines.length - 1];
  const entries = shown.map((index) => {
    const { stroke, dash } = strokeOf(lines, index);
    const sample = points ? dot(index, 14, 6, stroke) : svg("path", { d: "M0 6H28", stroke, "stroke-width": 2, "stroke-dasharray": dash });
    return make("span", {}, svg("svg", { viewBox: "0 0 28 12", "aria-hidden": "true" }, sample), lines[index].label);
  });
  if (lines.length > FEW) entries.splice(1, 0, make("span", {}, "…")) && entries.splice(3, 0, make("span", {}, "…"));
  return make("div", { class: "line-key" }, ...entries);
}

/** Pointing at a chart, and moving over it by keys: left and right along x, up and down from line to line. */
function followChart(drawing, readout, chart, x, y, bottom, top) {
  const { lines, points = false } = chart;
  const spots = lines.flatMap((line, index) =>
    line.y.flatMap((value, at) => (present(value) ? [{ index, x: line.x[at], y: value }] : [])),
  );
  if (!spots.length) return;
  const stops = [...new Set(spots.map((spot) => spot.x))].sort((a, b) => a - b);
  const together = !points && lines.length <= FEW;
  const guide = svg("line", { class: "guide", y1: top, y2: bottom, visibility: "hidden" });
  const marker = svg("circle", { class: "marker", r: 4, visibility: "hidden" });
  drawing.append(guide, marker);
  setAll(drawing, {
    tabindex: "0",
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${chart.name}: ${lines.map((line) => line.label).slice(0, FEW).join(", ")}. Arrow keys move along it.`,
  });
  let current = spots[0];

  function show(spot) {
    current = spot;
    const [px, py] = [x.at(spot.x), y.at(spot.y)];
    setAll(guide, { x1: px, x2: px, visibility: points ? "hidden" : "visible" });
    setAll(marker, { cx: px, cy: py, stroke: strokeOf(lines, spot.index).stroke, visibility: "visible" });
    const at = together ? spots.filter((each) => each.x === spot.x) : [spot];
    const title = `${chart.xLabel} ${written(spot.x)}`;
    const rows = at.map((each) => [lines[each.index].label, written(each.y)]);
    const scaled = drawing.getBoundingClientRect();
    const left = scaled.left + px;
    showTip(title, rows, { left, right: left, top: scaled.top + py });
    readout.textContent = `${title}: ${rows.map(([name, value]) => (lines.length > 1 ? `${name} ${value}` : value)).join(", ")}${chart.yLabel && chart.whole ? ` ${chart.yLabel}` : ""}`;
  }
  function hide() {
    hideTip();
    setAll(guide, { visibility: "hidden" });
    setAll(marker, { visibility: "hidden" });
  }
  function nearest(event) {
    const { left, top: up } = drawing.getBoundingClientRect();
    const [px, py] = [event.clientX - left, event.clientY - up];
    const weight = points ? 1 : 20; // on lines the place along x decides, and then the nearest line
    const far = (spot) => weight * Math.abs(x.at(spot.x) - px) + Math.abs(y.at(spot.y) - py);
    return spots.reduce((best, spot) => (far(spot) < far(best) ? spot : best));
  }
  function moved(key) {
    const at = stops.indexOf(current.x);
    const along = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 }[key];
    if (present(along)) {
      const there = spots.filter((spot) => spot.x === stops[clamp(along, 0, stops.length - 1)]);
      return there.find((spot) => spot.index === current.index) ?? there[0];
    }
    const step = { ArrowUp: 1, ArrowDown: -1 }[key];
    if (!step) return null;
    const column = spots.filter((spot) => spot.x === current.x).sort((a, b) => a.y - b.y);
    return column[clamp(column.indexOf(current) + step, 0, column.length - 1)];
  }
  drawing.addEventListener("pointermove", (event) => show(nearest(event)));
  drawing.addEventListener("pointerdown", (event) => show(nearest(event)));
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("focus", () => drawing.matches(":focus-visible") && show(current));
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const to = event.ctrlKey || event.altKey || event.metaKey ? null : moved(event.key);
    if (!to) return;
    event.preventDefault();
    show(to);
  });
}

function startCharts() {
  for (const figure of document.querySelectorAll("[data-layers]")) {
    placeCharts(figure, [layerChart(report.measures[figure.dataset.layers])]);
  }
  for (const figure of document.querySelectorAll("[data-curve]")) {
    const of = report.curves[figure.closest("[data-section]").dataset.section][figure.dataset.curve];
    const title = figure.querySelector("h3").textContent;
    placeCharts(figure, curveCharts(of, title).map((chart) => ({ ...chart, height: 230 })));
  }
}

function placeCharts(figure, charts) {
  const plots = charts.map(() => make("div", { class: "plot" }));
  figure.append(make("div", { class: "plots" }, ...plots));
  figure.classList.toggle("whole-width", charts.length > 1);
  charts.forEach((chart, index) => drawn(() => drawChart(plots[index], chart)));
}

// ---- a text, token by token -------------------------------------------------------------------------------------

/** Base64 of float16, little-endian, as floats. */
function decodeHalves(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const halves = new DataView(bytes.buffer);
  const powers = range(32).map((exponent) => 2 ** (exponent - 25)); // of a fraction with 10 bits
  const floats = new Float32Array(bytes.length / 2);
  for (let index = 0; index < floats.length; index++) {
    const half = halves.getUint16(2 * index, true);
    const exponent = (half >> 10) & 31;
    const size = exponent ? powers[exponent] * (1024 + (half & 1023)) : powers[1] * (half & 1023);
    floats[index] = half & 0x8000 ? -size : size;
  }
  return floats;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The masses of an example: of a head, the mean over a layer's heads (head null), or over all (layer null too). */
function exampleOf(encoded) {
  const [layers, heads, length] = encoded.shape;
  const all = decodeHalves(encoded.masses);
  const ofHead = (layer, head) => all.subarray((layer * heads + head) * length, (layer * heads + head + 1) * length);
  const chosen = (layer, head) => {
    if (present(layer) && present(head)) return ofHead(layer, head);
    const mean = new Float32Array(length);
    const of = present(layer) ? [layer] : range(layers);
    for (const each of of) {
      for (const own of range(heads)) ofHead(each, own).forEach((mass, at) => (mean[at] += mass / (of.length * heads)));
    }
    return mean;
  };
  const [first, end] = encoded.span;
  const answer = range(layers).map((layer) => range(heads).map((head) => sum(ofHead(layer, head).subarray(first, end))));
  return { ...encoded, layers, heads, length, chosen, answer, signed: all.some((mass) => mass < 0) };
}

/** Where the mass on the answer is largest. */
function strongest(answer) {
  let best = [0, 0];
  answer.forEach((row, layer) => row.forEach((mass, head) => (mass > answer[best[0]][best[1]] ? (best = [layer, head]) : 0)));
  return best;
}

/**
 * Ends of the colours of a text. The first token often takes most of the mass, which would leave the rest pale: the
 * colours end at the largest mass of another token, and the first token's is said in words.
 */
function tokenScale(texts) {
  const others = texts.flatMap(({ masses }) => [...masses.subarray(1)].map(Math.abs));
  const high = others.reduce((largest, mass) => Math.max(largest, mass), 0) || 1;
  const all = texts.flatMap(({ masses }) => [...masses]);
  const diverging = texts.some(({ example }) => example.signed);
  const [lowest, highest] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  return { low: diverging ? -high : 0, high, lowest, highest, diverging };
}

/** The texts of a section. Where both models have as many layers and heads, a choice for one is one for both. */
function startExamples(holder) {
  const encoded = report.examples[holder.dataset.examples];
  const texts = [...holder.querySelectorAll("[data-example]")].map((element) => {
    const which = Number(element.dataset.example);
    return textOf(element, which, exampleOf(encoded[which]));
  });
  const alike = texts.every(({ example }) => String(example.shape) === String(texts[0].example.shape));
  const scale = () => scaleOf(texts.flatMap(({ example }) => example.answer.flat()), texts.some(({ example }) => example.signed));

  function choose(from, layer, head) {
    for (const text of alike ? texts : [from]) text.choose(layer, present(layer) ? head : null);
    colour();
  }
  function colour() {
    const shared = tokenScale(texts.map(({ example, choice }) => ({ example, masses: example.chosen(...choice()) })));
    for (const text of texts) text.colour(shared);
  }
  for (const text of texts) {
    text.onChoose = (layer, head) => choose(text, layer, head);
    text.choose(...strongest(alike ? texts[0].example.answer : text.example.answer));
  }
  drawn(() => {
    for (const text of texts) text.drawMap(scale());
    colour();
  });
}

function textOf(element, which, example) {
  const tokens = [...element.querySelectorAll("[data-token]")];
  const map = element.querySelector(".example-map");
  const readout = element.querySelector(".readout");
  const place = element.querySelector(".legend-place");
  const sums = make("p", { class: "sums", "aria-live": "polite" });
  readout.before(sums);
  let [layer, head] = [0, 0];
  let masses = example.chosen(0, 0);
  let drawnMap = null;

  const text = {
    example,
    onChoose: () => {},
    choice: () => [layer, head],
    choose(newLayer, newHead) {
      [layer, head] = [newLayer, newHead];
      masses = example.chosen(layer, head);
      controls.show(layer, head);
      markMap();
    },
    colour(scale) {
      colourTokens(tokens, masses, scale);
      sums.textContent = sumsOf(example, masses, layer, head);
      place.replaceChildren(legendOf(scale, "mass of a token", { negative: "tokens with dots below are negative" }));
    },
    drawMap(scale) {
      const room = element.clientWidth;
      const cell = cellFor(Math.min(room, 420), example.layers, example.heads, { height: two ? 320 : 420 });
      drawnMap = heatMap({
        values: example.answer,
        scale,
        cell,
        title: ["Mass on the answer"],
        label: `Mass on the answer${two ? `, ${models[which].label}` : ""}`,
        onPoint: (overLayer, overHead, box) => {
          drawnMap.mark(overLayer, overHead);
          const words = `layer ${overLayer}, head ${overHead}: ${written(example.answer[overLayer][overHead])}`;
          showTip(words, [], box);
          readout.textContent = `${words} on the answer`;
        },
        onLeave: () => {
          drawnMap.unmark();
          hideTip();
        },
        onChoose: (toLayer, toHead) => text.onChoose(toLayer, toHead),
      });
      drawnMap.element.append(legendOf(scale, "", { width: example.heads * cell.width }));
      map.replaceChildren(drawnMap.element);
      markMap();
    },
  };
  function markMap() {
    if (present(layer) && present(head)) drawnMap?.choose(layer, head);
    else drawnMap?.unchoose();
  }
  const controls = choices(element.querySelector(".choices"), example, (...to) => text.onChoose(...to));
  followTokens(element.querySelector(".tokens"), tokens, (at) => {
    const words = tokens[at].textContent;
    readout.textContent = `token ${at} “${words}”: ${written(roundMass(masses[at]))}${marksOf(example, at)}`;
    return written(roundMass(masses[at]));
  });
  readout.textContent = "Point at a token, or move over them with the arrow keys.";
  return text;
}

/** The masses were stored with eleven bits: three digits of them mean something. */
const roundMass = (mass) => Number(mass.toPrecision(3));

function marksOf(example, at) {
  const [first, end] = example.span;
  if (at >= first && at < end) return ", in the answer";
  return example.queries.includes(at) ? ", a query" : "";
}

function sumsOf(example, masses, layer, head) {
  const [first, end] = example.span;
  const answer = sum(masses.subarray(first, end));
  const start = first === 0 ? 0 : masses[0];
  const rest = sum(masses) - answer - start;
  const of = present(head) ? `Layer ${layer}, head ${head}` : present(layer) ? `Layer ${layer}, mean of its heads` : "Mean of all heads";
  const firstToken = first === 0 ? "" : `${written(roundMass(start))} on the first token, `;
  return `${of}: ${written(roundMass(answer))} on the answer, ${firstToken}${written(roundMass(rest))} on all other tokens.`;
}

function colourTokens(tokens, masses, scale) {
  const anchors = anchorsOf(scale.diverging);
  const faint = scale.diverging ? 0.02 * scale.high : 0;
  tokens.forEach((token, at) => {
    const colour = colourAt(anchors, shareOf(scale, masses[at]));
    token.style.background = css(colour);
    token.style.color = inkOn(colour);
    token.classList.toggle("negative", masses[at] < -faint);
  });
}

/** Selects for a layer and a head. Heads of different layers have nothing in common, so all layers mean all heads. */
function choices(holder, example, onChoose) {
  const select = (count, word) =>
    make("select", {}, make("option", { value: "" }, `all ${word}s (mean)`), ...range(count).map((each) => make("option", { value: each }, String(each))));
  const [layer, head] = [select(example.layers, "layer"), select(example.heads, "head")];
  const strong = make("button", { type: "button", class: "quiet" }, "Strongest on the answer");
  holder.append(make("label", {}, "Layer", layer), make("label", {}, "Head", head), strong);
  const number = (text) => (text === "" ? null : Number(text));
  for (const each of [layer, head]) each.addEventListener("change", () => onChoose(number(layer.value), number(head.value)));
  strong.addEventListener("click", () => onChoose(...strongest(example.answer)));
  return {
    show(toLayer, toHead) {
      layer.value = toLayer ?? "";
      head.value = toHead ?? "";
      head.disabled = !present(toLayer);
    },
  };
}

/** Pointing at tokens, and moving over them by keys; one of them is in the order of Tab. */
function followTokens(holder, tokens, say) {
  let current = 0;
  tokens.forEach((token, at) => token.setAttribute("tabindex", at === 0 ? "0" : "-1"));

  function show(at) {
    tokens[current].classList.remove("pointed");
    tokens[current].setAttribute("tabindex", "-1");
    current = at;
    tokens[at].classList.add("pointed");
    tokens[at].setAttribute("tabindex", "0");
    const box = tokens[at].getClientRects()[0] ?? tokens[at].getBoundingClientRect();
    showTip(say(at), [], { left: box.left, right: box.right, top: (box.top + box.bottom) / 2 });
  }
  function hide() {
    tokens[current].classList.remove("pointed");
    hideTip();
  }
  const placeOf = (event) => tokens.indexOf(event.target.closest?.("[data-token]"));
  holder.addEventListener("pointerover", (event) => placeOf(event) >= 0 && show(placeOf(event)));
  holder.addEventListener("pointerleave", hide);
  holder.addEventListener("focusin", (event) => placeOf(event) >= 0 && show(placeOf(event)));
  holder.addEventListener("focusout", hide);
  holder.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (!present(to) || event.altKey || event.metaKey) return;
    event.preventDefault();
    tokens[clamp(to, 0, tokens.length - 1)].focus();
  });
}

// ---- where the reader is ----------------------------------------------------------------------------------------

function startContents() {
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-15% 0px -80% 0px" },
  );
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
}

// ---- start ------------------------------------------------------------------------------------------------------

startTheme();
startGlance();
startThumbnails();
for (const holder of document.querySelectorAll("[data-maps]")) startMaps(holder);
startCharts();
for (const holder of document.querySelectorAll("[data-examples]")) tasks.push(() => startExamples(holder));
startContents();
addEventListener("hashchange", followHash);
work();
