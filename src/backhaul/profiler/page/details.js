// The panel with the details of the selection: a call on the caller and on the callee, or a slice.

const line = (label, value, kind = null, testid = null) => [
  make("dt", {}, kind ? swatch(kind) : null, label),
  make("dd", { "data-testid": testid, title: value }, value),
];

const facts = (...lines) => make("dl", { className: "lines" }, ...lines.flat());

// `go(slice)` scrolls to a slice, `pick(call)` selects a call.
function showDetails({ call, slice }, go, pick) {
  const content = call ? callDetails(call, slice, go, pick) : slice ? sliceDetails(slice) : hints();
  at("details").replaceChildren(...content.filter(Boolean));
  at("details").scrollTop = 0;
}

function hints() {
  const keys = [
    ["w  s", "zoom"],
    ["a  d  ← →", "move"],
    ["↑ ↓", "scroll"],
    ["/", "search"],
    ["f", "zoom to the selection"],
    ["0", "show the whole profile"],
    ["Esc", "clear the selection"],
  ];
  const text = timeline.calls.length
    ? "Click a slice, or a call in the table, to see what happened on the caller and on the callee."
    : "There are no calls in this profile. Click a slice to see its details.";
  return [
    make("h2", {}, "Nothing selected"),
    make("p", { className: "hint" }, text),
    make(
      "dl",
      { className: "keys" },
      ...keys.flatMap(([key, what]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, what)]),
    ),
    make("p", { className: "hint" }, "Turn the wheel to zoom, or with Shift to move sideways. Drag to move."),
  ];
}

// ---- A slice ----

function sliceLines(slice) {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return facts(
    line("worker", workerName(workerOf(slice))),
    line("track", tracks.get(slice.track)?.name ?? UNKNOWN),
    line("start", timeText(slice.start, 5)),
    line("duration", timeText(slice.end - slice.start)),
    ...messageLines(slice),
    ...Object.entries(slice.args).map(([name, value]) => line(name, text(value))),
  );
}

// The number and size of the messages that a slice, or a whole pass, sent and received.
function messageLines(slice) {
  const list = timeline.arrows.filter((arrow) => belongsTo(arrow, { slice }));
  if (!list.length) return [];
  return [
    line("messages", `${countText(list.length)}, ${bytesText(list.reduce((all, arrow) => all + arrow.nbytes, 0))}`),
  ];
}

function sliceDetails(slice) {
  return [
    make("h2", { "data-testid": "selected", title: slice.name }, slice.name),
    make("p", { className: "sub" }, swatch(slice.kind), kinds[slice.kind] ?? slice.kind),
    sliceLines(slice),
  ];
}

// ---- A call ----

function callDetails(call, slice, go, pick) {
  const parts = partsOf(call);
  return [
    make("h2", { "data-testid": "selected", title: call.name }, call.function || call.name),
    make(
      "p",
      { className: "sub" },
      `${call.mode} · ${workerName(call.caller)} → ${workerName(call.callee)} · `,
      make("b", {}, parts.total === null ? "not finished" : timeText(parts.total)),
    ),
    call.failed
      ? make("p", { className: "failed", "data-testid": "failed" }, make("b", {}, "Failed: "), call.failed)
      : null,
    phases(call, parts),
    make("div", { className: "halves" }, nearHalf(call, parts, go), farHalf(call, parts, go)),
    make("h3", {}, "On the wire"),
    facts(
      line("request", `${bytesText(call.bytes_out)} in ${timeText(parts.wireThere)}`, "wire", "wire-there"),
      line("reply", `${bytesText(call.bytes_in)} in ${timeText(parts.wireBack)}`, "wire", "wire-back"),
    ),
    ...callList("Called by", calls.has(call.parent) ? [calls.get(call.parent)] : [], pick, "parent"),
    ...callList("Calls it made", childrenOfCall.get(call.id) ?? [], pick, "child"),
    ...(slice && slice.id !== call.near && slice.id !== call.far
      ? [make("h3", { title: slice.name }, `Selected slice: ${slice.name}`), sliceLines(slice)]
      : []),
  ];
}

// A bar that shows the phases of a call in order.
function phases(call, parts) {
  const [near, far] = [workerName(call.caller), workerName(call.callee)];
  const all = [
    ["encode", parts.encode, `encode on ${near}`],
    ["wire", parts.wireThere, "wire, request"],
    ["queue", parts.queue, `queue on ${far}`],
    ["decode", parts.decodeThere, `decode on ${far}`],
    ["run", parts.run, `run on ${far}`],
    ["encode", parts.encodeThere, `encode on ${far}`],
    ["wire", parts.wireBack, "wire, reply"],
    ["decode", parts.decode, `decode on ${near}`],
  ];
  if (all.every(([, time]) => time === null)) return null;
  const piece = ([kind, time, text]) => swatch(kind, { "--share": String(time), title: `${text}: ${timeText(time)}` });
  return make(
    "div",
    { className: "phases", role: "img", "aria-label": "Phases of the call, in order" },
    ...all.filter(([, time]) => time > 0).map(piece),
  );
}

const moment = (time) => (time < 0 ? UNKNOWN : timeText(time, 5));

function nearHalf(call, parts, go) {
  const lines = facts(
    line("started", moment(call.start)),
    line("encode", timeText(parts.encode), "encode"),
    line("sent", moment(call.sent)),
    line("waited", timeText(parts.waited), "wait"),
    line("received", moment(call.received)),
    line("decode", timeText(parts.decode), "decode"),
    line("done", moment(call.done)),
    line("bytes out", bytesText(call.bytes_out)),
  );
  return half("near", `On ${workerName(call.caller)}`, "caller", lines, call.near, "Show on caller", go);
}

function farHalf(call, parts, go) {
  const missing = workers.get(call.callee)?.missing;
  const lines = facts(
    line("arrived", moment(call.arrived)),
    line("queue", timeText(parts.queue), "queue"),
    line("decode", timeText(parts.decodeThere), "decode"),
    line("run", timeText(parts.run), "run"),
    line("encode", timeText(parts.encodeThere), "encode"),
    line("replied", moment(call.replied)),
    line("raised", call.failed || "nothing"),
    line("bytes back", bytesText(call.bytes_in)),
  );
  const reason = `The records of this worker are missing: ${missing}`;
  const body = missing && call.far < 0 ? make("p", { className: "hint" }, reason) : lines;
  return half("far", `On ${workerName(call.callee)}`, "callee", body, call.far, "Show on callee", go);
}

function half(testid, title, role, body, id, text, go) {
  const slice = slices.get(id);
  return make(
    "section",
    { className: "half", "data-testid": testid, "aria-label": `${title} (${role})` },
    make("h3", { title }, make("span", {}, title), make("small", {}, role)),
    body,
    button(() => go(slice), { disabled: !slice, "data-testid": `show-${testid}` }, text),
  );
}

function callList(title, list, pick, testid) {
  if (!list.length) return [];
  const most = 50;
  const item = (call) =>
    make(
      "li",
      {},
      button(() => pick(call), { className: "link", "data-testid": testid, title: call.name }, call.name),
      make("span", { className: "muted" }, timeText(partsOf(call).total)),
    );
  const more =
    list.length > most ? make("li", { className: "muted" }, `and ${countText(list.length - most)} more`) : null;
  return [make("h3", {}, title), make("ul", { className: "call-list" }, ...list.slice(0, most).map(item), more)];
}
