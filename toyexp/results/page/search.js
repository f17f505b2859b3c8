// The section of a search: the metric of each trial, the best so far, and the metric against each setting.

function drawSearch() {
  const search = data.search, section = byId("search");
  section.hidden = !search;
  if (!search || !Plotly) return;
  const scored = search.trials.filter((trial) => trial.score !== null), range = searchRange(scored);
  const better = search.minimising ? Math.min : Math.max, done = scored.filter((trial) => trial.complete);
  let best = null;
  const history = done.map((trial) => (best = best === null ? trial.score : better(best, trial.score)));
  const star = done.find((trial) => trial.score === best);
  const numbers = scored.map((trial) => trial.number), last = Math.max(0, ...numbers), colour = style("mark");
  const steps = lineTrace([...done.map((t) => t.number), ...(star ? [last] : [])], [...history, ...(star ? [best] : [])], "", { line: { width: 2, shape: "hv", color: colour } });
  const label = { x: last, y: best, text: "best so far", font: { color: colour }, xanchor: "right", yanchor: search.minimising ? "top" : "bottom", showarrow: false };
  drawTrials("trials", scored, numbers, range, { title: { text: "trial" } }, [steps], star, star ? [label] : []);
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
    drawTrials(`setting-${key}`, trials, xs, range, axis, [], star, [], borders);
  }
  const best_ = search.minimising ? "lowest" : "highest", beyond = scored.filter((t) => t.score < range[0] || t.score > range[1]);
  const crosses = scored.filter((trial) => !trial.complete && !beyond.includes(trial)).length;
  const furthest = search.minimising ? Math.max(...beyond.map((t) => t.score)) : Math.min(...beyond.map((t) => t.score));
  const triangles = beyond.filter((trial) => !trial.complete).length, many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  byId("search-note").textContent = `${search.trials.length} trials of a ${search.algorithm} search. The line is the ${best_} ` +
    `${search.metric} so far.` + (star ? " The star is the best trial." : "") +
    (crosses ? ` Crosses: ${many(crosses, "pruned trial")}, at the last metric.` : "") +
    (beyond.length ? ` Triangles at the edge: ${many(beyond.length, "trial")} outside the range, as far as ${formatNumber(furthest)}` +
      `${triangles ? `; ${triangles} pruned (grey)` : ""}.` : "");
}

// Return the range of the metric to show: from the best trial to four times the median's distance from it.
function searchRange(scored) {
  const sign = data.search.minimising ? 1 : -1;
  const costs = scored.map((trial) => sign * trial.score).sort((a, b) => a - b);
  if (!costs.length) return [0, 1];
  const middle = costs[Math.floor((costs.length - 1) / 2)], near = costs.filter((cost) => cost <= costs[0] + 4 * (middle - costs[0]));
  const room = 0.08 * (near[near.length - 1] - costs[0]) || 0.05 * Math.abs(costs[0]) || 1;
  return [sign * (costs[0] - 2.5 * room), sign * (near[near.length - 1] + room)].sort((a, b) => a - b);
}

// Draw trials as dots, pruned ones as crosses, those outside the range as triangles at its edge, and the trial `star` as a star.
function drawTrials(id, trials, xs, [low, high], xaxis, more, star, annotations = [], shapes = []) {
  const about = (t) => `<b>trial ${t.number}</b>${t.complete ? "" : " (pruned)"}<br>${escapeHtml(data.search.metric)} ${formatNumber(t.score)}` +
    Object.entries(t.values).map(([key, value]) => `<br>${escapeHtml(key)}=${escapeHtml(value)}`).join("");
  const dots = {
    type: "scatter", mode: "markers", x: xs, y: trials.map((t) => Math.min(Math.max(t.score, low), high)),
    text: trials.map(about), hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    marker: {
      size: 8, opacity: 0.75, color: trials.map((t) => style(t.complete ? "accent" : "soft")),
      symbol: trials.map((t) => (t.score > high ? "triangle-up" : t.score < low ? "triangle-down" : t.complete ? "circle" : "x-thin-open")),
    },
  };
  const stars = trials.flatMap((trial, i) => (trial === star ? [i] : [])).map((i) => ({
    ...dots, x: [xs[i]], y: [dots.y[i]], text: [dots.text[i]],
    marker: { size: 17, symbol: "star-open", color: style("mark"), line: { width: 2 } }, // open: the trials below it stay visible
  }));
  const shape = layout({ annotations, shapes, yaxis: { title: { text: data.search.metric, standoff: 4 }, range: [low, high], nticks: 6 }, margin: { l: 52, r: 10, t: 12, b: 36 } });
  const plain = { gridcolor: style("line"), linecolor: style("line"), automargin: true, zeroline: false };
  const described = `${data.search.metric} of ${trials.length} trials against ${id === "trials" ? "the trial's number" : id.replace("setting-", "")}`;
  drawChart(id, [...more, dots, ...stars], { ...shape, xaxis: { ...plain, ...xaxis }, dragmode: false }, { ...CONFIG, displayModeBar: false }, described);
}
