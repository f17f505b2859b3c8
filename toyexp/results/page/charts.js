// Charts of curves. Each point (a group of runs that differ only in their seed) has a colour. Raw curves are paler than
// smoothed ones.

const AXES = { step: "step", tokens: "tokens", seconds: "time (s)" };
const MOST_RAW = 8; // runs with a raw curve; if there are more, only the best shown point has raw curves
const SCREEN = 60000; // values drawn at once; more would slow the page down

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function theme() {
  return document.documentElement.dataset.theme;
}

const MARKS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "pentagon"];
const SHAPES = [
  "M6,1a5,5 0 1 0 .01,0z", "M1.5,1.5h9v9h-9z", "M6,1L11.2,10.5H.8z", "M6,.3L11.7,6L6,11.7L.3,6z", "M6,11L11.2,1.5H.8z",
  "M4.2,.8h3.6v3.4h3.4v3.6H7.8v3.4H4.2V7.8H.8V4.2h3.4z", "M3,.8L6,3.8L9,.8L11.2,3L8.2,6L11.2,9L9,11.2L6,8.2L3,11.2L.8,9L3.8,6L.8,3z",
  "M6,.6L11.6,4.7L9.5,11.2H2.5L.4,4.7z",
];

// Return true if each point has a colour and mark of its own; otherwise colours show the rank.
function isDistinct() {
  return data.points.length <= MARKS.length;
}

function colour({ place }, alpha = 1) {
  if (isDistinct()) return `rgba(${channels(data.colours[theme()][place]).join(", ")}, ${alpha})`;
  const last = (data.points.filter((p) => p.mean !== null).length || data.points.length) - 1, ramp = data.ramps[theme()];
  const at = (Math.min(place, last) / Math.max(last, 1)) * (ramp.length - 1), low = Math.floor(at); // from the strongest colour
  const [a, b] = [ramp[low], ramp[Math.min(low + 1, ramp.length - 1)]].map(channels);
  return `rgba(${a.map((v, i) => Math.round(v + (b[i] - v) * (at - low))).join(", ")}, ${alpha})`;
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Add a point's mark in its colour.
function addMark(parent, point) {
  const svg = addSvg("svg", { class: "chip", viewBox: "0 0 12 12", "aria-hidden": "true" }, parent);
  const hollow = point.mean === null; // without a final metric, such as a pruned point
  const d = SHAPES[isDistinct() ? point.place : 0];
  addSvg("path", { d, fill: hollow ? "none" : colour(point), stroke: hollow ? colour(point) : "none" }, svg);
}

// Draw a chart, and describe its plot, but not its buttons, to screen readers. Only the large chart has buttons.
function drawChart(id, traces, shape, text) {
  const { clientWidth: width, clientHeight: height } = byId(id);
  Plotly.react(id, traces, { ...shape, width, height }, { ...CONFIG, ...(id !== "main" && { displayModeBar: false }) });
  const plot = byId(id).querySelector(".main-svg");
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", text);
}

// Keep a chart's axes if no point is shown.
function drawEmpty(id) {
  const { xaxis, yaxis, margin } = byId(id).layout || {}, keep = (axis) => ({ ...(axis || { visible: false }), autorange: false });
  drawChart(id, [], layout({ xaxis: keep(xaxis), yaxis: keep(yaxis), ...(margin && { margin }) }), "no points");
}

function escapeHtml(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function layout(extra) {
  const grid = { gridcolor: style("line"), zerolinecolor: style("line"), linecolor: style("line"), automargin: true };
  const ends = xRange(), font = { family: getComputedStyle(document.body).fontFamily, color: style("ink") };
  const x = {
    ...grid, title: { text: AXES[state.over], standoff: 6 }, exponentformat: "SI",
    ...(state.xlog ? { type: "log", tickformat: state.over === "seconds" ? "~g" : "~s", nticks: 5 } : { type: "linear" }),
    ...(ends ? { range: ends, autorange: false } : { autorange: true }),
    ...(state.over === "step" && !state.xlog && ends && ends[1] - ends[0] < 8 ? { dtick: 1 } : {}), // steps are integers
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { ...font, size: isPrinted() ? 9 : 12 }, hoverlabel: { bgcolor: style("card"), bordercolor: style("line"), align: "left", font },
    margin: { l: 48, r: 10, t: isPrinted() ? 6 : 30, b: 40 }, dragmode: isTouch() ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("soft"), activecolor: style("accent") },
    xaxis: x, uirevision: `${state.over} ${state.xlog} ${state.ylog} ${state.zoom} ${state.tall}`, ...extra,
    yaxis: { ...grid, exponentformat: "e", ...(extra.yaxis || {}) },
  };
}

// Remove plotly's button that uploads a chart: the page must not send anything.
const CONFIG = {
  displaylogo: false, doubleClick: false, plotlyServerURL: "", showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "resetScale2d", "sendChartToCloud"], toImageButtonOptions: { scale: 2 },
};

// Return the range of x: the zoomed range, or the full length of the curves. null lets plotly choose.
function xRange() {
  if (state.zoom || state.xlog) return state.zoom;
  const ends = shownRuns().flatMap((run) => {
    const steps = [run.curves.loss.x, ...Object.values(run.held).map(([xs]) => xs)].filter((xs) => xs.length);
    return steps.map((xs) => clockAt(run, xs[xs.length - 1], state.over));
  });
  const last = ends.reduce((a, b) => Math.max(a, b), 0);
  return last > 0 ? [-0.012 * last, 1.012 * last] : null;
}

// Return the range of y: smoothed curves and held-out values in full, raw values without outliers. Losses far above all
// initial losses, as of a diverged run, are cut off; the switch "outliers" shows everything.
function yRange(traces, raw) {
  const f = state.ylog ? Math.log10 : (v) => v;
  const [from, to] = zoomLimits(), seen = (x, y) => x >= from && x <= to && y !== null && (!state.ylog || y > 0);
  const sorted = (some) => Float64Array.from(some.flatMap((trace) => trace.y.filter((y, i) => seen(trace.x[i], y)))).sort();
  const part = (ys, share) => f(ys[Math.floor((ys.length - 1) * share)]), ys = sorted(traces), raws = sorted(raw);
  state.cut = false;
  if (!ys.length) return null;
  const firsts = shownRuns().map(({ curves, held }) => (state.score === "loss" ? curves.loss.my[0] : null) ?? held[state.score]?.[1][0]);
  const first = Math.max(...firsts.filter(Number.isFinite)), cap = f(first) + (f(first) - part(ys, 0)) / 4;
  const limit = ["loss", "ppl"].includes(state.score) && first - ys[0] > 0.02 * Math.abs(first) ? cap : Infinity; // if no loss falls, show all
  const near = (sorted) => sorted.filter((y) => f(y) <= limit);
  let low = part(ys, 0), high = near(ys).length ? part(near(ys), 1) : part(ys, 1);
  if (near(raws).length) [low, high] = [Math.min(low, part(raws, 0.01)), Math.max(high, part(near(raws), 0.98))];
  const whole = raws.length ? [Math.min(low, part(raws, 0)), Math.max(part(ys, 1), part(raws, 1))] : [low, part(ys, 1)];
  state.cut = whole[1] - whole[0] > 1.25 * (high - low);
  if (state.outliers || !state.cut) [low, high] = whole;
  const least = state.zoom || state.ylog ? 2e-4 : 0.05; // share of the highest value, as in the static plots: noise is no trend
  const room = Math.max(0.04 * (high - low), (least * Math.abs(high) - (high - low)) / 2) || 0.1;
  return [low - room, high + room];
}

function zoomLimits() {
  if (!state.zoom) return [-Infinity, Infinity];
  return state.xlog ? state.zoom.map((v) => 10 ** v) : state.zoom;
}

// Return a run's curve [xs, ys] over the chosen x axis, optionally smoothed.
function readCurve(run, name, smooth) {
  const { x, y, mx, my } = run.curves[name], xs = smooth ? mx : x;
  let ys = smooth ? my : y;
  const average = name === "grad_norm" || (name === "loss" && state.ylog) ? smoothLogs : smoothCurve;
  if (smooth && xs.length) ys = average(xs, ys, ((xs[xs.length - 1] - xs[0]) * state.smooth ** 2) / 60000);
  return [xValues(run, xs), ys];
}

function xValues(run, xs) {
  return state.over === "step" ? xs : xs.map((x) => clockAt(run, x, state.over));
}

function lineTrace(xs, ys, name, look) {
  return { type: "scatter", mode: "lines", x: xs, y: ys, name, hoverinfo: "skip", ...look };
}

// Return plotly's hover text. For a mean it shows the deviation, which is in customdata.
function hoverTemplate(label, what, form = ".4f", mean = false) {
  const value = mean ? `<br>%{y:${form}} ± %{customdata:${form}}` : ` %{y:${form}}`;
  return `<b>${escapeHtml(label)}</b><br>${what}${value}<br>${AXES[state.over]} %{x:.6~g}<extra></extra>`;
}

function runLabel(run) {
  const { label, runs } = run.point;
  return runs.length > 1 ? `${label}  seed=${run.seed}` : label;
}

// Return a band between two curves. If many points are shown, bands are paler, so that overlapping bands stay transparent.
function bandTrace(xs, lows, highs, point) {
  const alpha = Math.max(0.16 * Math.min(1, 4 / Math.max(visible().length, 1)), 0.02);
  return lineTrace([...xs, ...xs.slice().reverse()], [...highs, ...lows.slice().reverse()], "", {
    fill: "toself", fillcolor: colour(point, alpha), line: { width: 0 }, hoverinfo: "skip",
  });
}

// Return [lines, bands] of a point's training numbers `name`: of each run or, if seeds are drawn together, of their mean. At most
// `most` points of a run are drawn, in the look `line`.
function curveTraces(point, name, what, form, most, line) {
  const runs = point.runs.filter((run) => run.curves[name].x.length), curves = runs.map((run) => readCurve(run, name, name !== "lr"));
  if (state.bands && runs.length > 1) {
    const [xs, means, customdata, lows, highs] = clipAndThin(band(curves), ...zoomLimits(), most);
    const hovertemplate = hoverTemplate(point.label, `${what}, mean of ${runs.length} seeds`, form, true);
    return [[lineTrace(xs, means, point.label, { line, hoverinfo: "all", customdata, hovertemplate })], [bandTrace(xs, lows, highs, point)]];
  }
  const lines = curves.map((curve, i) => {
    const [xs, ys] = clipAndThin(curve, ...zoomLimits(), most);
    return lineTrace(xs, ys, point.label, { line, hoverinfo: "all", hovertemplate: hoverTemplate(runLabel(runs[i]), what, form) });
  });
  return [lines, []];
}

// Return [all, those that are always in the range of y, raw curves].
function lossTraces() {
  const back = [], bands = [], front = [], marks = [], shown = visible(), count = shownRuns().length;
  const most = Math.max(Math.floor(SCREEN / count / 2), 40);
  for (const point of shown.slice().reverse()) {
    const held = state.held ? heldTraces(point, "loss") : [], { runs } = point, chosen = [shown[0], state.hot].includes(point);
    for (const run of state.raw && (count <= MOST_RAW || chosen) ? runs : []) {
      const [xs, ys] = clipAndThin(readCurve(run, "loss", false), ...zoomLimits(), Math.min(most, 4000 / runs.length));
      back.push(lineTrace(xs, ys, "raw", { line: { width: 0.7, color: colour(point, runs.length > 2 ? 0.2 : 0.4) } }));
    }
    const width = state.hot === point ? 3.5 : held.length ? 1 : count > 30 ? 1.3 : 2.2; // the held-out curve is the main one
    const isCovering = held.length && !isDistinct() && !chosen; // training curves of many points would cover the held-out ones
    const [lines, shades] = isCovering ? [[], []] : curveTraces(point, "loss", "training loss", ".4f", most, { width, color: colour(point) });
    front.push(...lines);
    bands.push(...(held.length ? [] : shades));
    marks.push(...held, ...endTraces(point, isCovering));
  }
  return [[...back, ...bands, ...front, ...marks], [...bands, ...front, ...marks], back];
}

// Return a cross at the last step of each run that did not complete.
// If training curves are hidden, it is on the held-out curve.
function endTraces(point, isHidden) {
  return point.runs.filter((run) => !run.counts && run.curves.loss.x.length).map((run) => {
    const [steps, scores] = (isHidden && run.held.loss) || [[], []];
    const [xs, ys] = steps.length ? [xValues(run, steps), scores] : readCurve(run, "loss", true), last = ys.findLastIndex((y) => y !== null);
    return {
      type: "scatter", mode: "markers", x: xs.slice(last, last + 1), y: ys.slice(last, last + 1), name: "end",
      marker: { symbol: "x-thin-open", size: 11, color: colour(point), line: { width: 2.5 } },
      hovertemplate: `<b>${escapeHtml(runLabel(run))}</b><br>${escapeHtml(run.state)} at ${AXES[state.over]} %{x:.6~g}<extra></extra>`,
    };
  });
}

// Return arrows at the top edge of a chart, where curves are above the range of its y axis.
function arrowTraces(traces, range, log, most = 40) {
  if (!range) return [];
  const top = log ? 10 ** range[1] : range[1], lines = traces.filter((t) => !t.fill && t.mode !== "markers");
  const [from, to] = zoomLimits(), ends = lines.flatMap((t) => t.x.slice(-1)), places = new Map(); // one arrow on a spot
  const apart = (to < Infinity ? to - from : ends.reduce((a, b) => Math.max(a, b), 0)) / most;
  for (const { x, y, line } of lines) x.forEach((at, i) => {
    const slot = Math.round(at / apart);
    if (y[i] > top) places.set(`${slot} ${line.color}`, [Math.min(slot * apart, x[x.length - 1]), line.color]);
  });
  const found = [...places.values()];
  return found.length ? [{ // inside the chart: plotly hides the marks of others when a trace without cliponaxis goes
    type: "scatter", mode: "text", name: "above", x: found.map(([at]) => at), y: found.map(() => top), textposition: "bottom center",
    text: "<b>↑</b>", textfont: { color: found.map(([, shade]) => shade) }, hovertemplate: "above the shown range<extra></extra>",
  }] : [];
}

// Return the steps to mark in the chart of a single run, by the dash of their lines: its divergence, and its warnings.
function marksOfRun() {
  const [run, ...others] = data.runs;
  if (others.length) return {};
  const warned = run.warnings.map((w) => w.step).filter((step) => step !== null);
  return { ...(run.diverged === null ? {} : { solid: [run.diverged] }), ...(warned.length ? { dot: warned } : {}) };
}

// Return vertical lines at these steps.
function markLines() {
  return Object.entries(marksOfRun()).flatMap(([dash, steps]) => steps.map((step) => clockAt(data.runs[0], step, state.over)).map((at) => ({
    x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "below", line: { width: 1.2, color: style("soft"), dash },
  })));
}

function heldTraces(point, score) {
  const runs = point.runs.filter((run) => run.held[score]?.[0].length);
  const many = data.points.length > 12, wide = state.hot === point ? 4 : isBest(point) ? 3.2 : many ? 1.3 : 2.2;
  const ended = many && point.mean === null; // such as of a pruned trial
  const look = {
    type: "scatter", mode: "lines+markers", line: { width: ended ? 1 : wide, color: colour(point, ended ? 0.6 : 1) }, connectgaps: true,
    marker: {
      size: many ? 4 : 8, symbol: MARKS[isDistinct() ? point.place : 0], color: colour(point),
      line: { width: many ? 0 : 1, color: style("card") },
    },
  };
  if (state.bands && runs.length > 1) {
    const steps = [...new Set(runs.flatMap((run) => run.held[score][0]))].sort((a, b) => a - b);
    const rows = steps.map((step) => {
      const some = runs.filter((run) => run.held[score][0].includes(step));
      const scores = some.map((run) => run.held[score][1][run.held[score][0].indexOf(step)]);
      return [mean(some.map((run) => clockAt(run, step, state.over))), ...meanAndDeviation(scores)];
    });
    const [x, y, customdata, lows, highs] = [0, 1, 2, 3, 4].map((n) => rows.map((row) => row[n]));
    const hovertemplate = hoverTemplate(point.label, `held-out ${score}, mean of ${runs.length} seeds`, ".4f", true);
    return [bandTrace(x, lows, highs, point), { ...look, name: "held out", x, y, customdata, hovertemplate }];
  }
  return runs.map((run) => ({
    ...look, name: "held out", x: xValues(run, run.held[score][0]), y: run.held[score][1],
    hovertemplate: hoverTemplate(runLabel(run), `held-out ${score}`),
  }));
}

function drawMain() {
  if (!Plotly) return;
  saveView();
  if (!visible().length) return drawEmpty("main");
  const loss = state.score === "loss";
  const marks = loss ? [] : visible().slice().reverse().flatMap((p) => heldTraces(p, state.score));
  const [traces, front, back] = loss ? lossTraces() : [marks, marks, []];
  const range = state.tall || yRange(front, back), limit = !range || !loss ? Infinity : state.ylog ? 10 ** range[1] : range[1];
  const above = state.outliers ? 0 : shownRuns().filter((run) => run.curves.loss.my.some((y) => y > limit)).length;
  byId("outliers-label").hidden = !state.cut;
  byId("outliers-label").lastChild.textContent = above ? ` outliers (${above} ${above === 1 ? "run" : "runs"} above)` : " outliers";
  const unit = { tokens: " (nats per token)", images: " (nats per image)" }[data.unit] || "", best = data.points[0];
  const edge = range && range[1] - 0.045 * (range[1] - range[0]); // for crosses of runs that ended above the range
  for (const trace of traces) if (trace.name === "end" && trace.y[0] > limit) trace.y = [state.ylog ? 10 ** edge : edge];
  const y = {
    title: { text: loss ? `loss${unit}` : `held-out ${state.score}`, standoff: 4 },
    ...(state.ylog ? { type: "log", ...(range && logTicks(...range.map((v) => 10 ** v))) } : { type: "linear" }), ...(range ? { range } : {}),
    ...(!state.ylog && range && range[1] >= 1e3 ? labelTicks(roundTicks(...range, false)) : {}),
  };
  const about = `${y.title.text} against ${AXES[state.over]}: ${visible().length} of ${data.points.length} points. `;
  const ranked = data.best ? `Best: ${best.label}, ${data.metric} ${value(best)}.` : "";
  drawChart("main", [...traces, ...arrowTraces(front, range, state.ylog)], layout({ yaxis: y, shapes: markLines() }), about + ranked);
}

function drawSmall(name) {
  const shown = visible(), drawn = new Map();
  if (!Plotly) return;
  if (!shown.length) return drawEmpty(name);
  const count = state.bands ? shown.length : shownRuns().length, most = Math.max(Math.floor(SCREEN / 4 / count), 30);
  const traces = shown.slice().reverse().flatMap((point) => {
    const line = { width: state.hot === point ? 3 : count > 30 ? 0.9 : 1.5, color: colour(point, 0.9) };
    const look = { mode: isDistinct() ? "lines+markers" : "lines", marker: { symbol: MARKS[point.place], size: 6, maxdisplayed: 5 } };
    return curveTraces(point, name, name.replace("_", " "), ".4~g", most, line)[0].map((trace) => ({ ...trace, ...look }));
  });
  for (const trace of traces) { // dashed above a curve that it covers
    const key = String(trace.y), nth = drawn.get(key) || 0;
    drawn.set(key, nth + 1);
    trace.line = { ...trace.line, dash: ["solid", "9px,9px"][nth] || "3px,15px" };
  }
  const title = { lr: "learning rate", grad_norm: "gradient norm", speed: `${data.unit} per second` }[name];
  const axis = name === "speed" ? { nticks: 5, rangemode: "tozero", exponentformat: "SI" } : { type: "log", ...logAxis(name) };
  traces.push(...arrowTraces(traces, axis.range, true, 20));
  const shape = layout({ yaxis: { ...axis, fixedrange: true }, margin: { l: 44, r: 12, t: 4, b: 36 } });
  drawChart(name, traces, shape, `${title} against ${AXES[state.over]}`);
}

// Return ticks and range of a logarithmic axis. The range fits the runs that did not diverge or fail, so that those do not
// flatten the others' curves, and leaves out gradient norms far from most others. The range of the learning rate fits all
// runs, unless a rate is 10,000 times those of the completed runs.
function logAxis(name) {
  const read = (runs) => runs.flatMap((run) => readCurve(run, name, name !== "lr")[1]).filter((y) => y > 0);
  const shown = shownRuns(), calm = read(shown.filter((run) => run.state === "completed"));
  const least = calm.reduce((a, b) => Math.min(a, b), Infinity) / 1e4, most = calm.reduce((a, b) => Math.max(a, b), 0) * 1e4;
  const near = (run) => (name === "lr" ? read([run]).every((y) => y >= least && y <= most) : !["diverged", "failed"].includes(run.state));
  const done = shown.filter((run) => run.state === "completed" || near(run));
  const whole = state.outliers || done.length === shown.length || !read(done).length, values = Float64Array.from(read(whole ? shown : done)).sort();
  if (!values.length) return {};
  let [low, high] = [values[0], values[values.length - 1]];
  if (name !== "lr" && !state.outliers) { // the outlier rule of the static plots
    const [from, to] = [0.01, 0.98].map((share) => values[Math.floor((values.length - 1) * share)]), reach = Math.max(to / from, 2) ** 2;
    [low, high] = [Math.max(low, from / reach), Math.min(high, to * reach)];
  }
  const peaks = name === "lr" ? [...new Set(shown.map((run) => Math.max(...run.curves.lr.y)))].filter((v) => v >= low && v <= high).sort((a, b) => a - b) : [];
  const typed = peaks.length <= 4 && peaks.every((v, i) => !i || v > Math.max((high / low) ** 0.1, 1.6) * peaks[i - 1]) ? peaks : []; // rates as they were typed
  const room = Math.max(0.1, 0.06 * Math.log10(high / low)); // plotly hides labels that do not fit
  return { ...logTicks(low / 1.1, high * 1.1, typed), range: [Math.log10(low) - room, Math.log10(high) + room], autorange: false };
}

// Return 3 to 7 ticks of a logarithmic axis, fewer if its values are almost equal: the values `typed` and round numbers that
// are not close to those.
function logTicks(low, high, typed = []) {
  const gap = (1.6 * high / low) ** 0.13, isFar = (v) => typed.every((t) => v > gap * t || t > gap * v), decades = roundTicks(low, high, true, [1]);
  const rounds = [[1], [1, 2, 5], [1, 3], [1, 1.5, 2, 3, 5, 7]].map((factors) => roundTicks(low, high, true, factors)), few = decades.filter((_, n) => n % Math.ceil(decades.length / 5) === 0), add = (some) => [...typed, ...some.filter(isFar)];
  const lists = [...rounds.map(add), high < 10 * low ? add(roundTicks(low, high, false)) : few];
  return labelTicks((lists.find((some) => some.length >= (high > 1.5 * low ? 3 : 1) && some.length < 8) || lists[4]).sort((a, b) => a - b));
}

function labelTicks(ticks) {
  return { tickvals: ticks, ticktext: tickLabels(ticks) };
}

function resetZoom() {
  state.zoom = state.tall = null;
  drawCharts();
}

function drawCharts() {
  drawMain();
  ["lr", "grad_norm", "speed"].forEach(drawSmall);
}

// Zooming one chart zooms all of them; curves are then thinned again within the visible range.
function listen() {
  for (const id of ["main", "lr", "grad_norm", "speed"]) {
    const chart = byId(id);
    chart.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) return resetZoom();
      const [x, y] = ["xaxis.range", "yaxis.range"].map((range) => Object.keys(change).some((key) => key.startsWith(range)));
      if (x) state.zoom = chart.layout.xaxis.range.map(Number);
      if (y) state.tall = chart.layout.yaxis.range.map(Number);
      if (x || y) drawCharts();
    });
    chart.on("plotly_doubleclick", resetZoom);
  }
}
