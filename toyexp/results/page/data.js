// Unpack the page's data, and compute from it: the time and tokens at a step, smoothed and thinned curves, and bands
// (mean and standard deviation over several curves).

async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function cumulativeSum(differences) {
  let at = 0;
  return differences.map((d) => (at += d));
}

function prepare(data) {
  data.points.forEach((point, place) => Object.assign(point, { place, runs: [] }));
  // runs that count are ranked; others follow, the longest first
  data.runs.sort((a, b) => b.counts - a.counts || (a.counts ? 0 : b.steps - a.steps || a.loss - b.loss));
  for (const run of data.runs) {
    run.point = data.points[run.point];
    run.point.runs.push(run);
    run.point.all = run.all; // equal in all settings that the page shows of a point
    for (const w of run.warnings) w.text = w.text.replace(/^step \d+: /, ""); // the page has the step beside the text
    for (const curve of Object.values(run.curves)) {
      curve.x = cumulativeSum(curve.x);
      curve.mx = curve.mx ? cumulativeSum(curve.mx) : curve.x;
      curve.my = curve.my || curve.y;
    }
  }
  return data;
}

const shortName = (key) => data.names[key] ?? key; // a setting's last part if no other setting has that

// Return where a step lies on the x axis `over` (step, tokens or seconds). Tokens and seconds are interpolated linearly.
function clockAt(run, step, over) {
  if (over === "step") return step;
  const [steps, seconds, tokens] = run.clock, values = over === "tokens" ? tokens : seconds, last = steps.length - 1;
  if (last < 0) return null;
  if (step <= steps[0]) return steps[0] ? (values[0] * step) / steps[0] : values[0];
  return step >= steps[last] ? values[last] : valueAt(steps, values, step);
}

// Return a moving average whose weights halve every `half` steps to both sides, so that it does not lag behind. At the left
// end the curve is continued by its reflection about the first point, so that it begins there.
function smoothCurve(xs, ys, half) {
  if (!(half > 0)) return ys;
  const sums = ys.map(() => 0), weights = ys.map(() => 0);
  for (const direction of [-1, 1]) {
    let [sum, weight] = direction < 0 || ys[0] === null ? [0, 0] : [2 * ys[0] * weights[0] - sums[0], weights[0]];
    for (let n = 0, i = direction > 0 ? 0 : ys.length - 1; n < ys.length; n++, i += direction) {
      const keep = n ? 2 ** (-Math.abs(xs[i] - xs[i - direction]) / half) : 1;
      sum *= keep;
      weight *= keep;
      sums[i] += sum;
      weights[i] += weight;
      if (ys[i] !== null) [sum, weight] = [sum + ys[i], weight + 1];
    }
  }
  return ys.map((y, i) => (y === null ? null : (sums[i] + y) / (weights[i] + 1)));
}

// Return `smoothCurve` of the logarithms, as a logarithmic axis shows them; values without a logarithm are left out.
function smoothLogs(xs, ys, half) {
  return smoothCurve(xs, ys.map((y) => (y > 0 ? Math.log(y) : null)), half).map((y) => (y === null ? null : Math.exp(y)));
}

// Return the values that are near the best one: at most 5 times as far from it as the median. If these are all equal, return
// all values.
function nearBest(values) {
  const sorted = values.slice().sort((a, b) => (data.rising ? b - a : a - b)), far = 5 * Math.abs(sorted[sorted.length >> 1] - sorted[0]);
  const near = values.filter((v) => Math.abs(v - sorted[0]) <= far);
  return new Set(near).size > 1 ? near : values;
}

// Return the points of a curve [xs, ys, ...] with x between low and high, and one point beyond each end. If these are more than
// `most`, divide them into bins and return only the points with the lowest and highest y of each.
function clipAndThin(curve, low, high, most) {
  const [xs, ys] = curve;
  let from = 0, to = xs.length;
  while (from < to && xs[from] < low) from++;
  while (to > from && xs[to - 1] > high) to--;
  from = Math.max(from - 1, 0);
  to = Math.min(to + 1, xs.length);
  if (to - from <= most) return curve.map((values) => values.slice(from, to));
  const kept = new Set(), bins = Math.max(most >> 1, 1), border = (n) => from + Math.floor(((to - from) * n) / bins);
  for (let bin = 0; bin < bins; bin++) {
    let least = border(bin), greatest = least;
    for (let i = least; i < border(bin + 1); i++) {
      if (ys[i] < ys[least]) least = i;
      if (ys[i] > ys[greatest]) greatest = i;
    }
    kept.add(Math.min(least, greatest)).add(Math.max(least, greatest));
  }
  return curve.map((values) => [...kept].map((i) => values[i]));
}

function valueAt(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return xs[high] === xs[low] ? ys[low] : ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

// Return the mean, the deviation, and the ends of a band of one deviation to both sides, cut off at the extremes: the band of
// a group in which one run diverged would otherwise contain values that no run has.
function meanAndDeviation(values) {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const deviation = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(values.length - 1, 1));
  return [mean, deviation, Math.max(mean - deviation, Math.min(...values)), Math.min(mean + deviation, Math.max(...values))];
}

// Return [xs, means, deviations, lows, highs] over several curves, at each x where at least two of them have values.
function band(curves) {
  const low = Math.min(...curves.map(([xs]) => xs[0])), high = Math.max(...curves.map(([xs]) => xs.at(-1))), most = 220;
  const own = curves.reduce((a, b) => (b[0].length > a[0].length ? b : a))[0];
  const grid = own.length <= most ? own : Array.from({ length: most }, (_, i) => low + ((high - low) * i) / (most - 1));
  const out = [[], [], [], [], []];
  for (const x of grid) {
    const values = curves.map(([xs, ys]) => valueAt(xs, ys, x)).filter((v) => v !== null);
    if (values.length < Math.min(curves.length, 2)) continue;
    [x, ...meanAndDeviation(values)].forEach((number, i) => out[i].push(number));
  }
  return out;
}

// Return how many times the lowest loss the highest one is; 0 if a loss is not positive, or if there is none.
function lossRatio(runs) {
  const losses = runs.flatMap((run) => run.curves.loss.my).filter(Number.isFinite).sort((a, b) => a - b);
  return losses[0] > 0 ? losses.at(-1) / losses[0] : 0;
}
