// Charts as SVG. Each says in its label what it shows.

function sparkline(values, label) {
  const [width, height, most] = [220, 28, Math.max(...values, 1e-9)];
  const points = values.map((value, at) => {
    const x = (at / Math.max(values.length - 1, 1)) * width;
    return `${x.toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`;
  });
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none", height },
    draw("polyline", { class: "spark", points: points.join(" ") }));
}

const MAX_STEPS = 40;

// The time between the ends of two passes, and how much of it the pass took.
function stepsOf(passes) {
  const steps = [];
  for (let n = 1; n < passes.length; n++) {
    const [before, pass] = [passes[n - 1], passes[n]];
    const end = pass.began + pass.seconds;
    const whole = end - (before.began + before.seconds);
    if (whole > 0) steps.push({ whole, backward: Math.min(pass.seconds, whole) });
  }
  return steps.slice(-MAX_STEPS);
}

function stepsChart(name, passes) {
  const steps = stepsOf(passes);
  if (!steps.length) return null;
  const [width, height, last] = [600, 90, steps[steps.length - 1]];
  const sorted = steps.map((step) => step.whole).sort((one, other) => one - other);
  const [median, most] = [sorted[Math.floor(sorted.length / 2)], sorted[sorted.length - 1]];
  const wide = width / MAX_STEPS;
  const text = `${name}: last step ${secondsText(last.whole)}, of it backward ${secondsText(last.backward)}; ` +
    `median ${secondsText(median)}, longest ${secondsText(most)}`;
  const bars = steps.flatMap((step, at) => {
    const x = (MAX_STEPS - steps.length + at) * wide + 1;
    const [whole, backward] = [(step.whole / most) * height, (step.backward / most) * height];
    const title = () => draw("title", {}, `${secondsText(step.whole)}, backward ${secondsText(step.backward)}`);
    return [
      draw("rect", { class: "rest", x, y: height - whole, width: wide - 2, height: Math.max(whole - backward, 0) }, title()),
      draw("rect", { class: "backward", x, y: height - backward, width: wide - 2, height: Math.max(backward, 1) }, title()),
    ];
  });
  return make("figure", { class: "steps" },
    make("figcaption", {}, text),
    draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text }, bars));
}

const MAX_DRAWN = 32;

// Workers on a circle, in the order of hosts. The width of a line is how much goes along it.
function channelPicture(workers, channels) {
  if (workers.length < 2 || workers.length > MAX_DRAWN) return null;
  const ordered = [...workers].sort((one, other) => one.host.localeCompare(other.host) || one.id - other.id);
  const [width, height, radius] = [600, workers.length > 8 ? 420 : 260, workers.length > 8 ? 160 : 90];
  const places = new Map(ordered.map((worker, at) => {
    const angle = (at / ordered.length) * 2 * Math.PI - Math.PI / 2 + (ordered.length === 2 ? Math.PI / 2 : 0);
    return [worker.name, { x: width / 2 + Math.cos(angle) * radius * 1.5, y: height / 2 + Math.sin(angle) * radius, angle }];
  }));
  const drawn = channels.filter((channel) => places.has(channel.source) && places.has(channel.target));
  const most = Math.max(...drawn.map((channel) => channel.rate), 1);
  const edges = drawn.map((channel) => {
    const [from, to] = [places.get(channel.source), places.get(channel.target)];
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    // Bent to one side, so that the two directions do not cover each other.
    const [x, y] = [(from.x + to.x) / 2 - dy * 0.12, (from.y + to.y) / 2 + dx * 0.12];
    const strength = channel.rate > 0 ? 1 + 5 * Math.sqrt(channel.rate / most) : 0.5;
    return draw("path", { class: "edge", d: `M${from.x},${from.y} Q${x},${y} ${to.x},${to.y}`, "stroke-width": strength.toFixed(1) },
      draw("title", {}, `${channel.source} to ${channel.target}: ${bytesText(channel.rate)}/s`));
  });
  const nodes = ordered.flatMap((worker) => {
    const { x, y, angle } = places.get(worker.name);
    const side = Math.cos(angle) > 0.2 ? "start" : Math.cos(angle) < -0.2 ? "end" : "middle";
    const [tx, ty] = [x + Math.cos(angle) * 14, y + Math.sin(angle) * 18 + 4];
    return [
      draw("circle", { class: "node", "data-state": worker.state, cx: x, cy: y, r: 8 }, draw("title", {}, `${worker.name}: ${worker.state}`)),
      draw("text", { x: tx, y: ty, "text-anchor": side }, worker.name.slice(0, 24)),
    ];
  });
  const strongest = drawn.reduce((one, other) => (other.rate > (one?.rate ?? 0) ? other : one), null);
  const label = `${ordered.length} workers and ${drawn.length} channels` +
    (strongest ? `; most goes from ${strongest.source} to ${strongest.target}: ${bytesText(strongest.rate)} per second` : "");
  const heights = [...places.values()].map((place) => place.y);
  const [top, bottom] = [Math.min(...heights) - 40, Math.max(...heights) + 40];
  return draw("svg", { viewBox: `0 ${top} ${width} ${bottom - top}`, role: "img", "aria-label": label }, edges, nodes);
}
