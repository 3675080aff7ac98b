// Charts of lines and points.

const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const FEW = 8; // lines that are told apart by hue and dash; more take the colours of a scale in their order

/** A layer statistic over the layers, and below it the difference of two models on an axis of its own with 0 on it. */
function layerCharts(measure) {
  const y = measure.difference;
  if (!y) return [layerChart(measure)];
  const line = { label: DIFFERENCE, which: DIFFERENCE, x: range(y.length), y };
  const name = `${measure.title}, ${nameOf(DIFFERENCE)}`;
  const below = { lines: [line], alike: [line, { x: [], y: [0] }], model: DIFFERENCE, height: 130, name };
  return [layerChart(measure), { ...layerChart(measure), ...below }];
}

/** Lines over the layers, one for each model. */
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
  const ownLines = ({ curve, which }) =>
    curve.lines.map(({ label, y }) => ({ label, y, x: curve.x, which: curve.lines.length === 1 ? which : null }));
  if (own.every(({ curve }) => curve.lines.length === 1)) {
    const lines = own.map((each) => ({ ...ownLines(each)[0], label: two ? models[each.which].label : each.curve.lines[0].label }));
    return [{ ...axes(own[0]), lines }];
  }
  const all = own.flatMap(ownLines);
  return own.map((each) => ({ ...axes(each), lines: ownLines(each), model: each.which, alike: all }));
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
    drawing.append(...(points ? dotsOf(line, index, x, y, style) : pathOf(line, x, y, style)));
  });
  holder.replaceChildren();
  if (two && present(chart.model)) holder.append(make("p", { class: "plot-name" }, ...titleOf(chart.model)));
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
function pathOf(line, x, y, { stroke, dash }) {
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
  return [svg("path", { class: "line", d: path, stroke, "stroke-dasharray": dash }), ...dots];
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
    placeCharts(figure, layerCharts(report.measures[figure.dataset.layers]));
  }
  for (const figure of document.querySelectorAll("[data-curve]")) {
    const of = report.curves[figure.closest("[data-section]").dataset.section][figure.dataset.curve];
    const title = figure.querySelector("h3").textContent;
    const charts = curveCharts(of, title).map((chart) => ({ ...chart, height: 230 }));
    figure.classList.toggle("whole-width", charts.length > 1);
    placeCharts(figure, charts);
  }
}

function placeCharts(figure, charts) {
  const plots = charts.map(() => make("div", { class: "plot" }));
  figure.append(make("div", { class: "plots" }, ...plots));
  charts.forEach((chart, index) => drawn(() => drawChart(plots[index], chart)));
}
