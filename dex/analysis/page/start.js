// The page of `dex analyze`: its words and tables stand there already, and this adds pictures to them, from the JSON
// in #data (see data.py). The files are one module, in this order:
//
//     base.js      the report; elements and numbers
//     colours.js   colours of values and of the theme
//     drawing.js   drawing again when the theme or the width changes; the tip
//     cells.js     one map of layers and heads
//     maps.js      a statistic's maps side by side, large and small
//     charts.js    lines and points
//     tokens.js    a text, token by token
//     start.js     where the reader is, and the start
//
// Whatever can be pointed at can be reached by keyboard, and says its value in a read-out that is announced. Nothing
// is said by colour alone: every value is also a number in the read-out, and signs have a mark of their own.

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

startTheme();
startGlance();
startThumbnails();
for (const holder of document.querySelectorAll("[data-maps]")) startMaps(holder);
startCharts();
for (const holder of document.querySelectorAll("[data-examples]")) tasks.push(() => startExamples(holder));
startContents();
addEventListener("hashchange", followHash);
work();
