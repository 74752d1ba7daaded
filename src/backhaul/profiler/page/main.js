// Combines the parts of the page: keeps the selection, the filter and the search, and updates all parts.

const state = { selection: {}, name: null, search: "", found: [], current: -1 };

const view = new View({ onPick: pickSlice, onHover: showTooltip });

const namesTable = new SortedTable(
  "names",
  [
    ["Name", "name", (row) => row.name, "wide"],
    ["Calls", "count", (row) => countText(row.count), "number"],
    ["Total", "total", (row) => timeText(row.total), "number"],
    ["Run", "run", (row) => timeText(row.run), "number"],
    ["Queue", "queue", (row) => timeText(row.queue), "number"],
    ["Wire", "wire", (row) => timeText(row.wire), "number"],
    ["Bytes", "bytes", (row) => bytesText(row.bytes), "number"],
  ],
  ["total", true],
  {
    press: (row) => filterBy(state.name === row.name ? null : row.name),
    empty: "No calls were made.",
    testid: "name-row",
    marked: (row) => row.name === state.name,
  },
);

const callsTable = new SortedTable(
  "calls",
  [
    ["Call", "name", (row) => row.name, "wide"],
    ["Start", "start", (row) => timeText(row.start, 4), "number"],
    ["Duration", "duration", (row) => timeText(row.duration), "number"],
    ["Run", "run", (row) => timeText(row.run), "number"],
  ],
  ["start", false],
  {
    press: (row) => pickCall(calls.get(row.id)),
    empty: "No calls were made.",
    testid: "call-row",
    marked: (row) => row.id === state.selection.call?.id,
  },
);

// ---- Selecting ----

function select(selection) {
  state.selection = view.display.selection = selection;
  showDetails(selection, (slice) => view.goTo(slice), pickCall);
  callsTable.mark((id) => calls.get(Number(id)));
  view.refresh();
}

function pickSlice(slice) {
  select(slice ? { slice, call: calls.get(slice.call) } : {});
}

// Selects a call from a table or a list, and shows its slices on the caller and on the callee.
function pickCall(call) {
  const halves = halvesOf({ call });
  select({ call, slice: halves[0] ?? halves[1] });
  view.goToAll(halves);
}

const halvesOf = ({ call, slice }) => (call ? [slices.get(call.near), slices.get(call.far)] : [slice]);

// ---- Filtering by name, and searching ----

function filterBy(name) {
  state.name = name;
  at("filter").hidden = name === null;
  at("filter").replaceChildren(make("span", {}, name ?? ""), " ×");
  at("filter").title = "Show all calls again";
  showCalls();
  namesTable.mark((id) => ({ name: id }));
  highlightMatches();
}

function showCalls() {
  const chosen = timeline.calls.filter((call) => state.name === null || call.name === state.name);
  callsTable.show(chosen.map((call) => ({ ...call, duration: partsOf(call).total, run: partsOf(call).run })));
}

// Dims all slices that do not match the filter and the search.
function highlightMatches() {
  const wanted = state.search.toLowerCase();
  const byName = new Map(); // names repeat, so each is compared once
  const fits = (name) => {
    if (!byName.has(name)) byName.set(name, name.toLowerCase().includes(wanted));
    return byName.get(name);
  };
  const found = [];
  for (const box of boxes.values()) {
    box.lit = (state.name === null || calls.get(box.slice.call)?.name === state.name) && fits(box.slice.name);
    if (box.lit && wanted) found.push(box.slice);
  }
  state.found = found.sort((a, b) => a.start - b.start || a.id - b.id);
  view.display.filtered = Boolean(wanted) || state.name !== null;
  jump(0, wanted && found.length ? 0 : -1);
}

// Shows another match; `to` is its number.
function jump(by, to = (state.current + by + state.found.length) % state.found.length) {
  state.current = Number.isNaN(to) ? -1 : to;
  const slice = state.found[state.current];
  view.display.current = slice?.id ?? null;
  const place = slice ? `${countText(state.current + 1)} of ${countText(state.found.length)}` : "none";
  at("search-count").textContent = state.search ? place : "";
  if (slice) view.goTo(slice, 0.1);
  view.refresh();
}

at("search-text").addEventListener("input", (event) => {
  state.search = event.target.value.trim();
  highlightMatches();
});
at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  jump(1);
});
at("search-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.shiftKey) {
    event.preventDefault();
    jump(-1);
  }
});
at("search-back").addEventListener("click", () => jump(-1));
at("filter").addEventListener("click", () => filterBy(null));

// ---- The tooltip ----

function showTooltip(what, event) {
  const tooltip = at("tooltip");
  tooltip.hidden = !what;
  if (!what) return;
  const segment = !("track" in what);
  const worker = workerName(segment ? what.worker : workerOf(what));
  tooltip.replaceChildren(
    make("b", {}, segment ? waitedText(what.kind, what.worker) : what.name),
    make("span", {}, segment ? what.name : `${kinds[what.kind] ?? what.kind}, ${worker}`),
    make("span", { className: "numbers" }, `${timeText(what.end - what.start)}, start ${timeText(what.start, 5)}`),
  );
  const [width, height] = [tooltip.offsetWidth, tooltip.offsetHeight];
  tooltip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  const under = event.clientY + 18;
  tooltip.style.top = `${under + height > innerHeight ? event.clientY - height - 10 : under}px`;
}

// ---- The head, the legend, the buttons, the keys ----

function showFacts() {
  const bytes = timeline.calls.reduce((all, call) => all + call.bytes_out + call.bytes_in, 0);
  const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  const missing = timeline.workers.filter((worker) => worker.missing).length;
  const failed = timeline.calls.filter((call) => call.failed).length;
  at("facts").replaceChildren(
    fact("Duration", timeText(timeline.end, 4)),
    fact("Workers", `${timeline.workers.length}${missing ? ` (${missing} missing)` : ""}`),
    fact("Calls", `${countText(timeline.calls.length)}${failed ? ` (${failed} failed)` : ""}`),
    fact("Bytes", bytesText(bytes)),
  );
}

function showLegend() {
  const used = new Set(timeline.slices.map((slice) => slice.kind));
  const item = (kind) => {
    const toggle = (event) => {
      const hide = !view.display.hidden.delete(kind);
      if (hide) view.display.hidden.add(kind);
      event.currentTarget.setAttribute("aria-pressed", String(!hide));
      view.refresh();
    };
    const properties = { title: kinds[kind] ?? kind, "aria-pressed": "true", "data-testid": `kind-${kind}` };
    return button(toggle, properties, swatch(kind), kind);
  };
  const order = [...Object.keys(kinds), ...[...used].filter((kind) => !(kind in kinds))];
  const arrows = new Set(timeline.arrows.map((arrow) => arrow.kind));
  const arrow = (kind) => make("span", { className: "key" }, swatch(kind, { className: "stroke" }), kind);
  at("legend").replaceChildren(
    ...order.filter((kind) => used.has(kind)).map(item),
    ...["request", "reply", "gradient"].filter((kind) => arrows.has(kind)).map(arrow),
  );
}

for (const id of ["arrows", "path"]) {
  at(id).addEventListener("click", (event) => {
    view.display[id] = !view.display[id];
    event.currentTarget.setAttribute("aria-pressed", String(view.display[id]));
    view.refresh();
  });
}
for (const [id, key] of [
  ["zoom-in", "w"],
  ["zoom-out", "s"],
  ["fit", "0"],
])
  at(id).addEventListener("click", () => view.key(key));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    at("search-text").value = state.search = "";
    filterBy(null);
    return select({});
  }
  if (event.target.matches("input")) return;
  // Outside the timeline, the browser handles the arrow keys.
  const scrolls = event.key.startsWith("Arrow") && !event.target.matches("body, #tracks");
  if (event.key === "/") at("search-text").focus();
  else if (event.key === "f" && state.selection.slice) view.goToAll(halvesOf(state.selection));
  else if (scrolls || !view.key(event.key)) return;
  event.preventDefault();
});

showFacts();
showLegend();
showWaited((segment) => {
  const slice = slices.get(segment.slice);
  if (slice) {
    pickSlice(slice);
    view.goTo(slice);
  }
  view.range.show(segment.start, segment.end);
  view.refresh();
});
namesTable.show(callsByName());
showCalls();
select({});

// For tests, and for use in the console of the browser.
window.backhaul = {
  timeline,
  pixelOf: (id) => view.pixelOf(id),
  select: (id) => pickCall(calls.get(id)),
  visible: () => ({ start: view.range.start, end: view.range.end }),
  selected: () => ({ call: state.selection.call?.id ?? -1, slice: state.selection.slice?.id ?? -1 }),
};
