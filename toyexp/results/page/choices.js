// Settings against the metric: parallel coordinates (drag along an axis to filter) and importances.

// Return {place, ticks} of an axis: a function from a value to its position, from 0 (bottom) to 1, and [position, label] of
// each tick. Numbers are placed linearly, or logarithmically if they span a factor of 8 or are `tagged`; names are evenly
// spaced. `turned` puts the lowest value at the top, as for a loss. `exact` labels the values themselves if they are few. The
// values keep a distance of 7 % from both ends.
function makeScale(values, turned = false, exact = true, tagged = false) {
  const known = [...new Set(values.filter((v) => v !== null && v !== undefined))];
  const numbers = known.map(Number);
  if (known.length > 1 && known.every(isNumber)) {
    const low = Math.min(...numbers), high = Math.max(...numbers), log = low > 0 && (tagged || high / low >= 8);
    const f = log ? Math.log : (v) => v;
    const up = (v) => 0.07 + (0.86 * (f(Number(v)) - f(low))) / (f(high) - f(low)), place = (v) => (turned ? 1 - up(v) : up(v));
    const ticks = exact && known.length <= 6 ? [...numbers, ...(log ? roundTicks(low, high, log, [1]) : [])] : roundTicks(low, high, log);
    return { place, ticks: tickLabels(ticks).map((text, n) => [place(ticks[n]), text]) };
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

// Return the labels of an axis in one notation: with exponents if one of the numbers is large or tiny.
function tickLabels(values) {
  const rounded = values.map((v) => Number(Number(v).toPrecision(4)));
  const isLong = rounded.some((v) => v && (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-6));
  return rounded.map((v) => (isLong ? v.toExponential().replace("e+", "e") : v.toLocaleString("en", { maximumSignificantDigits: 4 })));
}

let axes = []; // of the chart of settings and metric

// Return the axes: at most 11 settings that differ between points, and the metric. Of each axis, `place` is a function from a
// point to its position, NaN if the point lacks the setting, `ticks` are as in makeScale, and `lines` are the ends of its parts.
function listAxes() {
  const completed = data.points.filter((p) => p.mean !== null), ended = data.points.filter((p) => p.mean === null);
  if (data.points.length < 3 || !completed.length || !data.keys.length) return [];
  const differs = (key) => new Set(data.points.map((p) => p.all[key])).size > 1;
  const settings = data.keys.filter(differs).slice(0, 11).map((key) => {
    const scale = makeScale(data.points.map((p) => p.all[key]), false, true, data.search?.log.includes(key));
    return { key, place: (p) => (key in p.all ? scale.place(p.all[key]) : NaN), ticks: scale.ticks, lines: [[0, 1]] };
  });
  const near = nearBest(completed.map((p) => p.mean)), scale = makeScale(near, !data.rising, false);
  const metric = { key: data.metric, place: (p) => scale.place(p.mean), ticks: scale.ticks, lines: [[0, 1]] };
  if (near.length < completed.length) { // points far from the best are at the axis's end
    const furthest = (data.rising ? Math.min : Math.max)(...completed.map((p) => p.mean));
    metric.place = (p) => Math.min(Math.max(scale.place(p.mean), 0), 1);
    metric.ticks = [[0, `to ${tickLabels([furthest])}`], ...metric.ticks];
  }
  if (ended.length) { // points that did not complete have an end of the axis of their own
    const { place, ticks } = metric, low = 0.03, raised = (t) => 0.12 + 0.88 * t;
    const endings = [...new Set(ended.flatMap((p) => p.runs.map((run) => run.state)))];
    metric.place = (p) => (p.mean === null ? low : raised(place(p)));
    metric.ticks = [[low, endings.length > 1 ? "not completed" : endings[0]], ...ticks.map(([t, text]) => [raised(t), text])];
    metric.lines = [[0, 0.06], [0.12, 1]];
  }
  return [...settings, metric];
}

// Return true if a point is in the range that was chosen on an axis. Without a range, all points are kept.
function isKept(point, { key, place }) {
  const range = state.brushes.get(key);
  return !range || (place(point) >= range[0] - 1e-9 && place(point) <= range[1] + 1e-9);
}

function drawChoices() {
  const box = byId("parallel"), focused = document.activeElement.dataset.axis, last = axes.length - 1;
  byId("choices").hidden = !axes.length;
  if (!axes.length) return;
  box.textContent = "";
  const width = Math.max(box.clientWidth, 280), height = isPrinted() ? 220 : 340, top = 50, foot = height - 26;
  const names = axes.slice(0, -1).map(({ key }) => shortName(key)).join(", ");
  const left = Math.max(26, 16 + 6.2 * Math.max(...axes[0].ticks.map(([, text]) => Math.min(String(text).length, 14))));
  const x = (i) => left + (i * (width - left - 62)) / Math.max(last, 1), y = (t) => foot - t * (foot - top);
  const about = `${data.metric} of ${data.points.length} points against ${names}`;
  const svg = addSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": about }, box);
  for (const p of data.points.slice().reverse()) { // draw the best point last, on top
    const stops = axes.map(({ place }, i) => [x(i), y(place(p))]).filter(([, at]) => !Number.isNaN(at));
    const path = stops.map(([px, py], n) => {
      if (!n) return `M${px},${py}`;
      const [beforeX, beforeY] = stops[n - 1], middle = (beforeX + px) / 2;
      return `C${middle},${beforeY} ${middle},${py} ${px},${py}`;
    }).join(" ");
    const ended = p.mean === null, kind = ended ? "run ended" : p.place || !data.best ? "run" : "run best";
    const element = addSvg("path", { class: kind, d: path, stroke: colour(p), "data-point": p.place }, svg);
    element.classList.toggle("off", !shows(p));
    element.addEventListener("pointermove", (event) => showTip(event, `${p.label}\n${data.metric} ${value(p)}`));
    element.addEventListener("pointerleave", () => { showTip(null); highlight(null); });
    element.addEventListener("pointerenter", () => highlight(p));
    element.addEventListener("click", () => showOnly(p));
    if (isDistinct() && shows(p)) stops.forEach(([px, py], n) => { // marks between two axes and on the last one
      const [nextX, nextY] = stops[n + 1] ?? [px, py], place = `translate(${(px + nextX) / 2 - 5}, ${(py + nextY) / 2 - 5}) scale(0.83)`;
      addSvg("path", { class: "mark", d: SHAPES[p.place], fill: ended ? style("card") : colour(p), stroke: colour(p), transform: place }, svg);
    });
  }
  axes.forEach(({ key, ticks, lines }, i) => {
    const narrow = x(1) - x(0), side = i === last ? 1 : -1;
    const most = Math.max(Math.floor((narrow < 90 ? 1.9 : 1) * narrow / 7), 5); // narrow axes put names in two lines
    const short = shortName(key), name = short.length > most ? short.split(/[. ]/).pop() : short;
    const title = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    const head = addSvg("text", { x: x(i), y: i % 2 && narrow < 90 ? 30 : 16, "text-anchor": "middle" }, svg, title);
    addSvg("title", {}, head, key);
    for (const [a, b] of lines) addSvg("line", { x1: x(i), x2: x(i), y1: y(b), y2: y(a) }, svg);
    const apart = (some, tick) => (some.some(([t]) => Math.abs(t - tick[0]) < 0.05) ? some : [...some, tick]);
    for (const [t, text] of ticks.reduce(apart, [])) { // labels must not overlap curves or each other
      const cut = text.length > 14 ? `${text.slice(0, 13)}…` : text;
      addSvg("line", { x1: x(i), x2: x(i) + 4 * side, y1: y(t), y2: y(t) }, svg);
      addSvg("text", { class: "tick", x: x(i) + 7 * side, y: y(t) + 4, "text-anchor": i === last ? "start" : "end" }, svg, cut);
    }
    const grip = addBrush(svg, axes[i], x(i), top, foot);
    if (key === focused) grip.focus();
  });
}

// Filter points by an axis: dragging along it keeps the points whose lines cross the dragged range; a click removes the
// filter. Arrow keys keep the points at the next position. Return the element that takes the events.
function addBrush(svg, axis, x, top, foot) {
  const { key, place } = axis, old = state.brushes.get(key);
  const label = old ? `${data.points.filter((p) => isKept(p, axis)).length} points kept` : "all points";
  const grip = addSvg("rect", {
    class: "grip", x: x - 12, y: top - 6, width: 24, height: foot - top + 12, "data-axis": key,
    tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-label": key, "aria-valuenow": old ? old[0] : 0, "aria-valuetext": label,
  }, svg);
  const mark = addSvg("rect", { class: "brush", x: x - 7, y: top, width: 14, height: 0, rx: 3 }, svg);
  const show = ([a, b]) => {
    mark.setAttribute("y", foot - b * (foot - top));
    mark.setAttribute("height", (b - a) * (foot - top));
  };
  if (old) show(old);
  let from = null;
  const range = (event) => { // from the start of the drag to the pointer
    const box = svg.getBoundingClientRect(), at = ((event.clientY - box.top) * svg.viewBox.baseVal.height) / box.height;
    const t = Math.min(Math.max((foot - at) / (foot - top), 0), 1);
    return [from ?? t, t].sort((a, b) => a - b);
  };
  grip.addEventListener("pointerdown", (event) => {
    [from] = range(event);
    grip.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  grip.addEventListener("keydown", (event) => {
    const up = event.key === "ArrowUp", [a, b] = old || (up ? [-1, -1] : [2, 2]);
    if (event.key === "Escape") state.brushes.delete(key);
    else if (up || event.key === "ArrowDown") {
      const stops = data.points.map(place).filter((t) => !Number.isNaN(t)).sort((s, t) => s - t);
      const at = up ? stops.find((t) => t > b) ?? stops.at(-1) : stops.findLast((t) => t < a) ?? stops[0];
      state.brushes.set(key, event.shiftKey && old ? [Math.min(a, at - 0.01), Math.max(b, at + 0.01)] : [at - 0.01, at + 0.01]);
    } else return;
    event.preventDefault();
    refresh();
  });
  grip.addEventListener("pointermove", (event) => from !== null && show(range(event)));
  grip.addEventListener("pointerup", (event) => {
    if (from === null) return; // pressed elsewhere
    const [low, high] = range(event);
    if (high - low < 0.02) state.brushes.delete(key);
    else state.brushes.set(key, [low, high]);
    refresh();
  });
  return grip;
}

function drawImportance() {
  const box = byId("importance"), found = Object.entries(data.importance);
  if (!data.keys.length) return;
  const ranked = data.search ? `${data.search.trials.length} trials` : `${data.points.filter((p) => p.mean !== null).length} points`;
  addElement(box, "p", "small", found.length ? `Importance of each setting for the ranking of ${ranked}:` : `Importance unknown: ${data.no_importance}.`);
  const list = addElement(box, "div", "columns");
  for (const [key, share] of found.sort((a, b) => b[1] - a[1])) {
    const row = addElement(list, "div", "row");
    addName(addElement(row, "span", "label"), key);
    const bar = addElement(addElement(row, "span", "track"), "i");
    bar.style.width = `${(Math.min(share, 1) * 100).toFixed(1)}%`;
    addElement(row, "span", "value", share > 0 && share < 0.005 ? "<1 %" : `${(share * 100).toFixed(0)} %`);
  }
}
