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

function drawChoices() {
  const section = byId("choices"), box = byId("parallel");
  const points = data.points.map((p, place) => ({ ...p, place, ended: p.mean === null })), completed = points.filter((p) => !p.ended);
  section.hidden = points.length < 3 || !completed.length || !data.keys.length;
  if (section.hidden) return;
  const focused = document.activeElement.dataset.axis;
  box.textContent = "";
  const fresh = [...state.brushes.values()].some((brush) => brush.fresh), ended = points.filter((p) => p.ended);
  const width = Math.max(box.clientWidth, 280), height = isPrinted() ? 220 : 340, top = 50, foot = height - 26;
  const near = nearBest(completed.map((p) => p.mean)), furthest = data.rising ? Math.min : Math.max;
  const several = (key) => new Set(points.map((p) => p.settings[key])).size > 1;
  const axes = [...data.keys.filter(several).slice(0, 11), data.metric], names = axes.slice(0, -1).map(shortName).join(", "), last = axes.length - 1;
  const scales = axes.map((key, i) => i === last ? makeScale(near, !data.rising, false) :
    makeScale(points.map((p) => p.settings[key]), false, true, (data.search ? data.search.log : []).includes(key)));
  if (near.length < completed.length) { // points far from the best are at the axis's end
    const { place, ticks } = scales[last];
    scales[last] = { place: (v) => Math.min(Math.max(place(v), 0), 1), ticks: [[0, `to ${tickLabels([furthest(...completed.map((p) => p.mean))])}`], ...ticks] };
  }
  const endings = [...new Set(ended.flatMap((p) => runsOf(p.place).map((run) => run.state)))];
  if (ended.length) { // points that did not complete have an end of the axis of their own
    const { place, ticks } = scales[last], raised = (t) => 0.12 + 0.88 * t;
    const tick = [0.03, endings.length > 1 ? "not completed" : endings[0]];
    scales[last] = { place: (v) => (v === null ? tick[0] : raised(place(v))), ticks: [tick, ...ticks.map(([t, text]) => [raised(t), text])] };
  }
  const left = Math.max(26, 16 + 6.2 * Math.max(...scales[0].ticks.map(([, text]) => Math.min(String(text).length, 14))));
  const x = (i) => left + (i * (width - left - 62)) / Math.max(last, 1), y = (t) => foot - t * (foot - top);
  const valueOf = (p, i) => (i === last ? p.mean : p.settings[axes[i]]), drawn = (p, i) => i === last || ![null, undefined].includes(valueOf(p, i));
  const svg = addSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${data.metric} of ${points.length} points against ${names}` }, box);
  for (const p of points.slice().reverse()) { // draw the best point last, on top
    const stops = axes.map((_, i) => [i, valueOf(p, i)]).filter(([i]) => drawn(p, i));
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
  axes.forEach((key, i) => {
    const narrow = x(1) - x(0);
    const most = Math.max(Math.floor((narrow < 90 ? 1.9 : 1) * narrow / 7), 5); // narrow axes put names in two lines
    const short = shortName(key), name = short.length > most ? short.split(/[. ]/).pop() : short;
    const title = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    const head = addSvg("text", { x: x(i), y: i % 2 && narrow < 90 ? 30 : 16, "text-anchor": "middle" }, svg, title);
    addSvg("title", {}, head, key);
    for (const [a, b] of i === last && ended.length ? [[0, 0.06], [0.12, 1]] : [[0, 1]]) addSvg("line", { x1: x(i), x2: x(i), y1: y(b), y2: y(a) }, svg);
    const apart = (some, tick) => (some.some(([t]) => Math.abs(t - tick[0]) < 0.05) ? some : [...some, tick]);
    for (const [t, text] of scales[i].ticks.reduce(apart, [])) { // labels must not overlap curves or each other
      const cut = text.length > 14 ? `${text.slice(0, 13)}…` : text;
      const side = i === last ? 1 : -1;
      addSvg("line", { x1: x(i), x2: x(i) + 4 * side, y1: y(t), y2: y(t) }, svg);
      addSvg("text", { class: "tick", x: x(i) + 7 * side, y: y(t) + 4, "text-anchor": i === last ? "start" : "end" }, svg, cut);
    }
    const stops = [...new Set(points.filter((p) => drawn(p, i)).map((p) => scales[i].place(valueOf(p, i))))].sort((a, b) => a - b);
    addBrush(svg, key, x(i), top, foot, stops, (t) => points.filter((p) => {
      const at = drawn(p, i) ? scales[i].place(valueOf(p, i)) : -1;
      return at >= t[0] - 1e-9 && at <= t[1] + 1e-9;
    }).map((p) => p.place));
    if (key === focused) svg.querySelector(`[data-axis="${CSS.escape(key)}"]`).focus();
  });
  if (fresh) refresh(); // filters from the page's address have their points only now
}

// Filter points by an axis: dragging along it keeps the points whose lines cross the dragged range; a click removes the
// filter. Arrow keys keep the next of the positions `stops`. `taken` returns the points in a range.
function addBrush(svg, key, x, top, foot, stops, taken) {
  const old = state.brushes.get(key), label = old ? `${taken(old.range).length} points kept` : "all points";
  const grip = addSvg("rect", {
    class: "grip", x: x - 12, y: top - 6, width: 24, height: foot - top + 12, "data-axis": key,
    tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-label": key, "aria-valuenow": old ? old.range[0] : 0, "aria-valuetext": label,
  }, svg);
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
  grip.addEventListener("keydown", (event) => {
    const up = event.key === "ArrowUp", [a, b] = old ? old.range : up ? [-1, -1] : [2, 2];
    if (event.key === "Escape") state.brushes.delete(key);
    else if (up || event.key === "ArrowDown") {
      const at = up ? stops.find((t) => t > b) ?? stops[stops.length - 1] : stops.findLast((t) => t < a) ?? stops[0];
      const range = event.shiftKey && old ? [Math.min(a, at - 0.01), Math.max(b, at + 0.01)] : [at - 0.01, at + 0.01];
      state.brushes.set(key, { range, points: new Set(taken(range)) });
    } else return;
    event.preventDefault();
    refresh();
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
  const pruned = data.points.filter((p) => p.mean === null).length, total = data.search ? data.search.trials.length : data.points.length - pruned;
  addElement(box, "p", "small", found.length ? `Importance of each setting for the ranking of ${total} ${data.search ? "trials" : "points"}:` :
    `Importance unknown: ${data.no_importance}.`);
  const list = addElement(box, "div", "columns");
  for (const [key, share] of found.sort((a, b) => b[1] - a[1])) {
    const row = addElement(list, "div", "row");
    addName(addElement(row, "span", "label"), key);
    const bar = addElement(addElement(row, "span", "track"), "i");
    bar.style.width = `${(Math.min(share, 1) * 100).toFixed(1)}%`;
    addElement(row, "span", "value", share > 0 && share < 0.005 ? "<1 %" : `${(share * 100).toFixed(0)} %`);
  }
}
