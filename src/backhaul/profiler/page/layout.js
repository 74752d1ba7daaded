// The layout: time on the x axis; workers, tracks and levels on the y axis. All lengths are CSS pixels.

const GUTTER = window.innerWidth > 760 ? 168 : 104; // width of the labels at the left
document.documentElement.style.setProperty("--gutter", `${GUTTER}px`);
const BAND = 30; // height of the head of a worker
const LEVEL = 18; // height of a slice and of the gap below it
const BAR = 16; // height of a slice
const REMARK = 26; // height of a line of text in place of tracks

// A box is a slice with its place: { slice, row, level, lit }. Boxes of one level never overlap. A box that is not lit
// is dimmed.
const boxes = new Map();

// How many slices contain a slice. Decides which of two slices with the same times is the inner one.
function depthOf(slice) {
  let depth = 0;
  for (let around = slices.get(slice.parent); around && depth < 1000; around = slices.get(around.parent)) depth += 1;
  return depth;
}

// A nested slice gets the level below its parent. Other slices that overlap, which a lane may contain, move down to the
// first free level, so that no slice hides another.
function levelsOf(row, list) {
  const levels = [];
  list.sort((a, b) => a.start - b.start || b.end - a.end || depthOf(a) - depthOf(b) || a.id - b.id);
  for (const slice of list) {
    let level = (boxes.get(slice.parent)?.level ?? -1) + 1;
    while (levels[level]?.length && levels[level].at(-1).slice.end > slice.start) level += 1;
    const box = { slice, row, level, lit: true };
    while (levels.length <= level) levels.push([]);
    levels[level].push(box);
    boxes.set(slice.id, box);
  }
  return levels;
}

// One band per worker, the owner of the profile first. In a band, one row per track, the threads first.
const bands = (() => {
  const ofTrack = groupBy(timeline.slices, (slice) => slice.track);
  const ofWorker = groupBy(timeline.tracks, (track) => track.worker);
  const order = [...timeline.workers].sort(
    (a, b) => (b.id === timeline.owner) - (a.id === timeline.owner) || a.id - b.id,
  );
  return order.map((worker) => {
    const band = { worker, rows: [], open: true, y: 0, height: 0 };
    const inOrder = (a, b) =>
      a.lane - b.lane || (a.lane ? a.name.localeCompare(b.name, "en", { numeric: true }) : a.id - b.id);
    for (const track of (ofWorker.get(worker.id) ?? []).sort(inOrder)) {
      const row = { band, track, levels: [], y: 0, height: 0 };
      row.levels = levelsOf(row, ofTrack.get(track.id) ?? []);
      if (row.levels.length) band.rows.push(row);
    }
    return band;
  });
})();

// The space above and below the levels of a row. It is smaller for lanes, because there are many of them.
const padOf = (row) => (row.track.lane ? 3 : 5);

// Sets the y of every band and row; returns the total height.
function stack() {
  let y = 0;
  for (const band of bands) {
    band.y = y;
    y += BAND;
    for (const row of band.rows) {
      row.y = y;
      row.height = band.open ? row.levels.length * LEVEL + 2 * padOf(row) - (LEVEL - BAR) : 0;
      y += row.height;
    }
    if (!band.rows.length && band.open) y += REMARK;
    band.height = y - band.y;
  }
  return y;
}

// The top of a box. All boxes of a collapsed band are in its head.
const topOf = (box) =>
  box.row.band.open ? box.row.y + padOf(box.row) + box.level * LEVEL : box.row.band.y + (BAND - BAR) / 2;

// The index of the first box of a level that ends after a time.
function firstAfter(level, time) {
  let [low, high] = [0, level.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (level[middle].slice.end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The box at a position, or else the nearest box at most `slack` away, so that thin slices can be clicked.
function boxAt(y, time, slack, shown) {
  const row = bands.flatMap((band) => (band.open ? band.rows : [])).find((row) => y >= row.y && y < row.y + row.height);
  const level = row?.levels[Math.floor((y - row.y - padOf(row)) / LEVEL)];
  if (!level) return null;
  let [best, least] = [null, slack];
  for (let i = firstAfter(level, time - slack); i < level.length && level[i].slice.start <= time + slack; i += 1) {
    const { slice } = level[i];
    const away = Math.max(slice.start - time, time - slice.end, 0);
    if (shown(level[i]) && away <= least && !(best && away === least)) [best, least] = [level[i], away];
    if (away === 0 && best) break;
  }
  return best;
}

// The visible range of time. Zooming keeps the time at `x` in place.
class TimeRange {
  constructor() {
    this.width = 1;
    this.fit();
  }

  get end() {
    return this.start + this.span;
  }

  x(time) {
    return ((time - this.start) / this.span) * this.width;
  }

  time(x) {
    return this.start + (x / this.width) * this.span;
  }

  set(start, end) {
    const [margin, most] = [(extent.end - extent.start) * 0.02, (extent.end - extent.start) * 1.04];
    this.span = Math.min(most, Math.max(50, end - start));
    this.start = Math.min(extent.end + margin - this.span, Math.max(extent.start - margin, start));
  }

  fit() {
    this.set(-Infinity, Infinity);
  }

  zoom(factor, x = this.width / 2) {
    const time = this.time(x);
    const span = this.span * factor;
    this.set(time - (x / this.width) * span, time + (1 - x / this.width) * span);
  }

  pan(pixels) {
    const by = (pixels / this.width) * this.span;
    this.set(this.start + by, this.end + by);
  }

  // Shows the time from `start` to `end` in the middle; it fills `share` of the width.
  show(start, end, share = 0.5) {
    const span = Math.max(end - start, 200) / share;
    const middle = (start + end) / 2;
    this.set(middle - span / 2, middle + span / 2);
  }
}
