"use strict";
// The list of runs, filled again every two seconds; rows stay in place, so ticks and focus do too.
(() => {
  const body = document.querySelector("#runs tbody");
  const filter = document.getElementById("filter");
  const button = document.getElementById("compare");
  const rows = new Map();
  const fixed = (v, digits) => v === null ? "" : v.toPrecision(digits);
  const count = (v) => v === null ? "" : v >= 1000 ? (v / 1000).toPrecision(3) + "k tokens/s" : v.toPrecision(3) + " tokens/s";

  function time(seconds) {
    if (seconds === null) return "";
    const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
    return h ? `${h} h ${m} min` : m ? `${m} min` : `${s} s`;
  }
  function cell(row, name, className) {
    const td = row.insertCell();
    if (name) td.dataset.name = name;
    if (className) td.className = className;
    return td;
  }
  function make(path) {
    const row = body.insertRow();
    row.dataset.run = path;
    const tick = document.createElement("input");
    tick.type = "checkbox"; tick.setAttribute("aria-label", "compare " + path);
    tick.addEventListener("change", ticked);
    cell(row).append(tick);
    const link = document.createElement("a");
    link.href = "/run/" + path.split("/").map(encodeURIComponent).join("/");
    link.textContent = path;
    cell(row).append(link);
    const badge = document.createElement("span");
    cell(row).append(badge);
    const bar = document.createElement("progress"), steps = document.createElement("div");
    steps.className = "muted";
    cell(row).append(bar, steps);
    const made = { row, tick, badge, bar, steps, stage: cell(row, "stage"), loss: cell(row, "loss"), speed: cell(row, "speed"),
      eta: cell(row, "left"), evaluation: cell(row, "evaluated", "wrap") };
    rows.set(path, made);
    return made;
  }
  const ticks = () => [...rows].filter(([, r]) => r.tick.checked).map(([path]) => path);
  function ticked() { button.disabled = ticks().length < 2; }
  function sieve() { for (const [path, r] of rows) r.row.hidden = !path.includes(filter.value); }

  function fill(runs) {
    const seen = new Set();
    for (const run of runs) {
      seen.add(run.path);
      const r = rows.get(run.path) || make(run.path);
      r.badge.textContent = run.state; r.badge.className = "badge " + run.state;
      r.bar.max = run.total_steps || 1; r.bar.value = run.total_steps ? run.step : 0;
      r.steps.textContent = run.total_steps ? `${run.step} of ${run.total_steps}` : String(run.step);
      r.stage.textContent = run.stage; r.loss.textContent = fixed(run.loss, 4);
      r.speed.textContent = run.state === "running" ? count(run.tokens_per_second) : "";
      r.eta.textContent = run.state === "running" ? time(run.eta_seconds) : "";
      r.evaluation.textContent = run.evaluation;
    }
    for (const [path, r] of rows) if (!seen.has(path)) { r.row.remove(); rows.delete(path); }
    document.getElementById("empty").hidden = runs.length > 0;
    sieve(); ticked();
  }
  async function refresh() {
    const when = document.getElementById("when");
    try {
      const answer = await fetch("/api/runs");
      if (!answer.ok) throw new Error(String(answer.status));
      fill(await answer.json());
      when.textContent = "as of " + new Date().toLocaleTimeString();
    } catch (error) {
      when.textContent = "the board does not answer";
    }
    setTimeout(refresh, 2000);
  }
  filter.addEventListener("input", sieve);
  button.addEventListener("click", () => {
    location.href = "/compare?" + ticks().map((path) => "run=" + encodeURIComponent(path)).join("&");
  });
  fill(JSON.parse(document.getElementById("first").textContent));
  setTimeout(refresh, 1000);
})();
