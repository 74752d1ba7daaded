// Asks the server once a second, and shows what it answers.

const PERIOD = 1000;
const STORED = "backhaul-token";

// The token leaves the address bar, so that it is not in the history of the browser or on pictures of the screen.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(STORED, given);
    window.history.replaceState(null, "", location.pathname);
  }
  return given ?? sessionStorage.getItem(STORED) ?? "";
}

let token = takeToken();
let [status, selected, paused, said] = [null, null, false, new Map()];

function setLive(state, text) {
  find("live").dataset.state = state;
  find("live").textContent = text;
}
function setNotice(text) {
  find("notice").hidden = !text;
  find("notice").textContent = text;
}

function show() {
  if (!status) return;
  showHead(status);
  showWorkers(status, selected, select);
  showDetails(status, selected);
  showTables(status);
  showLosses(status);
  setNotice(status.problems.join("; "));
}
// Screen readers hear of changes of state only.
function say() {
  const news = status.workers.filter((worker) => said.has(worker.name) && said.get(worker.name) !== worker.state);
  said = new Map(status.workers.map((worker) => [worker.name, worker.state]));
  if (news.length) find("news").textContent = news.map((worker) => `${worker.name} is ${worker.state}`).join(", ");
}

function select(name) {
  selected = selected === name ? null : name;
  show();
  if (selected) find("details-title").focus();
}
function close() {
  const before = selected;
  selected = null;
  show();
  cards.get(before)?.focus();
}

async function ask() {
  let answer;
  try {
    answer = await fetch("api/status", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  } catch {
    setLive("bad", "the server does not answer");
    return;
  }
  if (answer.status === 401) {
    setLive("bad", "no access");
    setNotice("The token is missing or wrong. Open the address that the program has printed, with everything after #.");
    return;
  }
  if (!answer.ok) {
    setLive("bad", `the server answers ${answer.status}`);
    return;
  }
  status = await answer.json();
  remember(status);
  say();
  show();
  if (!paused) setLive("ok", "live"); // the user may have pressed the button meanwhile
}
async function run() {
  if (!paused && !document.hidden) await ask();
  setTimeout(run, PERIOD);
}

find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", String(paused));
  if (paused) setLive("wait", "paused");
  else ask();
});
find("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected) close();
});
window.addEventListener("hashchange", () => {
  token = takeToken();
  ask();
});
run();
