// The page: what is shown, and everything but the charts. Text of runs is only ever set as text.

let data, Plotly;
const state = {
  score: "loss", over: "step", xlog: false, ylog: false, raw: true, held: true, bands: true, smooth: 45, zoom: null,
  tall: null, outliers: false, cut: false, hidden: new Set(), words: [], brushes: new Map(), hot: null, rows: "points",
  sort: null, falling: false, every: false,
};

function put(parent, tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined && text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function by(id) {
  return document.getElementById(id);
}

// Text that may be broken behind each dot and underscore.
function broken(parent, text) {
  text.split(/(?<=[._])/).forEach((part, n) => { if (n) put(parent, "wbr"); parent.append(part); });
}

// Whether fingers do what a mouse does elsewhere.
function touched() {
  return matchMedia("(pointer: coarse)").matches;
}

// -- which points are shown --

function runsOf(place) {
  return data.runs.filter((run) => run.point === place);
}

function passes(place) {
  const point = data.points[place], runs = runsOf(place);
  const text = [point.label, ...runs.map((run) => `${run.name} ${run.state} seed=${run.seed}`)].join(" ").toLowerCase();
  const brushed = [...state.brushes.values()].every((brush) => brush.points.has(place));
  return brushed && state.words.every((word) => text.includes(word));
}

function shows(place) {
  return !state.hidden.has(place) && passes(place);
}

function visible() {
  return data.points.map((_, place) => place).filter(shows);
}

function alone(place) {
  const others = data.points.map((_, p) => p).filter((p) => p !== place);
  const was = others.every((p) => state.hidden.has(p)) && !state.hidden.has(place);
  state.hidden = new Set(was ? [] : others);
  refresh();
}

let soon = 0;
function hot(place) {
  if (state.hot === place || data.points.length > 60) return;
  state.hot = place;
  cancelAnimationFrame(soon);
  soon = requestAnimationFrame(drawMain);
}

// -- words and numbers --

function digits(number) {
  return number === null || number === undefined ? "–" : Number(number).toFixed(4);
}

function value(point) {
  return digits(point.mean) + (point.deviation !== null ? ` ± ${point.deviation.toFixed(4)}` : "");
}

function counted(number) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (number >= size) return `${(number / size).toPrecision(3)}${unit}`;
  return String(Number(Number(number).toPrecision(3)));
}

function lasted(seconds) {
  if (seconds >= 6000) return `${(seconds / 3600).toFixed(1)} h`;
  return seconds >= 100 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

function moment(time) {
  return new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

function mean(values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function tip(event, text) {
  const box = by("tip");
  box.hidden = !event;
  if (!event) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
}

// -- the parts --

function drawAbout() {
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const running = data.runs.filter((run) => run.state === "running").length;
  const parts = [many(data.runs.length, "run"), ...(data.points.length < data.runs.length ? [many(data.points.length, "point")] : []),
    `by ${data.metric}`, `written ${moment(data.written)}`, ...(running ? [`${running} still running`] : [])];
  by("about").textContent = parts.join(" · ");
  data.notes.forEach((note) => put(by("notes"), "li", "", note));
  const thin = data.runs.filter((run) => run.curves.loss.n > run.curves.loss.x.length);
  const longest = Math.max(0, ...data.runs.map((run) => run.curves.loss.n));
  by("said").textContent = [
    touched() ? "Tap a curve to read it; the buttons that then appear zoom." : "Drag to zoom, double click to zoom out.",
    thin.length ? `Of curves of up to ${longest} steps at most ${data.most} points are kept: the lowest and the highest loss of each stretch; smoothing begins from means of stretches.` : "Every step is kept.",
    "A zoomed curve is drawn from all points that are kept.",
    data.points.some((p) => p.counted > 1) ? "Bands and ± are one standard deviation over the seeds (n-1)." : "",
  ].join(" ");
}

// Where the parts are that are far below; how many warnings there are is told at the top.
function drawWays() {
  const warned = data.runs.reduce((n, run) => n + run.warned, 0);
  for (const section of document.querySelectorAll("main section:not([hidden])")) {
    const title = section.querySelector("h2");
    if (!title) continue;
    const more = section.id === "warnings" ? ` (${warned})` : "";
    put(by("ways"), "a", more && "best", title.textContent.toLowerCase() + more).href = `#${section.id}`;
  }
}

function drawLegend() {
  const box = by("legend"), shown = data.points.filter((_, place) => passes(place)).length;
  box.textContent = "";
  data.points.forEach((point, place) => {
    if (!passes(place)) return;
    const button = put(box, "button");
    button.setAttribute("aria-pressed", String(!state.hidden.has(place)));
    put(button, "span", "chip").style.background = colour(place);
    put(button, "span", "label", point.label);
    put(button, "span", place === 0 && data.best ? "value best" : "value", value(point));
    button.addEventListener("click", (event) => {
      if (event.altKey || event.shiftKey) return alone(place);
      if (!state.hidden.delete(place)) state.hidden.add(place);
      refresh();
    });
    button.addEventListener("dblclick", () => alone(place));
    button.addEventListener("pointerenter", () => hot(place));
    button.addEventListener("pointerleave", () => hot(null));
  });
  const hint = touched() ? "Tap to hide or show, twice for one alone." : "Click to hide or show, double click for one alone.";
  put(box, "p", "small hint", shown ? hint : "No point passes the filter.");
}

function listed(values) {
  const numbers = values.every((v) => v !== "" && Number.isFinite(Number(v)));
  const sorted = values.slice().sort((a, b) => (numbers ? a - b : a.localeCompare(b)));
  if (numbers && values.length > 12) return `${values.length} numbers from ${sorted[0]} to ${sorted[sorted.length - 1]}`;
  return sorted.slice(0, 40).join(" · ") + (values.length > 40 ? ` · and ${values.length - 40} more` : "");
}

function drawDifferences() {
  const table = document.querySelector("#differences table"), entries = Object.entries(data.differ);
  by("differences").hidden = !entries.length;
  const leader = {};
  for (const [key, along] of Object.entries(data.along)) for (const one of along) leader[one] = key;
  for (const [key, values] of entries) {
    const row = put(table, "tr");
    put(row, "td", "key", key);
    const cell = put(row, "td", "wraps", listed(values));
    if (leader[key]) put(cell, "div", "small", `goes along with ${leader[key]}`);
    else if (!data.keys.includes(key)) put(cell, "div", "small", "alone it makes no other point");
  }
}

function drawSamples() {
  const cards = document.querySelector("#samples .cards");
  cards.textContent = "";
  const some = visible().map((place) => runsOf(place).find((run) => run.samples.length)).filter(Boolean);
  by("samples").hidden = !data.runs.some((run) => run.samples.length);
  for (const run of some.slice(0, 12)) {
    const card = put(cards, "div", "card"), last = run.samples[run.samples.length - 1];
    const title = put(card, "h3");
    put(title, "span", "chip").style.background = colour(run.point);
    put(title, "span", "", ` ${ofRun(run)}, step ${last.step ?? "?"}`);
    said(card, last);
  }
  if (some.length > 12) put(cards, "p", "small", `and ${some.length - 12} more points: hide some, or look below at the runs`);
}

function said(parent, sample) {
  const text = put(parent, "pre");
  put(text, "span", "prompt", sample.prompt);
  put(text, "span", "", sample.text.startsWith(sample.prompt) ? sample.text.slice(sample.prompt.length) : sample.text);
}

function drawWarnings() {
  const box = document.querySelector("#warnings div"), some = data.runs.filter((run) => run.warned && shows(run.point));
  by("warnings").hidden = !data.runs.some((run) => run.warned);
  box.textContent = "";
  const same = new Map(); // what many runs say is said once
  for (const run of some) for (const w of run.warnings) {
    if (!same.has(w.text)) same.set(w.text, []);
    same.get(w.text).push(`${ofRun(run)}${w.step === null ? "" : `, step ${w.step}`}`);
  }
  for (const [text, runs] of same) {
    const details = put(box, "details");
    put(details, "summary", "", `${text} (${runs.length})`);
    put(details, "p", "small", runs.slice(0, 60).join(" · ") + (runs.length > 60 ? ` · and ${runs.length - 60} more` : ""));
  }
}

function drawRuns() {
  const box = document.querySelector("#runs div");
  box.textContent = "";
  const shown = data.runs.filter((run) => shows(run.point));
  furtherRows("more-runs", shown.length);
  for (const run of state.every ? shown : shown.slice(0, MOST_ROWS)) {
    const details = put(box, "details"), summary = put(details, "summary");
    put(summary, "span", "chip").style.background = colour(run.point);
    const state = run.state === "completed" ? "" : ` · ${run.state}`, warned = run.warned ? ` · warnings: ${run.warned}` : "";
    put(summary, "span", "", ` ${ofRun(run)}${state}${warned} · ${data.metric} ${digits(scoreOf(run, data.metric))}`);
    details.addEventListener("toggle", () => details.childElementCount === 1 && drawRun(details, run));
  }
}

function drawRun(box, run) {
  const again = put(box, "div", "again");
  put(again, "pre", "", run.again);
  const copy = put(again, "button", "", "copy");
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(run.again); copy.textContent = "copied"; } catch { getSelection().selectAllChildren(again.firstChild); }
  });
  const list = put(box, "dl");
  const facts = { directory: run.path, state: run.why ? `${run.state}: ${run.why}` : run.state, ...run.facts };
  for (const [key, text] of Object.entries(facts)) { put(list, "dt", "", key); put(list, "dd", "", text); }
  put(box, "pre", "", Object.entries(run.all).map(([key, text]) => `${key}=${text}`).join("\n"));
  run.warnings.forEach((w) => put(box, "p", "small", `warning${w.step === null ? "" : ` at step ${w.step}`}: ${w.text}`));
  run.samples.forEach((sample) => { put(box, "p", "small", `step ${sample.step ?? "?"}`); said(box, sample); });
}

// -- all of it --

function choice(id, options, key, then) {
  const box = by(id);
  box.hidden = options.length < 2;
  for (const [option, text] of options) {
    const button = put(box, "button", "", text);
    button.setAttribute("aria-pressed", String(state[key] === option));
    button.addEventListener("click", () => {
      state[key] = option;
      [...box.children].forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      then();
    });
  }
}

function refresh() {
  drawLegend();
  drawCharts();
  drawTable();
  drawChoices();
  drawSamples();
  drawWarnings();
  drawRuns();
}

function themed(theme) {
  document.documentElement.dataset.theme = theme;
}

function controls() {
  choice("score", [["loss", "loss"], ...data.scores.map((s) => [s, s])], "score", () => { state.tall = null; drawMain(); });
  choice("over", [["step", "steps"], ["tokens", data.unit], ["seconds", "time"]], "over", unzoomed);
  const rows = data.points.length < data.runs.length ? [["points", "points"], ["runs", "runs"]] : [];
  choice("rows", rows, "rows", () => { state.sort = null; drawTable(); });
  for (const name of ["xlog", "ylog", "raw", "held", "bands", "outliers"]) {
    by(name).checked = state[name];
    by(name).addEventListener("change", () => {
      state[name] = by(name).checked;
      if (name === "xlog" || name === "ylog") unzoomed();
      else if (name === "bands") drawCharts();
      else drawMain();
    });
  }
  by("bands-label").hidden = !data.points.some((_, place) => runsOf(place).length > 1);
  by("smooth").addEventListener("input", () => { state.smooth = Number(by("smooth").value); drawCharts(); });
  let waiting = 0;
  by("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.words = by("filter").value.toLowerCase().split(/\s+/).filter(Boolean); refresh(); }, 150);
  });
  by("theme").addEventListener("click", () => { themed(isDark() ? "light" : "dark"); refresh(); drawImportance(); });
  for (const id of ["more-rows", "more-runs"]) {
    by(id).addEventListener("click", () => { state.every = true; drawTable(); drawRuns(); });
  }
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawChoices, 150); });
}

async function begin() {
  const asked = matchMedia("(prefers-color-scheme: dark)");
  themed(asked.matches ? "dark" : "light");
  if (!window.DecompressionStream) throw new Error("this page needs a browser of 2023 or later");
  data = prepare(JSON.parse(await unpacked("data")));
  AXES.tokens = by("unit").textContent = data.unit;
  state.rows = data.points.length < data.runs.length ? "points" : "runs";
  if (!data.runs.some((run) => run.curves.loss.x.length) && data.scores.length) state.score = data.scores[0];
  by("opening").remove();
  document.querySelector("main").hidden = false;
  drawAbout();
  controls();
  drawDifferences();
  drawImportance();
  refresh();
  drawWays();
  // What draws takes longer than all else to load: meanwhile the rest can be read. A page in the background has no frames.
  await new Promise((done) => (document.hidden ? done() : requestAnimationFrame(() => setTimeout(done))));
  const script = document.createElement("script");
  script.textContent = await unpacked("library");
  document.head.append(script);
  Plotly = window.Plotly;
  drawCharts();
  listen();
  asked.addEventListener("change", () => { themed(asked.matches ? "dark" : "light"); refresh(); });
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  const told = `This page could not be drawn: ${error.message}`;
  if (by("opening")) by("opening").textContent = told;
  else by("main").textContent = told;
  throw error;
});
