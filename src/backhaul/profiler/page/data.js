// The timeline that the page shows, with indexes and summaries of it. Nothing here draws or changes the page.

const timeline = JSON.parse(document.getElementById("timeline-data").textContent);
const kinds = JSON.parse(document.getElementById("kinds-data").textContent);

const byId = (rows) => new Map(rows.map((row) => [row.id, row]));
const workers = byId(timeline.workers);
const tracks = byId(timeline.tracks);
const slices = byId(timeline.slices);
const calls = byId(timeline.calls);

const groupBy = (rows, key) => {
  const groups = new Map();
  for (const row of rows) {
    const value = key(row);
    if (!groups.has(value)) groups.set(value, []);
    groups.get(value).push(row);
  }
  return groups;
};
const childrenOfCall = groupBy(timeline.calls, (call) => call.parent);

const workerName = (id) => workers.get(id)?.name ?? "unknown worker";
const workerOf = (slice) => tracks.get(slice.track)?.worker ?? -1;

// The first and the last time of any slice. A slice without an end lasts until the end of the profile.
const extent = (() => {
  let [start, end] = [0, timeline.end];
  for (const slice of timeline.slices) {
    start = Math.min(start, slice.start);
    end = Math.max(end, slice.end);
  }
  for (const slice of timeline.slices) if (slice.end < slice.start) slice.end = end;
  return { start, end: Math.max(end, start + 1000) };
})();

// ---- Numbers as text ----

const UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];
const UNKNOWN = "–";

function timeText(ns, digits = 3) {
  if (ns === null || ns === undefined) return UNKNOWN;
  if (ns === 0) return "0";
  const [unit, size] = UNITS.find(([, least]) => Math.abs(ns) >= least * 0.9995) ?? ["ns", 1];
  const value = ns / size;
  const whole = Math.trunc(Math.abs(value)).toString().length;
  return `${value.toFixed(unit === "ns" ? 0 : Math.max(0, digits - whole))} ${unit}`;
}

function bytesText(count) {
  if (count < 1000) return `${count} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    count /= 1000;
    if (count < 999.5 || unit === "GB") return `${count.toFixed(count < 10 ? 2 : count < 100 ? 1 : 0)} ${unit}`;
  }
}

const countText = (count) => count.toLocaleString("en");
const percentText = (part, all) => {
  const percent = (100 * part) / all;
  return percent > 0 && percent < 1 ? "<1%" : `${Math.round(percent)}%`;
};

// ---- Calls ----

// The time between two moments of a call; null if one is unknown. Clocks of workers differ slightly, so a negative
// difference counts as 0.
const between = (from, to) => (from < 0 || to < 0 ? null : Math.max(0, to - from));

function partsOf(call) {
  return {
    total: between(call.start, call.done),
    encode: between(call.start, call.sent),
    wireThere: between(call.sent, call.arrived),
    queue: between(call.arrived, call.begun),
    decodeThere: between(call.begun, call.decoded),
    run: between(call.decoded, call.ran),
    encodeThere: between(call.ran, call.replied),
    wireBack: between(call.replied, call.received),
    decode: between(call.received, call.done),
    waited: between(call.sent, call.received),
  };
}

const sum = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
};

// One row per name, with the totals of all calls of that name.
function callsByName() {
  return [...groupBy(timeline.calls, (call) => call.name)].map(([name, group]) => {
    const parts = group.map(partsOf);
    return {
      name,
      count: group.length,
      failed: group.filter((call) => call.failed).length,
      total: sum(parts.map((part) => part.total)),
      run: sum(parts.map((part) => part.run)),
      queue: sum(parts.map((part) => part.queue)),
      wire: sum(parts.flatMap((part) => [part.wireThere, part.wireBack])),
      bytes: group.reduce((all, call) => all + call.bytes_out + call.bytes_in, 0),
    };
  });
}

// One row per kind and worker of the critical path, the longest first.
function waitedFor() {
  const groups = groupBy(timeline.path, (segment) => `${segment.kind} ${segment.worker}`);
  const rows = [...groups.values()].map((group) => ({
    kind: group[0].kind,
    worker: group[0].worker,
    time: group.reduce((all, segment) => all + segment.end - segment.start, 0),
    segments: group,
  }));
  return rows.sort((a, b) => b.time - a.time);
}

// The critical path, with adjacent segments of the same kind and worker merged.
const mergedPath = [];
for (const { kind, worker, start, end } of timeline.path) {
  const last = mergedPath.at(-1);
  if (last && last.kind === kind && last.worker === worker && last.end === start) last.end = end;
  else mergedPath.push({ kind, worker, start, end });
}

const waitedText = (kind, worker) =>
  kind === "wire" ? `wire from ${workerName(worker)}` : `${kind} on ${workerName(worker)}`;

// ---- Messages ----

// Whether a message belongs to the selection: a call, a slice, or a pass. The gradients of a pass are found by its
// number, or by time if there is no number.
function belongsTo(arrow, selection) {
  const { call, slice } = selection;
  if (call) return arrow.call === call.id;
  if (!slice) return false;
  if (arrow.source === slice.id || arrow.target === slice.id) return true;
  if (slice.kind !== "pass" || arrow.kind !== "gradient") return false;
  const pass = slices.get(arrow.source)?.args.pass;
  if (pass !== undefined && slice.args.pass !== undefined) return pass === slice.args.pass;
  return arrow.start >= slice.start && arrow.end <= slice.end;
}
