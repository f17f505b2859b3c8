// Build the page, except its charts. Texts from runs are never inserted as HTML.

let data, Plotly;
const state = {
  score: "loss", over: "step", xlog: false, ylog: false, raw: false, held: true, bands: true, smooth: 45, zoom: null,
  tall: null, outliers: false, cut: false, hidden: new Set(), filter: "", brushes: new Map(), hot: null, rows: "points",
  sort: null, falling: false, every: false, theme: null,
};
let defaults, conditions = { tests: [], problem: "" };

function addElement(parent, tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined && text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function addSvg(tag, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

// Add a setting's short name with possible line breaks after each dot and underscore, and its full name as tooltip.
function addName(parent, key) {
  parent.title = key;
  shortName(key).split(/(?<=[._])/).forEach((part, n) => { if (n) addElement(parent, "wbr"); parent.append(part); });
}

// Return true while the page is laid out for paper.
function isPrinted() {
  return document.body.classList.contains("print");
}

// Return true on a touch screen.
function isTouch() {
  return matchMedia("(pointer: coarse)").matches;
}

// -- which points are shown --

// A point (a group of runs that differ only in their seed) passes the filter if one of its runs does.
function passes(point) {
  return axes.every((axis) => isKept(point, axis)) && point.runs.some((run) => conditions.tests.every((test) => test(run)));
}

function shows(point) {
  return !state.hidden.has(point) && passes(point);
}

function visible() {
  return data.points.filter(shows);
}

function shownRuns() {
  return visible().flatMap((point) => point.runs);
}

// Return true for the best point, unless points cannot be ranked.
function isBest(point) {
  return data.best && point.place === 0;
}

// Hide all points but one; if they are hidden already, show all.
function showOnly(point) {
  const others = data.points.filter((p) => p !== point);
  const isAlone = !state.hidden.has(point) && others.every((p) => state.hidden.has(p));
  state.hidden = new Set(isAlone ? [] : others);
  refresh();
}

let soon = 0;
function highlight(point) {
  if (state.hot === point || data.points.length > 60) return;
  state.hot = point;
  cancelAnimationFrame(soon);
  soon = requestAnimationFrame(drawMain);
}

// -- the page's address holds the view: a reload keeps it, and a link shares it --

const KEPT = ["theme", "score", "over", "xlog", "ylog", "raw", "held", "bands", "outliers", "smooth", "filter", "rows", "sort", "falling", "zoom", "tall"];

function saveView() {
  const words = new URLSearchParams();
  for (const key of KEPT) if (String(state[key]) !== String(defaults[key])) words.set(key, state[key]);
  for (const { label } of state.hidden) words.append("hide", label);
  for (const [key, range] of state.brushes) words.append("axis", `${key} ${range.map((t) => t.toFixed(3)).join(" ")}`);
  const hash = String(words) ? `#${words}` : "";
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
}

function loadView() {
  const words = new URLSearchParams(location.hash.slice(1)), numbers = (text) => text.split(/[ ,]/).map(Number);
  for (const key of KEPT) {
    const text = words.get(key), kind = typeof defaults[key];
    if (text === null) continue;
    if (key === "zoom" || key === "tall") state[key] = numbers(text).length === 2 && numbers(text).every(Number.isFinite) ? numbers(text) : null;
    else state[key] = kind === "boolean" ? text === "true" : kind === "number" ? Number(text) || 0 : text;
  }
  if (!["loss", ...data.scores].includes(state.score)) state.score = defaults.score;
  if (!(state.over in AXES)) state.over = defaults.over;
  state.hidden = new Set(data.points.filter((point) => words.getAll("hide").includes(point.label)));
  for (const text of words.getAll("axis")) {
    const [key, low, high] = text.split(" ");
    if (high) state.brushes.set(key, numbers(`${low} ${high}`));
  }
}

// -- words and numbers --

function formatNumber(number) {
  return number === null || number === undefined ? "–" : Math.abs(number) < 1e6 ? Number(number).toFixed(4) : tickLabels([number])[0];
}

// Return how the runs ended if all of them diverged or failed, else "".
function commonFailure(runs) {
  const states = [...new Set(runs.map((run) => run.state))].sort();
  return states.every((state) => ["diverged", "failed"].includes(state)) ? states.join(" or ") : "";
}

function value(point) {
  return formatNumber(point.mean) + (point.deviation !== null ? ` ± ${formatNumber(point.deviation)}` : "");
}

function formatCount(number) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (number >= size) return `${(number / size).toPrecision(3)}${unit}`;
  return String(Number(Number(number).toPrecision(3)));
}

function formatDuration(seconds) {
  if (seconds >= 6000) return `${(seconds / 3600).toFixed(1)} h`;
  return seconds >= 100 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

function formatTime(time) {
  return localTime(time).slice(0, 16).replace("T", " ");
}

function mean(values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function showTip(event, text) {
  const box = byId("tip");
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
    `by ${data.metric}`, `written ${formatTime(data.written)}`, ...(running ? [`${running} still running`] : [])];
  byId("about").textContent = parts.join(" · ");
  const thin = data.runs.filter((run) => run.curves.loss.n > run.curves.loss.x.length);
  const longest = Math.max(0, ...data.runs.map((run) => run.curves.loss.n));
  const scored = data.runs.some((run) => run.held.loss && run.held.loss[0].length);
  byId("said").textContent = [
    scored ? `With marks: held-out loss; thin: smoothed training loss${isDistinct() ? "" : " of the best point and of the one pointed at in the legend"}.` : "",
    thin.length ? `Curves of up to ${longest} steps are reduced to the extremes of at most ${data.most / 2} bins.` : "",
    data.points.some((p) => p.counted > 1) ? "±: standard deviation over seeds (n-1); bands: the same within the extremes of the seeds." : "",
    data.runs.some((run) => !run.counts) ? "Cross: end of a run that did not complete." : "",
    data.runs.some((run) => [run.loss, ...Object.values(run.scores)].some((v) => Math.abs(v) >= 1e300)) ? "Values beyond ±1e300 are not drawn." : "",
    ...Object.keys(marksOfRun()).map((dash) => ({ solid: "Solid line: divergence.", dot: "Dotted lines: warnings." })[dash]),
    isDistinct() ? "" : "Stronger colour: better rank.",
  ].join(" ");
  const [{ curves: { grad_norm: { x, y } } }] = data.runs, zero = y.findLastIndex((v) => v !== 0) + 1;
  if (data.runs.length === 1 && zero < y.length) byId("grad_norm").previousElementSibling.append(`; 0 from step ${x[zero]}`); // no logarithm
  byId("zooming").textContent = isTouch() ? "Tap a curve for its values and buttons to zoom." : "Drag to zoom, double click to reset.";
  byId("raw-label").title = `the loss of each step; with more than ${MOST_RAW} runs, only of the best point and of the one pointed at in the legend`;
}

// Add links to the sections of the page; the link to the warnings has their number.
function drawLinks() {
  const warned = data.runs.reduce((n, run) => n + run.warned, 0);
  for (const section of document.querySelectorAll("main section:not([hidden])")) {
    const title = section.querySelector("h2");
    const more = section.id === "warnings" ? ` (${warned})` : "";
    const link = addElement(byId("ways"), "a", more && "bad", title.textContent.toLowerCase() + more);
    link.href = `#${section.id}`;
    link.addEventListener("click", (event) => { // a jump would replace the view in the address
      event.preventDefault();
      section.scrollIntoView();
    });
  }
}

function drawLegend() {
  const box = byId("legend"), passing = data.points.filter(passes), shown = passing.length;
  const most = innerWidth <= 820 && !isPrinted() ? 8 : 24;
  const focused = document.activeElement.dataset.place, total = data.points.length;
  box.textContent = "";
  const partly = data.runs.some((run) => passes(run.point) && !conditions.tests.every((test) => test(run)));
  const note = partly ? "; points contain a matching run; means are of all their runs" : "", { problem } = conditions;
  byId("count").textContent = `${shown} of ${total} ${total === 1 ? "point" : "points"}${note}${problem && "; "}`;
  if (problem) addElement(byId("count"), "strong", "bad", problem);
  byId("filter").setAttribute("aria-invalid", String(conditions.problem !== ""));
  for (const point of passing.slice(0, limitRows("more-points", shown, most))) {
    const button = addElement(box, "button");
    button.setAttribute("aria-pressed", String(!state.hidden.has(point)));
    button.dataset.place = point.place;
    if (focused === String(point.place)) button.focus();
    addMark(button, point);
    addElement(button, "span", "label", point.label);
    const last = point.mean === null ? mean(point.runs.map((run) => scoreOf(run, data.metric))) : null; // such as of a pruned run
    const failure = commonFailure(point.runs), kind = failure ? " bad" : isBest(point) ? " best" : last === null ? "" : " last";
    addElement(button, "span", `value${kind}`, failure || (last === null ? value(point) : formatNumber(last)));
    button.addEventListener("click", (event) => {
      if (event.altKey || event.shiftKey) return showOnly(point);
      if (!state.hidden.delete(point)) state.hidden.add(point);
      refresh();
    });
    button.addEventListener("dblclick", () => showOnly(point));
    button.addEventListener("pointerenter", () => highlight(point));
    button.addEventListener("pointerleave", () => highlight(null));
  }
  byId("hint").textContent = !shown ? "" : isTouch() ? "Tap a point to hide or show it, twice to isolate it." :
    "Click a point to hide or show it, double click (Shift+Enter) to isolate it.";
}

// List the notes about the runs, except those about unranked runs that are not shown.
function drawNotes() {
  const states = shownRuns().map((run) => run.state), box = byId("notes");
  const omitted = Object.entries(data.unranked).filter(([state]) => !states.includes(state)).map(([, note]) => note);
  box.textContent = "";
  data.notes.filter((note) => !omitted.includes(note)).forEach((note) => addElement(box, "li", "", note));
}

// Write the best result of the shown points, or how they ended if none has one. If no point is shown, say why instead, with a
// button that shows all points.
function drawResult() {
  const [best] = visible(), box = byId("result"), filtered = !data.points.some(passes);
  const runs = shownRuns(), [run] = runs, shown = visible().length < data.points.length ? "shown " : "", failure = commonFailure(runs);
  box.textContent = !best ? `${filtered ? "No point passes the filter" : "All points are hidden"} ` :
    data.runs.length === 1 && (failure || !run.counts) ? `${run.state[0].toUpperCase()}${run.state.slice(1)} at step ${run.diverged ?? run.steps}` :
    failure ? `${runs.length === 1 ? `The ${shown}run` : `All ${runs.length} ${shown}runs`} ${failure}` :
    best.mean === null ? "No shown run has completed" : data.best ? `Best ${shown}${data.metric}: ${value(best)}, ${best.label}` :
    data.points.length === 1 ? `${data.metric[0].toUpperCase()}${data.metric.slice(1)}: ${value(best)}` : "";
  if (visible().length) return;
  addElement(box, "button", "", filtered ? "clear" : "show all").addEventListener("click", () => {
    state.filter = byId("filter").value = "";
    state.brushes.clear();
    state.hidden.clear();
    refresh();
  });
}

function formatValues(values) {
  const numbers = values.every(isNumber);
  const sorted = values.slice().sort((a, b) => (numbers ? a - b : a.localeCompare(b)));
  if (numbers && values.length > 12) return `${values.length} numbers from ${sorted[0]} to ${sorted[sorted.length - 1]}`;
  return sorted.slice(0, 40).join(" · ") + (values.length > 40 ? ` · and ${values.length - 40} more` : "");
}

function drawDifferences() {
  const table = document.querySelector("#differences table"), entries = Object.entries(data.differ);
  byId("differences").hidden = !entries.length;
  for (const [key, values] of entries) {
    const row = addElement(table, "tr");
    addName(addElement(row, "td", "key"), key);
    const cell = addElement(row, "td", "wraps", formatValues(values));
    if (data.along[key]) addElement(cell, "div", "small", `varies together with ${shortName(data.along[key])}`);
    else if (!data.keys.includes(key)) addElement(cell, "div", "small", "runs that differ only in this setting form one point");
  }
}

function drawSamples() {
  const cards = document.querySelector("#samples .cards");
  cards.textContent = "";
  const some = visible().map((point) => point.runs.find((run) => run.samples.length)).filter(Boolean);
  byId("samples").hidden = !data.runs.some((run) => run.samples.length);
  for (const run of some.slice(0, 12)) {
    const card = addElement(cards, "div", "card"), last = run.samples[run.samples.length - 1];
    const title = addElement(card, "h3");
    addMark(title, run.point);
    addElement(title, "span", "", ` ${runLabel(run)}, step ${last.step ?? "?"}`);
    addSample(card, last);
  }
  if (some.length > 12) addElement(cards, "p", "small", `and ${some.length - 12} more points: hide some, or see the runs below`);
}

function addSample(parent, sample) {
  const text = addElement(parent, "pre");
  addElement(text, "span", "prompt", sample.prompt);
  addElement(text, "span", "", sample.text.startsWith(sample.prompt) ? sample.text.slice(sample.prompt.length) : sample.text);
}

function drawWarnings() {
  const box = document.querySelector("#warnings div"), some = data.runs.filter((run) => run.warned && shows(run.point));
  byId("warnings").hidden = !data.runs.some((run) => run.warned);
  box.textContent = "";
  const same = new Map(), number = /\d+(\.\d+)?(e[+-]?\d+)?/g; // texts of a point that differ only in numbers are shown once
  for (const run of some) for (const w of run.warnings) {
    const { text } = w, key = `${run.point.place} ${text.replace(number, "")}`;
    if (!same.has(key)) same.set(key, { text, runs: new Set(), numbers: text.match(number)?.map(() => []), told: [] });
    const { runs, numbers, told } = same.get(key);
    runs.add(run);
    (text.match(number) || []).forEach((n, i) => numbers[i].push(n));
    told.push(`${runLabel(run)}${w.step === null ? "" : `, step ${w.step}`}`);
  }
  for (const { text, runs, numbers, told } of same.values()) {
    const details = addElement(box, "details"), [{ point: { label } }] = runs;
    const ends = (all) => [...new Set([Math.min, Math.max].map((end) => all.find((n) => Number(n) === end(...all))))].join("–");
    let nth = 0;
    addElement(details, "summary", "", `${text.replace(number, () => ends(numbers[nth++]))} (${label}: ${runs.size === 1 ? "1 run" : `${runs.size} runs`})`);
    details.open = isPrinted();
    addElement(details, "p", "small", told.slice(0, 60).join(" · ") + (told.length > 60 ? ` · and ${told.length - 60} more` : ""));
  }
}

function drawRuns() {
  const box = document.querySelector("#runs div");
  box.textContent = "";
  const shown = data.runs.filter((run) => shows(run.point));
  byId("by").textContent = data.metric;
  byId("shared").hidden = !isPrinted();
  byId("shared").textContent = `# settings of all runs\n${formatSettings(data.runs[0], (key) => data.runs.every((run) => run.all[key] === data.runs[0].all[key]))}`;
  for (const run of shown.slice(0, limitRows("more-runs", shown.length))) {
    const details = addElement(box, "details"), summary = addElement(details, "summary");
    addMark(summary, run.point);
    addElement(summary, "span", "", runLabel(run));
    addElement(summary, "span", commonFailure([run]) && "bad", run.state + (run.warned ? `, warnings: ${run.warned}` : ""));
    addElement(summary, "span", "", formatNumber(scoreOf(run, data.metric)));
    details.addEventListener("toggle", () => details.childElementCount === 1 && drawRun(details, run));
    if (isPrinted()) {
      details.open = true;
      drawRun(details, run);
    }
  }
}

// Return settings of a run as lines: first those that were typed or differ between runs, then the defaults.
function formatSettings(run, includes) {
  const lines = (some) => some.filter(([key]) => includes(key)).map(([key, text]) => `${key}=${text}`), all = Object.entries(run.all);
  const first = lines(all.slice(0, run.typed));
  return [...first, ...(first.length ? ["# defaults"] : []), ...lines(all.slice(run.typed))].join("\n");
}

function drawRun(box, run) {
  const again = addElement(box, "div", "again");
  addElement(again, "pre", "", run.again);
  const copy = addElement(again, "button", "", "copy");
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(run.again); copy.textContent = "copied"; } catch { getSelection().selectAllChildren(again.firstChild); }
  });
  const facts = { directory: run.path, ...(run.when && { begun: formatTime(run.when) }), state: run.why ? `${run.state}: ${run.why}` : run.state, ...run.facts };
  if (isPrinted()) return addElement(box, "p", "small", `${facts.state} · ${run.path}`);
  const list = addElement(box, "dl");
  for (const [key, text] of Object.entries(facts)) { addElement(list, "dt", "", key); addElement(list, "dd", "", text); }
  addElement(box, "pre", "", formatSettings(run, () => true));
  run.warnings.forEach((w) => addElement(box, "p", "small", `warning${w.step === null ? "" : ` at step ${w.step}`}: ${w.text}`));
  run.samples.forEach((sample) => { addElement(box, "p", "small", `step ${sample.step ?? "?"}`); addSample(box, sample); });
}

// -- start --

function addChoice(id, options, key, then) {
  const box = byId(id);
  box.hidden = options.length < 2;
  for (const [option, text] of options) {
    const button = addElement(box, "button", "", text);
    button.setAttribute("aria-pressed", String(state[key] === option));
    button.addEventListener("click", () => {
      state[key] = option;
      [...box.children].forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      then();
    });
  }
}

// Draw the parts whose layout depends on the width of the window.
function drawSized() {
  drawCharts();
  drawTable();
  drawChoices();
  drawSearch();
}

function refresh() {
  conditions = parseFilter(state.filter);
  drawNotes();
  drawResult();
  drawLegend();
  drawSized();
  drawSamples();
  drawWarnings();
  drawRuns();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

// Print in light colours and at the width of a page.
function listenPrint() {
  const screen = {}, draw = (on, theme) => {
    setTheme(theme);
    document.body.classList.toggle("print", on);
    refresh();
    fitTable();
  };
  addEventListener("beforeprint", () => { screen.theme = document.documentElement.dataset.theme; draw(true, "light"); });
  addEventListener("afterprint", () => draw(false, screen.theme));
}

// Shrink the text of a printed table that is wider than the page, down to 6 points; if that is not enough, break its words.
function fitTable() {
  const table = document.querySelector("#table table"), size = parseFloat(getComputedStyle(table).fontSize);
  const isTooWide = () => isPrinted() && table.offsetWidth > table.parentElement.clientWidth;
  table.style.fontSize = "";
  table.classList.remove("broken");
  for (let now = size; isTooWide() && now > 8; now -= 0.5) table.style.fontSize = `${now}px`;
  table.classList.toggle("broken", isTooWide());
}

function controls() {
  addChoice("score", [["loss", "loss"], ...data.scores.map((s) => [s, s])], "score", () => { state.tall = null; drawMain(); });
  addChoice("over", [["step", "steps"], ["tokens", data.unit], ["seconds", "time"]], "over", resetZoom);
  const rows = data.points.length < data.runs.length ? [["points", "points"], ["runs", "runs"]] : [];
  addChoice("rows", rows, "rows", () => {
    Object.assign(state, { sort: defaults.sort, falling: defaults.falling });
    drawTable();
  });
  for (const name of ["xlog", "ylog", "raw", "held", "bands", "outliers"]) {
    byId(name).checked = state[name];
    byId(name).addEventListener("change", () => {
      state[name] = byId(name).checked;
      if (name === "outliers" && ["loss", "ppl"].includes(state.score)) { // outliers would flatten all else on a linear axis
        byId("ylog").checked = state.ylog = state.outliers ? state.ylog || lossRatio(shownRuns()) > 100 : defaults.ylog;
      }
      (name.endsWith("log") ? resetZoom : drawCharts)();
    });
  }
  byId("bands-label").hidden = !data.points.some((point) => point.runs.length > 1);
  byId("smooth").value = state.smooth;
  byId("smooth").addEventListener("input", () => { state.smooth = Number(byId("smooth").value); drawCharts(); });
  let waiting = 0;
  byId("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.filter = byId("filter").value.trim(); refresh(); }, 150);
  });
  byId("filter").value = state.filter;
  byId("theme").addEventListener("click", () => {
    setTheme(state.theme = theme() === "dark" ? "light" : "dark");
    refresh();
  });
  byId("save").addEventListener("click", saveTable);
  for (const id of ["more-points", "more-rows", "more-runs"]) {
    byId(id).addEventListener("click", () => { state.every = true; refresh(); });
  }
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawSized, 150); });
}

async function begin() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(new URLSearchParams(location.hash.slice(1)).get("theme") || (system.matches ? "dark" : "light"));
  if (!window.DecompressionStream) throw new Error("this page needs a browser of 2023 or later");
  data = prepare(JSON.parse(await unpack("data")));
  AXES.tokens = byId("unit").textContent = data.unit;
  state.rows = data.points.length < data.runs.length ? "points" : "runs";
  if (!data.runs.some((run) => run.curves.loss.x.length) && data.scores.length) state.score = data.scores[0];
  Object.assign(state, { sort: data.metric, falling: data.rising });
  state.raw = data.runs.length === 1;
  state.ylog = commonFailure(data.runs) === "diverged" && lossRatio(data.runs) > 20;
  defaults = { ...state };
  axes = listAxes();
  loadView();
  byId("opening").remove();
  document.querySelector("main").hidden = false;
  drawAbout();
  controls();
  drawDifferences();
  drawImportance();
  refresh();
  drawLinks();
  listenPrint();
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); document.querySelector("main").focus(); });
  for (const box of document.querySelectorAll(".scroll")) {
    fade(box);
    box.addEventListener("scroll", () => fade(box));
  }
  // plotly loads slowly, so show the rest first. A page in the background gets no animation frames.
  await new Promise((done) => (document.hidden ? done() : requestAnimationFrame(() => setTimeout(done))));
  const script = document.createElement("script");
  script.textContent = await unpack("library");
  document.head.append(script);
  Plotly = window.Plotly;
  drawCharts();
  drawSearch();
  listen();
  addEventListener("hashchange", () => location.reload()); // an address was pasted that has another view
  system.addEventListener("change", () => {
    if (!state.theme) setTheme(system.matches ? "dark" : "light");
    refresh();
  });
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  const told = `This page could not be drawn: ${error.message}`;
  if (byId("opening")) byId("opening").textContent = told;
  else byId("main").textContent = told;
  throw error;
});
