// The page: what is shown, and everything but the charts. Text of runs is only ever set as text.

let data, Plotly;
const state = {
  score: "loss", over: "step", xlog: false, ylog: false, raw: true, held: true, bands: true, smooth: 45, zoom: null,
  hidden: new Set(), words: [], brushes: new Map(), hot: null, rows: "points", sort: null, falling: false,
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
  if (number === null || number === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (number >= size) return `${Number((number / size).toPrecision(3))}${unit}`;
  return String(Number(Number(number).toPrecision(3)));
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
    `by ${data.metric}`, `written ${new Date(data.written).toLocaleString()}`, ...(running ? [`${running} still running`] : [])];
  by("about").textContent = parts.join(" · ");
  data.notes.forEach((note) => put(by("notes"), "li", "", note));
  const thin = data.runs.filter((run) => run.curves.loss.n > run.curves.loss.x.length);
  const longest = Math.max(0, ...data.runs.map((run) => run.curves.loss.n));
  by("said").textContent = [
    "Drag to zoom, double click to zoom out.",
    thin.length ? `Of curves of up to ${longest} steps at most ${data.most} points are kept: the lowest and the highest loss of each stretch; smoothing begins from means of stretches.` : "Every step is kept.",
    "A zoomed curve is drawn from all points that are kept.",
    data.points.some((p) => p.counted > 1) ? "Bands and ± are one standard deviation over the seeds (n-1)." : "",
  ].join(" ");
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
    put(button, "span", place === 0 && point.mean !== null && data.points.length > 1 ? "value best" : "value", value(point));
    button.addEventListener("click", (event) => {
      if (event.altKey || event.shiftKey) return alone(place);
      if (!state.hidden.delete(place)) state.hidden.add(place);
      refresh();
    });
    button.addEventListener("dblclick", () => alone(place));
    button.addEventListener("pointerenter", () => hot(place));
    button.addEventListener("pointerleave", () => hot(null));
  });
  put(box, "p", "small hint", shown ? "Click to hide or show, double click for one alone." : "No point passes the filter.");
}

function columnsOf() {
  const keys = (key) => ({ head: key, of: (row) => row.settings[key] ?? null, number: false });
  const scores = ["loss", ...data.scores].filter((s) => `held-out ${s}` !== data.metric);
  if (state.rows === "points") {
    return [...(data.keys.length ? data.keys.map(keys) : [{ head: "name", of: (p) => p.label }]),
      { head: "runs", of: (p) => p.counted, text: (p) => (p.counted < p.runs.length ? `${p.counted}/${p.runs.length}` : `${p.counted}`), number: true },
      { head: data.metric, of: (p) => p.mean, text: value, number: true, best: true },
      ...scores.map((s) => ({ head: `held-out ${s}`, of: (p) => mean(p.runs.map((r) => (s === "loss" ? r.loss : r.scores[s] ?? null))), number: true })),
      { head: "train loss", of: (p) => mean(p.runs.map((r) => r.train_loss)), number: true },
      { head: "speed", of: (p) => mean(p.runs.map((r) => r.speed)), text: (p) => counted(mean(p.runs.map((r) => r.speed))), number: true },
      { head: "seconds", of: (p) => mean(p.runs.map((r) => r.seconds)), text: (p) => counted(mean(p.runs.map((r) => r.seconds))), number: true }];
  }
  return [{ head: "name", of: (r) => r.name }, ...data.keys.map(keys), { head: "seed", of: (r) => r.seed, text: (r) => r.seed ?? "–", number: true },
    { head: "state", of: (r) => r.state }, { head: "steps", of: (r) => r.steps, text: (r) => r.steps ?? "–", number: true },
    { head: "held-out loss", of: (r) => r.loss, number: true },
    ...data.scores.map((s) => ({ head: `held-out ${s}`, of: (r) => r.scores[s] ?? null, number: true })),
    { head: "train loss", of: (r) => r.train_loss, number: true },
    { head: "speed", of: (r) => r.speed, text: (r) => counted(r.speed), number: true },
    { head: "seconds", of: (r) => r.seconds, text: (r) => counted(r.seconds), number: true },
    { head: "begun", of: (r) => r.when, text: (r) => (r.when ? new Date(r.when).toLocaleString() : "–") },
    { head: "warnings", of: (r) => r.warned, text: (r) => r.warned || "", number: true }];
}

function compared(a, b) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // what has none comes last
  const [m, n] = [Number(a), Number(b)];
  const order = a !== "" && b !== "" && Number.isFinite(m) && Number.isFinite(n) ? m - n : String(a).localeCompare(String(b));
  return state.falling ? -order : order;
}

function drawTable() {
  const head = document.querySelector("#table thead"), body = document.querySelector("#table tbody"), columns = columnsOf();
  head.textContent = body.textContent = "";
  const line = put(head, "tr");
  put(line, "th");
  for (const column of columns) {
    const cell = put(line, "th", column.number ? "number" : ""), sorted = state.sort === column.head;
    cell.setAttribute("aria-sort", sorted ? (state.falling ? "descending" : "ascending") : "none");
    const button = put(cell, "button", "", column.head + (sorted ? (state.falling ? " ↓" : " ↑") : ""));
    button.addEventListener("click", () => {
      state.falling = sorted && !state.falling;
      state.sort = column.head;
      drawTable();
    });
  }
  let rows = state.rows === "points" ? data.points.map((p, place) => ({ ...p, point: place, runs: runsOf(place) })) : data.runs.slice();
  rows = rows.filter((row) => shows(row.point));
  const by = columns.find((column) => column.head === state.sort);
  if (by) rows.sort((a, b) => compared(by.of(a), by.of(b)));
  for (const row of rows) {
    const cells = put(body, "tr");
    put(put(cells, "td"), "span", "chip").style.background = colour(row.point);
    for (const column of columns) {
      const known = column.of(row), text = column.text ? column.text(row) : column.number ? digits(known) : known ?? "–";
      const best = column.best && row.point === 0 && known !== null && data.points.length > 1;
      put(cells, "td", (column.number ? "number" : "") + (best ? " best" : ""), best ? `${text} best` : text);
    }
  }
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
    put(row, "td", "", key);
    put(row, "td", "wraps", listed(values));
    put(row, "td", "small", leader[key] ? `goes along with ${leader[key]}` : data.keys.includes(key) ? "" : "makes no point of its own");
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
    put(details, "summary", "", `${text}  (${runs.length})`);
    put(details, "p", "small", runs.slice(0, 60).join(" · ") + (runs.length > 60 ? ` · and ${runs.length - 60} more` : ""));
  }
}

function drawRuns() {
  const box = document.querySelector("#runs div");
  box.textContent = "";
  for (const run of data.runs.filter((run) => shows(run.point))) {
    const details = put(box, "details"), summary = put(details, "summary");
    put(summary, "span", "chip").style.background = colour(run.point);
    put(summary, "span", "", ` ${ofRun(run)} · ${run.state} · held-out loss ${digits(run.loss)}`);
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
  const unzoomed = () => { state.zoom = null; drawCharts(); };
  choice("score", [["loss", "loss"], ...data.scores.map((s) => [s, s])], "score", drawMain);
  choice("over", [["step", "steps"], ["tokens", "tokens"], ["seconds", "time"]], "over", unzoomed);
  choice("rows", [["points", "points"], ["runs", "runs"]], "rows", () => { state.sort = null; drawTable(); });
  for (const name of ["xlog", "ylog", "raw", "held", "bands"]) {
    by(name).checked = state[name];
    by(name).addEventListener("change", () => {
      state[name] = by(name).checked;
      if (name === "xlog") unzoomed();
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
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawChoices, 150); });
}

async function begin() {
  const asked = matchMedia("(prefers-color-scheme: dark)");
  themed(asked.matches ? "dark" : "light");
  if (!window.DecompressionStream) throw new Error("this page needs a browser of 2023 or later");
  data = prepare(JSON.parse(await unpacked("data")));
  state.rows = data.points.length < data.runs.length ? "points" : "runs";
  if (!data.runs.some((run) => run.curves.loss.x.length) && data.scores.length) state.score = data.scores[0];
  const script = document.createElement("script");
  script.textContent = await unpacked("library");
  document.head.append(script);
  Plotly = window.Plotly;
  by("opening").remove();
  document.querySelector("main").hidden = false;
  drawAbout();
  controls();
  drawDifferences();
  drawImportance();
  refresh();
  listen();
  asked.addEventListener("change", () => { themed(asked.matches ? "dark" : "light"); refresh(); });
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  by("opening").textContent = `This page could not be drawn: ${error.message}`;
  throw error;
});
