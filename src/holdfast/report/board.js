"use strict";
// The list of runs, filled again every two seconds, and a view of the ticked ones that the page's address holds.
// Every text goes in as text: names of runs and tasks are whatever someone called them.
(() => {
  const byId = (id) => document.getElementById(id);
  const body = document.querySelector("#runs tbody");
  const rows = new Map();
  const COLORS = 10, HEIGHT = 260, LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 34;
  const view = { runs: [], metrics: null, axis: "tokens", smooth: 0, log: false, follow: true, low: null, high: null,
    measure: "", filter: "", state: "", sort: "path", down: false };
  let WIDTH = 560; // of a chart: as wide as its place, so that letters keep their size
  let known = [], curves = { metrics: [], series: {} }, etag = "", asking = 0, timer = 0, matrixKey = "";

  // Numbers and elements.
  const big = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const show = (v) => v === null || v === undefined ? "–" : v === 0 ? "0" : Math.abs(v) >= 10000 ? big.format(v)
    : Math.abs(v) < 0.001 ? v.toExponential(2) : String(Number(v.toPrecision(5)));
  const fixed = (v, digits) => v === null ? "" : Math.abs(v) >= 1e6 ? v.toExponential(2) : v.toPrecision(digits);
  const count = (v) => v === null ? "" : (v >= 1000 ? (v / 1000).toPrecision(3) + "k" : v.toPrecision(3)) + " tokens/s";
  function time(seconds) {
    if (seconds === null) return "";
    const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
    return h ? `${h} h ${m} min` : m ? `${m} min` : `${s} s`;
  }
  function make(parent, tag, content, className) {
    const element = parent.appendChild(document.createElement(tag));
    if (content !== undefined && content !== "") element.textContent = content;
    if (className) element.className = className;
    return element;
  }
  function draw(parent, tag, attributes, content) {
    const element = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (content !== undefined) element.textContent = content;
    return element;
  }
  const say = (text) => { byId("said").textContent = text; };
  const color = (path) => "c" + view.runs.indexOf(path) % COLORS;
  // The end of a path that no other ticked run has: `seed0` alone, `plain/seed0` beside `held/seed0`.
  function short(path) {
    const parts = path.split("/");
    const tails = parts.map((_, index) => parts.slice(-index - 1).join("/"));
    return tails.find((tail) => !view.runs.some((other) => other !== path && ("/" + other).endsWith("/" + tail))) || path;
  }

  // The list.
  function cell(row, name, className) {
    const td = row.insertCell();
    if (name) td.dataset.name = name;
    if (className) td.className = className;
    return td;
  }
  function add(path) {
    const row = body.insertRow();
    row.dataset.run = path;
    const tick = document.createElement("input");
    tick.type = "checkbox"; tick.setAttribute("aria-label", "show and compare " + path);
    tick.addEventListener("change", () => choose(path, tick.checked));
    cell(row).append(tick);
    const link = document.createElement("a");
    link.href = "/run/" + path.split("/").map(encodeURIComponent).join("/");
    // A path may be broken after its folders, never inside a name, at a hyphen neither; a very long one anywhere.
    path.split("/").forEach((name, index, names) => {
      make(link, "span", index < names.length - 1 ? name + "/" : name, name.length > 40 ? "long" : "");
      if (index < names.length - 1) link.append(document.createElement("wbr"));
    });
    cell(row).append(link);
    const badge = document.createElement("span");
    cell(row).append(badge);
    const bar = document.createElement("progress"), steps = document.createElement("div");
    bar.setAttribute("aria-label", "progress of " + path);
    steps.className = "muted";
    cell(row).append(bar, steps);
    const made = { row, tick, badge, bar, steps, told: "", stage: cell(row, "stage"), loss: cell(row, "loss"),
      speed: cell(row, "speed"), eta: cell(row, "left"), evaluation: cell(row, "evaluated", "wrap") };
    rows.set(path, made);
    return made;
  }
  function fill(runs) {
    const seen = new Set(), before = new Map(known.map((run) => [run.path, run.state]));
    for (const run of runs) {
      seen.add(run.path);
      const r = rows.get(run.path) || add(run.path), told = JSON.stringify(run);
      if (before.has(run.path) && before.get(run.path) !== run.state) say(`${run.path} is ${run.state}`);
      if (r.told === told) continue; // of a thousand runs a few change
      r.told = told;
      r.badge.textContent = run.state; r.badge.className = "badge " + run.state;
      r.bar.max = run.total_steps || 1; r.bar.value = run.total_steps ? run.step : 0;
      r.steps.textContent = run.total_steps ? `${run.step} of ${run.total_steps}` : String(run.step);
      r.stage.textContent = run.stage; r.loss.textContent = fixed(run.loss, 4);
      r.speed.textContent = run.state === "running" ? count(run.tokens_per_second) : "";
      r.eta.textContent = run.state === "running" ? time(run.eta_seconds) : "";
      r.evaluation.textContent = run.evaluation;
      if (run.problem) make(r.evaluation, "div", run.problem, "problem");
    }
    for (const [path, r] of rows) if (!seen.has(path)) { r.row.remove(); rows.delete(path); }
    known = runs;
    byId("runs").classList.toggle("still", !runs.some((run) => run.state === "running"));
    byId("empty").hidden = runs.length > 0;
    order(); sieve(); marks();
  }
  function order() {
    const key = view.sort, sign = view.down ? -1 : 1;
    const rank = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign;
    const sorted = [...known].sort((a, b) => rank(a[key], b[key]) || rank(a.path, b.path));
    let place = body.firstElementChild;
    for (const run of sorted) { // only what is out of place moves: focus stays
      const row = rows.get(run.path).row;
      if (row === place) place = place.nextElementSibling; else body.insertBefore(row, place);
    }
    for (const th of document.querySelectorAll("th[data-sort]"))
      if (th.dataset.sort === key) th.setAttribute("aria-sort", view.down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
  }
  const listed = () => known.filter((run) => run.path.includes(view.filter) && (!view.state || run.state === view.state));
  function sieve() {
    const shown = new Set(listed().map((run) => run.path));
    for (const [path, r] of rows) if (r.row.hidden === shown.has(path)) r.row.hidden = !shown.has(path);
    byId("count").textContent = shown.size === known.length ? `${known.length} runs` : `${shown.size} of ${known.length} runs`;
  }
  function marks() {
    for (const [path, r] of rows) {
      const on = view.runs.includes(path);
      r.tick.checked = on;
      r.row.className = on ? "ticked " + color(path) : "";
    }
    byId("compare").disabled = view.runs.length < 2;
    document.querySelector(".list").classList.toggle("short", view.runs.length > 0);
  }
  async function refresh() {
    const when = byId("when");
    try {
      const answer = await fetch("/api/runs", etag ? { headers: { "If-None-Match": etag } } : {});
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(String(answer.status));
        etag = answer.headers.get("ETag") || "";
        fill(await answer.json());
      }
      when.textContent = "as of " + new Date().toLocaleTimeString();
      const live = known.some((run) => run.state === "running" && view.runs.includes(run.path));
      if (view.follow && live) ask(true);
    } catch (error) {
      when.textContent = "the board does not answer";
    }
    setTimeout(refresh, document.hidden ? 10000 : 2000);
  }

  // The view and its address.
  function write() {
    const q = new URLSearchParams();
    for (const run of view.runs) q.append("run", run);
    for (const metric of view.metrics || []) q.append("metric", metric);
    if (view.axis !== "tokens") q.set("x", view.axis);
    if (view.smooth) q.set("smooth", String(view.smooth));
    if (view.log) q.set("log", "1");
    if (!view.follow) q.set("follow", "0");
    if (view.low !== null) { q.set("low", String(view.low)); q.set("high", String(view.high)); }
    if (view.measure) q.set("measure", view.measure);
    if (view.filter) q.set("filter", view.filter);
    if (view.state) q.set("state", view.state);
    if (view.sort !== "path" || view.down) q.set("sort", (view.down ? "-" : "") + view.sort);
    const text = q.toString();
    history.replaceState(null, "", text ? "/?" + text : "/");
  }
  function readAddress() {
    const q = new URLSearchParams(location.search), number = (name) => q.has(name) && isFinite(q.get(name)) ? Number(q.get(name)) : null;
    view.runs = [...new Set(q.getAll("run"))]; view.metrics = q.has("metric") ? q.getAll("metric") : null;
    view.axis = q.get("x") === "step" ? "step" : "tokens";
    view.smooth = Math.min(Math.max(number("smooth") || 0, 0), 0.99); view.log = q.get("log") === "1"; view.follow = q.get("follow") !== "0";
    view.low = number("low"); view.high = number("high");
    if (view.low === null || view.high === null || !(view.low < view.high)) view.low = view.high = null;
    view.measure = q.get("measure") || ""; view.filter = q.get("filter") || "";
    view.state = ["running", "finished", "unfinished", "unreadable"].includes(q.get("state")) ? q.get("state") : "";
    const sort = q.get("sort") || "path";
    view.down = sort.startsWith("-"); view.sort = sort.replace("-", "");
    if (!["path", "state", "step", "loss", "updated"].includes(view.sort)) view.sort = "path";
    byId("axis").value = view.axis; byId("smooth").value = view.smooth; byId("weight").textContent = view.smooth;
    byId("log").checked = view.log; byId("follow").checked = view.follow; byId("filter").value = view.filter; byId("state").value = view.state;
  }
  function choose(path, on) {
    view.runs = on ? [...view.runs.filter((other) => other !== path), path] : view.runs.filter((other) => other !== path);
    changed();
  }
  function changed() { write(); marks(); ask(false); }

  async function ask(quiet) {
    const chosen = view.runs.length > 0;
    byId("chosen").hidden = !chosen; byId("hint").hidden = chosen;
    if (!chosen) return;
    const mine = ++asking, q = new URLSearchParams();
    for (const run of view.runs) q.append("run", run);
    for (const metric of view.metrics || ["train/loss", "validation/loss"]) q.append("metric", metric);
    q.set("x", view.axis);
    if (view.smooth) q.set("smooth", String(view.smooth));
    if (view.low !== null) { q.set("low", String(view.low)); q.set("high", String(view.high)); }
    try {
      const answer = await fetch("/api/curves?" + q);
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      if (mine !== asking) return; // a newer question is on its way
      if (follow(found)) { ask(true); return; }
      curves = found;
      paint();
      if (!quiet) say(`${view.runs.length} runs, ${Object.keys(curves.series).length} charts`);
      matrices();
    } catch (error) {
      if (!quiet) say("the curves could not be read");
    }
  }
  // A window whose right edge is the newest value stays there as a run goes on.
  let newest = null;
  function follow(found) {
    const ends = Object.values(found.series).flatMap((lines) => Object.values(lines).map((line) => line.end));
    const end = ends.length ? Math.max(...ends) : null, before = newest;
    newest = end;
    if (!view.follow || view.low === null || before === null || end === null || end <= before || view.high < before) return false;
    const width = view.high - view.low;
    view.high = end; view.low = end - width;
    write();
    return true;
  }

  // Charts.
  function ticks(low, high, wanted) {
    if (!(high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) return [low];
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }
  function paint() {
    legend(); picker();
    const shown = Object.entries(curves.series).filter(([, lines]) => Object.keys(lines).length);
    const place = byId("charts"), room = place.clientWidth;
    WIDTH = Math.round(Math.max(260, (room >= 976 && shown.length > 1 ? (room - 16) / 2 : room) - 30));
    const old = new Map([...place.children].map((figure) => [figure.dataset.metric, figure]));
    for (const [metric, figure] of old) if (!shown.some(([name]) => name === metric)) figure.remove();
    for (const [metric, lines] of shown) {
      const figure = old.get(metric) || frame(place, metric);
      chart(figure, metric, lines);
      place.append(figure);
    }
    if (!shown.length && !place.childElementCount) make(place, "p", "These runs have no such curve.", "muted");
    else for (const p of place.querySelectorAll(":scope > p")) p.remove();
  }
  function frame(place, metric) {
    const figure = make(place, "figure");
    figure.dataset.metric = metric;
    make(figure, "h3", metric);
    const svg = draw(figure, "svg", { class: "chart", role: "img", tabindex: "0" });
    const details = make(figure, "details");
    make(details, "summary", "Table");
    make(details, "div", "", "scroll");
    details.addEventListener("toggle", () => table(figure));
    listen(figure, svg);
    return figure;
  }
  function chart(figure, metric, lines) {
    const svg = figure.querySelector("svg"), all = Object.values(lines);
    const xs = all.flatMap((line) => line.line.x);
    const x = view.low !== null ? [view.low, view.high] : [Math.min(...xs, 0), Math.max(...xs, 1)];
    const inView = (line) => line.y.filter((v, i) => v !== null && line.x[i] >= x[0] && line.x[i] <= x[1]);
    const seen = all.flatMap((line) => [...inView(line.line), ...(line.faint ? inView(line.faint) : [])]);
    const log = view.log && seen.length > 0 && seen.every((v) => v > 0), scale = log ? Math.log10 : (v) => v;
    let low = Math.min(...seen.map(scale)), high = Math.max(...seen.map(scale));
    if (!seen.length) { low = 0; high = 1; }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    low -= pad; high += pad;
    const px = (v) => LEFT + (v - x[0]) / (x[1] - x[0] || 1) * (WIDTH - LEFT - RIGHT);
    const py = (v) => HEIGHT - BOTTOM - (scale(v) - low) / (high - low || 1) * (HEIGHT - TOP - BOTTOM);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    for (const tick of ticks(low, high, 5)) {
      const y = HEIGHT - BOTTOM - (tick - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
      draw(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y });
      draw(svg, "text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, show(log ? Number((10 ** tick).toPrecision(3)) : tick));
    }
    for (const tick of ticks(x[0], x[1], Math.max(2, Math.floor(WIDTH / 110)))) {
      draw(svg, "line", { class: "grid", x1: px(tick), x2: px(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 });
      draw(svg, "text", { class: "tick", x: px(tick), y: HEIGHT - BOTTOM + 16, "text-anchor": px(tick) > WIDTH - 30 ? "end" : "middle" }, show(tick));
    }
    draw(svg, "text", { class: "label", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, view.axis === "step" ? "steps" : "tokens");
    const clip = "clip" + [...byId("charts").children].indexOf(figure);
    draw(draw(svg, "clipPath", { id: clip }), "rect", { x: LEFT, y: TOP - 4, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 8 });
    const inside = draw(svg, "g", { "clip-path": `url(#${clip})` });
    const path = (line) => { let up = true; return line.x.map((at, i) => {
      const y = line.y[i];
      if (y === null || (log && y <= 0)) { up = true; return ""; }
      const text = (up ? "M" : "L") + px(at).toFixed(1) + " " + py(y).toFixed(1);
      up = false; return text; }).join(""); };
    for (const run of view.runs) {
      const line = lines[run];
      if (!line) continue;
      const group = draw(inside, "g", { class: color(run) + (view.runs.indexOf(run) >= COLORS ? " dashed" : "") });
      group.dataset.line = run;
      if (line.faint) draw(group, "path", { class: "faint", d: path(line.faint) });
      draw(group, "path", { class: "line", d: path(line.line) });
      if (line.line.x.length < 40) line.line.x.forEach((at, i) => line.line.y[i] === null || draw(group, "circle", { cx: px(at).toFixed(1), cy: py(line.line.y[i]).toFixed(1), r: 2.5 }));
    }
    draw(svg, "rect", { class: "pick", x: 0, y: TOP, width: 0, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
    draw(svg, "line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const told = view.runs.filter((run) => lines[run]).map((run) => `${short(run)} ${show(lines[run].last)}`).join(", ");
    svg.setAttribute("aria-label", `${metric} over ${view.axis === "step" ? "steps" : "tokens"}, last values: ${told}`);
    figure.drawn = { x, px, lines, places: [...new Set(xs)].filter((at) => at >= x[0] && at <= x[1]).sort((a, b) => a - b), at: figure.drawn ? figure.drawn.at : -1 };
    table(figure);
  }
  function table(figure) {
    const details = figure.querySelector("details");
    if (!details.open) return;
    const { lines, places } = figure.drawn, box = details.querySelector("div"), every = Math.max(1, Math.ceil(places.length / 50));
    box.replaceChildren();
    const made = make(box, "table"), head = make(make(made, "thead"), "tr"), inside = make(made, "tbody");
    const runs = view.runs.filter((run) => lines[run]);
    for (const name of [view.axis === "step" ? "step" : "tokens", ...runs]) make(head, "th", name).scope = "col";
    for (const at of places.filter((_, index) => index % every === 0 || index === places.length - 1)) {
      const row = make(inside, "tr");
      make(row, "th", show(at)).scope = "row";
      for (const run of runs) make(row, "td", show(lines[run].line.y[nearest(lines[run].line.x, at)]), "number");
    }
  }
  function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (values[mid] < x) low = mid; else high = mid; }
    return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
  }
  function read(figure, at, clientX, clientY, aloud) {
    const { px, lines, x } = figure.drawn, cursor = figure.querySelector(".cursor"), tip = byId("tip"), told = [];
    cursor.setAttribute("x1", px(at)); cursor.setAttribute("x2", px(at)); cursor.setAttribute("visibility", "visible");
    tip.replaceChildren();
    make(tip, "b", `${show(at)} ${view.axis === "step" ? "steps" : "tokens"}`);
    for (const run of view.runs) {
      const line = lines[run] && lines[run].line;
      if (!line || !line.x.length) continue;
      const i = nearest(line.x, at);
      if (Math.abs(line.x[i] - at) > (x[1] - x[0]) * 0.05) continue;
      const row = make(tip, "div"), name = make(row, "span", "", color(run));
      make(name, "i"); name.append(short(run));
      make(row, "span", show(line.y[i]));
      told.push(`${short(run)} ${show(line.y[i])}`);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, clientX + 16 + box.width > innerWidth ? clientX - box.width - 16 : clientX + 16) + "px";
    tip.style.top = Math.max(4, Math.min(clientY + 12, innerHeight - box.height - 4)) + "px";
    if (aloud) say(`${show(at)}: ${told.join(", ")}`);
  }
  function listen(figure, svg) {
    let from = null;
    const value = (event) => {
      const box = svg.getBoundingClientRect(), { x } = figure.drawn;
      const at = (event.clientX - box.left) / box.width * WIDTH;
      return x[0] + Math.min(Math.max((at - LEFT) / (WIDTH - LEFT - RIGHT), 0), 1) * (x[1] - x[0]);
    };
    const away = () => { byId("tip").hidden = true; svg.querySelector(".cursor")?.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { from = value(event); svg.setPointerCapture(event.pointerId); } });
    svg.addEventListener("pointermove", (event) => {
      const { places, px } = figure.drawn;
      if (from !== null) {
        const [a, b] = [from, value(event)].sort((p, q) => p - q), pick = svg.querySelector(".pick");
        pick.setAttribute("x", px(a)); pick.setAttribute("width", px(b) - px(a)); pick.setAttribute("visibility", "visible");
        return;
      }
      if (places.length) read(figure, places[nearest(places, value(event))], event.clientX, event.clientY, false);
    });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [a, b] = [from, value(event)].sort((p, q) => p - q), { x } = figure.drawn;
      from = null;
      svg.querySelector(".pick").setAttribute("visibility", "hidden");
      if (b - a > (x[1] - x[0]) * 0.01) zoom(a, b);
    });
    svg.addEventListener("pointercancel", () => { from = null; });
    svg.addEventListener("pointerleave", away);
    svg.addEventListener("blur", away);
    svg.addEventListener("dblclick", () => zoom(null, null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], drawn = figure.drawn;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "+" || event.key === "=") scaled(0.5);
      else if (event.key === "-") scaled(2);
      else if (event.key === "0") zoom(null, null);
      else if (event.key === "Escape") away();
      else if (step && event.shiftKey) moved(step);
      else if (step && drawn.places.length) {
        drawn.at = Math.min(Math.max(drawn.at + step, 0), drawn.places.length - 1);
        const box = svg.getBoundingClientRect(), at = drawn.places[drawn.at];
        read(figure, at, box.left + box.width * drawn.px(at) / WIDTH, box.top + 20, true);
      } else return;
      event.preventDefault();
    });
  }
  const span = () => {
    const first = document.querySelector("#charts figure");
    return view.low !== null ? [view.low, view.high] : first && first.drawn ? first.drawn.x : null;
  };
  function zoom(low, high) {
    view.low = low; view.high = high;
    say(low === null ? "the whole run" : `from ${show(low)} to ${show(high)}`);
    write(); ask(true);
  }
  function scaled(factor) {
    const now = span();
    if (!now) return;
    const middle = (now[0] + now[1]) / 2, half = (now[1] - now[0]) / 2 * factor;
    if (newest !== null && 2 * half >= newest) zoom(null, null); else zoom(Math.max(0, middle - half), middle + half);
  }
  function moved(direction) {
    const now = span();
    if (!now || view.low === null) return;
    const by = Math.max(direction * (now[1] - now[0]) / 4, -now[0]);
    zoom(now[0] + by, now[1] + by);
  }

  // What is shown: runs, curves, matrices.
  function legend() {
    const list = byId("lines");
    list.replaceChildren();
    for (const run of view.runs) {
      const button = make(make(list, "li"), "button", "", color(run));
      button.type = "button"; button.setAttribute("aria-label", "untick " + run);
      make(button, "i"); button.append(run + (rows.has(run) ? "" : " (not there)"));
      button.addEventListener("click", () => choose(run, false));
    }
  }
  function picker() {
    const box = byId("metrics"), names = curves.metrics, on = Object.keys(curves.series), key = JSON.stringify([names, on]);
    byId("picked").textContent = on.length > 2 ? `${on.length} chosen` : on.join(", ") || "none";
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    const kept = document.activeElement && box.contains(document.activeElement) ? document.activeElement.value : null;
    for (const label of box.querySelectorAll("label")) label.remove();
    for (const name of [...new Set([...names, ...on])].sort()) {
      const label = make(box, "label"), tick = make(label, "input");
      tick.type = "checkbox"; tick.value = name; tick.checked = on.includes(name);
      label.append(" " + name);
      tick.addEventListener("change", () => {
        view.metrics = [...box.querySelectorAll("input")].filter((each) => each.checked).map((each) => each.value);
        changed();
      });
      if (name === kept) tick.focus();
    }
  }
  async function matrices() {
    const key = JSON.stringify([view.runs, view.measure, known.filter((run) => view.runs.includes(run.path)).map((run) => run.evaluation)]);
    if (key === matrixKey) return;
    matrixKey = key;
    const q = new URLSearchParams();
    for (const run of view.runs) q.append("run", run);
    if (view.measure) q.set("measure", view.measure);
    const answer = await fetch("/api/matrix?" + q);
    if (!answer.ok || key !== matrixKey) { matrixKey = ""; return; }
    const found = await answer.json(), select = byId("measure"), place = byId("matrices");
    select.replaceChildren();
    for (const measure of found.measures) make(select, "option", measure.replaceAll("_", " ")).value = measure;
    select.value = view.measure || "bits_per_byte";
    place.replaceChildren();
    for (const each of found.runs) {
      const figure = make(place, "figure", "", color(each.run)), title = make(figure, "h3", each.run);
      title.id = "matrix" + place.childElementCount;
      if (!each.rows) { make(figure, "p", each.problem || "not measured", each.problem ? "problem" : "muted"); continue; }
      const box = make(figure, "div", "", "scroll"), table = make(box, "table", "", "heat");
      box.tabIndex = 0; box.setAttribute("role", "region"); box.setAttribute("aria-labelledby", title.id);
      make(table, "caption", each.title);
      const head = make(make(table, "thead"), "tr"), inside = make(table, "tbody");
      make(head, "td");
      for (const name of each.columns) make(head, "th", name).scope = "col";
      each.cells.forEach((cells, index) => {
        const row = make(inside, "tr");
        make(row, "th", each.rows[index]).scope = "row";
        for (const item of cells) {
          const td = make(row, "td", item.value === null ? "–" : show(item.value), item.value === null ? "none"
            : `${item.shade >= 0 ? "better" : "worse"} s${Math.min(Math.abs(item.shade), 20)}${item.home ? " home" : ""}`);
          if (item.ends) make(td, "small", item.ends);
        }
      });
    }
  }

  // Controls.
  const later = (work) => { clearTimeout(timer); timer = setTimeout(work, 150); };
  byId("filter").addEventListener("input", () => { view.filter = byId("filter").value; write(); sieve(); });
  byId("state").addEventListener("change", () => { view.state = byId("state").value; write(); sieve(); });
  byId("all").addEventListener("click", () => {
    const most = 32, added = listed().map((run) => run.path).filter((path) => !view.runs.includes(path));
    if (view.runs.length + added.length > most) say(`the first ${most} are chosen: more lines cannot be told apart`);
    view.runs = [...view.runs, ...added].slice(0, most); changed();
  });
  byId("none").addEventListener("click", () => { view.runs = []; changed(); });
  byId("compare").addEventListener("click", () => {
    location.href = "/compare?" + view.runs.map((path) => "run=" + encodeURIComponent(path)).join("&");
  });
  for (const th of document.querySelectorAll("th[data-sort]")) th.querySelector("button").addEventListener("click", () => {
    view.down = view.sort === th.dataset.sort && !view.down; view.sort = th.dataset.sort; write(); order();
  });
  byId("axis").addEventListener("change", () => { view.axis = byId("axis").value; view.low = view.high = newest = null; changed(); });
  byId("smooth").addEventListener("input", () => { view.smooth = Number(byId("smooth").value); byId("weight").textContent = view.smooth; later(changed); });
  byId("log").addEventListener("change", () => { view.log = byId("log").checked; write(); paint(); });
  byId("follow").addEventListener("change", () => { view.follow = byId("follow").checked; changed(); });
  byId("measure").addEventListener("change", () => { view.measure = byId("measure").value; write(); matrices(); });
  byId("in").addEventListener("click", () => scaled(0.5));
  byId("out").addEventListener("click", () => scaled(2));
  byId("left").addEventListener("click", () => moved(-1));
  byId("right").addEventListener("click", () => moved(1));
  byId("whole").addEventListener("click", () => zoom(null, null));
  byId("link").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(location.href); say("the link is copied"); byId("link").textContent = "Copied"; }
    catch (error) { byId("link").textContent = "The address bar holds it"; }
    setTimeout(() => { byId("link").textContent = "Copy link"; }, 2000);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) { event.preventDefault(); byId("filter").focus(); }
    if (event.key === "Escape" && byId("picker").open) { byId("picker").open = false; byId("picker").querySelector("summary").focus(); }
  });
  document.addEventListener("pointerdown", (event) => { if (!byId("picker").contains(event.target)) byId("picker").open = false; });
  addEventListener("resize", () => later(() => { if (view.runs.length) paint(); }));
  addEventListener("popstate", () => { readAddress(); marks(); ask(false); });

  readAddress();
  fill(JSON.parse(byId("first").textContent));
  ask(true);
  setTimeout(refresh, 1000);
})();
