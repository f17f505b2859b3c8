// The filter in the page's header. It takes conditions as in `toyexp runs` (lr=0.01, optim.weight_decay!=0, loss<3), and
// words that the label, name, state or seed of a run must contain.

const CONDITION = /^([A-Za-z_][\w.]*)(!=|<=|>=|==?|<|>)(.*)$/s;
const SPACED = /\s*(!=|<=|>=|==?|<|>)(?!\s+\S+[=<>])\s*/g; // an operator with spaces that do not precede another condition
const ALIASES = { held_out: "loss", eval_loss: "loss", tokens_per_second: "speed", started: "when", begun: "when", time: "seconds" };
const ORDER = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b };
const localTime = (time) => new Date(new Date(time) - new Date(time).getTimezoneOffset() * 6e4).toISOString().slice(0, 19);

// Return the names of all settings and columns of the runs. A setting can also be named by its last part, if that is unique.
function listKeys() {
  const full = new Set(data.runs.flatMap((run) => [...Object.keys(run.all), ...Object.keys(run.scores)]));
  for (const column of [...data.columns, "job", ...(data.search ? ["trial"] : [])]) full.add(column);
  const keys = new Map([...full].map((key) => [key, key])), short = [...full].map((key) => key.split(".").pop());
  [...full].forEach((key, n) => {
    if (!keys.has(short[n]) && short.filter((s) => s === short[n]).length === 1) keys.set(short[n], key);
  });
  return keys;
}

// Return {tests, problem}. Each of `tests` takes a run and returns whether it matches one condition. `problem` says which
// conditions are invalid and thus ignored, or have a value that no run has, or is "".
function parseFilter(text) {
  const keys = listKeys(), tests = [];
  const problems = [], ignore = (word, why) => problems.push(`ignored: ${word} (${why})`);
  for (const word of text.replace(SPACED, "$1").split(/\s+/).filter(Boolean)) {
    const [, typed, sign, value] = CONDITION.exec(word) || [];
    if (!sign) {
      const part = word.toLowerCase(), test = (run) => `${data.points[run.point].label} ${run.name} ${run.state} seed=${run.seed}`.toLowerCase().includes(part);
      tests.push(test);
      if (!data.runs.some(test)) problems.push(`no run contains ${word}; try a condition such as state!=diverged`);
      continue;
    }
    const key = keys.get(ALIASES[typed] || typed), known = data.runs.map((run) => readValue(run, key));
    const dated = key === "when", wanted = dated ? readTime(value, ORDER[sign]) : value;
    if (!key) { ignore(word, `no run has the setting ${typed}`); continue; }
    const needs = dated ? "a date or time such as 2026-11-20T18:00, today or yesterday" : "a number";
    if (ORDER[sign] && !(dated ? wanted : isNumber(value))) { ignore(word, `${sign} needs ${needs}`); continue; }
    const unknown = ORDER[sign] ? undefined : wanted.split(",").find((item) => !known.some((v) => matchesCondition(v, "=", item, key)));
    if (unknown === "") { ignore(word, "needs a value"); continue; }
    if (unknown) problems.push(`no run has ${typed}=${unknown}; values: ${formatValues([...new Set(known.filter((v) => v !== null).map((v) => String(typeof v === "number" ? Number(v.toPrecision(6)) : v)))])}`);
    tests.push((run) => matchesCondition(readValue(run, key), sign, wanted, key));
  }
  return { tests, problem: problems.join("; ") };
}

function readValue(run, key) {
  if (key === "when") return run.when && localTime(run.when);
  if (key === "job") return run.sweep ? (/(\d+)-[^/\\]*$/.exec(run.path) || [])[1] ?? null : null;
  if (key === "trial") return (data.search.trials.find((t) => Object.entries(t.values).every(([k, v]) => isEqual(run.all[k] ?? "", String(v)))) || {}).number ?? null;
  return (data.columns.includes(key) ? run[key] : run.all[key] ?? run.scores[key]) ?? null;
}

// Return a typed time as text in local time, "" if it is none; or if not `ordered`, patterns of the times of typed days.
function readTime(text, ordered) {
  const days = text.replace(/\b(today|yesterday)\b/g, (day) => localTime(Date.now() - 864e5 * (day === "yesterday")).slice(0, 10));
  if (!ordered) return days.replace(/[^,]+/g, "$&*");
  const time = days + "2000-01-01T00:00".slice(days.length); // the start of a year, month or day
  return /^\d{4}(-\d\d){0,2}(T.*)?$/.test(days) && Date.parse(time) ? localTime(time) : "";
}

function isNumber(text) {
  return text !== null && String(text).trim() !== "" && Number.isFinite(Number(text));
}

function matchesCondition(value, sign, text, key) {
  if (value === null) return sign === "!=" || (sign !== "!=" && !ORDER[sign] && ["", "null"].includes(text));
  if (!ORDER[sign]) return text.split(",").some((item) => isEqual(value, item, key)) === (sign !== "!=");
  if (isNumber(value)) return ORDER[sign](Number(value), Number(text));
  return !isNumber(text) && ORDER[sign](value, text); // a time such as 2026-11-20T18:00:00
}

// Numbers are equal by value; a metric also equals its print with four decimals. In texts * and ? are wildcards.
function isEqual(value, text, key = "") {
  const isPrint = key !== "lr" && !key.includes(".") && Number(value).toFixed(4) === text;
  if (isNumber(value) && isNumber(text)) return Number(value) === Number(text) || isPrint;
  if (["true", "false", "null"].includes(value)) return text.toLowerCase().replace("none", "null") === value;
  const pattern = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${pattern}$`, "s").test(String(value));
}
