// The table of results: its columns, sorting, and the button that shows all rows.

// Return the metric of a run whose name in the head of the table is `head`.
function scoreOf(run, head) {
  const name = head.replace("held-out ", "");
  if (head === "smoothed train loss") return run.train_loss;
  return name === "loss" ? run.loss : run.scores[name] ?? (name === "ppl" && run.loss !== null ? Math.exp(run.loss) : null);
}

// Return the columns of the table. The metric that ranks the points comes first, so that a phone shows it. The columns
// name, seed and warnings are left out if they would say nothing. If `saved`, each run has its name and path. `rank` is the value
// to sort by if it is not the value shown; `minor` columns are not printed.
function listColumns(saved = false) {
  const points = state.rows === "points", each = (of) => (row) => (points ? mean(row.runs.map(of)) : of(row));
  const spread = (of) => (row) => (row.counted > 1 ? meanAndDeviation(row.runs.map(of).filter((v) => v !== null))[1] : null);
  const withSpread = (head, of) => [{ head, of: each(of), number: true }, ...(saved && points ? [{ head: `± ${head}`, of: spread(of) }] : [])];
  const keys = data.keys.map((key) => ({ head: key, of: (row) => row.settings[key] ?? null }));
  if (data.search) keys.unshift({ head: "trial", of: (row) => readValue(points ? row.runs[0] : row, "trial"), form: String, number: true });
  const scores = ["held-out loss", ...data.scores.map((s) => `held-out ${s}`), "smoothed train loss"].filter((s) => s !== data.metric);
  const numbers = [
    ...scores.flatMap((s) => withSpread(s, (r) => scoreOf(r, s))),
    { head: saved ? `${data.unit} per second` : "speed", of: each((r) => r.speed), form: (v) => `${formatCount(v)}/s`, number: true },
    { head: saved ? "seconds" : "time", of: each((r) => r.seconds), form: formatDuration, number: true }];
  if (points) {
    return [{ head: data.metric, of: (p) => p.mean, text: value, number: true, best: true },
      ...(saved ? [{ head: `± ${data.metric}`, of: (p) => p.deviation }, { head: "steps taken", of: each((r) => r.steps) }] : []),
      ...(saved || !keys.length ? [{ head: "name", of: (p) => p.label }] : []), ...keys,
      ...(data.points.some((p) => p.state) ? [{ head: "state", of: (p) => p.state }] : []),
      { head: "runs", of: (p) => p.counted, text: (p) => (p.counted < p.runs.length ? `${p.counted}/${p.runs.length}` : `${p.counted}`), number: true },
      ...numbers];
  }
  const several = (of, runs = data.runs) => new Set(runs.map(of)).size > 1, warned = data.runs.some((r) => r.warned);
  const named = saved || !keys.length || data.points.some((_, place) => several((r) => r.name, runsOf(place)));
  const metric = (r) => scoreOf(r, data.metric), rank = (r) => (r.counts ? metric(r) : null);
  return [{ head: data.metric, of: metric, rank, number: true, best: data.points.length === data.runs.length },
    ...(named ? [{ head: "name", of: (r) => r.name }] : []), ...keys,
    ...(several((r) => r.seed) ? [{ head: "seed", of: (r) => r.seed, form: String, number: true }] : []),
    { head: "state", of: (r) => r.state }, { head: "steps taken", of: (r) => r.steps, form: String, number: true }, ...numbers,
    ...(warned ? [{ head: "warnings", of: (r) => r.warned, form: (n) => n || "", number: true }] : []),
    ...(saved || several((r) => r.when?.slice(0, 10)) ? [{ head: "begun", of: (r) => r.when || null, form: formatTime, minor: true }] : []), ...(saved ? [{ head: "path", of: (r) => r.path }] : [])];
}

const MOST_ROWS = 20; // rows shown before "show all" is clicked

// Return the number of rows to show, and update the button that shows all rows. On paper, a table has all of them, and the
// button says how many items of a longer list are shown.
function limitRows(id, count, most = MOST_ROWS) {
  const box = byId(id);
  if (isPrinted()) most = id === "more-rows" ? count : 100;
  box.hidden = count <= most || state.every;
  box.textContent = isPrinted() ? `${most} of ${count} shown` : `show all ${count}`;
  return box.hidden ? count : most;
}

function compareCells(a, b) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // missing values come last
  const [m, n] = [Number(a), Number(b)];
  const order = a !== "" && b !== "" && Number.isFinite(m) && Number.isFinite(n) ? m - n : String(a).localeCompare(String(b));
  return state.falling ? -order : order;
}

function drawTable() {
  const head = document.querySelector("#table thead"), body = document.querySelector("#table tbody"), columns = listColumns();
  const focused = document.activeElement.dataset.head;
  head.textContent = body.textContent = "";
  const line = addElement(head, "tr");
  addElement(line, "th").ariaLabel = "mark";
  for (const column of columns) {
    const cell = addElement(line, "th", cellClass(column)), sorted = state.sort === column.head;
    if (sorted) cell.setAttribute("aria-sort", state.falling ? "descending" : "ascending");
    const button = isPrinted() ? cell : addElement(cell, "button"); // Chromium does not repeat a head with buttons on each page
    addName(button, column.head);
    if (sorted) addElement(button, "span", "", state.falling ? " ↓" : " ↑").ariaHidden = "true"; // aria-sort says so
    button.dataset.head = column.head;
    if (focused === column.head) button.focus();
    button.addEventListener("click", () => {
      state.falling = sorted && !state.falling;
      state.sort = column.head;
      drawTable();
    });
  }
  const rows = listRows(columns), { rank = columns[0].of } = columns[0], ranked = rows.map(rank).filter((v) => v !== null);
  const near = nearBest(ranked), reach = rows.filter((row) => near.includes(rank(row))).flatMap((row) => [-1, 1].map((n) => rank(row) + n * (row.deviation || 0)));
  const scale = new Set(ranked).size > 2 && !isPrinted() ? makeScale(reach, false, false) : null;
  if (scale) {
    const cell = addElement(line, "th", "strip"), ends = addElement(cell, "div");
    cell.title = cell.ariaLabel = `${data.metric}, with a line of one standard deviation`;
    for (const end of [Math.min, Math.max]) addElement(ends, "span", "", formatNumber(end(...reach)));
  }
  saveView();
  for (const row of rows.slice(0, limitRows("more-rows", rows.length))) {
    const cells = addElement(body, "tr");
    addMark(addElement(cells, "td"), row.point);
    for (const column of columns) {
      const text = formatCell(column, row);
      const best = column.best && row.point === 0 && column.of(row) !== null && data.best;
      const cell = addElement(cells, "td", cellClass(column) + (String(text).length > 16 ? " long" : "") + (/(diverged|failed)$/.test(text) ? " bad" : "") + (best ? " best" : ""));
      if (best) addElement(cell, "span", "badge", "best");
      cell.append(text);
    }
    const strip = scale && addElement(cells, "td", "strip");
    if (strip && rank(row) !== null) drawStrip(addElement(strip, "div"), scale.place, rank(row), row.deviation || 0, row.point);
  }
  const table = body.parentElement;
  table.classList.remove("tight");
  table.classList.toggle("tight", table.offsetWidth > table.parentElement.clientWidth);
  fade(table.parentElement);
}

// Fade the right edge of a table that can be scrolled further than by a cell's padding.
function fade(box) {
  box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 12);
}

// Draw a row's metric as its point's mark on a scale, with a line of one deviation to both sides. Beyond the scale it is an
// arrow.
function drawStrip(box, place, known, deviation, point) {
  const [low, at, high] = [-1, 0, 1].map((n) => 100 * Math.min(Math.max(place(known + n * deviation) || 0, 0), 1)), line = addElement(box, "i");
  Object.assign(line.style, { left: `${low}%`, width: `${high - low}%`, background: colour(point) });
  addMark(box, point);
  box.lastChild.style.left = `${at}%`;
  if (place(known) < 0 || place(known) > 1) box.lastChild.firstChild.setAttribute("d", at ? "M1,1L11,6L1,11z" : "M11,1L1,6L11,11z"); // beyond the scale
}

function cellClass(column) {
  return (column.number ? "number" : "") + (column.minor ? " minor" : "");
}

function formatCell(column, row) {
  const known = column.of(row), form = column.form || (column.number ? formatNumber : (v) => v);
  return column.text ? column.text(row) : known === null || known === undefined ? "–" : form(known);
}

// Return the rows of the table that pass the filter, sorted.
function listRows(columns) {
  let rows = state.rows === "points" ? data.points.map((p, place) => ({ ...p, point: place, runs: runsOf(place) })) : data.runs.slice();
  rows = rows.filter((row) => shows(row.point));
  const order = columns.find((column) => column.head === state.sort);
  const rank = order && (order.rank || order.of);
  if (order) rows.sort((a, b) => compareCells(rank(a), rank(b)));
  return rows;
}

// Offer the table as a CSV file. A text that a spreadsheet would run as a formula gets a leading quote.
function saveTable() {
  const columns = listColumns(true), quote = (text) => `"${String(text).replace(/"/g, '""')}"`;
  const safe = (cell) => (typeof cell === "string" && /^[=+@\t\r-]/.test(cell) && !isNumber(cell) ? `'${cell}` : cell);
  const round = (cell) => (typeof cell === "number" && !Number.isInteger(cell) ? Number(cell.toPrecision(5)) : cell ?? "");
  const rows = listRows(columns).map((row) => columns.map((column) => round(column.of(row))));
  const lines = [columns.map((column) => column.head), ...rows].map((cells) => cells.map(safe).map(quote).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  link.download = "results.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
