// One map of layers and heads: its cells, their labels, and moving over them.

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
