// What is redrawn when the theme or the width changes, and the tip beside what is pointed at.

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

// ---- the tip ----

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
