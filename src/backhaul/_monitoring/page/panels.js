// What the page shows of one status. Worker buttons are kept and changed in place, so that they keep the focus.

const MAX_ROWS = 30;
const running = (status) => status.workers.filter((worker) => worker.status && worker.state !== "lost");

function showHead(status) {
  const counts = new Map();
  for (const worker of status.workers) counts.set(worker.state, (counts.get(worker.state) ?? 0) + 1);
  const order = ["up", "new", "silent", "lost"].filter((state) => counts.has(state));
  find("summary").replaceChildren(...order.map((state) => make("li", {}, stateBadge(state, `${counts.get(state)} ${state}`))));
  const calls = status.workers.reduce((sum, worker) => sum + worker.rates.served, 0);
  const sent = status.workers.reduce((sum, worker) => sum + worker.rates.sent, 0);
  find("totals").textContent = `${rateText(calls)} calls/s, ${bytesText(sent)}/s`;
}

const cards = new Map(); // by worker: its button and the parts of it that change
const history = new Map(); // by worker: calls per second, oldest first
const MAX_HISTORY = 60;

function remember(status) {
  for (const worker of status.workers) {
    const values = history.get(worker.name) ?? [];
    values.push(worker.state === "lost" ? 0 : worker.rates.served + worker.rates.called);
    history.set(worker.name, values.slice(-MAX_HISTORY));
  }
}

function showWorkers(status, selected, select) {
  const hosts = new Map();
  for (const worker of status.workers) hosts.set(worker.host, [...(hosts.get(worker.host) ?? []), worker]);
  const names = status.workers.map((worker) => `${worker.host}/${worker.name}`).join("\n");
  const box = find("hosts");
  if (box.dataset.names !== names) {
    box.dataset.names = names;
    cards.clear();
    box.replaceChildren(...[...hosts].map(([host, workers]) =>
      make("div", { class: "host" }, make("h3", {}, host || "unknown host"), make("ul", {}, workers.map((worker) => {
        const button = make("button", { type: "button", class: "worker", "data-testid": "worker", "data-name": worker.name });
        button.addEventListener("click", () => select(worker.name));
        cards.set(worker.name, button);
        return make("li", {}, button);
      })))));
  }
  for (const worker of status.workers) {
    const button = cards.get(worker.name);
    button.dataset.state = worker.state;
    button.setAttribute("aria-expanded", String(worker.name === selected));
    const { rates, status: found } = worker;
    const parts = [make("span", { class: "name" }, worker.name), stateBadge(worker.state)];
    if (worker.reason) parts.push(make("span", { class: "reason" }, worker.reason));
    if (found && worker.state !== "lost") {
      parts.push(make("span", { class: "numbers" },
        `${rateText(rates.served)} served/s, ${rateText(rates.called)} made/s, ${bytesText(rates.received)}/s in, ${bytesText(rates.sent)}/s out`));
      const values = history.get(worker.name) ?? [0];
      parts.push(sparkline(values, `calls per second: now ${rateText(values[values.length - 1])}, at most ${rateText(Math.max(...values))}`));
    }
    button.replaceChildren(...parts);
  }
}

function showDetails(status, selected) {
  const worker = status.workers.find((each) => each.name === selected);
  find("details").hidden = !worker;
  if (!worker) return;
  find("details-title").textContent = `${worker.name} on ${worker.host}: ${worker.state}`;
  const found = worker.status;
  if (!found) {
    find("details-body").replaceChildren(make("p", { class: "empty" }, worker.reason || "It has not answered yet."));
    return;
  }
  const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  const call = (other) => [["function", (row) => row.function], [other, (row) => row.worker], ["for", (row) => secondsText(row.seconds), true]];
  const views = status.doubts.filter((doubt) => doubt.worker === selected);
  find("details-body").replaceChildren(
    ...(worker.reason ? [make("p", { class: "reason" }, worker.reason)] : []),
    make("dl", { class: "facts" },
      fact("id", String(worker.id)), fact("process", String(found.pid)), fact("runs for", durationText(found.uptime)),
      fact("version", found.version), fact("last answer", `${secondsText(Math.max(worker.age, 0))} ago`),
      fact("calls served", String(found.served)), fact("calls made", String(found.called)),
      fact("tasks that wait", String(found.tasks)), fact("memory", bytesText(found.memory)),
      fact("values owned", `${found.references.owned} (${bytesText(found.references.owned_bytes)})`),
      fact("references held", String(found.references.held)), fact("contexts open", String(found.graphs.contexts)),
      fact("passes driven", String(found.graphs.passes_ended)),
      fact("await gradients", `${found.graphs.messages} messages`), fact("gradients", bytesText(found.graphs.gradient_bytes))),
    make("div", { class: "split" },
      make("div", {}, make("h3", {}, `Serves now (${found.num_serving})`), table(call("from"), found.serving, "No calls.")),
      make("div", {}, make("h3", {}, `Waits for (${found.num_calling})`), table(call("on"), found.calling, "No calls.")),
      make("div", {}, make("h3", {}, "Functions"), functionTable(found.functions.slice(0, MAX_ROWS).map((each) => ({ ...each, worker: worker.name })))),
      make("div", {}, make("h3", {}, "What others say"), views.length
        ? table([["worker", (row) => row.by], ["says", (row) => stateBadge(row.state)], ["why", (row) => row.reason]], views, "")
        : make("p", { class: "empty" }, "No worker suspects it."))));
}

function functionTable(functions) {
  const most = Math.max(...functions.map((each) => each.seconds), 1e-9);
  return table([
    ["function", (row) => row.name], ["on", (row) => row.worker], ["calls", (row) => String(row.calls), true],
    ["mean", (row) => secondsText(row.seconds / row.calls), true], ["longest", (row) => secondsText(row.longest), true],
    ["waited", (row) => secondsText(row.waited / row.calls), true], ["", (row) => bar(row.seconds / most)],
  ], functions, "No calls were served since somebody watches.");
}

function showTables(status) {
  const workers = running(status);
  const functions = workers.flatMap((worker) => worker.status.functions.map((each) => ({ ...each, worker: worker.name })));
  functions.sort((one, other) => other.seconds - one.seconds);
  find("functions").replaceChildren(functionTable(functions.slice(0, MAX_ROWS)));

  const calls = workers.flatMap((worker) => worker.status.serving.map((each) => ({ ...each, on: worker.name })));
  calls.sort((one, other) => other.seconds - one.seconds);
  find("calls").replaceChildren(table([
    ["function", (row) => row.function], ["from", (row) => row.worker], ["on", (row) => row.on],
    ["for", (row) => secondsText(row.seconds), true],
  ], calls.slice(0, MAX_ROWS), "No calls are under way."));

  const channels = [...status.channels].sort((one, other) => other.rate - one.rate || other.total - one.total);
  const most = Math.max(...channels.map((channel) => channel.rate), 1);
  find("picture").replaceChildren(...[channelPicture(status.workers, channels)].filter(Boolean));
  find("channels").replaceChildren(table([
    ["from", (row) => row.source], ["to", (row) => row.target], ["per second", (row) => bytesText(row.rate), true],
    ["in all", (row) => bytesText(row.total), true], ["wait", (row) => bytesText(row.waiting), true], ["", (row) => bar(row.rate / most)],
  ], channels.slice(0, MAX_ROWS), "No channels are open."));

  const held = (found) => found.references.owned_bytes + found.graphs.gradient_bytes;
  const byMemory = [...workers].sort((one, other) => held(other.status) - held(one.status) || other.status.memory - one.status.memory);
  const largest = Math.max(...byMemory.map((worker) => held(worker.status)), 1);
  find("memory").replaceChildren(table([
    ["worker", (row) => row.name], ["process", (row) => bytesText(row.status.memory), true],
    ["values", (row) => `${row.status.references.owned} (${bytesText(row.status.references.owned_bytes)})`, true],
    ["gradients", (row) => bytesText(row.status.graphs.gradient_bytes), true], ["", (row) => bar(held(row.status) / largest)],
  ], byMemory.slice(0, MAX_ROWS), "No worker answers."));

  const steps = workers.map((worker) => stepsChart(worker.name, worker.status.passes)).filter(Boolean);
  find("steps").replaceChildren(...(steps.length ? steps : [make("p", { class: "empty" }, "No backward pass has ended since somebody watches.")]));
}

function showLosses(status) {
  find("doubts").replaceChildren(status.doubts.length
    ? table([["worker", (row) => row.by], ["says of", (row) => row.worker], ["state", (row) => stateBadge(row.state)],
      ["why", (row) => row.reason]], status.doubts.slice(0, MAX_ROWS), "")
    : make("p", { class: "empty" }, "No worker suspects another one."));
  const events = [...status.events].reverse().slice(0, MAX_ROWS);
  find("events").replaceChildren(...events.map((event) => make("li", {},
    make("time", {}, `${durationText(status.at - event.at)} ago`), stateBadge(event.kind, `${event.worker} ${event.kind}`), make("span", {}, event.reason))));
}
