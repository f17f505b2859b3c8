// The section of a search: the metric of each trial, the best so far, and the metric against each setting.

function drawSearch() {
  const search = data.search, section = byId("search");
  section.hidden = !search;
  if (!search || !Plotly) return;
  const scored = search.trials.filter((trial) => trial.score !== null), [low, high] = search.limits;
  const better = search.minimising ? Math.min : Math.max, done = scored.filter((trial) => trial.complete);
  let best = null;
  const history = done.map((trial) => (best = best === null ? trial.score : better(best, trial.score)));
  const star = done.find((trial) => trial.score === best);
  const numbers = scored.map((trial) => trial.number), last = Math.max(0, ...numbers), colour = style("mark");
  const steps = lineTrace([...done.map((t) => t.number), ...(star ? [last] : [])], [...history, ...(star ? [best] : [])], "", { line: { width: 2, shape: "hv", color: colour } });
  drawTrials("trials", scored, numbers, { title: { text: "trial" } }, [steps], star);
  const box = byId("settings");
  for (const key of box.childElementCount ? [] : search.keys) { // before the charts: they take the width of their cells
    const figure = addElement(box, "figure"), share = search.importances[key];
    addElement(figure, "figcaption", "", key + (share === undefined ? "" : ` (importance ${(share * 100).toFixed(0)} %)`));
    addElement(figure, "div", "chart").id = `setting-${key}`;
  }
  for (const key of search.keys) {
    const trials = scored.filter((trial) => key in trial.values), values = trials.map((trial) => trial.values[key]);
    const log = search.log.includes(key) && values.every((value) => value > 0), different = [...new Set(values)];
    const listed = !log && different.length <= 6 && different.length < values.length; // values from a list have names
    const numeric = !listed && values.every((value) => typeof value === "number");
    const decades = log && Math.max(...values) / Math.min(...values) > 50 ? { dtick: 1 } : {}; // more ticks would overlap
    different.sort((a, b) => (a > b) - (a < b));
    const slots = different.map((_, place) => place), shift = (trial) => 0.6 * (trial.number / last - 0.5);
    const axis = numeric ? { type: log ? "log" : "linear", nticks: 5, tickformat: "~g", ...decades } :
      { tickvals: slots, ticktext: different.map(String), range: [-0.5, slots.length - 0.5], showgrid: false, title: { text: "equal values side by side, by trial", standoff: 4 } };
    const borders = numeric ? [] : slots.slice(1).map((x) => ({ x0: x - 0.5, x1: x - 0.5, y0: 0, y1: 1, yref: "paper", line: { width: 1, color: style("line") } }));
    const xs = numeric ? values : trials.map((trial, i) => different.indexOf(values[i]) + shift(trial));
    drawTrials(`setting-${key}`, trials, xs, axis, [], star, borders);
  }
  const beyond = done.filter((t) => t.score < low || t.score > high), pruned = scored.length - done.length;
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`, furthest = search.minimising ? Math.max : Math.min;
  byId("search-note").textContent = (star ? `Line: ${search.minimising ? "lowest" : "highest"} ${search.metric} so far. Star: best trial. ` : "") +
    (pruned ? `Rings: ${many(pruned, "pruned trial")}, whose last metric is of an earlier step. ` : "") +
    (beyond.length ? `Triangles: ${many(beyond.length, "trial")} outside the range, as far as ${formatNumber(furthest(...beyond.map((t) => t.score)))}.` : "");
}

// Draw trials as dots, those outside the range as triangles at its edge, pruned ones as rings in a band of their own, and
// the trial `star` as a star.
function drawTrials(id, trials, xs, xaxis, more, star, shapes = []) {
  const [low, high, pruned] = data.search.limits, inner = pruned > high ? high : low, outer = 2 * pruned - inner;
  const banded = data.search.trials.some((t) => !t.complete && t.score !== null), ticks = roundTicks(low, high, false);
  const band = { x0: 0, x1: 1, xref: "paper", y0: inner, y1: outer, fillcolor: style("shade"), line: { width: 0 }, layer: "below" };
  const yaxis = {
    title: { text: data.search.metric, standoff: 4 }, range: banded ? [Math.min(low, outer), Math.max(high, outer)] : [low, high],
    tickvals: [...ticks, pruned], ticktext: [...ticks.map((v) => String(Number(v.toPrecision(6)))), "pruned"],
  };
  const about = (t) => `<b>trial ${t.number}</b>${t.complete ? "" : " (pruned)"}<br>${escapeHtml(data.search.metric)} ${formatNumber(t.score)}` +
    Object.entries(t.values).map(([key, value]) => `<br>${escapeHtml(key)}=${escapeHtml(value)}`).join("");
  const dots = {
    type: "scatter", mode: "markers", x: xs, y: trials.map((t) => (t.complete ? Math.min(Math.max(t.score, low), high) : pruned)),
    text: trials.map(about), hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    marker: {
      size: 8, opacity: 0.8, color: trials.map((t) => style(t.complete ? "accent" : "soft")),
      symbol: trials.map((t) => (!t.complete ? "circle-open" : t.score > high ? "triangle-up" : t.score < low ? "triangle-down" : "circle")),
    },
  };
  const stars = trials.flatMap((trial, i) => (trial === star ? [i] : [])).map((i) => ({
    ...dots, x: [xs[i]], y: [dots.y[i]], text: [dots.text[i]],
    marker: { size: 17, symbol: "star-open", color: style("mark"), line: { width: 2 } }, // open: the trials below it stay visible
  }));
  const shape = layout({ shapes: banded ? [band, ...shapes] : shapes, yaxis, margin: { l: 52, r: 10, t: 12, b: 36 } });
  const plain = { gridcolor: style("line"), linecolor: style("line"), automargin: true, zeroline: false };
  const described = `${data.search.metric} of ${trials.length} trials against ${id === "trials" ? "the trial's number" : id.replace("setting-", "")}`;
  drawChart(id, [...more, dots, ...stars], { ...shape, xaxis: { ...plain, ...xaxis }, dragmode: false }, { ...CONFIG, displayModeBar: false }, described);
}
