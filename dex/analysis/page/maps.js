// A statistic's maps side by side: the models, their difference, each layer's spread; and all of it small.

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
