// A text, token by token, in the colours of a head's masses.

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
  return { ...encoded, layers, heads, length, chosen, signed: all.some((mass) => mass < 0) };
}

/** Of values of layers and heads, that of a head, or the mean over a layer's heads or over all. */
function chosenOf(values, layer, head) {
  if (present(layer) && present(head)) return values[layer][head];
  const there = present(layer) ? values[layer] : values.flat();
  return sum(there) / there.length;
}

/** Where the mass on the answer is largest. */
function strongest(answer) {
  let best = [0, 0];
  answer.forEach((row, layer) => row.forEach((mass, head) => (mass > answer[best[0]][best[1]] ? (best = [layer, head]) : 0)));
  return best;
}

/**
 * Ends of the colours of a text. The first token often takes most of the mass, which would leave the rest pale: the
 * colours end at the largest mass of another token, and the first token's is said in words. A part of a text that
 * starts later does not show it.
 */
function tokenScale(texts) {
  const others = texts.flatMap(({ example, masses }) => [...masses.subarray(example.start === 0 ? 1 : 0)].map(Math.abs));
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
  const scale = () => scaleOf(texts.flatMap(({ example }) => example.onAnswer.flat()), texts.some(({ example }) => example.signed));

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
    text.choose(...strongest(alike ? texts[0].example.onAnswer : text.example.onAnswer));
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
      sums.textContent = sumsOf(example, layer, head);
      place.replaceChildren(legendOf(scale, "mass of a token", { negative: "tokens with dots below are negative" }));
    },
    drawMap(scale) {
      const room = element.clientWidth;
      const cell = cellFor(Math.min(room, 420), example.layers, example.heads, { height: two ? 320 : 420 });
      drawnMap = heatMap({
        values: example.onAnswer,
        scale,
        cell,
        title: ["Mass on the answer"],
        label: `Mass on the answer${two ? `, ${models[which].label}` : ""}`,
        onPoint: (overLayer, overHead, box) => {
          drawnMap.mark(overLayer, overHead);
          const words = `layer ${overLayer}, head ${overHead}: ${written(example.onAnswer[overLayer][overHead])}`;
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
    readout.textContent = `token ${example.start + at} “${words}”: ${written(roundMass(masses[at]))}${marksOf(example, at)}`;
    return written(roundMass(masses[at]));
  });
  readout.textContent = "Point at a token, or move over them with the arrow keys.";
  return text;
}

/** Of a mass with eleven bits three digits mean something; of one below 6e−5 fewer do (see data.py). */
const roundMass = (mass) => Number(mass.toPrecision(3));

function marksOf(example, at) {
  const [first, end] = example.span;
  if (at >= first && at < end) return ", in the answer";
  return example.queries.includes(at) ? ", a query" : "";
}

/** Of the whole text, also where a part of it is shown. */
function sumsOf(example, layer, head) {
  const [answer, first, all] = [example.onAnswer, example.onFirst, example.onAll].map((of) => chosenOf(of, layer, head));
  const inAnswer = example.start + example.span[0] === 0;
  const rest = all - answer - (inAnswer ? 0 : first);
  const of = present(head) ? `Layer ${layer}, head ${head}` : present(layer) ? `Layer ${layer}, mean of its heads` : "Mean of all heads";
  const firstToken = inAnswer ? "" : `${written(roundMass(first))} on the first token, `;
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
  strong.addEventListener("click", () => onChoose(...strongest(example.onAnswer)));
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
