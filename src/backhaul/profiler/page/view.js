// The timeline on the page: handles the mouse, the wheel and the keyboard, and redraws when something has changed.

const at = (id) => document.getElementById(id);

// Makes an element. A string child becomes text, never markup. A property `on...` becomes a listener; `data-...` and
// `aria-...` become attributes.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A button. `properties` are added to its own.
const button = (onclick, properties, ...children) =>
  make("button", { type: "button", onclick, ...properties }, ...children);

// An element in the color of a kind.
const swatch = (kind, properties = { className: "swatch" }) =>
  make("i", { "--swatch": `var(--kind-${kind})`, ...properties });

class View {
  // `onPick` gets the slice that was clicked, or null; `onHover` gets the slice or the segment under the mouse.
  constructor({ onPick, onHover }) {
    this.range = new TimeRange();
    this.display = { selection: {}, filtered: false, hidden: new Set(), arrows: true, path: true, current: null };
    this.tracks = at("tracks");
    this.canvas = at("canvas");
    this.overview = at("overview");
    this.mouse = null; // x of the mouse; the keys zoom there
    this.segment = -1; // of the critical path, where the arrows are
    this.waiting = false;
    this.label();
    this.listen(onPick, onHover);
    new ResizeObserver(() => this.resize()).observe(this.tracks);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      readTheme();
      this.refresh();
    });
    readTheme();
    this.resize();
  }

  resize() {
    this.range.width = Math.max(50, this.tracks.clientWidth - GUTTER);
    this.canvas.style.width = `${GUTTER + this.range.width}px`;
    this.canvas.style.height = `${this.tracks.clientHeight}px`;
    this.overview.style.width = `${this.range.width}px`;
    this.overview.style.height = `${OVERVIEW}px`;
    this.paint(); // at once, because resizing a canvas clears it
  }

  refresh() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    paintOverview(this.overview, this.range);
    const left = paintTracks(this.canvas, this.range, this.tracks.scrollTop, this.tracks.clientHeight, this.display);
    at("arrows-note").textContent = left ? `${countText(left)} arrows: zoom in to see them` : "";
  }

  // ---- The labels at the left ----

  label() {
    at("content").style.height = `${stack()}px`;
    at("labels").replaceChildren(...bands.flatMap((band) => [this.bandLabel(band), ...this.rowLabels(band)]));
  }

  bandLabel(band) {
    const { worker } = band;
    const clock =
      worker.id === timeline.owner
        ? "reference clock"
        : !worker.error
          ? "same clock"
          : `clock ${signed(worker.offset)} ± ${timeText(worker.error, 2)}`;
    const facts = worker.missing
      ? []
      : [worker.pid ? `pid ${worker.pid}` : "", worker.host, clock, worker.note].filter(Boolean);
    const toggle = () => {
      band.open = !band.open;
      this.label();
      this.refresh();
    };
    return make(
      "div",
      { className: "band", "--y": `${band.y}px`, "data-testid": "worker", "data-worker": worker.name },
      button(
        toggle,
        { "aria-expanded": String(band.open), title: worker.name },
        make("span", { className: "twist", "aria-hidden": "true" }, band.open ? "▾" : "▸"),
        make("span", { className: "name" }, worker.name),
      ),
      make("span", { className: "facts" }, facts.join("  ·  ")),
      worker.missing
        ? make(
            "span",
            { className: "missing", "data-testid": "missing", title: worker.missing },
            `missing: ${worker.missing}`,
          )
        : null,
    );
  }

  rowLabels(band) {
    if (!band.open) return [];
    if (!band.rows.length) {
      const text = band.worker.missing
        ? "The records of this worker are missing."
        : "This worker recorded nothing.";
      return [make("div", { className: "remark", "--y": `${band.y + BAND}px` }, text)];
    }
    return band.rows.map((row) =>
      make(
        "div",
        { className: row.track.lane ? "row lane" : "row", "--y": `${row.y}px`, title: row.track.name },
        row.track.name,
      ),
    );
  }

  // ---- Moving to slices ----

  // Zooms to a slice and scrolls it to the middle.
  goTo(slice, share = 0.4) {
    const box = boxes.get(slice.id);
    if (!box) return;
    this.open(box);
    this.range.show(slice.start, slice.end, share);
    this.tracks.scrollTop = topOf(box) - this.tracks.clientHeight / 2;
    this.refresh();
  }

  // Zooms and scrolls so that all of the given slices are visible, if possible.
  goToAll(list) {
    const known = list.map((slice) => boxes.get(slice?.id)).filter(Boolean);
    if (!known.length) return;
    known.forEach((box) => this.open(box));
    this.range.show(
      Math.min(...known.map((box) => box.slice.start)),
      Math.max(...known.map((box) => box.slice.end)),
      0.7,
    );
    const tops = known.map(topOf);
    const room = this.tracks.clientHeight - (Math.max(...tops) - Math.min(...tops) + BAR);
    // If not all fit, show the first one.
    this.tracks.scrollTop = room > 0 ? Math.min(...tops) - room / 2 : tops[0] - BAND;
    this.refresh();
  }

  open(box) {
    if (box.row.band.open) return;
    box.row.band.open = true;
    this.label();
  }

  // The middle of the visible part of a slice, in the coordinates of mouse events; null if no part is visible.
  pixelOf(id) {
    const box = boxes.get(id);
    if (!box) return null;
    const from = Math.max(0, this.range.x(box.slice.start));
    const to = Math.min(this.range.width, this.range.x(box.slice.end));
    const y = topOf(box) - this.tracks.scrollTop + BAR / 2;
    if (to < from || y < 0 || y > this.tracks.clientHeight) return null;
    const frame = this.tracks.getBoundingClientRect();
    return { x: frame.left + GUTTER + (from + to) / 2, y: frame.top + y, width: to - from };
  }

  // ---- Mouse and keys ----

  boxUnder(event) {
    const frame = this.tracks.getBoundingClientRect();
    const x = event.clientX - frame.left - GUTTER;
    if (x < 0) return null;
    const slack = (3 / this.range.width) * this.range.span;
    const y = event.clientY - frame.top + this.tracks.scrollTop;
    return boxAt(y, this.range.time(x), slack, (box) => !this.display.hidden.has(box.slice.kind));
  }

  listen(onPick, onHover) {
    this.tracks.addEventListener("scroll", () => this.refresh());
    this.tracks.addEventListener("pointerdown", (event) => this.drag(event, onPick, onHover));
    this.tracks.addEventListener("pointermove", (event) => {
      this.mouse = event.clientX - this.tracks.getBoundingClientRect().left - GUTTER;
      if (!event.buttons) onHover(this.boxUnder(event)?.slice ?? null, event);
    });
    this.tracks.addEventListener("pointerleave", () => {
      this.mouse = null;
      onHover(null);
    });
    for (const element of [this.tracks, this.overview]) {
      element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }
    this.overview.addEventListener("pointerdown", (event) => this.dragOverview(event));
    this.overview.addEventListener("pointermove", (event) => onHover(this.segmentUnder(event), event));
    this.overview.addEventListener("pointerleave", () => onHover(null));
    this.overview.addEventListener("click", (event) => {
      const segment = this.segmentUnder(event);
      if (slices.has(segment?.slice)) onPick(slices.get(segment.slice));
    });
    this.overview.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      const slice = this.nextOnPath(by);
      if (!slice) return;
      onPick(slice);
      this.goTo(slice);
    });
  }

  // The wheel scrolls over the labels. Over the timeline it zooms, or moves sideways with Shift.
  wheel(event) {
    const x = event.clientX - this.overview.getBoundingClientRect().left;
    if (x < 0) return;
    event.preventDefault();
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.range.pan(sideways);
    else this.range.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0022), x);
    this.refresh();
  }

  // Moves the timeline. A press without movement is a click.
  drag(down, onPick, onHover) {
    if (down.button !== 0 || down.target.closest("button") || down.offsetX > this.tracks.clientWidth) return;
    let [x, y, moved] = [down.clientX, down.clientY, false];
    const move = (event) => {
      if (!moved && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) < 4) return;
      if (!moved) this.tracks.setPointerCapture(down.pointerId);
      moved = true;
      onHover(null);
      this.range.pan(x - event.clientX);
      this.tracks.scrollTop += y - event.clientY;
      [x, y] = [event.clientX, event.clientY];
      this.refresh();
    };
    const up = (event) => {
      this.tracks.removeEventListener("pointermove", move);
      for (const end of ["pointerup", "pointercancel"]) this.tracks.removeEventListener(end, up);
      if (!moved && event.type === "pointerup") onPick(this.boxUnder(event)?.slice ?? null);
    };
    this.tracks.addEventListener("pointermove", move);
    for (const end of ["pointerup", "pointercancel"]) this.tracks.addEventListener(end, up);
  }

  // Moves the visible range to the mouse, in the minimap.
  dragOverview(down) {
    const frame = this.overview.getBoundingClientRect();
    if (down.clientY - frame.top > MINIMAP) return;
    this.overview.setPointerCapture(down.pointerId);
    const move = (event) => {
      const middle = extent.start + ((event.clientX - frame.left) / frame.width) * (extent.end - extent.start);
      this.range.set(middle - this.range.span / 2, middle + this.range.span / 2);
      this.refresh();
    };
    this.overview.addEventListener("pointermove", move);
    this.overview.addEventListener("lostpointercapture", () => this.overview.removeEventListener("pointermove", move), {
      once: true,
    });
    move(down);
  }

  segmentUnder(event) {
    const frame = this.overview.getBoundingClientRect();
    if (event.clientY - frame.top < MINIMAP + RULER) return null;
    const time = this.range.time(event.clientX - frame.left);
    return timeline.path.find((segment) => segment.start <= time && time < segment.end) ?? null;
  }

  // The slice of the segment of the critical path beside the selected one; beside nothing, the first or the last one.
  nextOnPath(by) {
    const path = timeline.path.filter((segment) => slices.has(segment.slice));
    const selected = this.display.selection.slice?.id;
    if (path[this.segment]?.slice !== selected) this.segment = path.findIndex((segment) => segment.slice === selected);
    if (this.segment < 0 && by < 0) this.segment = path.length;
    do this.segment += by;
    while (path[this.segment] && path[this.segment].slice === selected);
    this.segment = Math.max(0, Math.min(path.length - 1, this.segment));
    return slices.get(path[this.segment]?.slice);
  }

  // Returns whether the key has a meaning here.
  key(key) {
    const step = this.range.width * 0.12;
    const x = this.mouse === null || this.mouse < 0 ? undefined : this.mouse;
    const keys = {
      w: () => this.range.zoom(1 / 1.35, x),
      s: () => this.range.zoom(1.35, x),
      a: () => this.range.pan(-step),
      d: () => this.range.pan(step),
      ArrowLeft: () => this.range.pan(-step),
      ArrowRight: () => this.range.pan(step),
      ArrowUp: () => (this.tracks.scrollTop -= 60),
      ArrowDown: () => (this.tracks.scrollTop += 60),
      0: () => this.range.fit(),
    };
    if (!Object.hasOwn(keys, key)) return false;
    keys[key]();
    this.refresh();
    return true;
  }
}

const signed = (ns) => `${ns < 0 ? "−" : "+"}${timeText(Math.abs(ns))}`;
