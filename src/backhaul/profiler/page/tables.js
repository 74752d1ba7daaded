// The tables below the timeline. They show the same profile without a canvas.

const ROWS_PER_PAGE = 200;

// ---- The critical path ----

function showWaited(go) {
  const rows = waitedFor();
  const all = sum(rows.map((row) => row.time));
  if (!rows.length) return at("waited").replaceChildren(nothing("The profile has no critical path."));
  const body = rows.map((row) => {
    const longest = row.segments.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a));
    const text = waitedText(row.kind, row.worker);
    return make(
      "tr",
      { "data-testid": "waited-row" },
      make(
        "td",
        { className: "wide" },
        swatch(row.kind),
        button(() => go(longest), { className: "link", title: `${text}; press to show the longest segment` }, text),
      ),
      make("td", { className: "number" }, timeText(row.time)),
      make("td", { className: "number" }, percentText(row.time, all)),
      make("td", { className: "bar" }, swatch(row.kind, { "--share": String(row.time / rows[0].time) })),
    );
  });
  at("waited").replaceChildren(head(["What", "Time", "Share", ""]), make("tbody", {}, ...body));
}

const head = (titles) =>
  make(
    "thead",
    {},
    make("tr", {}, ...titles.map((title, n) => make("th", { scope: "col", className: n ? "number" : "wide" }, title))),
  );

const nothing = (text) => make("tbody", {}, make("tr", {}, make("td", { className: "hint" }, text)));

// ---- Tables that can be sorted ----

// Columns are [title, key, text(row), class]. The first column contains a button, which calls `press(row)`.
class SortedTable {
  constructor(id, columns, sort, { press, empty, testid, marked }) {
    Object.assign(this, { table: at(id), columns, press, empty, testid, marked, rows: [], most: ROWS_PER_PAGE });
    [this.key, this.down] = sort;
  }

  show(rows) {
    this.rows = rows;
    this.most = ROWS_PER_PAGE;
    this.fill();
  }

  fill() {
    if (!this.rows.length) return this.table.replaceChildren(nothing(this.empty));
    const order = [...this.rows].sort((a, b) => compare(a[this.key], b[this.key]) * (this.down ? -1 : 1));
    const shown = order.slice(0, this.most).map((row) => this.row(row));
    const left = order.length - this.most;
    const more = () => {
      this.most += ROWS_PER_PAGE;
      this.fill();
    };
    const rest = make(
      "td",
      { colSpan: this.columns.length },
      button(more, { className: "link" }, `${countText(left)} more`),
    );
    this.table.replaceChildren(this.head(), make("tbody", {}, ...shown, left > 0 ? make("tr", {}, rest) : null));
  }

  head() {
    const cells = this.columns.map(([title, key, , kind]) => {
      const sorted = key === this.key;
      const sort = () => {
        [this.down, this.key] = [sorted ? !this.down : kind === "number", key];
        this.fill();
        this.table.querySelector(`[data-key="${key}"]`).focus();
      };
      const [word, sign] = !sorted ? ["none", ""] : this.down ? ["descending", " ↓"] : ["ascending", " ↑"];
      const press = button(sort, { "data-key": key }, title, make("span", { "aria-hidden": "true" }, sign));
      return make("th", { scope: "col", className: kind, "aria-sort": word }, press);
    });
    return make("thead", {}, make("tr", {}, ...cells));
  }

  row(row) {
    const [[, , first, kind], ...others] = this.columns;
    const marked = this.marked(row);
    const failed = this.testid === "call-row" ? "failed" : `${row.failed} failed`;
    // The row handles the click, so that a click beside the name works, too.
    const name = button(null, { className: "link", title: first(row), "aria-pressed": String(marked) }, first(row));
    return make(
      "tr",
      {
        "data-testid": this.testid,
        "data-id": String(row.id ?? row.name),
        className: marked ? "marked" : "",
        onclick: () => this.press(row),
      },
      make("td", { className: kind }, name, row.failed ? make("span", { className: "tag" }, failed) : null),
      ...others.map(([, , text, kind]) => make("td", { className: kind }, text(row))),
    );
  }

  // Updates the marks of the rows without replacing the rows, so that the focus stays.
  mark(rowOf) {
    for (const element of this.table.querySelectorAll("tbody tr[data-id]")) {
      const marked = this.marked(rowOf(element.dataset.id));
      element.classList.toggle("marked", marked);
      element.querySelector("button").setAttribute("aria-pressed", String(marked));
      if (marked) reveal(element);
    }
  }
}

// Scrolls the frame of the table if the row is not visible.
function reveal(element) {
  const frame = element.closest(".scroll");
  const [top, covered] = [element.offsetTop, 30]; // the head of the table covers the top of the frame
  if (top < frame.scrollTop + covered) frame.scrollTop = top - covered;
  else if (top + element.offsetHeight > frame.scrollTop + frame.clientHeight)
    frame.scrollTop = top + element.offsetHeight - frame.clientHeight;
}

const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1));
