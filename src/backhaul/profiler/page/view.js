// The timeline on the page: follows the mouse, the wheel and the keyboard, and asks for a frame when something changed.

const at = (id) => document.getElementById(id);

// Makes an element. Texts become text, never markup; `on...` becomes a listener, `data-...` and `aria-...` attributes.
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

// A button that does something; `properties` may add to it.
const button = (onclick, properties, ...children) =>
  make("button", { type: "button", onclick, ...properties }, ...children);

// A piece in the colour of a kind.
const swatch = (kind, properties = { className: "swatch" }) =>
  make("i", { "--swatch": `var(--kind-${kind})`, ...properties });

class View {
  // `onPick` is told the slice that was clicked, or null; `onHover` the slice or the segment under the mouse.
  constructor({ onPick, onHover }) {
    this.stretch = new Stretch();
    this.look = { selection: {}, filtered: false, hidden: new Set(), arrows: true, path: true, current: null };
    this.tracks = at("tracks");
    this.canvas = at("canvas");
    this.overview = at("overview");
    this.mouse = null; // x of the mouse, where zooming by keys takes place
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
    this.stretch.width = Math.max(50, this.tracks.clientWidth - GUTTER);
    this.canvas.style.width = `${GUTTER + this.stretch.width}px`;
    this.canvas.style.height = `${this.tracks.clientHeight}px`;
    this.overview.style.width = `${this.stretch.width}px`;
    this.overview.style.height = `${OVERVIEW}px`;
    this.paint(); // at once: a canvas of another size is empty
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
    paintOverview(this.overview, this.stretch);
    const left = paintTracks(this.canvas, this.stretch, this.tracks.scrollTop, this.tracks.clientHeight, this.look);
    at("arrows-note").textContent = left ? `${countText(left)} arrows: zoom in to see them` : "";
  }

  // ---- The words at the left ----

  label() {
    at("content").style.height = `${stack()}px`;
    at("labels").replaceChildren(...bands.flatMap((band) => [this.bandLabel(band), ...this.rowLabels(band)]));
  }

  bandLabel(band) {
    const { worker } = band;
    const clock =
      worker.id === timeline.owner
        ? "clock of this profile"
        : !worker.error
          ? "the same clock"
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
            `not here: ${worker.missing}`,
          )
        : null,
    );
  }

  rowLabels(band) {
    if (!band.open) return [];
    if (!band.rows.length) {
      const text = band.worker.missing ? "Its share of the profile did not come." : "It recorded nothing.";
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

  // ---- Going places ----

  // Zooms to a slice and scrolls it to the middle.
  goTo(slice, share = 0.4) {
    const box = boxes.get(slice.id);
    if (!box) return;
    this.open(box);
    this.stretch.show(slice.start, slice.end, share);
    this.tracks.scrollTop = topOf(box) - this.tracks.clientHeight / 2;
    this.refresh();
  }

  // Zooms out as little as is needed to see all of some slices at once.
  goToAll(list) {
    const known = list.map((slice) => boxes.get(slice?.id)).filter(Boolean);
    if (!known.length) return;
    known.forEach((box) => this.open(box));
    this.stretch.show(
      Math.min(...known.map((box) => box.slice.start)),
      Math.max(...known.map((box) => box.slice.end)),
      0.7,
    );
    const tops = known.map(topOf);
    const room = this.tracks.clientHeight - (Math.max(...tops) - Math.min(...tops) + BAR);
    this.tracks.scrollTop = room > 0 ? Math.min(...tops) - room / 2 : tops[0] - BAND; // the first, if not all fit
    this.refresh();
  }

  open(box) {
    if (box.row.band.open) return;
    box.row.band.open = true;
    this.label();
  }

  // The middle of the visible part of a slice, in the coordinates of mouse events; null if no part of it is visible.
  pixelOf(id) {
    const box = boxes.get(id);
    if (!box) return null;
    const from = Math.max(0, this.stretch.x(box.slice.start));
    const to = Math.min(this.stretch.width, this.stretch.x(box.slice.end));
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
    const slack = (3 / this.stretch.width) * this.stretch.span;
    const y = event.clientY - frame.top + this.tracks.scrollTop;
    return boxAt(y, this.stretch.time(x), slack, (box) => !this.look.hidden.has(box.slice.kind));
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
  }

  // Over the labels the wheel scrolls; over the timeline it zooms, or moves sideways with Shift.
  wheel(event) {
    const x = event.clientX - this.overview.getBoundingClientRect().left;
    if (x < 0) return;
    event.preventDefault();
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.stretch.pan(sideways);
    else this.stretch.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0022), x);
    this.refresh();
  }

  // A press that does not move is a click.
  drag(down, onPick, onHover) {
    if (down.button !== 0 || down.target.closest("button") || down.offsetX > this.tracks.clientWidth) return;
    let [x, y, moved] = [down.clientX, down.clientY, false];
    const move = (event) => {
      if (!moved && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) < 4) return;
      if (!moved) this.tracks.setPointerCapture(down.pointerId);
      moved = true;
      onHover(null);
      this.stretch.pan(x - event.clientX);
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

  // In the minimap the window goes to the mouse.
  dragOverview(down) {
    const frame = this.overview.getBoundingClientRect();
    if (down.clientY - frame.top > MINIMAP) return;
    this.overview.setPointerCapture(down.pointerId);
    const move = (event) => {
      const middle = extent.start + ((event.clientX - frame.left) / frame.width) * (extent.end - extent.start);
      this.stretch.set(middle - this.stretch.span / 2, middle + this.stretch.span / 2);
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
    const time = this.stretch.time(event.clientX - frame.left);
    return timeline.path.find((segment) => segment.start <= time && time < segment.end) ?? null;
  }

  // Returns whether the key meant something here.
  key(key) {
    const step = this.stretch.width * 0.12;
    const x = this.mouse === null || this.mouse < 0 ? undefined : this.mouse;
    const keys = {
      w: () => this.stretch.zoom(1 / 1.35, x),
      s: () => this.stretch.zoom(1.35, x),
      a: () => this.stretch.pan(-step),
      d: () => this.stretch.pan(step),
      ArrowLeft: () => this.stretch.pan(-step),
      ArrowRight: () => this.stretch.pan(step),
      ArrowUp: () => (this.tracks.scrollTop -= 60),
      ArrowDown: () => (this.tracks.scrollTop += 60),
      0: () => this.stretch.fit(),
    };
    if (!Object.hasOwn(keys, key)) return false;
    keys[key]();
    this.refresh();
    return true;
  }
}

const signed = (ns) => `${ns < 0 ? "−" : "+"}${timeText(Math.abs(ns))}`;
