// The section of a search: the metric of each trial, the best so far, and the metric against each setting.

function drawSearch() {
  const search = data.search, section = byId("search");
  section.hidden = !search;
  if (!search || !Plotly) return;
  const hidden = new Set(data.runs.filter((run) => !shows(run.point)).map((run) => readValue(run, "trial")));
  const scored = search.trials.filter((trial) => trial.score !== null && !hidden.has(trial.number));
  const [better, worse] = search.limits, done = scored.filter((trial) => trial.complete);
  const wins = (a, b) => (better < worse ? a.score < b.score : a.score > b.score);
  let star = null; // best trial so far
  const history = done.map((trial) => (star = star && !wins(trial, star) ? star : trial).height);
  const numbers = scored.map((trial) => trial.number), last = Math.max(1, ...search.trials.map((trial) => trial.number)), colour = style("mark");
  const steps = lineTrace([...done.map((t) => t.number), ...(star ? [last] : [])], [...history, ...(star ? [star.height] : [])], "", { line: { width: 2, shape: "hv", color: colour } });
  drawTrials("trials", scored, numbers, { title: { text: "trial" } }, [steps], star);
  const box = byId("settings");
  for (const key of box.childElementCount ? [] : search.keys) { // before the charts: they take the width of their cells
    const figure = addElement(box, "figure"), share = data.importance[key];
    addElement(figure, "figcaption", "", shortName(key) + (share === undefined ? "" : ` (importance ${(share * 100).toFixed(0)} %)`)).title = key;
    addElement(figure, "div", "chart").id = `setting-${key}`;
  }
  for (const key of search.keys) {
    const trials = scored.filter((trial) => key in trial.values), values = trials.map((trial) => trial.values[key]);
    const log = search.log.includes(key) && values.every((value) => value > 0), different = [...new Set(values)];
    const listed = !log && different.length <= 6 && different.length < values.length; // values from a list have names
    const numeric = !listed && values.every((value) => typeof value === "number");
    const decades = log ? Math.log10(Math.max(...values) / Math.min(...values)) : 0; // more than four ticks would overlap
    different.sort((a, b) => (a > b) - (a < b));
    const slots = different.map((_, place) => place), shift = (trial) => 0.6 * (trial.number / last - 0.5);
    const axis = numeric ? { type: log ? "log" : "linear", nticks: 4, tickformat: "~g", tickangle: 0, ...(decades > 1.7 && { dtick: Math.ceil(decades / 3) }) } :
      { tickvals: slots, ticktext: different.map(String), range: [-0.5, slots.length - 0.5], showgrid: false, title: { text: "dots of one value: left to right by trial", standoff: 4 } };
    const borders = numeric ? [] : slots.slice(1).map((x) => ({ x0: x - 0.5, x1: x - 0.5, y0: 0, y1: 1, yref: "paper", line: { width: 1, color: style("line") } }));
    const xs = numeric ? values : trials.map((trial, i) => different.indexOf(values[i]) + shift(trial));
    drawTrials(`setting-${key}`, trials, xs, axis, [], star, borders);
  }
  const run = star && data.runs.find((one) => readValue(one, "trial") === star.number);
  const about = star ? `Best ${hidden.size ? "shown " : ""}${search.metric}: ${formatNumber(star.score)}` : "";
  byId("search-best").textContent = star && `${about}${run ? `, ${run.point.label}` : ""}, trial ${star.number}`;
  const rings = scored.filter((trial) => !trial.complete).length, band = scored.some(isFar) ? ["grey band: logarithmic"] : [];
  const legend = hidden.size ? [...(rings ? [`rings: ${rings} pruned`] : []), ...band] : search.legend;
  const text = [...(star ? ["line: best so far", "star: best trial"] : []), ...legend].join("; ");
  byId("search-note").textContent = text && `${text[0].toUpperCase()}${text.slice(1)}.`;
}

// Return true if a trial is in the logarithmic part of the axis.
function isFar(trial) {
  const [, worse, end] = data.search.limits;
  return end < worse ? trial.height < worse : end > worse && trial.height > worse;
}

// Draw trials as dots, pruned ones as grey rings, and the trial `star` as a star. If some of them are in the logarithmic part
// of the axis, a band shows it.
function drawTrials(id, trials, xs, xaxis, more, star, shapes = []) {
  const { limits: [better, worse, far], ticks: cut, pruning: [first, last] } = data.search, low = Math.min(better, worse), high = Math.max(better, worse);
  const end = trials.some(isFar) ? far : worse;
  const band = { x0: 0, x1: 1, xref: "paper", y0: worse, y1: end, fillcolor: style("shade"), line: { width: 0 }, layer: "below" };
  const ticks = [...roundTicks(low, high, false).map((v) => [v, String(Number(v.toPrecision(6)))]), ...(end === worse ? [] : cut)];
  const yaxis = {
    title: { text: data.search.metric, standoff: 4 }, range: [Math.min(low, end), Math.max(high, end)],
    tickvals: ticks.map(([at]) => at), ticktext: ticks.map(([, text]) => text),
  };
  const about = (t) => `<b>trial ${t.number}</b>${t.complete ? "" : ` (pruned${t.step === null ? "" : ` at step ${t.step}`})`}` +
    `<br>${escapeHtml(data.search.metric)} ${formatNumber(t.score)}` + Object.entries(t.values).map(([key, value]) => `<br>${escapeHtml(shortName(key))}=${escapeHtml(value)}`).join("");
  const dots = {
    type: "scatter", mode: "markers", x: xs, y: trials.map((t) => t.height),
    text: trials.map(about), hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    marker: {
      size: 8, symbol: trials.map((t) => (t.complete ? "circle" : "circle-open")), line: { width: trials.map((t) => (t.complete ? 0 : 1.5)) },
      opacity: trials.map((t) => (t.complete ? 0.85 : 1 - 0.35 * (last - (t.step ?? first)) / Math.max(last - first, 1))),
      color: trials.map((t) => style(t.complete ? "accent" : "soft")),
    },
  };
  const stars = trials.flatMap((trial, i) => (trial === star ? [i] : [])).map((i) => ({
    ...dots, x: [xs[i]], y: [dots.y[i]], text: [dots.text[i]],
    marker: { size: 17, symbol: "star-open", color: style("mark"), line: { width: 2 } }, // open: the trials below it stay visible
  }));
  const shape = layout({ shapes: [band, ...shapes], yaxis, margin: { l: 52, r: 10, t: 12, b: 36 } });
  const plain = { gridcolor: style("line"), linecolor: style("line"), automargin: true, zeroline: false };
  const described = `${data.search.metric} of ${trials.length} trials against ${id === "trials" ? "the trial's number" : shortName(id.replace("setting-", ""))}`;
  drawChart(id, [...more, dots, ...stars], { ...shape, xaxis: { ...plain, ...xaxis }, dragmode: false }, described);
}
