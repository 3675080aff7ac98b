// The report, and small things: elements, and numbers in words.

const report = JSON.parse(document.getElementById("data").textContent);
const models = report.models;
const two = models.length > 1;
const DIFFERENCE = "difference";

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const present = (value) => value !== null && value !== undefined;
const sum = (values) => values.reduce((total, value) => total + value, 0);
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
