// The filter in the page's header. It takes conditions as in `toyexp runs` (lr=0.01, optim.weight_decay!=0, loss<3), and
// words that the label, name, state or seed of a run must contain.

const CONDITION = /^([A-Za-z_][\w.]*)(!=|<=|>=|==?|<|>)(.*)$/s;
const SPACED = /\s*(!=|<=|>=|==?|<|>)(?!\s+\S+[=<>])\s*/g; // an operator with spaces that do not precede another condition
const ALIASES = { held_out: "loss", eval_loss: "loss", tokens_per_second: "speed", started: "when" };
const ORDER = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b };

// Return the names of all settings and columns of the runs. A setting can also be named by its last part, if that is unique.
function listKeys() {
  const full = new Set(data.runs.flatMap((run) => [...Object.keys(run.all), ...Object.keys(run.scores)]));
  for (const column of ["name", "state", "seed", "steps", "loss", "train_loss", "seconds", "speed", "when"]) full.add(column);
  const keys = new Map([...full].map((key) => [key, key])), short = [...full].map((key) => key.split(".").pop());
  [...full].forEach((key, n) => {
    if (!keys.has(short[n]) && short.filter((s) => s === short[n]).length === 1) keys.set(short[n], key);
  });
  return keys;
}

// Return {tests, problem}. Each of `tests` takes a run and returns whether it matches one condition. `problem` says what is
// wrong with the filter, or is "".
function parseFilter(text) {
  const keys = listKeys(), tests = [];
  let problem = "";
  for (const word of text.replace(SPACED, "$1").split(/\s+/).filter(Boolean)) {
    const [, typed, sign, value] = CONDITION.exec(word) || [];
    if (!sign) {
      const part = word.toLowerCase();
      tests.push((run) => `${data.points[run.point].label} ${run.name} ${run.state} seed=${run.seed}`.toLowerCase().includes(part));
      continue;
    }
    const key = keys.get(ALIASES[typed] || typed), known = data.runs.map((run) => readValue(run, key));
    if (!key) return { tests: [], problem: `no run has the setting ${typed}` };
    if (ORDER[sign] && key !== "when" && !isNumber(value)) return { tests: [], problem: `${word}: ${sign} needs a number` };
    const unknown = ORDER[sign] ? undefined : value.split(",").find((item) => !known.some((v) => matchesCondition(v, "=", item)));
    if (unknown === "") return { tests: [], problem: `${word}: needs a value` };
    if (unknown) problem = `no run has ${typed}=${unknown}; values: ${formatValues([...new Set(known.filter((v) => v !== null).map(String))])}`;
    tests.push((run) => matchesCondition(readValue(run, key), sign, value));
  }
  return { tests, problem };
}

function readValue(run, key) {
  return run.all[key] ?? run[key] ?? run.scores[key] ?? null;
}

function isNumber(text) {
  return text !== null && String(text).trim() !== "" && Number.isFinite(Number(text));
}

function matchesCondition(value, sign, text) {
  if (value === null) return sign === "!=" || (sign !== "!=" && !ORDER[sign] && ["", "null"].includes(text));
  if (!ORDER[sign]) return text.split(",").some((item) => isEqual(value, item)) === (sign !== "!=");
  if (isNumber(value)) return ORDER[sign](Number(value), Number(text));
  return typeof value === "string" && ORDER[sign](value, text); // a time such as 2026-11-20T18:00
}

// Numbers are equal by value, or as printed with four decimals; in texts * and ? are wildcards.
function isEqual(value, text) {
  if (isNumber(value) && isNumber(text)) return Number(value) === Number(text) || Number(value).toFixed(4) === text;
  const pattern = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${pattern}$`, "s").test(String(value));
}
