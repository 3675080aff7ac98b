// Colours of values and of the theme, and the legend under them.
//
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

/** The relative luminance of WCAG 2, from 0 to 1. */
function luminance(rgb) {
  const [red, green, blue] = rgb.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** White or black ink. At 0.179 both have the same contrast, (L + 0.05)/0.05 = 1.05/(L + 0.05): 4.6 to 1 at least. */
const inkOn = (rgb) => (luminance(rgb) < 0.179 ? "#ffffff" : "#000000");

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
