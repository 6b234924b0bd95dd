"use strict";
// The page of a run. Texts of the run are hostile: they become text nodes alone (`element`), with control characters
// spelled out (`visible`). Nothing is loaded but /api.

const POLL_MS = 2000;
const POLL_ENDED_MS = 15000;
const PAGE_GROUPS = 25;
const OUTCOMES = ["trained", "batched", "under way", "left over", "stale", "zero_variance", "unscorable", "dead"];
const FOLD_TOKENS = 60; // runs of masked tokens from here on are folded,
const FOLD_KEPT = 12; // but for so many at either end
const TONES = { trained: "good", batched: "good", running: "good", finished: "good", ok: "good", "under way": "warn", waiting: "warn", warn: "warn", starting: "warn", stopping: "warn", restarting: "warn", backpressure: "warn", dead: "bad", failed: "bad", interrupted: "bad", silent: "bad", halt: "bad", quarantine: "bad", void: "bad" };
const CHARTS = {
  reward: ["Training reward", (v) => number(v)],
  held_out: ["Held-out rate", (v) => number(v)],
  end_to_end_p99: ["Task to optimizer step, p99", (v) => seconds(v)],
  staleness: ["Staleness, optimizer steps", (v) => number(v)],
  difficulty: ["Sampled difficulty", (v) => number(v)],
};

const FIGURES = ["score", "disagreement", "advantage"]; // what groups can be ordered by, beside their raters
const RATINGS = "ratings/"; // and an environment: a chart of its raters

// ---- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  return filled(made, attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [property, text] of Object.entries(value)) made.style.setProperty(property, text);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return made;
}

/** Replace what `place` holds. What is missing (null, undefined, false) is left out, as in `element`. */
function refill(place, ...children) {
  place.replaceChildren();
  return filled(place, {}, children);
}

/** Spell out the characters that would move or hide others. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// ---- numbers and times

function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString().replace("-", "\u2212");
}

function seconds(value) {
  if (typeof value !== "number") return "-";
  if (value >= 120) return `${number(value / 60)} min`;
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} \u00b5s`;
}

function bytes(value) {
  if (typeof value !== "number") return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power)} ${units[power]}`;
}

function clock(ns) {
  if (typeof ns !== "number") return "-";
  const date = new Date(ns / 1e6);
  const day = date.toDateString() === new Date().toDateString() ? "" : `${date.toLocaleDateString("en-CA")} `;
  return element("time", { datetime: date.toISOString(), title: date.toISOString() }, day + date.toLocaleTimeString("en-GB"));
}

const shown = (value) => (value === null || value === undefined || value === "" ? "-" : value);
const pill = (text, tone = TONES[text]) => element("span", { class: `pill ${tone || ""}` }, text);
const link = (hash, ...children) => element("a", { href: hash }, ...children);
const groupLink = (id, text = id.slice(0, 12)) => link(`#/rollouts/${encodeURIComponent(id)}`, text);
const outcomeText = (row) => (row.step === null || row.step === undefined ? row.state : `${row.state} in step ${row.step}`);

// ---- the API

class ApiError extends Error {}

async function request(path, signal) {
  let response;
  try {
    response = await fetch(path, { signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server of this page does not answer: was `lachesis web` ended? This page asks again.");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new ApiError(`The server of this page answered ${response.status} without a reason.`);
  }
  if (!response.ok) throw new ApiError(answer.error || `status ${response.status}`);
  return answer;
}

function showProblem(text) {
  const place = document.getElementById("problem");
  place.hidden = !text;
  if (text && place.textContent !== visible(text)) refill(place, text);
}

// ---- routing and polling

let current = null;
let runFacts = null;
let listed = { ids: [], query: "" };

class View {
  constructor() {
    this.main = document.getElementById("main");
    this.aborter = new AbortController();
    this.timer = null;
    this.busy = false;
  }
  get period() { return runFacts && !runFacts.goes_on ? POLL_ENDED_MS : POLL_MS; }
  fetch(path) { return request(path, this.aborter.signal); }
  async poll() {
    clearTimeout(this.timer);
    if (this.busy || this.aborter.signal.aborted) return;
    this.busy = true;
    try {
      await this.refresh();
      showProblem("");
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      showProblem(error.message);
      this.failed?.();
    } finally {
      this.busy = false;
    }
    if (!this.aborter.signal.aborted && this.goesOn !== false && !document.hidden) {
      this.timer = setTimeout(() => this.poll(), this.period);
    }
  }
  close() { clearTimeout(this.timer); this.aborter.abort(); }
  async readRun() {
    runFacts = await this.fetch("/api/run");
    showRun(runFacts);
    return runFacts;
  }
}

function showRun(facts) {
  refill(document.getElementById("run-name"), facts.run);
  const state = document.getElementById("run-state");
  state.hidden = false;
  state.className = `pill ${TONES[facts.state] || ""}`;
  refill(state, facts.state);
}

function route() {
  const hash = location.hash.replace(/^#/, "") || "/";
  const [path, query = ""] = hash.split("?", 2);
  const parts = path.split("/").filter(Boolean);
  current?.close();
  document.getElementById("inspector").hidden = true;
  showProblem("");
  const inRollouts = parts[0] === "rollouts";
  const inRevisions = parts[0] === "revisions";
  for (const [id, here] of [["nav-overview", !inRollouts && !inRevisions], ["nav-rollouts", inRollouts], ["nav-revisions", inRevisions]]) {
    const tab = document.getElementById(id);
    if (here) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  if (inRevisions) current = new Revisions(query);
  else if (!inRollouts) current = new Overview();
  else if (parts.length > 1) current = new GroupPage(decoded(parts[1]));
  else current = new Rollouts(query);
  refill(current.main, element("p", { class: "quiet" }, "Loading..."));
  window.scrollTo(0, 0);
  current.poll();
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function titled(text) {
  document.title = `${visible(text)} - ${runFacts ? visible(runFacts.run) : "Lachesis"}`;
}

// ---- the overview

class Overview extends View {
  constructor() {
    super();
    this.rounds = 0;
    this.alerts = null;
    this.openDetails = new Set();
  }
  async refresh() {
    const [facts, series] = await Promise.all([this.readRun(), this.fetch("/api/series")]);
    if (!document.getElementById("charts")) this.build();
    titled("Overview");
    refill(this.head, ...this.headline(facts));
    this.charts.update(series.charts);
    refill(this.state, ...this.tables(facts));
    if (this.rounds++ % 3 === 0) {
      this.alerts = (await this.fetch("/api/alerts")).environments;
      const open = new Set([...this.health.querySelectorAll("details[open]")].map((one) => one.dataset.env));
      refill(this.health, ...this.healthTables(open));
    }
  }
  failed() {
    if (!document.getElementById("charts")) refill(this.main, element("p", { class: "quiet" }, "Nothing is known of this run yet."));
  }
  build() {
    this.head = element("div");
    this.charts = new Charts();
    this.health = element("div");
    this.state = element("div");
    refill(this.main, this.head, element("h2", {}, "Training"), this.charts.place, this.health, this.state);
  }
  headline(facts) {
    const { step, steps, policy, ledger } = facts;
    const made = [element("h1", {}, step === null ? "Before its first step" : `Step ${number(step)}${steps === null ? "" : ` of ${number(steps)}`}`)];
    if (step !== null && steps) {
      const share = Math.min(100, (100 * step) / steps);
      made.push(element("div", { class: "progress", role: "progressbar", "aria-label": "Optimizer steps", "aria-valuenow": step, "aria-valuemin": 0, "aria-valuemax": steps }, element("span", { style: { width: `${share}%` } })));
    }
    for (const text of facts.problems) made.push(element("p", { class: "problem" }, text));
    for (const one of facts.notices) made.push(element("p", { class: one.stops ? "problem" : "warning" }, one.text));
    for (const text of facts.warnings) made.push(element("p", { class: "warning" }, text));
    const figures = [["Training reward", number(facts.reward), ratersText(facts.rewards)]];
    for (const one of facts.evaluations) {
      const interval = one.low === null ? "" : ` [${number(one.low)}, ${number(one.high)}]`;
      const change = one.first_step === one.step ? `step ${one.step}` : `step ${one.step}; ${number(one.first)} at step ${one.first_step}`;
      figures.push([`Held out, ${one.env}`, number(one.rate) + interval, one.greedy === null ? change : `${change}; greedy ${number(one.greedy)}`]);
    }
    figures.push(["Staleness", number(facts.staleness), "optimizer steps, mean of the newest batch"]);
    figures.push(["Task to step, p99", seconds(facts.end_to_end_p99_s), "lately"]);
    figures.push(["Policy", policy ? `step ${number(policy.step)}` : "-", policy ? `published ${seconds(policy.age_s)} ago` : "none published yet"]);
    figures.push(["Batches", ledger ? number(ledger.batches) : "-", ledger ? `every rollout up to ${number(ledger.watermark)} has its outcome` : ""]);
    made.push(element("div", { class: "figures" }, figures.map(([name, value, more]) =>
      element("div", { class: "card figure" }, element("span", { class: "quiet small" }, name), element("b", {}, value), element("span", { class: "quiet small" }, more)))));
    return made;
  }
  healthTables(open) {
    const made = [element("h2", {}, "Health")];
    if (!this.alerts.length) made.push(element("p", { class: "quiet" }, "No environment was checked yet."));
    for (const env of this.alerts) {
      const said = env.results.filter((one) => !["ok", "idle"].includes(one.severity));
      const rest = env.results.filter((one) => ["ok", "idle"].includes(one.severity));
      const stops = [env.standing.halted && "halted", env.standing.quarantined_from && "quarantined"].filter(Boolean);
      const head = element("p", {}, element("b", {}, env.env), " ", stops.length ? pill(stops.join(", "), "bad") : pill(said.some((one) => one.severity !== "inform") ? "warnings" : env.groups ? "ok" : "not checked yet", said.some((one) => one.severity !== "inform") ? "warn" : env.groups ? "good" : ""), element("span", { class: "quiet" }, ` ${number(env.groups)} groups checked`), env.standing.cause ? ` because of ${env.standing.cause}` : "");
      made.push(head);
      if (said.length) made.push(checksTable(said));
      if (rest.length) made.push(element("details", { "data-env": env.env, open: open.has(env.env) }, element("summary", {}, `${rest.length} checks with nothing to report`), checksTable(rest)));
    }
    return made;
  }
  tables(facts) {
    const made = [];
    const outcomes = Object.entries(facts.ledger?.outcomes ?? {});
    if (outcomes.length) {
      const total = outcomes.reduce((sum, [, count]) => sum + count, 0);
      made.push(element("h2", {}, "What became of the groups"), table(["Outcome", "Groups", "Share"], outcomes.map(([kind, count]) => [
        link(`#/rollouts?state=${encodeURIComponent(kind === "batched" ? "trained" : kind)}`, kind), numeric(number(count)),
        element("td", {}, meter(count / total), ` ${number(Math.round((1000 * count) / total) / 10)} %`)])));
    }
    const lost = facts.lost_generation;
    if (lost && (lost.seconds || lost.groups || lost.resumed_groups)) {
      made.push(element("p", { class: "quiet" }, `Lost generation: ${seconds(lost.seconds)} of samples, ${number(lost.groups)} whole groups. Resumed after kills: ${seconds(lost.resumed_seconds)}, ${number(lost.resumed_groups)} groups. Since the processes started.`));
    }
    const services = facts.services.filter((row) => row.instances.length);
    if (services.length) {
      made.push(element("h2", {}, "Services"), table(["Service", "State", "Lag", "In work", "Handled", "Dead", "Wait p99", "Process p99"], services.map((row) => [
        row.service + (row.instances.length > 1 ? ` \u00d7 ${row.instances.length}` : ""), pill(row.state), numeric(number(row.lag)), numeric(number(row.in_flight)), numeric(number(row.handled)), numeric(number(row.dead)), numeric(seconds(row.wait?.p99)), numeric(seconds(row.process?.p99))])));
    }
    const streams = (facts.streams ?? []).filter((row) => row.messages);
    if (streams.length) {
      made.push(element("h2", {}, "Streams"), table(["Stream", "Messages", "Bytes", "Budget", "Full"], streams.map((row) => [
        row.name, numeric(number(row.messages)), numeric(bytes(row.bytes)), numeric(bytes(row.max_bytes)),
        element("td", {}, meter(row.bytes / row.max_bytes), ` ${number(Math.round((1000 * row.bytes) / row.max_bytes) / 10)} %`)])));
    }
    return made;
  }
}

function ratersText(rewards) {
  const rated = Object.entries(rewards).filter(([, one]) => Object.keys(one.raters).length);
  const words = ([env, one]) => (rated.length > 1 ? `${env}: ` : "") + Object.entries(one.raters).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return rated.map(words).join("; ");
}

function checksTable(results) {
  return table(["Check", "Says", "Value", "Threshold", "Reason", "Groups"], results.map((one) => [
    one.check, pill(one.severity), numeric(number(one.value)), numeric(number(one.threshold)), shown(one.reason),
    element("td", {}, (one.examples ?? []).slice(0, 3).flatMap((id) => [groupLink(id, id.slice(-8)), " "]))]));
}

const numeric = (text) => element("td", { class: "number" }, text);

function meter(share) {
  return element("span", { class: "range", "aria-hidden": "true" }, element("i", { style: { left: "0", width: `${Math.min(100, 100 * share)}%` } }));
}

function table(names, rows) {
  const cells = (row) => row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell)));
  const numbers = rows.length ? cells(rows[0]).map((cell) => cell.className === "number") : [];
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": names.join(", ") }, element("table", {},
    element("thead", {}, element("tr", {}, names.map((name, i) => element("th", { scope: "col", class: numbers[i] ? "number" : null }, name)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, cells(row))))));
}

// ---- charts

class Charts {
  constructor() {
    this.place = element("div", { class: "charts", id: "charts" });
    this.known = "";
  }
  update(charts) {
    const text = JSON.stringify(charts);
    if (text === this.known) return;
    this.known = text;
    const byName = new Map(charts.map((chart) => [chart.name, chart.lines]));
    const ratings = [...byName.keys()].filter((name) => name.startsWith(RATINGS)).sort();
    refill(this.place, ...Object.entries(CHARTS).map(([name, [title, format]]) => lineChart(title, byName.get(name) ?? [], format)),
      ...ratings.map((name) => lineChart(`Mean rating by rater, ${name.slice(RATINGS.length)}`, byName.get(name), number, name.slice(RATINGS.length))));
  }
}

/** Lines over optimizer steps. A click, or Enter, leads to the groups of the step, those of `env` alone if one is given. */
function lineChart(title, lines, format, env = null) {
  const drawnLines = lines.filter((line) => line.points.length);
  const newest = drawnLines.map((line) => line.points[line.points.length - 1][1]);
  const head = element("div", { class: "chart-head" }, element("h3", {}, title), element("span", { class: "small" }, newest.length ? newest.map(format).join(" / ") : "-"));
  if (!drawnLines.length) return element("div", { class: "card" }, head, element("p", { class: "quiet small" }, "No figures yet."));
  const all = drawnLines.flatMap((line) => line.points);
  const [x0, x1] = extent(all.map((point) => point[0]));
  let [y0, y1] = extent(all.map((point) => point[1]));
  if (y0 === y1) { y0 -= Math.abs(y0) / 10 || 0.5; y1 += Math.abs(y1) / 10 || 0.5; }
  const [width, height, left, bottom, top, right] = [330, 150, 46, 20, 8, 6];
  const x = (step) => left + ((width - left - right) * (x1 === x0 ? 0.5 : (step - x0) / (x1 - x0)));
  const y = (value) => height - bottom - ((height - bottom - top) * (value - y0)) / (y1 - y0);
  const words = drawnLines.map((line) => `${line.name} from ${format(line.points[0][1])} at step ${line.points[0][0]} to ${format(line.points[line.points.length - 1][1])} at step ${line.points[line.points.length - 1][0]}`);
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${words.join("; ")}`, tabindex: "0" });
  for (const value of [y0, (y0 + y1) / 2, y1]) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }), drawn("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, format(Number(value.toPrecision(3)))));
  }
  svg.append(drawn("text", { x: left, y: height - 4 }, `step ${number(x0)}`), drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, number(x1)));
  drawnLines.forEach((line, i) => {
    const colour = `var(--line-${(i % 6) + 1})`;
    svg.append(drawn("polyline", { points: line.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" "), style: { stroke: colour } }));
    if (line.points.length < 12) for (const [step, value] of line.points) svg.append(drawn("circle", { class: "dot", cx: x(step), cy: y(value), r: 3, style: { fill: colour } }));
  });
  const caption = element("div", { class: "legend", "aria-live": "off" });
  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, x1: 0, x2: 0, visibility: "hidden" });
  svg.append(cursor);
  let marked = null;
  const mark = (step) => {
    marked = step;
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    const at = step === null ? null : all.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best - step) ? point[0] : best), x0);
    if (at !== null) { cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); marked = at; }
    refill(caption, ...(at === null ? [] : [element("span", {}, `step ${number(at)}`)]), ...drawnLines.map((line, i) => {
      const point = at === null ? null : line.points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
      return element("span", {}, element("span", { class: "key", style: { background: `var(--line-${(i % 6) + 1})` } }), line.name, point ? ` ${format(point[1])}` : "");
    }), ...(at === null || at < 1 ? [] : [element("span", { class: "quiet" }, "click: its groups")]));
  };
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width;
    return x0 + ((inside - left) / (width - left - right)) * (x1 - x0);
  };
  svg.addEventListener("pointermove", (event) => mark(stepAt(event)));
  svg.addEventListener("pointerleave", () => mark(null));
  svg.addEventListener("blur", () => mark(null));
  const open = () => {
    if (marked === null || marked < 1) return;
    location.hash = `#/rollouts?${new URLSearchParams({ ...(env === null ? {} : { env }), step: String(Math.round(marked)) })}`;
  };
  svg.addEventListener("click", (event) => { mark(stepAt(event)); open(); });
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Enter") open();
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const steps = [...new Set(all.map((point) => point[0]))].sort((a, b) => a - b);
    const at = marked === null ? steps.length : steps.indexOf(marked);
    mark(steps[Math.max(0, Math.min(steps.length - 1, at + (event.key === "ArrowLeft" ? -1 : 1)))]);
  });
  mark(null);
  return element("div", { class: "card" }, head, svg, caption);
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

// ---- the browser of rollouts

class Rollouts extends View {
  constructor(query) {
    super();
    this.query = new URLSearchParams(query);
    this.known = "";
  }
  get isNewest() { return !this.query.has("before"); }
  get period() { return this.isNewest && runFacts?.goes_on ? POLL_MS : POLL_ENDED_MS; }
  async refresh() {
    if (!runFacts) await this.readRun();
    if (!this.list) this.build();
    titled("Rollouts");
    const asked = new URLSearchParams(this.query);
    if (!asked.has("limit")) asked.set("limit", PAGE_GROUPS);
    const page = await this.fetch(`/api/groups?${asked}`);
    const text = JSON.stringify(page);
    if (text !== this.known) {
      this.known = text;
      listed = { ids: page.groups.map((row) => row.group), query: this.query.toString() };
      refill(this.list, ...this.rows(page));
    }
    this.goesOn = this.isNewest;
    if (this.isNewest) await this.readRun();
  }
  failed() { this.list?.replaceChildren(); this.known = ""; }
  build() {
    const value = (name) => this.query.get(name) ?? "";
    const [low, high] = value("score").includes(":") ? value("score").split(":", 2) : [value("score"), value("score")];
    const [rater, range] = split(value("rating"));
    const [least, most] = range.includes(":") ? range.split(":", 2) : [range, range];
    const ordered = ["highest", "lowest"].find((way) => this.query.has(way));
    const by = ordered ? this.query.get(ordered) : null;
    const raters = [...new Set([...runFacts.raters, ...[rater, FIGURES.includes(by) ? null : by].filter(Boolean)])];
    const orders = [["", "newest first"], ...["highest", "lowest"].flatMap((way) => [...raters, ...FIGURES].map((name) => [`${way}=${name}`, `${way} ${name} first`]))];
    const choice = (name, label, values) => element("label", {}, label, element("select", { name }, element("option", { value: "" }, "any"),
      [...new Set([...values, ...(value(name) ? [value(name)] : [])])].map((one) => element("option", { value: one, selected: one === value(name) }, one))));
    const field = (name, label, more = {}, text = value(name)) => element("label", {}, label, element("input", { name, value: text, autocomplete: "off", ...more }));
    const outcomes = [...new Set([...OUTCOMES, ...Object.keys(runFacts.ledger?.outcomes ?? {})])];
    const numberField = { type: "number", step: "any" };
    const form = element("form", { class: "filters", role: "search", "aria-label": "Filter rollouts", onsubmit: (event) => { event.preventDefault(); this.apply(new FormData(form)); } },
      choice("env", "Environment", runFacts.environments), choice("state", "Outcome", outcomes),
      field("low", "Score from", numberField, low), field("high", "Score to", numberField, high),
      field("disagreement", "Disagreement from", numberField, value("disagreement").split(":")[0]),
      field("step", "Optimizer step", { ...numberField, step: "1", min: "1" }, value("step").split(":")[0]),
      element("label", {}, "Rater", element("select", { name: "rater" }, element("option", { value: "" }, "none"), raters.map((one) => element("option", { value: one, selected: one === (rater || by) }, one)))),
      field("least", "Rating from", numberField, least), field("most", "Rating to", numberField, most),
      element("label", {}, "Order", element("select", { name: "order" }, orders.map(([one, text]) => element("option", { value: one, selected: one === (ordered ? `${ordered}=${by}` : "") }, text)))),
      field("item", "Item has"), field("text", "Prompt or answer has"),
      element("div", { class: "pair" }, element("button", { class: "main", type: "submit" }, "Filter"), element("a", { class: "button", href: "#/rollouts" }, "Clear")));
    for (const select of form.querySelectorAll("select:not([name=rater])")) select.addEventListener("change", () => form.requestSubmit());
    this.list = element("div", {}, element("p", { class: "quiet" }, "Looking back..."));
    const wide = window.matchMedia("(min-width: 641px)").matches;
    refill(this.main, element("h1", {}, "Rollouts"), element("details", { open: wide || this.query.size > 0 }, element("summary", {}, "Filters"), form), this.list);
  }
  apply(data) {
    const query = new URLSearchParams();
    for (const name of ["env", "state", "item", "text"]) if (data.get(name)) query.set(name, data.get(name));
    if (data.get("low") || data.get("high")) query.set("score", `${data.get("low")}:${data.get("high")}`);
    if (data.get("disagreement")) query.set("disagreement", `${data.get("disagreement")}:`);
    if (data.get("step")) query.set("step", data.get("step"));
    if (data.get("rater") && (data.get("least") || data.get("most"))) query.set("rating", `${data.get("rater")}=${data.get("least")}:${data.get("most")}`);
    if (data.get("order")) query.set(...split(data.get("order"), "first"));
    const hash = `#/rollouts${query.size ? `?${query}` : ""}`;
    if (hash === location.hash) this.poll();
    else location.hash = hash;
  }
  rows(page) {
    const older = () => { const query = new URLSearchParams(this.query); query.set("before", page.before); return `#/rollouts?${query}`; };
    const newest = () => { const query = new URLSearchParams(this.query); query.delete("before"); return `#/rollouts${query.size ? `?${query}` : ""}`; };
    const isOrdered = this.query.has("highest") || this.query.has("lowest");
    const few = page.before !== null && (isOrdered || page.groups.length < PAGE_GROUPS);
    const foot = element("div", { class: "bar" },
      this.isNewest ? null : element("a", { class: "button", href: newest() }, "\u2190 Newest"),
      few ? element("span", { class: "quiet" }, `Searched back to sequence ${page.before}.`) : null,
      page.before === null ? element("span", { class: "quiet" }, !page.groups.length ? "" : isOrdered ? "These come first of all that are stored." : "These are the oldest that are stored.") : element("a", { class: "button", href: older() }, few ? "Search older ones \u2192" : "Older \u2192"));
    if (!page.groups.length) return [element("p", { class: "quiet" }, page.before === null ? ([...this.query.keys()].length ? "No group that is stored fits." : "No group is stored yet.") : "None found yet."), foot];
    const extents = extent(page.groups.flatMap((row) => (row.low === null ? [] : [row.low, row.high])));
    const raters = [...new Set([split(this.query.get("rating") ?? "")[0], this.query.get("highest"), this.query.get("lowest")])].filter((name) => page.groups.some((row) => Object.hasOwn(row.ratings, name)));
    const names = ["Task", "Score", "Disagreement", "Advantage", "Outcome", "Policy", "Tokens", "Stored", ...raters];
    const cell = (i, attributes, ...children) => element("td", { "data-name": names[i], ...attributes }, ...children);
    const several = runFacts.environments.length > 1;
    return [element("div", { class: "scroll" }, element("table", { class: "rows" },
      element("thead", {}, element("tr", {}, names.map((name, i) => element("th", { scope: "col", class: [2, 3, 5, 6].includes(i) || i > 7 ? "number" : null }, name)))),
      element("tbody", {}, page.groups.map((row) => element("tr", { class: "link" },
        cell(0, { class: "title" }, groupLink(row.group, taskText(row)), several ? element("span", { class: "quiet small" }, ` ${row.env}`) : null),
        cell(1, { class: "nowrap" }, element("span", {}, element("span", { class: "score-value" }, number(row.score)), spread(row, extents))),
        cell(2, { class: "number" }, number(row.disagreement)), cell(3, { class: "number" }, row.advantage === null ? "-" : `\u00b1${number(row.advantage)}`),
        cell(4, {}, element("span", { title: row.reason }, pill(outcomeText(row), TONES[row.state]))),
        cell(5, { class: "number" }, number(row.policy_step)), cell(6, { class: "number" }, number(row.tokens)), cell(7, { class: "nowrap" }, clock(row.stored_ns)), raters.map((rater, i) => cell(8 + i, { class: "number" }, number(row.ratings[rater])))))))), foot];
  }
}

/** What a group's task is called: by its item, or by its prompt where the item's name is a hash. */
function taskText(row) {
  const named = row.item !== null && !/^[0-9a-f]{16}$/.test(row.item);
  return named ? row.item : row.prompt?.slice(0, 60) ?? row.item ?? row.group.slice(0, 12);
}

/** A name and what follows its last `=` (or its first: names of raters may hold one). */
function split(text, which = "last") {
  const at = which === "first" ? text.indexOf("=") : text.lastIndexOf("=");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

/** The range of a group's scores as a small bar, with its mean. */
function spread(row, [low, high]) {
  if (row.low === null || high <= low) return null;
  const at = (value) => (100 * (value - low)) / (high - low);
  return element("span", { class: "range", role: "img", "aria-label": `from ${number(row.low)} to ${number(row.high)}`, title: `from ${number(row.low)} to ${number(row.high)}` },
    element("i", { style: { left: `${at(row.low)}%`, width: `${at(row.high) - at(row.low)}%` } }), element("b", { style: { left: `${at(row.score)}%` } }));
}

// ---- one group

const COLOURS = {
  logprob: ["logprob", (token) => token.logprob, (value) => -Math.min(1, -value / 5)],
  advantage: ["advantage", (token) => token.advantage, (value) => Math.max(-1, Math.min(1, value / 2))],
  teacher: ["teacher difference", (token) => token.difference, (value) => Math.max(-1, Math.min(1, value / 2))],
  none: ["nothing", () => null, () => 0],
};
let colour = "logprob";
let order = "drawn";

class GroupPage extends View {
  constructor(id) {
    super();
    this.id = id;
    this.known = "";
    this.goesOn = true;
  }
  async refresh() {
    if (!runFacts) await this.readRun();
    const detail = await this.fetch(`/api/groups/${encodeURIComponent(this.id)}`);
    const { row } = detail.view;
    this.goesOn = runFacts.goes_on && ["under way", "batched"].includes(row.state);
    const known = JSON.stringify([row, detail.view.samples, detail.timeline.spans.length, detail.revisions]);
    if (known === this.known) return;
    this.known = known;
    this.detail = detail;
    titled(`${detail.view.item}`);
    this.draw();
  }
  failed() {
    if (this.detail) return;
    const again = element("button", { type: "button", onclick: () => { refill(this.main, element("p", { class: "quiet" }, "Loading...")); this.poll(); } }, "Try again");
    refill(this.main, element("div", { class: "bar" }, again, link("#/rollouts", "All rollouts")));
    this.goesOn = false;
  }
  draw() {
    const { view, timeline } = this.detail;
    this.samples = element("div", { class: "samples" });
    refill(this.main, this.trail(), element("h1", {}, view.item), this.outcome(), this.facts(),
      ...this.prompt(), this.controls(), this.samples, ...this.trace(timeline), ...this.revisions());
    this.drawSamples();
  }
  trail() {
    const at = listed.ids.indexOf(this.detail.view.row.group);
    const [newer, older] = at < 0 ? [] : [listed.ids[at - 1], listed.ids[at + 1]];
    return element("div", { class: "bar" }, link(`#/rollouts${listed.query ? `?${listed.query}` : ""}`, "\u2190 Rollouts"),
      element("span", { class: "end" }, newer ? element("a", { class: "button", href: `#/rollouts/${newer}` }, "\u2191 Newer") : null, " ", older ? element("a", { class: "button", href: `#/rollouts/${older}` }, "\u2193 Older") : null));
  }
  outcome() {
    const { row } = this.detail.view;
    return element("p", {}, pill(row.state, TONES[row.state]), " ",
      row.step === null ? null : [row.state === "trained" ? "trained in " : "batched for ", link(`#/rollouts?step=${row.step}`, `optimizer step ${row.step}`), " "],
      row.reason ? element("span", { class: "quiet" }, row.reason) : null);
  }
  facts() {
    const { view, timeline } = this.detail;
    const { row } = view;
    const facts = [
      ["Score, mean", `${number(row.score)} (${number(row.low)} to ${number(row.high)})`], ["Disagreement of raters", number(row.disagreement)],
      ["Largest advantage", number(row.advantage)], ["Verdict", shown(view.verdict)], ["Environment", row.env], ["Policy", view.policy_versions.join(", ")],
      ["Samples, tokens", `${row.samples}${view.samples.length < row.samples ? ` (the first ${view.samples.length} are shown)` : ""}, ${number(row.tokens)}`], ["Difficulty, skill", `${number(view.difficulty)}, ${shown(view.skill)}`],
      ["Stored", clock(row.stored_ns)], took(timeline), ["Producer", timeline.producer], ["Place", `ROLLOUTS:${row.seq}`],
    ];
    return element("div", { class: "card" }, element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      element("p", { class: "quiet small mono" }, row.group),
      Object.entries(view.failures).map(([rater, why]) => element("p", { class: "warning" }, `${rater} gave no rating: ${why}`)),
      this.detail.teacher_reason ? element("p", { class: "warning" }, `Teacher: ${this.detail.teacher_reason}`) : null);
  }
  prompt() {
    const { view } = this.detail;
    const task = Object.keys(view.task).length ? element("details", {}, element("summary", {}, "Task, as the raters see it"), element("pre", {}, JSON.stringify(view.task, null, 2))) : null;
    return [element("h2", {}, "Prompt"), element("div", { class: "card" }, view.prompt.length ? view.prompt.map(turn) : element("p", { class: "quiet" }, "Its texts were not kept."), task)];
  }
  controls() {
    const select = (label, now, choices, changed) => element("label", {}, label, element("select", { onchange: (event) => changed(event.target.value) },
      choices.map(([value, text]) => element("option", { value, selected: value === now }, text))));
    this.scale = element("span", { class: "scale" });
    return element("div", {}, element("h2", {}, "Samples"), element("div", { class: "bar" },
      select("Colour tokens by", colour, Object.entries(COLOURS).map(([value, [text]]) => [value, text]), (value) => { colour = value; this.recolour(); }),
      select("Order", order, [["drawn", "as drawn"], ...[...new Set(["score", ...this.raters()])].flatMap((name) => [[`best=${name}`, `best ${name} first`], [`worst=${name}`, `worst ${name} first`]])], (value) => { order = value; this.drawSamples(); }),
      this.scale, element("span", { class: "quiet small" }, "Dotted tokens are masked: the loss leaves them out. Point at a token, or tab to it and use the arrow keys.")));
  }
  raters() { return [...new Set(this.detail.view.samples.flatMap((sample) => Object.keys(sample.ratings)))]; }
  drawSamples() {
    const { view, tokens } = this.detail;
    const numbers = view.samples.map((_, i) => i);
    const [way, by] = split(order, "first");
    const value = (i) => (by === "score" ? view.samples[i].score : view.samples[i].ratings[by]) ?? null;
    const key = (i) => (value(i) === null ? Infinity : way === "best" ? -value(i) : value(i)); // what is missing comes last
    if (by === "score" || this.raters().includes(by)) numbers.sort((a, b) => (key(a) === key(b) ? 0 : key(a) - key(b)));
    this.strips = [];
    refill(this.samples, ...numbers.map((i) => this.sample(i, view.samples[i], tokens.filter((columns) => columns.sample === i))));
    this.recolour();
  }
  sample(i, sample, sequences) {
    const ratings = Object.entries(sample.ratings).map(([rater, value]) => [
      element("span", {}, rater), element("span", { class: "meter" }, value === null ? null : element("i", { style: { width: `${100 * Math.max(0, Math.min(1, value))}%` } })), element("span", {}, number(value)),
      value === null ? element("span", { class: "why" }, [sample.statuses[rater], this.detail.view.failures[rater]].filter(Boolean).join(": ")) : null]);
    const figures = Object.entries(sample.figures).map(([name, value]) => [element("span", {}, name), element("span", { class: "quiet small" }, "not in the score"), element("span", {}, number(value))]);
    const own = Object.entries(sample.rewards).map(([name, value]) => [element("span", {}, name), element("span", { class: "quiet small" }, "by the environment"), element("span", {}, number(value))]);
    return element("article", { class: "card sample", "aria-label": `Sample ${i}` },
      element("div", { class: "sample-head" }, element("h3", {}, `Sample ${i}`), sample.excluded ? pill("not trained on", "warn") : null,
        element("span", { class: "quiet small" }, `advantage ${number(sample.advantage)}, reward ${number(sample.reward)}`),
        element("span", { class: "score", title: "score" }, number(sample.score))),
      element("div", { class: "quiet small" }, `${number(sample.tokens)} tokens${sample.sequences > 1 ? ` in ${sample.sequences} sequences` : ""}${sample.branches > 1 ? `, ${sample.branches} branches` : ""}, ended by ${sample.finish_reason}, mean logprob ${number(sample.logprob)}`),
      sample.messages.length ? element("div", {}, sample.messages.map(turn)) : null,
      ratings.length || own.length ? element("div", { class: "ratings" }, ratings, figures, own) : element("p", { class: "quiet small" }, "No ratings yet."),
      this.calls(sample), this.turns(sample),
      sequences.map((columns, place) => [
        sample.sequences > 1 ? element("p", { class: "quiet small" }, `Sequence ${place + 1} of ${sample.sequences}, ended by ${columns.finish_reason}`) : null,
        this.strip(columns, sample)]));
  }
  calls({ calls, turns, branches, sequences }) {
    if (!calls.length) return null;
    const rewarded = calls.every((call) => call.turn !== null);
    const names = ["Call", ...(sequences > 1 ? ["In"] : []), ...(branches > 1 ? ["After"] : []), "New", "Said", "End", "Step", ...(rewarded ? ["Reward", "Adv."] : [])];
    const row = (call, place) => {
      const own = rewarded ? turns[call.turn] : null;
      const [first, last] = call.steps;
      return [numeric(rewarded ? call.turn : place), ...(sequences > 1 ? [numeric(call.sequence + 1)] : []), ...(branches > 1 ? [numeric(own?.continues >= 0 ? own.continues : "")] : []),
        numeric(number(call.new)), numeric(number(call.tokens)), call.finish_reason ?? "", numeric(first === last ? first : `${first}\u2013${last}`), ...(rewarded ? [numeric(number(own.reward)), numeric(number(own.advantage))] : [])];
    };
    const inTime = rewarded ? [...calls].sort((a, b) => a.turn - b.turn) : calls;
    return element("details", { class: "small", open: calls.length <= 8, "aria-label": "Calls" }, element("summary", {}, `${calls.length} calls of the model`), table(names, inTime.map(row)),
      element("p", { class: "quiet small" }, `New: tokens that the call before lacks. Said: sampled tokens. Step: of the policy.${sequences > 1 ? " In: the sequence." : ""}${branches > 1 ? " After: the call that it continues." : ""}`));
  }
  turns({ turns, branches, calls }) {
    if (!turns.length || calls.length) return null;
    const text = (turn, place) => `Turn ${place}${branches > 1 && turn.continues >= 0 ? ` continues turn ${turn.continues}` : ""}: reward ${number(turn.reward)}, advantage ${number(turn.advantage)}`;
    return element("details", { class: "quiet small", "aria-label": "Turns" }, element("summary", {}, `Rewards of ${turns.length} turns`),
      turns.map((turn, place) => element("div", {}, text(turn, place))));
  }
  strip(columns, sample) {
    const place = element("div", { class: "tokens", role: "listbox", "aria-label": `Tokens of sequence ${columns.sequence}` });
    const strip = { place, spans: [], tokens: [] };
    this.strips.push(strip);
    this.extend(strip, columns, sample);
    const focusAt = (i) => { const span = strip.spans[i]; if (span) { span.tabIndex = 0; span.focus(); } };
    place.addEventListener("keydown", (event) => {
      const i = strip.spans.indexOf(document.activeElement);
      const step = (by) => { let at = i + by; while (strip.spans[at]?.hidden) at += by; return at; };
      const to = { ArrowRight: step(1), ArrowLeft: step(-1), Home: 0, End: strip.spans.length - 1 }[event.key];
      if (i < 0 || to === undefined || !strip.spans[to]) return;
      event.preventDefault();
      strip.spans[i].tabIndex = -1;
      focusAt(to);
    });
    const inspect = (event) => { const i = strip.spans.indexOf(event.target.closest(".token")); if (i >= 0) this.inspect(strip.tokens[i]); };
    place.addEventListener("pointerover", inspect);
    place.addEventListener("focusin", inspect);
    place.addEventListener("pointerleave", () => { document.getElementById("inspector").hidden = true; });
    place.addEventListener("focusout", () => { document.getElementById("inspector").hidden = true; });
    const total = element("span", { class: "quiet small" }, "");
    const more = element("button", { type: "button", onclick: async () => {
      more.disabled = true;
      try {
        const detail = await this.fetch(`/api/groups/${encodeURIComponent(this.detail.view.row.group)}?sequence=${columns.sequence}&start=${strip.tokens.length}`);
        this.extend(strip, detail.tokens[0], sample);
        this.recolour();
      } catch (error) {
        if (error.name !== "AbortError") showProblem(error.message);
      }
      more.disabled = false;
      more.hidden = strip.tokens.length >= columns.total;
      refill(total, `${number(strip.tokens.length)} of ${number(columns.total)} tokens`);
    } }, "More tokens");
    more.hidden = strip.tokens.length >= columns.total;
    refill(total, `${number(strip.tokens.length)} of ${number(columns.total)} tokens`);
    return element("div", {}, place, this.detail.texts_reason ? element("p", { class: "quiet small" }, `Ids without texts: ${this.detail.texts_reason}`) : null, columns.total > strip.tokens.length ? element("div", { class: "bar" }, more, total) : null);
  }
  extend(strip, columns, sample) {
    const folded = foldedRuns(columns.mask);
    columns.ids.forEach((id, i) => {
      const logprob = columns.logprobs[i];
      const teacher = columns.teacher ? columns.teacher[i] : null;
      const masked = !columns.mask[i];
      const advantage = masked ? null : columns.advantages ? columns.advantages[i] : sample.advantage;
      const text = columns.texts ? columns.texts[i] : ` ${id}`;
      const token = { id, text, masked, logprob, teacher, advantage, difference: logprob === null || teacher === null ? null : logprob - teacher, position: columns.start + i };
      const span = element("span", { class: masked ? "token masked" : "token", role: "option", tabindex: strip.spans.length ? "-1" : "0", "aria-label": `${visible(text).trim() || `token ${id}`}${masked ? ", masked" : ""}` });
      const lines = text === "" ? ["\u00b7"] : text.split("\n");
      lines.forEach((line, n) => {
        if (n) span.append(element("span", { class: "sign" }, "\u21b5"), "\n");
        span.append(visible(line));
      });
      strip.tokens.push(token);
      strip.spans.push(span);
      const fold = folded.find((run) => i >= run.start && i < run.end);
      if (fold) {
        fold.spans.push(span);
        span.hidden = true;
        if (i === fold.start) strip.place.append(foldButton(fold));
      }
      strip.place.append(span);
    });
  }
  recolour() {
    const [name, valueOf, shareOf] = COLOURS[colour];
    let any = colour === "none";
    for (const { spans, tokens } of this.strips) {
      tokens.forEach((token, i) => {
        const value = valueOf(token);
        const share = value === null ? 0 : shareOf(value);
        any ||= value !== null;
        spans[i].classList.toggle("hot", share < 0);
        spans[i].classList.toggle("cold", share > 0);
        spans[i].style.setProperty("--share", `${Math.round(70 * Math.abs(share))}%`);
      });
    }
    const ends = { logprob: ["0", "\u22125 or less"], advantage: ["\u22122", "2"], teacher: ["less likely than by the teacher", "more likely"] }[colour];
    refill(this.scale, ...(!any ? [`There is no ${name} of these tokens.`] : ends ? [ends[0], element("span", { class: `ramp ${colour === "logprob" ? "logprob" : "both"}`, "aria-hidden": "true" }), ends[1]] : []));
  }
  inspect(token) {
    const place = document.getElementById("inspector");
    const fact = (name, value) => element("span", {}, `${name} `, element("b", {}, value));
    refill(place, fact("token", JSON.stringify(token.text)), fact("id", String(token.id)), fact("at", String(token.position)),
      ...(token.masked ? [element("span", { class: "quiet" }, "masked: the loss leaves it out")] : [
        fact("logprob", token.logprob === null ? "-" : String(token.logprob)), fact("probability", token.logprob === null ? "-" : number(Math.exp(token.logprob))),
        fact("teacher", token.teacher === null ? "-" : String(token.teacher)), fact("difference", token.difference === null ? "-" : token.difference.toFixed(4)), fact("advantage", number(token.advantage))]));
    place.hidden = false;
  }
  trace(timeline) {
    if (!timeline.spans.length) return [];
    const [start, end] = extent(timeline.spans.flatMap((span) => [span.start_ns, span.end_ns]));
    const whole = Math.max(end - start, 1);
    const spans = [...timeline.spans].sort((a, b) => a.start_ns - b.start_ns || b.end_ns - a.end_ns);
    return [element("h2", {}, "Trace"), element("div", { class: "card waterfall" }, spans.flatMap((span) => {
      const took = (span.end_ns - span.start_ns) / 1e9;
      const kind = span.parent === null ? "root" : /wait|receive|hold/.test(span.name) ? "wait" : "";
      const at = `${seconds((span.start_ns - start) / 1e9)} after the start`;
      return [element("span", {}, span.parent === null ? "whole rollout" : element("span", { title: span.name }, `${span.service}: ${span.name.replace(/ rl\..*/, "")}`), span.error ? element("span", { class: "pill bad", title: span.error }, "error") : null),
        element("span", { class: "track", title: at }, element("i", { class: kind, style: { left: `${(100 * (span.start_ns - start)) / whole}%`, width: `${(100 * (span.end_ns - span.start_ns)) / whole}%` } })), element("span", { class: "took" }, seconds(took))];
    })), timeline.waits_for ? element("p", { class: "quiet" }, `It waits for ${timeline.waits_for}.`) : null];
  }
  revisions() {
    const { revisions, view } = this.detail;
    if (!revisions.length && this.detail.revisions_complete) return [];
    const live = view.samples.map((sample) => sample.score);
    return [element("h2", {}, "Other revisions"), revisions.length ? table(["Revision", "Verdict", ...live.map((_, i) => `Sample ${i}`)], [["live", shown(view.verdict), ...live.map((score) => numeric(number(score)))],
      ...revisions.map((one) => [element("td", { title: Object.keys(one.raters).join(", ") }, one.revision), one.unscored ?? shown(one.verdict), ...live.map((_, i) => numeric(number(one.scores[i])))])]) : null,
      this.detail.revisions_complete ? null : element("p", { class: "quiet" }, "There are more revisions than could be read in time; see `lachesis compare`.")];
  }
}

// ---- two revisions of the history

class Revisions extends View {
  constructor(query) {
    super();
    this.query = new URLSearchParams(query);
    this.goesOn = false; // a comparison is of the moment: the button requests it again
  }
  async refresh() {
    if (!runFacts) await this.readRun();
    titled("Revisions");
    const { revisions } = await this.fetch("/api/revisions");
    if (revisions.length < 2) {
      refill(this.main, element("h1", {}, "Revisions"), element("p", { class: "quiet" }, "This run has only its live revision. `lachesis replay --revision NAME` scores its history again under another one."));
      return;
    }
    const [a, b] = [this.query.get("a") ?? revisions[0], this.query.get("b") ?? revisions[1]];
    const found = element("div", { id: "comparison" }, element("p", { class: "quiet" }, "Comparing..."));
    refill(this.main, element("h1", {}, "Two revisions of the history"), this.form(revisions, a, b), found);
    try {
      refill(found, ...this.comparison(a, b, await this.fetch(`/api/comparison?${new URLSearchParams({ a, b })}`)));
    } catch (error) {
      found.replaceChildren();
      throw error;
    }
  }
  form(revisions, a, b) {
    const select = (name, label, chosen) => element("label", {}, label, element("select", { name }, revisions.map((one) => element("option", { value: one, selected: one === chosen }, one))));
    return element("form", { class: "filters", onsubmit: (event) => {
      event.preventDefault();
      const asked = `#/revisions?${new URLSearchParams(new FormData(event.target))}`;
      if (location.hash === asked) this.poll();
      else location.hash = asked;
    } }, select("a", "First", a), select("b", "Second", b), element("button", { class: "main" }, "Compare"));
  }
  comparison(a, b, found) {
    return [
      ...found.findings.map((text) => element("p", { class: "warning" }, text)),
      element("div", { class: "charts" }, found.histograms.map(histogram)),
      ...found.tables.slice(0, 2).flatMap(reportTable),
      found.disputed.length ? element("h2", {}, "Most disputed") : null,
      ...found.disputed.map((one) => element("div", { class: "card" }, element("p", {}, groupLink(one.group), ` ${one.title}`), one.lines.map(([role, text]) => turn({ role, content: text })))),
      ...found.tables.slice(2).flatMap(reportTable),
    ].filter(Boolean);
  }
}

function reportTable({ title, header, rows }) {
  return rows.length ? [element("h2", {}, title), table(header, rows)] : [];
}

/** Scores of the same groups under two revisions: the first filled, the second as a line. */
function histogram({ title, a, b, edges, counts }) {
  const [width, height, left, bottom, top, right] = [330, 150, 46, 20, 8, 6];
  const most = Math.max(1, ...counts.flat());
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const x = (score) => left + ((width - left - right) * (score - low)) / (high - low || 1);
  const y = (count) => height - bottom - ((height - bottom - top) * count) / most;
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: scores of ${a} and ${b}` });
  for (const count of [0, most]) svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(count), y2: y(count) }), drawn("text", { x: left - 5, y: y(count) + 4, "text-anchor": "end" }, number(count)));
  counts[0].forEach((count, i) => svg.append(drawn("rect", { x: x(edges[i]), y: y(count), width: Math.max(0.5, x(edges[i + 1]) - x(edges[i])), height: Math.max(0, y(0) - y(count)), style: { fill: "var(--line-1)", opacity: 0.45 } })));
  svg.append(drawn("polyline", { points: counts[1].flatMap((count, i) => [`${x(edges[i]).toFixed(1)},${y(count).toFixed(1)}`, `${x(edges[i + 1]).toFixed(1)},${y(count).toFixed(1)}`]).join(" "), style: { stroke: "var(--line-2)" } }));
  svg.append(drawn("text", { x: left, y: height - 4 }, number(low)), drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, number(high)));
  const key = (name, i) => element("span", {}, element("span", { class: "key", style: { background: `var(--line-${i + 1})` } }), name);
  return element("div", { class: "card" }, element("div", { class: "chart-head" }, element("h3", {}, `Scores, ${title}`)), svg, element("div", { class: "legend" }, key(a, 0), key(b, 1)));
}

/** The inner part of long runs of masked tokens: a prompt of thousands would hide what was sampled. */
function foldedRuns(mask) {
  const runs = [];
  for (let start = 0; start < mask.length; ) {
    let end = start;
    while (end < mask.length && !mask[end]) end++;
    if (end - start >= FOLD_TOKENS) runs.push({ start: start + FOLD_KEPT, end: end - FOLD_KEPT, spans: [] });
    start = Math.max(end, start + 1);
  }
  return runs;
}

/** How long a rollout took; of one that goes on, so far. Of one that was left when its run stopped there is no end. */
function took({ ended_ns: ended, seconds: so_far }) {
  return ended === null && so_far !== null && runFacts.goes_on ? ["Under way for", seconds(so_far)] : ["From task to end", ended === null ? "-" : seconds(so_far)];
}

function foldButton(fold) {
  const button = element("button", { class: "fold", type: "button", onclick: () => {
    for (const span of fold.spans) span.hidden = false;
    button.remove();
  } }, `show ${number(fold.end - fold.start)} masked tokens`);
  return button;
}

function turn(message) {
  return element("div", { class: `turn ${message.role === "assistant" ? "assistant" : ""}` }, element("span", { class: "role" }, message.name ? `${message.role} (${message.name})` : message.role),
    message.content ? element("div", { class: "said", tabindex: message.content.length > 1500 ? "0" : null }, message.content) : null,
    (message.tool_calls ?? []).map((call) => element("div", { class: "said call" }, `calls ${call.name}(${call.arguments})`)),
    message.attachments?.length ? element("div", { class: "quiet small" }, `${message.attachments.length} attachments`) : null);
}

// ---- start

window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => { if (!document.hidden && current?.goesOn !== false) current?.poll(); });
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });
route();
