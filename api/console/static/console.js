// What the pages do beyond links and forms: they stay fresh, and listen to keys. Reading needs none of it.
"use strict";

// --- times: from now, counted here, so that a page that is not refreshed is not wrong either

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 0, ""]];

function span(seconds) {
  for (const [length, name, smaller, small] of UNITS) {
    if (seconds < length) continue;
    const rest = smaller ? Math.floor((seconds % length) / smaller) : 0;
    return `${Math.floor(seconds / length)} ${name}` + (rest ? ` ${rest} ${small}` : "");
  }
  return `${Math.floor(seconds)} s`;
}

function countTimes() {
  for (const element of document.querySelectorAll("time[datetime], time[data-since]")) {
    const at = Date.parse(element.dateTime || element.dataset.since);
    const seconds = (Date.now() - at) / 1000;
    const words = element.dataset.since ? span(Math.max(0, seconds)) : seconds >= 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
    if (element.textContent !== words) element.textContent = words;
  }
  // Without JavaScript these stand in UTC.
  for (const element of document.querySelectorAll("time[data-local]")) {
    const at = new Date(element.dataset.local);
    const words = at.toLocaleString([], { weekday: "short", month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", timeZoneName: "short" });
    if (element.textContent !== words) element.textContent = words;
  }
}

// --- freshness: the page asks for itself while somebody can see it, and says when it gets no answer

let mark = "";
let failures = 0;
let freshAt = new Date();
let refreshing = false;
let dueAt = 0;
const GONE = { 403: "You may no longer see this page.", 404: "This is no longer here.", 410: "This was deleted." };

function isBusy() {
  const selected = document.getSelection();
  return refreshing || document.querySelector("details.ask[open], dialog[open], main form[data-begun]") || (selected && !selected.isCollapsed);
}

function refresh(now) {
  const main = document.querySelector("main[data-live]");
  if (!main || document.hidden || isBusy() || (!now && Date.now() < dueAt)) return;
  refreshing = true;
  htmx.trigger(main, "console:refresh");
}

function show(sentence, link) {
  const lost = document.getElementById("lost");
  lost.hidden = !sentence;
  lost.textContent = sentence;
  if (link) {
    const anchor = document.createElement("a");
    anchor.href = location.href;
    anchor.textContent = link;
    lost.append(" ", anchor);
  }
}

function showLag(lag) {
  const note = document.getElementById("as-of");
  note.hidden = !lag;
  if (lag) note.querySelector("span").textContent = lag;
}

document.addEventListener("htmx:configRequest", (event) => { if (mark) event.detail.headers["X-Console-Mark"] = mark; });
document.addEventListener("htmx:afterRequest", (event) => {
  refreshing = false;
  const answer = event.detail.xhr;
  const main = document.querySelector("main[data-live]");
  const seconds = main ? Number(main.dataset.live) : 5;
  if (answer.status === 200 || answer.status === 204) {
    mark = answer.getResponseHeader("X-Console-Mark") || mark;
    failures = 0;
    freshAt = new Date();
    show("");
    showLag(answer.getResponseHeader("Leasehold-Read-Lag"));
    countTimes();
  } else if (answer.status === 401) {
    show("Your session has ended.", "Sign in");
  } else {
    failures += 1;
    const gone = GONE[answer.status];
    const why = gone || (answer.status ? "The server cannot answer now." : "Not connected.");
    show(`${why} This page shows the state of ${freshAt.toLocaleTimeString()}.`, gone && "Open it again");
  }
  dueAt = Date.now() + 1000 * Math.min(60, seconds * 2 ** Math.min(failures, 4));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(true); });
addEventListener("online", () => refresh(true));

Idiomorph.defaults.ignoreActiveValue = true;
Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
  !(name === "open" && node.tagName === "DETAILS") && !(name === "checked" && node.tagName === "INPUT");
Idiomorph.defaults.callbacks.beforeNodeMorphed = (old) => !(old.nodeType === 1 && old.tagName === "INPUT" && old.type === "checkbox");

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

setInterval(() => { countTimes(); refresh(false); }, 1000);
dueAt = Date.now() + 4000;
countTimes();
countPicked();

// --- pointing and typing

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy, [data-copy]");
  if (button) {
    // A button in the row of a job copies the job's id, which the row has.
    await navigator.clipboard.writeText(button.dataset.copy ?? button.closest("tr").id.slice("job-".length));
    const label = button.querySelector("code") || button;
    const before = label.textContent;
    label.textContent = "copied";
    setTimeout(() => { label.textContent = before; }, 900);
    return;
  }
  if (event.target.closest("[data-theme-switch]")) {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("leasehold-theme", document.documentElement.dataset.theme);
    return;
  }
  for (const open of document.querySelectorAll("details.ask[open]")) if (!open.contains(event.target)) open.open = false;
});

document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (event.target.method === "post" && button) setTimeout(() => { button.disabled = true; }, 0);
});
addEventListener("pageshow", () => { for (const button of document.querySelectorAll("form button[disabled]:not([data-off])")) button.disabled = false; });

// What a person has begun to write stays: the page refreshes itself again after the form is sent.
document.addEventListener("input", (event) => {
  const form = event.target.closest("main form[method=post]");
  if (form && event.target.type !== "checkbox") form.dataset.begun = "";
});

document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-pick-all], [name=job]")) return;
  if (event.target.matches("[data-pick-all]")) for (const box of document.querySelectorAll("[name=job]")) box.checked = event.target.checked;
  countPicked();
});

function countPicked() {
  const bar = document.getElementById("picked");
  if (!bar) return;
  const count = document.querySelectorAll("[name=job]:checked").length;
  bar.hidden = !count;
  bar.querySelector("b").textContent = count;
}

let going = false;
let row = -1;

function openRow(found) {
  location.href = found.dataset.href || found.querySelector("a").href;
}

function move(step) {
  const rows = [...document.querySelectorAll("tbody tr[data-href]")];
  if (!rows.length) return;
  for (const one of rows) one.classList.remove("here");
  row = Math.max(0, Math.min(rows.length - 1, row + step));
  rows[row].classList.add("here");
  rows[row].scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea, [contenteditable]")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (going) {
    going = false;
    const link = document.querySelector(`nav [data-go="${CSS.escape(event.key)}"]`);
    if (link) link.click();
    return;
  }
  const filter = document.querySelector("[data-filter]");
  const jobs = document.querySelector('nav [data-go="j"]');
  if (event.key === "/" && filter) { event.preventDefault(); filter.focus(); filter.select(); }
  else if (event.key === "/" && jobs) { event.preventDefault(); location.href = `${jobs.href}#filter`; }
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "g") going = true;
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "Enter" && document.querySelector("tr.here") && event.target === document.body) openRow(document.querySelector("tr.here"));
  else if (event.key === "Escape") for (const open of document.querySelectorAll("details.ask[open]")) open.open = false;
});

// --- the filter completes its last word

const filter = document.querySelector("[data-filter][list]");
if (filter) {
  if (location.hash === "#filter") filter.focus();
  const words = [...document.querySelectorAll("#words option")].map((option) => option.value);
  filter.addEventListener("input", () => {
    const start = filter.value.lastIndexOf(" ") + 1;
    const head = filter.value.slice(0, start);
    const last = filter.value.slice(start);
    const list = document.getElementById("words");
    list.replaceChildren(...words.filter((word) => last && word.startsWith(last) && word !== last).slice(0, 12).map((word) => {
      const option = document.createElement("option");
      option.value = head + word;
      return option;
    }));
  });
}
