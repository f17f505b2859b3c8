// Charts of curves. Each point has a colour; raw curves are paler than smoothed ones.

const AXES = { step: "step", tokens: "tokens", seconds: "time (s)" };
const SCREEN = 60000; // values drawn at once; more would slow the page down

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

const HUES = [[217, 62], [22, 75], [152, 52], [285, 45], [43, 72], [340, 62], [190, 70], [28, 18], [245, 60], [75, 50]];

function colour(place, alpha = 1) {
  const ranked = data.points.filter((p) => p.mean !== null).length || data.points.length, dark = isDark();
  let [hue, much] = HUES[place % HUES.length], light = dark ? 66 : 45;
  if (data.points.length > HUES.length) { // by rank: blue is best, orange worst, grey has no metric
    hue = 225 - (205 * place) / Math.max(ranked - 1, 1);
    if (place < ranked) much = 58;
    else [much, light] = [0, dark ? 42 : 72];
  }
  return `hsla(${hue.toFixed(1)}, ${much}%, ${light}%, ${alpha})`;
}

function escapeHtml(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function layout(extra) {
  const grid = { gridcolor: style("line"), zerolinecolor: style("line"), linecolor: style("line"), automargin: true };
  const ends = xRange();
  const x = {
    ...grid, title: { text: AXES[state.over], standoff: 6 }, exponentformat: "SI",
    ...(state.xlog ? { type: "log", tickformat: state.over === "seconds" ? "~g" : "~s", nticks: 5 } : { type: "linear" }),
    ...(ends ? { range: ends, autorange: false } : { autorange: true }),
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style("ink") },
    margin: { l: 48, r: 10, t: 30, b: 40 }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: {
      bgcolor: style("card"), bordercolor: style("line"), align: "left",
      font: { color: style("ink"), family: getComputedStyle(document.body).fontFamily },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("soft"), activecolor: style("accent") },
    xaxis: x, uirevision: `${state.over} ${state.xlog} ${state.ylog} ${state.zoom} ${state.tall}`, ...extra,
    yaxis: { ...grid, exponentformat: "e", ...(extra.yaxis || {}) },
  };
}

// Remove plotly's button that uploads a chart: the page must not send anything.
const CONFIG = {
  responsive: true, displaylogo: false, doubleClick: false, plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "resetScale2d", "sendChartToCloud"], toImageButtonOptions: { scale: 2 },
};

// Return the zoomed range of x, or the full length of the curves; null lets plotly choose.
function xRange() {
  if (state.zoom || state.xlog) return state.zoom;
  const ends = visible().flatMap(runsOf).flatMap((run) => {
    const steps = [run.curves.loss.x, ...Object.values(run.held).map(([xs]) => xs)].filter((xs) => xs.length);
    return steps.map((xs) => clockAt(run, xs[xs.length - 1], state.over));
  });
  const last = ends.reduce((a, b) => Math.max(a, b), 0);
  return last > 0 ? [-0.012 * last, 1.012 * last] : null;
}

// Return the range of y: smoothed curves and held-out values in full, raw values without outliers. The top 1 % is cut off
// if it would flatten the rest; the switch "outliers" shows everything.
function yRange(traces, raw) {
  const f = state.ylog ? Math.log10 : (v) => v;
  const [from, to] = zoomLimits(), seen = (x, y) => x >= from && x <= to && y !== null && (!state.ylog || y > 0);
  const sorted = (some) => Float64Array.from(some.flatMap((trace) => trace.y.filter((y, i) => seen(trace.x[i], y)))).sort();
  const part = (ys, share) => f(ys[Math.floor((ys.length - 1) * share)]), ys = sorted(traces), raws = sorted(raw);
  state.cut = false;
  if (!ys.length) return null;
  let low = part(ys, 0), high = part(ys, 0.99);
  if (state.score !== "loss" || part(ys, 1) - low <= 1.4 * (high - low)) high = part(ys, 1);
  if (raws.length) [low, high] = [Math.min(low, part(raws, 0.01)), Math.max(high, part(raws, 0.98))];
  const whole = raws.length ? [Math.min(low, part(raws, 0)), Math.max(part(ys, 1), part(raws, 1))] : [low, part(ys, 1)];
  state.cut = whole[1] - whole[0] > 1.25 * (high - low);
  if (state.outliers || !state.cut) [low, high] = whole;
  const room = 0.04 * (high - low) || 0.1;
  return [low - room, high + room];
}

function zoomLimits() {
  if (!state.zoom) return [-Infinity, Infinity];
  return state.xlog ? state.zoom.map((v) => 10 ** v) : state.zoom;
}

// Return a run's curve [xs, ys] over the chosen x axis, optionally smoothed.
function readCurve(run, name, smooth) {
  const curve = run.curves[name];
  const xs = smooth ? curve.mx : curve.x;
  let ys = smooth ? curve.my : curve.y;
  if (smooth && xs.length) ys = smoothCurve(xs, ys, ((xs[xs.length - 1] - xs[0]) * state.smooth ** 2) / 60000);
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
  const value = mean ? `<br>%{y:${form}} ± %{customdata:.4f}` : ` %{y:${form}}`;
  return `<b>${escapeHtml(label)}</b><br>${what}${value}<br>${AXES[state.over]} %{x:.6~g}<extra></extra>`;
}

function runLabel(run) {
  const label = data.points[run.point].label, many = runsOf(run.point).length > 1;
  return many ? `${label}  seed=${run.seed}` : label;
}

function bandTrace(xs, means, deviations, place, log) {
  const least = log ? Math.min(...means.filter((m) => m > 0)) / 100 : -Infinity;
  const up = means.map((m, i) => m + deviations[i]), down = means.map((m, i) => Math.max(m - deviations[i], least));
  return lineTrace([...xs, ...xs.slice().reverse()], [...up, ...down.reverse()], "", {
    fill: "toself", fillcolor: colour(place, 0.16), line: { width: 0 }, hoverinfo: "skip",
  });
}

function lossTraces() {
  const back = [], bands = [], front = [], marks = [], shown = visible();
  const [low, high] = zoomLimits(), count = shown.reduce((n, p) => n + runsOf(p).length, 0) || 1;
  const most = Math.max(Math.floor(SCREEN / count / 2), 40);
  for (const place of shown.slice().reverse()) {
    const runs = runsOf(place).filter((run) => run.curves.loss.x.length), label = data.points[place].label;
    const together = state.bands && runs.length > 1, wide = state.hot === place ? 4 : count > 30 ? 1.3 : 2.2;
    if (state.raw && !together) {
      for (const run of runs) {
        const [xs, ys] = clipAndThin(...readCurve(run, "loss", false), low, high, Math.min(most, 4000));
        back.push(lineTrace(xs, ys, "raw", { line: { width: 1, color: colour(place, count > 12 ? 0.16 : 0.3) } }));
      }
    } else if (state.raw && count <= 30) {
      for (const run of runs) {
        const [xs, ys] = clipAndThin(...readCurve(run, "loss", false), low, high, Math.min(most, 1500));
        back.push(lineTrace(xs, ys, "raw", { line: { width: 0.7, color: colour(place, 0.16) } }));
      }
    }
    if (together) {
      const [xs, means, deviations] = band(runs.map((run) => readCurve(run, "loss", true)));
      bands.push(bandTrace(xs, means, deviations, place, state.ylog));
      const about = hoverTemplate(label, `training loss, mean of ${runs.length} seeds`, ".4f", true);
      front.push(lineTrace(xs, means, label, {
        line: { width: wide, color: colour(place) }, hoverinfo: "all", customdata: deviations, hovertemplate: about,
      }));
    } else {
      for (const run of runs) {
        const [xs, ys] = clipAndThin(...readCurve(run, "loss", true), low, high, most);
        front.push(lineTrace(xs, ys, label, {
          line: { width: wide, color: colour(place) }, hoverinfo: "all", hovertemplate: hoverTemplate(runLabel(run), "training loss"),
        }));
      }
    }
    if (state.held) marks.push(...heldTraces(place, "loss", "markers"));
  }
  return [[...back, ...bands, ...front, ...marks], [...bands, ...front, ...marks], back];
}

function heldTraces(place, score, mode) {
  const runs = runsOf(place).filter((run) => run.held[score] && run.held[score][0].length);
  const many = data.points.length > 12;
  const look = {
    type: "scatter", mode, line: { width: 2, color: colour(place) },
    marker: { size: many ? 5 : 8, color: colour(place), line: { width: many ? 0.5 : 1.5, color: style("card") } },
  };
  if (state.bands && runs.length > 1) {
    const steps = [...new Set(runs.flatMap((run) => run.held[score][0]))].sort((a, b) => a - b);
    const each = steps.map((step) => runs.filter((run) => run.held[score][0].includes(step)));
    const found = each.map((some, i) => meanAndDeviation(some.map((run) => run.held[score][1][run.held[score][0].indexOf(steps[i])])));
    const xs = steps.map((step, i) => meanAndDeviation(each[i].map((run) => clockAt(run, step, state.over)))[0]);
    const about = hoverTemplate(data.points[place].label, `held-out ${score}, mean of ${runs.length} seeds`, ".4f", true);
    return [{
      ...look, x: xs, y: found.map((f) => f[0]), customdata: found.map((f) => f[1]), hovertemplate: about,
      error_y: { type: "data", array: found.map((f) => f[1]), thickness: 1, width: 3, color: colour(place, 0.7) },
    }];
  }
  return runs.map((run) => ({
    ...look, x: xValues(run, run.held[score][0]), y: run.held[score][1],
    hovertemplate: hoverTemplate(runLabel(run), `held-out ${score}`),
  }));
}

function drawMain() {
  if (!Plotly) return;
  const loss = state.score === "loss";
  const marks = loss ? [] : visible().slice().reverse().flatMap((p) => heldTraces(p, state.score, "lines+markers"));
  const [traces, front, back] = loss ? lossTraces() : [marks, marks, []];
  const range = state.tall || yRange(front, back);
  byId("outliers-label").hidden = !state.cut;
  const y = {
    title: { text: loss ? "loss" : `held-out ${state.score}`, standoff: 4 },
    ...(state.ylog ? { type: "log", tickformat: "~g", nticks: 7 } : { type: "linear" }), ...(range ? { range } : {}),
  };
  return Plotly.react("main", traces, layout({ yaxis: y }), CONFIG);
}

function drawSmall(name) {
  if (!Plotly) return;
  const [low, high] = zoomLimits(), shown = visible(), traces = [], form = name === "lr" ? ".3~e" : ".4~g";
  const count = shown.reduce((n, p) => n + (state.bands ? 1 : runsOf(p).length), 0) || 1;
  const most = Math.max(Math.floor(SCREEN / 4 / count), 30), what = name.replace("_", " ");
  for (const place of shown.slice().reverse()) {
    const look = { line: { width: state.hot === place ? 3 : count > 30 ? 0.9 : 1.5, color: colour(place, 0.9) }, hoverinfo: "all" };
    const runs = runsOf(place).filter((run) => run.curves[name].x.length);
    const curves = runs.map((run) => readCurve(run, name, name !== "lr"));
    if (state.bands && runs.length > 1) {
      const [xs, ys] = band(curves);
      const of = hoverTemplate(data.points[place].label, `${what}, mean of ${runs.length} seeds:`, form);
      traces.push(lineTrace(...clipAndThin(xs, ys, low, high, most), "", { ...look, hovertemplate: of }));
      continue;
    }
    runs.forEach((run, i) => {
      const [xs, ys] = clipAndThin(...curves[i], low, high, most);
      traces.push(lineTrace(xs, ys, "", { ...look, hovertemplate: hoverTemplate(runLabel(run), what, form) }));
    });
  }
  const y = {
    lr: { type: "log", dtick: 1, tickformat: "~e" },
    grad_norm: { type: "log", nticks: 5, tickformat: "~g" },
    speed: { type: "linear", nticks: 5, rangemode: "tozero", exponentformat: "SI" },
  }[name];
  const quiet = { ...CONFIG, displayModeBar: false };
  return Plotly.react(name, traces, layout({ yaxis: { ...y, fixedrange: true }, margin: { l: 44, r: 8, t: 4, b: 36 } }), quiet);
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
    const chart = document.getElementById(id);
    chart.on("plotly_relayout", (change) => {
      const ranges = ["xaxis", "yaxis"].map((axis) => change[`${axis}.range`] ||
        (change[`${axis}.range[0]`] === undefined ? null : [change[`${axis}.range[0]`], change[`${axis}.range[1]`]]));
      if (change["xaxis.autorange"]) return resetZoom();
      if (!ranges[0] && !ranges[1]) return;
      if (ranges[0]) state.zoom = ranges[0].map(Number);
      if (ranges[1]) state.tall = ranges[1].map(Number);
      drawCharts();
    });
    chart.on("plotly_doubleclick", resetZoom);
  }
}
