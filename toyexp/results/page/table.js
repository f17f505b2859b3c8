// The table of results: which columns it has, in which order its rows stand, and how many are shown at first.

// A run's score by the name that it has in heads.
function scoreOf(run, head) {
  const name = head.replace("held-out ", "");
  if (head === "smoothed train loss") return run.train_loss;
  return name === "loss" ? run.loss : run.scores[name] ?? (name === "ppl" && run.loss !== null ? Math.exp(run.loss) : null);
}

// What decides stands first, where a phone has it in sight; what is alike in all rows, or follows from others, is left out.
function columnsOf() {
  const points = state.rows === "points", each = (of) => (row) => (points ? mean(row.runs.map(of)) : of(row));
  const keys = data.keys.map((key) => ({ head: key, of: (row) => row.settings[key] ?? null }));
  const scores = ["held-out loss", ...data.scores.map((s) => `held-out ${s}`), "smoothed train loss"].filter((s) => s !== data.metric);
  const numbers = [
    ...scores.map((s) => ({ head: s, of: each((r) => scoreOf(r, s)), number: true })),
    { head: "speed", of: each((r) => r.speed), form: (v) => `${counted(v)}/s`, number: true },
    { head: "time", of: each((r) => r.seconds), form: lasted, number: true }];
  if (points) {
    return [{ head: data.metric, of: (p) => p.mean, text: value, number: true, best: true },
      ...(keys.length ? keys : [{ head: "name", of: (p) => p.label }]),
      { head: "runs", of: (p) => p.counted, text: (p) => (p.counted < p.runs.length ? `${p.counted}/${p.runs.length}` : `${p.counted}`), number: true },
      ...numbers];
  }
  const several = (of, runs = data.runs) => new Set(runs.map(of)).size > 1, warned = data.runs.some((r) => r.warned);
  const named = !keys.length || data.points.some((_, place) => several((r) => r.name, runsOf(place)));
  return [{ head: data.metric, of: (r) => scoreOf(r, data.metric), number: true, best: data.points.length === data.runs.length },
    ...(named ? [{ head: "name", of: (r) => r.name }] : []), ...keys,
    ...(several((r) => r.seed) ? [{ head: "seed", of: (r) => r.seed, form: String, number: true }] : []),
    { head: "state", of: (r) => r.state }, { head: "steps", of: (r) => r.steps, form: String, number: true }, ...numbers,
    ...(warned ? [{ head: "warnings", of: (r) => r.warned, form: (n) => n || "", number: true }] : []),
    { head: "begun", of: (r) => r.when || null, form: moment }];
}

const MOST_ROWS = 20; // of a table or a list, until all are asked for

// Behind the first rows: how many more there are, and what shows them.
function furtherRows(id, count) {
  const box = by(id);
  box.hidden = count <= MOST_ROWS || state.every;
  box.textContent = `show all ${count}`;
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
  const order = columns.find((column) => column.head === state.sort);
  if (order) rows.sort((a, b) => compared(order.of(a), order.of(b)));
  furtherRows("more-rows", rows.length);
  for (const row of state.every ? rows : rows.slice(0, MOST_ROWS)) {
    const cells = put(body, "tr");
    put(put(cells, "td"), "span", "chip").style.background = colour(row.point);
    for (const column of columns) {
      const known = column.of(row), form = column.form || (column.number ? digits : (v) => v);
      const text = column.text ? column.text(row) : known === null || known === undefined ? "–" : form(known);
      const best = column.best && row.point === 0 && known !== null && data.best;
      const cell = put(cells, "td", (column.number ? "number" : "") + (best ? " best" : ""));
      if (best) put(cell, "span", "badge", "best");
      cell.append(text);
    }
  }
}
