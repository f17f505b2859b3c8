// Settings against the metric: parallel coordinates (drag along an axis to filter) and importances.

// Return {place, ticks} of an axis: a function from a value to its position, from 0 (bottom) to 1, and [position, label] of
// each tick. Numbers are placed linearly, or logarithmically if they span a factor of 8 or are `tagged`; names are evenly
// spaced. `turned` puts the lowest value at the top, as for a loss. `exact` labels the values themselves if they are few. The
// values keep a distance of 7 % from both ends.
function makeScale(values, turned = false, exact = true, tagged = false) {
  const known = [...new Set(values.filter((v) => v !== null && v !== undefined))];
  const numbers = known.map(Number);
  if (known.length > 1 && known.every((v) => v !== "" && Number.isFinite(Number(v)))) {
    const low = Math.min(...numbers), high = Math.max(...numbers), log = low > 0 && (tagged || high / low >= 8);
    const f = log ? Math.log : (v) => v;
    const up = (v) => 0.07 + (0.86 * (f(Number(v)) - f(low))) / (f(high) - f(low)), place = (v) => (turned ? 1 - up(v) : up(v));
    const ticks = exact && known.length <= 6 ? [...numbers, ...(log ? roundTicks(low, high, log, [1]) : [])] : roundTicks(low, high, log);
    return { place, ticks: ticks.map((v) => [place(v), shortNumber(v)]) };
  }
  known.sort();
  const place = (v) => (known.length > 1 ? 0.07 + (0.86 * known.indexOf(v)) / (known.length - 1) : 0.5);
  return { place, ticks: known.map((v) => [place(v), v]) };
}

// Return round numbers from low to high. If `log`, these are powers of ten times each of `factors`; if not, multiples of 1, 2
// or 5 times a power of ten.
function roundTicks(low, high, log, factors = high / low < 200 ? [1, 2, 5] : [1]) {
  const power = (v) => 10 ** Math.floor(Math.log10(v)), found = [];
  if (log) {
    for (let p = power(low); p <= high; p *= 10) found.push(...factors.map((m) => m * p));
  } else {
    const rough = (high - low) / 5, size = power(rough), step = [1, 2, 5, 10].find((m) => m * size >= rough) * size;
    for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
  }
  return found.filter((v) => v >= low && v <= high);
}

function shortNumber(value) {
  const rounded = Number(Number(value).toPrecision(4));
  return Math.abs(rounded) >= 1e6 ? rounded.toExponential() : String(rounded);
}

function drawChoices() {
  const section = byId("choices"), box = byId("parallel"), lastOf = (place) => mean(runsOf(place).map((run) => scoreOf(run, data.metric)));
  const points = data.points.map((p, place) => ({ ...p, place, mean: p.mean ?? lastOf(place), ended: p.mean === null }));
  const scored = points.filter((p) => p.mean !== null);
  section.hidden = scored.length < 3 || !data.keys.length;
  if (section.hidden) return;
  box.textContent = "";
  const fresh = [...state.brushes.values()].some((brush) => brush.fresh), completed = scored.filter((p) => !p.ended);
  const width = Math.max(box.clientWidth, 280), height = 340, top = 50, foot = height - 26, left = 44;
  const several = (key) => new Set(scored.map((p) => p.settings[key])).size > 1;
  const axes = [...data.keys.filter(several).slice(0, 11), data.metric], names = axes.slice(0, -1).join(", ");
  const scales = axes.map((key, i) => i === axes.length - 1 ? makeScale((completed.length > 1 ? completed : scored).map((p) => p.mean), !data.rising, false) :
    makeScale(scored.map((p) => p.settings[key]), false, true, (data.search ? data.search.log : []).includes(key)));
  const x = (i) => left + (i * (width - left - 62)) / Math.max(axes.length - 1, 1);
  const y = (t) => foot - Math.min(Math.max(t, 0), 1) * (foot - top); // a pruned point may lie beyond the completed ones
  const valueOf = (p, i) => (i === axes.length - 1 ? p.mean : p.settings[axes[i]]);
  const svg = addSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${data.metric} of ${scored.length} points against ${names}` }, box);
  for (const p of scored.slice().reverse()) { // draw the best point last, on top
    const stops = axes.map((_, i) => [i, valueOf(p, i)]).filter(([, v]) => v !== null && v !== undefined);
    const path = stops.map(([i, v], n) => {
      const [px, py] = [x(i), y(scales[i].place(v))];
      if (!n) return `M${px},${py}`;
      const before = x(stops[n - 1][0]), middle = (before + px) / 2;
      return `C${middle},${y(scales[stops[n - 1][0]].place(stops[n - 1][1]))} ${middle},${py} ${px},${py}`;
    }).join(" ");
    const kind = p.ended ? "run ended" : p.place || !data.best ? "run" : "run best";
    const element = addSvg("path", { class: kind, d: path, stroke: colour(p.place), "data-point": p.place }, svg);
    element.classList.toggle("off", !shows(p.place));
    element.addEventListener("pointermove", (event) => showTip(event, `${p.label}\n${data.metric} ${value(p)}`));
    element.addEventListener("pointerleave", () => { showTip(null); highlight(null); });
    element.addEventListener("pointerenter", () => { element.classList.add("hot"); highlight(p.place); });
    element.addEventListener("click", () => showOnly(p.place));
    for (let n = 0; isDistinct() && shows(p.place) && n < stops.length; n++) { // marks between two axes and on the last one
      const [here, next] = [n, Math.min(n + 1, stops.length - 1)].map((at) => [x(stops[at][0]), y(scales[stops[at][0]].place(stops[at][1]))]);
      const place = `translate(${(here[0] + next[0]) / 2 - 5}, ${(here[1] + next[1]) / 2 - 5}) scale(0.83)`;
      addSvg("path", { class: "mark", d: SHAPES[p.place], fill: p.ended ? style("card") : colour(p.place), stroke: colour(p.place), transform: place }, svg);
    }
  }
  const ended = scored.length - completed.length, missing = points.length - scored.length;
  addElement(box, "p", "small", (ended ? `Dashed: points that did not complete, at their last metric or, outside the axis, at its end (${ended}). ` : "") +
    (missing ? `Not drawn: points without a metric (${missing}).` : ""));
  axes.forEach((key, i) => {
    const narrow = (width - left - 62) / Math.max(axes.length - 1, 1);
    const most = Math.max(Math.floor((narrow < 90 ? 1.9 : 1) * narrow / 7), 5); // narrow axes put names in two lines
    const last = key.split(/[. ]/).pop(), name = key.length > most ? last : key;
    const title = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    const head = addSvg("text", { x: x(i), y: i % 2 && narrow < 90 ? 30 : 16, "text-anchor": "middle" }, svg, title);
    addSvg("title", {}, head, key);
    addSvg("line", { x1: x(i), x2: x(i), y1: top, y2: foot }, svg);
    const apart = (some, tick) => (some.some(([t]) => Math.abs(t - tick[0]) < 0.05) ? some : [...some, tick]);
    for (const [t, text] of scales[i].ticks.reduce(apart, [])) { // labels must not overlap curves or each other
      const cut = text.length > 14 ? `${text.slice(0, 13)}…` : text;
      addSvg("text", { class: "tick", x: x(i) + (key === data.metric ? 9 : 5), y: y(t) + (key === data.metric ? 4 : t < 0.5 ? 14 : -5) }, svg, cut);
    }
    addBrush(svg, key, x(i), top, foot, (t) => scored.filter((p) => {
      const v = valueOf(p, i);
      return v !== null && v !== undefined && scales[i].place(v) >= t[0] - 1e-9 && scales[i].place(v) <= t[1] + 1e-9;
    }).map((p) => p.place));
  });
  if (fresh) refresh(); // filters from the page's address have their points only now
}

// Filter points by an axis: dragging along it keeps the points whose lines cross the dragged range; a click removes the
// filter. `taken` returns the points in a range.
function addBrush(svg, key, x, top, foot, taken) {
  const grip = addSvg("rect", { class: "grip", x: x - 12, y: top - 6, width: 24, height: foot - top + 12, "data-axis": key }, svg);
  const old = state.brushes.get(key);
  const mark = addSvg("rect", { class: "brush", x: x - 7, y: top, width: 14, height: 0, rx: 3 }, svg);
  const show = ([a, b]) => {
    mark.setAttribute("y", foot - b * (foot - top));
    mark.setAttribute("height", (b - a) * (foot - top));
  };
  if (old) show(old.range);
  if (old && old.fresh) state.brushes.set(key, { range: old.range, points: new Set(taken(old.range)), fresh: false });
  const place = (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientY - box.top) * svg.viewBox.baseVal.height) / box.height;
    return Math.min(Math.max((foot - at) / (foot - top), 0), 1);
  };
  let from = null;
  grip.addEventListener("pointerdown", (event) => {
    from = place(event);
    grip.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  grip.addEventListener("pointermove", (event) => {
    if (from !== null) show([from, place(event)].sort((a, b) => a - b));
  });
  grip.addEventListener("pointerup", (event) => {
    if (from === null) return; // pressed elsewhere
    const range = [from, place(event)].sort((a, b) => a - b);
    from = null;
    if (range[1] - range[0] < 0.02) state.brushes.delete(key);
    else state.brushes.set(key, { range, points: new Set(taken(range)) });
    refresh();
  });
}

function drawImportance() {
  const box = document.getElementById("importance"), found = Object.entries(data.importance);
  box.textContent = "";
  if (!data.keys.length) return;
  addElement(box, "p", "small", found.length ? "Importance: each setting's share in the ranking of the points." :
    `Importance unknown: ${data.no_importance}.`);
  for (const [key, share] of found.sort((a, b) => b[1] - a[1])) {
    const row = addElement(box, "div", "row");
    addBreakable(addElement(row, "span", "label"), key);
    const bar = addElement(addElement(row, "span", "track"), "i");
    bar.style.width = `${(Math.min(share, 1) * 100).toFixed(1)}%`;
    addElement(row, "span", "value", share > 0 && share < 0.005 ? "<1 %" : `${(share * 100).toFixed(0)} %`);
  }
}
