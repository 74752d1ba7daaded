// Draws what is visible, and of what is thinner than a pixel only as much as can be seen: a frame costs what the screen
// holds, not what the profile holds.

const MINIMAP = 30;
const RULER = 24;
const STRIP = 34; // what the step waited for
const OVERVIEW = MINIMAP + RULER + STRIP;
const MOST_ARROWS = 250; // more than these hide what is under them
const FONT = "11px -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', Arial, sans-serif";

// ---- Colours: those of the style sheet, light or dark ----

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

function brightness(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// ---- Pieces ----

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

const widths = new Map(); // of texts, as measured

function widthOf(context, text) {
  let width = widths.get(text);
  if (width === undefined) {
    if (widths.size > 20000) widths.clear();
    width = context.measureText(text).width;
    widths.set(text, width);
  }
  return width;
}

// As much of a text as fits, with an ellipsis where something is left out.
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
function tickOf(stretch, room = 110) {
  const least = (stretch.span / stretch.width) * room;
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(1, power * [1, 2, 5, 10].find((step) => power * step >= least));
}

function* ticks(stretch) {
  const step = tickOf(stretch);
  for (let n = Math.ceil(stretch.start / step); n * step <= stretch.end; n += 1) yield [n * step, step];
}

// Enough digits to tell a tick from the next, in the unit of the largest that is visible.
function tickText(time, step, largest) {
  const [unit, size] = UNITS.find(([, least]) => largest >= least) ?? ["ns", 1];
  return `${(time / size).toFixed(Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9)))} ${unit}`;
}

// ---- The part that stays at the top ----

function paintOverview(canvas, stretch) {
  const context = sized(canvas, stretch.width, OVERVIEW);
  paintMinimap(context, stretch);
  paintRuler(context, stretch);
  paintStrip(context, stretch);
}

const busy = new Map(); // per width: for every band the pixels in which one of its threads did something

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

function paintMinimap(context, stretch) {
  const all = busyPixels(stretch.width);
  const height = (MINIMAP - 6) / Math.max(1, all.length);
  all.forEach((pixels, number) => {
    for (let from = 0, to; from < pixels.length; from = to) {
      for (to = from + 1; to < pixels.length && pixels[to] === pixels[from];) to += 1;
      if (!pixels[from]) continue;
      context.fillStyle = pixels[from] === 1 ? theme.kind.wait : theme.kind.run;
      context.fillRect(from, 3 + number * height, to - from, Math.max(1, height - 1));
    }
  });
  const scale = stretch.width / (extent.end - extent.start);
  const from = Math.max(0, (stretch.start - extent.start) * scale);
  const to = Math.min(stretch.width, (stretch.end - extent.start) * scale);
  context.fillStyle = theme.window;
  context.fillRect(0, 0, from, MINIMAP);
  context.fillRect(to, 0, stretch.width - to, MINIMAP);
  context.strokeStyle = theme.accent;
  context.strokeRect(from + 0.5, 0.5, Math.max(2, to - from - 1), MINIMAP - 1);
}

function paintRuler(context, stretch) {
  context.fillStyle = theme.muted;
  for (const [time, step] of ticks(stretch)) {
    const x = Math.round(stretch.x(time));
    context.fillRect(x, MINIMAP + RULER - 6, 1, 6);
    if (x + 70 < stretch.width)
      context.fillText(tickText(time, step, Math.min(stretch.end, extent.end)), x + 4, MINIMAP + RULER - 10);
  }
  context.fillStyle = theme.line;
  context.fillRect(0, MINIMAP + RULER - 1, stretch.width, 1);
}

function paintStrip(context, stretch) {
  const [y, height] = [MINIMAP + RULER + 5, STRIP - 10];
  let last = -1;
  for (const segment of strip) {
    if (segment.end < stretch.start || segment.start > stretch.end) continue;
    const from = Math.max(0, stretch.x(segment.start));
    const to = Math.min(stretch.width, stretch.x(segment.end));
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

// `look` is what the page has been asked for: { selection, filtered, hidden, arrows, path, current }.
function paintTracks(canvas, stretch, scrolled, height, look) {
  const context = sized(canvas, GUTTER + stretch.width, height);
  context.save();
  context.translate(0, -scrolled);
  paintGround(context, stretch, scrolled, height);
  context.beginPath();
  context.rect(GUTTER, scrolled, stretch.width, height);
  context.clip();
  context.translate(GUTTER, 0);
  for (const band of bands) {
    for (const row of band.open ? band.rows : []) {
      if (row.y > scrolled + height || row.y + row.height < scrolled) continue;
      row.levels.forEach((level) => paintLevel(context, stretch, level, look));
    }
  }
  if (look.path) paintPath(context, stretch);
  const left = paintArrows(context, stretch, scrolled, height, look);
  paintOutlines(context, stretch, look);
  context.restore();
  return left;
}

function paintGround(context, stretch, scrolled, height) {
  context.fillStyle = theme.faint;
  for (const [time] of ticks(stretch)) context.fillRect(GUTTER + Math.round(stretch.x(time)), scrolled, 1, height);
  for (const band of bands) {
    context.fillStyle = theme.faint;
    context.fillRect(0, band.y, GUTTER + stretch.width, BAND);
    context.fillStyle = theme.line;
    if (band.y) context.fillRect(0, band.y - 1, GUTTER + stretch.width, 1);
    for (const row of band.open ? band.rows : [])
      context.fillRect(0, row.y + row.height - 1, GUTTER + stretch.width, 1);
  }
}

function paintLevel(context, stretch, level, look) {
  let [last, lastLit] = [-1, false];
  for (let i = firstAfter(level, stretch.start); i < level.length; i += 1) {
    const box = level[i];
    const { slice } = box;
    if (slice.start > stretch.end) break;
    if (look.hidden.has(slice.kind)) continue;
    const from = Math.max(-2, stretch.x(slice.start));
    const to = Math.min(stretch.width + 2, stretch.x(slice.end));
    if (to <= last && (lastLit || !box.lit)) continue; // in a pixel that is taken
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

// A line under the part of each slice that the step waited for.
function paintPath(context, stretch) {
  const last = new Map(); // per height, up to where there is a line
  context.fillStyle = theme.path;
  for (const segment of timeline.path) {
    if (segment.end < stretch.start || segment.start > stretch.end || !boxes.has(segment.slice)) continue;
    const box = boxes.get(segment.slice);
    const y = topOf(box) + BAR - 2;
    const from = stretch.x(segment.start);
    const to = Math.max(Math.floor(from) + 1, stretch.x(segment.end));
    if (to <= (last.get(y) ?? -1)) continue;
    last.set(y, to);
    context.globalAlpha = box.lit ? 1 : 0.25;
    context.fillRect(from, y, to - from, 3);
  }
  context.globalAlpha = 1;
}

// Returns how many were left out because there are too many.
function paintArrows(context, stretch, scrolled, height, look) {
  const [faint, strong] = [[], []];
  for (const arrow of timeline.arrows) {
    if (Math.max(arrow.start, arrow.end) < stretch.start || Math.min(arrow.start, arrow.end) > stretch.end) continue;
    const [source, target] = [boxes.get(arrow.source), boxes.get(arrow.target)];
    if (!source || !target) continue;
    const ys = [topOf(source) + BAR / 2, topOf(target) + BAR / 2];
    if (Math.max(...ys) < scrolled || Math.min(...ys) > scrolled + height) continue;
    if (belongsTo(arrow, look.selection)) strong.push([arrow, ...ys]);
    else if (look.arrows) faint.push([arrow, ...ys]);
  }
  if (faint.length <= MOST_ARROWS) for (const one of faint) paintArrow(context, stretch, one, false, look);
  for (const one of strong) paintArrow(context, stretch, one, true, look);
  return faint.length <= MOST_ARROWS ? 0 : faint.length;
}

function paintArrow(context, stretch, [arrow, fromY, toY], strong, look) {
  const [fromX, toX] = [stretch.x(arrow.start), stretch.x(arrow.end)];
  const bend = Math.min(40, Math.max(10, Math.abs(toX - fromX) / 2));
  const head = strong ? 7 : 5;
  context.globalAlpha = strong ? 1 : look.selection.slice || look.filtered ? 0.16 : 0.5;
  context.strokeStyle = context.fillStyle = theme.kind[arrow.kind] ?? theme.muted;
  if (strong) {
    context.strokeStyle = theme.card; // an edge, so that it stands out from what it crosses
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

function paintOutlines(context, stretch, look) {
  const { call, slice } = look.selection;
  const outline = (id, width, colour) => {
    const box = boxes.get(id);
    if (!box || box.slice.end < stretch.start || box.slice.start > stretch.end) return;
    const from = Math.max(-4, stretch.x(box.slice.start));
    const to = Math.min(stretch.width + 4, stretch.x(box.slice.end));
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(from - 1, topOf(box) - 1, Math.max(3, to - from + 1), BAR + 2);
  };
  if (call) for (const id of [call.near, call.far]) outline(id, 2.5, theme.accent);
  if (slice && slice.id !== call?.near && slice.id !== call?.far) outline(slice.id, 1.5, theme.text);
  if (look.current !== null) outline(look.current, 2.5, theme.path);
}
