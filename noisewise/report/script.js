"use strict";
// The page is complete without this script. It adds hover values, toggles, the slider, and renewal of a live page.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
let data = {};

// Methods, schedules, moments and seeds: what is shown follows the state of the controls --------------------------------

function chosen(name) {
  const found = document.querySelector(`input[name="${name}"]:checked`);
  return found ? found.id.split("-").pop() : "0";
}

function show() {
  for (const box of all("input[data-toggle]"))
    for (const part of all(`main [data-method="${box.dataset.toggle}"]`)) part.classList.toggle("off", !box.checked);
  if (document.querySelector("input[name=schedule]"))
    for (const block of all(".schedule")) block.hidden = block.dataset.schedule !== chosen("schedule");
  const slider = byId("moment");
  const moment = slider ? slider.value : null;
  if (slider) {
    byId("moment-text").textContent = data.moments.texts[moment];
    slider.setAttribute("aria-valuetext", data.moments.texts[moment]);
  }
  for (const figure of all(".samples figure")) {
    const shots = all(".shot", figure);
    for (const shot of shots)
      shot.hidden = (moment !== null && shot.dataset.moment !== moment) || shot.dataset.seed !== chosen("seed");
    figure.querySelector(".none").hidden = shots.some((shot) => !shot.hidden);
  }
}

// Hover values ----------------------------------------------------------------------------------------------------------

function place([low, high, start, end], value, log = false) {
  const f = log ? Math.log : (v) => v;
  return start + ((f(value) - f(low)) / (f(high) - f(low))) * (end - start);
}

function text(value) {
  if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function pointer(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height];
}

function draw(parent, kind, attributes) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
}

function tell(event, title, lines) {
  const tip = byId("tip"), head = document.createElement("b"), body = document.createElement("span");
  head.textContent = title;
  body.textContent = lines.join("\n");
  tip.replaceChildren(head, body);
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function quiet() {
  byId("tip").hidden = true;
  for (const group of all("svg .hover")) group.replaceChildren();
}

function overChart(svg, event) {
  const chart = data[svg.id], [x, y] = pointer(svg, event);
  let best = null;
  for (const line of chart.lines) {
    const box = document.querySelector(`input[data-toggle="${line.method}"]`);
    if (box && !box.checked) continue;
    for (const point of line.points) {
      const mean = point.y.reduce((a, b) => a + b) / point.y.length;
      const at = [place(chart.box.x, point.x), place(chart.box.y, mean, chart.log)];
      const far = Math.hypot(at[0] - x, at[1] - y);
      if (!best || far < best.far) best = { line, point, mean, at, far };
    }
  }
  if (!best) return quiet();
  const { line, point, mean, at } = best, group = svg.querySelector(".hover");
  group.replaceChildren();
  const ends = chart.box.y;
  draw(group, "line", { x1: at[0], x2: at[0], y1: ends[2], y2: ends[3] });
  for (const value of point.y) draw(group, "circle", { cx: at[0], cy: place(ends, value, chart.log), r: 1.8, style: `fill:${line.colour}` });
  draw(group, "circle", { cx: at[0], cy: at[1], r: 3.2, style: `fill:${line.colour}` });
  const seeds = point.y.length > 1 ? point.y.map((value, i) => `seed ${point.seeds[i]}: ${text(value)}`) : [];
  tell(event, line.name, [`${chart.y} ${text(mean)}`, `${chart.x.replace(/ \(0:.*/, "")}: ${text(point.x)}`, ...seeds]);
}

function overHeat(svg, event) {
  const map = data[svg.id], [x, y] = pointer(svg, event), view = chosen("view");
  const [, , left, right] = map.box.x, [, end, foot, top] = map.box.y;
  const u = (x - left) / (right - left), step = ((foot - y) / (foot - top)) * end, rows = map.views[view];
  if (!Array.isArray(rows) || u < 0 || u >= 1 || step <= 0 || step > map.end) return quiet();
  const row = rows[Math.min(Math.floor((step / map.end) * rows.length), rows.length - 1)];
  const value = row[Math.floor(u * row.length)], snr = map.snr[Math.floor(u * map.snr.length)];
  const name = svg.closest("figure").querySelector("figcaption span").textContent;
  tell(event, name, [
    value === null ? "not finite" : `${text(value)} times uniform`,
    `u ${u.toFixed(2)}, log SNR ${snr === null ? "infinite" : snr.toFixed(1)}`,
    `step ${Math.round(step).toLocaleString("en")}`,
  ]);
}

// The numbers of heat maps are many: they come as deflated JSON.
async function inflate(map) {
  for (const [view, packed] of Object.entries(map.views)) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    map.views[view] = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }
}

// Events are caught at the top, so that the page below can be replaced ---------------------------------------------------

document.addEventListener("input", (event) => { if (event.target.closest("main")) { quiet(); show(); } });
document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest ? event.target.closest("svg.chart, svg.heat") : null;
  if (!svg) return byId("tip").hidden || quiet();
  if (svg.classList.contains("heat")) overHeat(svg, event);
  else overChart(svg, event);
});
addEventListener("scroll", quiet, { passive: true });

function start() {
  const block = byId("data");
  data = block ? JSON.parse(block.textContent) : {};
  Object.values(data).filter((found) => found.views).forEach(inflate);
  show();
}

// A live page asks for a newer version and puts it in place of the old one, controls as they were -------------------------

function controls() {
  const inputs = all("main input").map((box) => [box.id, box.type === "range" ? [box.value, box.max] : box.checked]);
  return { inputs, open: all("main details").map((part) => part.open) };
}

function restore({ inputs, open }) {
  for (const [id, state] of inputs) {
    const box = byId(id);
    if (!box) continue;
    if (!Array.isArray(state)) box.checked = state;
    else if (state[0] !== state[1]) box.value = state[0]; // one at its end stays at the end
  }
  all("main details").forEach((part, i) => { part.open = Boolean(open[i]); });
}

async function renew() {
  try {
    const version = await (await fetch("version", { cache: "no-store" })).text();
    if (version !== document.body.dataset.live) {
      const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
      const state = controls();
      document.querySelector("main").replaceWith(document.adoptNode(page.querySelector("main")));
      document.body.dataset.live = page.body.dataset.live;
      restore(state);
      quiet();
      start();
    }
    document.body.classList.remove("gone");
  } catch {
    document.body.classList.add("gone"); // the command has ended: what is there stays readable
  }
}

async function follow() {
  await renew();
  setTimeout(follow, 2000);
}

start();
if (document.body.dataset.live) follow();
