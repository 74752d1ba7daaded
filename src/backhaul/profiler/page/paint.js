// Draws only the visible slices, and only one slice per pixel where they are thinner. So the cost of a frame depends on
// the size of the screen, not on the size of the profile.

// Heights in CSS pixels.
const MINIMAP = 30;
const RULER = 24;
const STRIP = 34; // the critical path
const OVERVIEW = MINIMAP + RULER + STRIP;

const MAX_ARROWS = 250; // more arrows would hide the slices below them
const FONT = "11px -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', Arial, sans-serif";

// ---- Colors, read from the light or dark theme of the style sheet ----

const theme = { kind: {}, ink: {} };

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  for (const name of ["text", "muted", "line", "faint", "card", "accent", "path", "window"])
    theme[name] = read(`--${name}`);
  for (const kind of [...Object.keys(kinds), "compute", "wire", "idle", "request", "reply", "gradient"]) {
    theme.kind[kind] = read(`--kind-${kind}`) || theme.muted;
    theme.ink[kind] = brightness(theme.kind[kind]) > 0.32 ? "#10151c" : "#ffffff";
  }
}

function brightness(color) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(color.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// ---- Canvas, text and ticks ----

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

const widths = new Map(); // text -> measured width

function widthOf(context, text) {
  let width = widths.get(text);
  if (width === undefined) {
    if (widths.size > 20000) widths.clear();
    width = context.measureText(text).width;
    widths.set(text, width);
  }
  return width;
}

// The text, shortened with an ellipsis if it does not fit.
function fitted(context, text, room) {
  if (text.length > 200) text = `${text.slice(0, 199)}…`;
  if (widthOf(context, text) <= room) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}

// The distance between ticks: 1, 2 or 5 of a power of ten, about `room` pixels apart.
function tickOf(range, room = 110) {
  const least = (range.span / range.width) * room;
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(1, power * [1, 2, 5, 10].find((step) => power * step >= least));
}

function* ticks(range) {
  const step = tickOf(range);
  for (let n = Math.ceil(range.start / step); n * step <= range.end; n += 1) yield [n * step, step];
}

// The label of a tick, with enough digits to differ from the next one, in the unit of the largest visible tick.
function tickText(time, step, largest) {
  const [unit, size] = UNITS.find(([, least]) => largest >= least) ?? ["ns", 1];
  return `${(time / size).toFixed(Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9)))} ${unit}`;
}

// ---- The overview, which stays at the top ----

function paintOverview(canvas, range) {
  const context = sized(canvas, range.width, OVERVIEW);
  paintMinimap(context, range);
  paintRuler(context, range);
  paintStrip(context, range);
}

const busy = new Map(); // width -> for every band, the pixels in which one of its threads ran (2) or waited (1)

function busyPixels(width) {
  if (!busy.has(width)) {
    busy.clear();
    const scale = width / (extent.end - extent.start);
    busy.set(
      width,
      bands.map((band) => {
        const pixels = new Uint8Array(Math.ceil(width) + 1);
        for (const row of band.rows.filter(({ track }) => !track.lane)) {
          for (const { slice } of row.levels[0]) {
            const from = Math.floor((slice.start - extent.start) * scale);
            pixels.fill(
              slice.kind === "wait" ? 1 : 2,
              from,
              Math.max(from + 1, Math.floor((slice.end - extent.start) * scale)),
            );
          }
        }
        return pixels;
      }),
    );
  }
  return busy.get(width);
}

function paintMinimap(context, range) {
  const all = busyPixels(range.width);
  const height = (MINIMAP - 6) / Math.max(1, all.length);
  all.forEach((pixels, number) => {
    for (let from = 0, to; from < pixels.length; from = to) {
      for (to = from + 1; to < pixels.length && pixels[to] === pixels[from];) to += 1;
      if (!pixels[from]) continue;
      context.fillStyle = pixels[from] === 1 ? theme.kind.wait : theme.kind.run;
      context.fillRect(from, 3 + number * height, to - from, Math.max(1, height - 1));
    }
  });
  const scale = range.width / (extent.end - extent.start);
  const from = Math.max(0, (range.start - extent.start) * scale);
  const to = Math.min(range.width, (range.end - extent.start) * scale);
  context.fillStyle = theme.window;
  context.fillRect(0, 0, from, MINIMAP);
  context.fillRect(to, 0, range.width - to, MINIMAP);
  context.strokeStyle = theme.accent;
  context.strokeRect(from + 0.5, 0.5, Math.max(2, to - from - 1), MINIMAP - 1);
}

function paintRuler(context, range) {
  context.fillStyle = theme.muted;
  for (const [time, step] of ticks(range)) {
    const x = Math.round(range.x(time));
    context.fillRect(x, MINIMAP + RULER - 6, 1, 6);
    if (x + 70 < range.width)
      context.fillText(tickText(time, step, Math.min(range.end, extent.end)), x + 4, MINIMAP + RULER - 10);
  }
  context.fillStyle = theme.line;
  context.fillRect(0, MINIMAP + RULER - 1, range.width, 1);
}

function paintStrip(context, range) {
  const [y, height] = [MINIMAP + RULER + 5, STRIP - 10];
  let last = -1;
  for (const segment of mergedPath) {
    if (segment.end < range.start || segment.start > range.end) continue;
    const from = Math.max(0, range.x(segment.start));
    const to = Math.min(range.width, range.x(segment.end));
    if (to <= last) continue;
    context.fillStyle = theme.kind[segment.kind];
    context.fillRect(from, y, Math.max(1, to - from - (to - from > 3 ? 1 : 0)), height);
    last = Math.max(to, from + 1);
    if (to - from > 34) {
      context.fillStyle = theme.ink[segment.kind];
      context.fillText(
        fitted(context, waitedText(segment.kind, segment.worker), to - from - 10),
        from + 5,
        y + height / 2 + 0.5,
      );
    }
  }
}

// ---- The tracks ----

// `display` is what to show: { selection, filtered, hidden, arrows, path, current }.
function paintTracks(canvas, range, scrolled, height, display) {
  const context = sized(canvas, GUTTER + range.width, height);
  context.save();
  context.translate(0, -scrolled);
  paintBackground(context, range, scrolled, height);
  context.beginPath();
  context.rect(GUTTER, scrolled, range.width, height);
  context.clip();
  context.translate(GUTTER, 0);
  for (const band of bands) {
    for (const row of band.open ? band.rows : []) {
      if (row.y > scrolled + height || row.y + row.height < scrolled) continue;
      row.levels.forEach((level) => paintLevel(context, range, level, display));
    }
  }
  if (display.path) paintPath(context, range);
  const left = paintArrows(context, range, scrolled, height, display);
  paintOutlines(context, range, display);
  context.restore();
  return left;
}

function paintBackground(context, range, scrolled, height) {
  context.fillStyle = theme.faint;
  for (const [time] of ticks(range)) context.fillRect(GUTTER + Math.round(range.x(time)), scrolled, 1, height);
  for (const band of bands) {
    context.fillStyle = theme.faint;
    context.fillRect(0, band.y, GUTTER + range.width, BAND);
    context.fillStyle = theme.line;
    if (band.y) context.fillRect(0, band.y - 1, GUTTER + range.width, 1);
    for (const row of band.open ? band.rows : [])
      context.fillRect(0, row.y + row.height - 1, GUTTER + range.width, 1);
  }
}

function paintLevel(context, range, level, display) {
  let [last, lastLit] = [-1, false];
  for (let i = firstAfter(level, range.start); i < level.length; i += 1) {
    const box = level[i];
    const { slice } = box;
    if (slice.start > range.end) break;
    if (display.hidden.has(slice.kind)) continue;
    const from = Math.max(-2, range.x(slice.start));
    const to = Math.min(range.width + 2, range.x(slice.end));
    if (to <= last && (lastLit || !box.lit)) continue; // another slice already fills this pixel
    const wide = to - from > 3;
    const top = topOf(box);
    context.globalAlpha = box.lit ? 1 : 0.16;
    context.fillStyle = theme.kind[slice.kind] ?? theme.muted;
    context.fillRect(from, top, Math.max(1, to - from - (wide ? 1 : 0)), BAR);
    [last, lastLit] = [Math.max(to, Math.floor(from) + 1), box.lit];
    if (to - from > 24) {
      context.globalAlpha = box.lit ? 1 : 0.5;
      context.fillStyle = box.lit ? (theme.ink[slice.kind] ?? theme.card) : theme.text;
      const begin = Math.max(0, from);
      context.fillText(fitted(context, slice.name, to - begin - 9), begin + 4, top + BAR / 2 + 0.5);
    }
  }
  context.globalAlpha = 1;
}

// Underlines the parts of slices that are on the critical path.
function paintPath(context, range) {
  const last = new Map(); // y -> the x at which the last line ends
  context.fillStyle = theme.path;
  for (const segment of timeline.path) {
    if (segment.end < range.start || segment.start > range.end || !boxes.has(segment.slice)) continue;
    const box = boxes.get(segment.slice);
    const y = topOf(box) + BAR - 2;
    const from = range.x(segment.start);
    const to = Math.max(Math.floor(from) + 1, range.x(segment.end));
    if (to <= (last.get(y) ?? -1)) continue;
    last.set(y, to);
    context.globalAlpha = box.lit ? 1 : 0.25;
    context.fillRect(from, y, to - from, 3);
  }
  context.globalAlpha = 1;
}

// Returns how many arrows were not drawn because there are too many.
function paintArrows(context, range, scrolled, height, display) {
  const [faint, strong] = [[], []];
  for (const arrow of timeline.arrows) {
    if (Math.max(arrow.start, arrow.end) < range.start || Math.min(arrow.start, arrow.end) > range.end) continue;
    const [source, target] = [boxes.get(arrow.source), boxes.get(arrow.target)];
    if (!source || !target) continue;
    const ys = [topOf(source) + BAR / 2, topOf(target) + BAR / 2];
    if (Math.max(...ys) < scrolled || Math.min(...ys) > scrolled + height) continue;
    if (belongsTo(arrow, display.selection)) strong.push([arrow, ...ys]);
    else if (display.arrows) faint.push([arrow, ...ys]);
  }
  if (faint.length <= MAX_ARROWS) for (const one of faint) paintArrow(context, range, one, false, display);
  for (const one of strong) paintArrow(context, range, one, true, display);
  return faint.length <= MAX_ARROWS ? 0 : faint.length;
}

function paintArrow(context, range, [arrow, fromY, toY], strong, display) {
  const [fromX, toX] = [range.x(arrow.start), range.x(arrow.end)];
  const bend = Math.min(40, Math.max(10, Math.abs(toX - fromX) / 2));
  const head = strong ? 7 : 5;
  context.globalAlpha = strong ? 1 : display.selection.slice || display.filtered ? 0.16 : 0.5;
  context.strokeStyle = context.fillStyle = theme.kind[arrow.kind] ?? theme.muted;
  if (strong) {
    context.strokeStyle = theme.card; // an edge that separates the arrow from what it crosses
    context.lineWidth = 4;
    curve(context, fromX, fromY, toX, toY, bend, head);
    context.strokeStyle = context.fillStyle;
  }
  context.lineWidth = strong ? 2.25 : 1;
  curve(context, fromX, fromY, toX, toY, bend, head);
  context.beginPath();
  context.moveTo(toX, toY);
  context.lineTo(toX - head - 1, toY - head / 2);
  context.lineTo(toX - head - 1, toY + head / 2);
  context.fill();
  context.globalAlpha = 1;
}

function curve(context, fromX, fromY, toX, toY, bend, head) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.bezierCurveTo(fromX + bend, fromY, toX - bend, toY, toX - head, toY);
  context.stroke();
}

function paintOutlines(context, range, display) {
  const { call, slice } = display.selection;
  const outline = (id, width, color) => {
    const box = boxes.get(id);
    if (!box || box.slice.end < range.start || box.slice.start > range.end) return;
    const from = Math.max(-4, range.x(box.slice.start));
    const to = Math.min(range.width + 4, range.x(box.slice.end));
    context.strokeStyle = color;
    context.lineWidth = width;
    context.strokeRect(from - 1, topOf(box) - 1, Math.max(3, to - from + 1), BAR + 2);
  };
  if (call) for (const id of [call.near, call.far]) outline(id, 2.5, theme.accent);
  if (slice && slice.id !== call?.near && slice.id !== call?.far) outline(slice.id, 1.5, theme.text);
  if (display.current !== null) outline(display.current, 2.5, theme.path);
}
