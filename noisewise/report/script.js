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

function place([low, high, start, end, log], value) {
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
      const at = [place(chart.axes.x, point.x), place(chart.axes.y, mean)];
      const far = Math.hypot(at[0] - x, at[1] - y);
      if (!best || far < best.far) best = { line, point, mean, at, far };
    }
  }
  if (!best) return quiet();
  const { line, point, mean, at } = best, group = svg.querySelector(".hover");
  group.replaceChildren();
  const ends = chart.axes.y;
  draw(group, "line", { x1: at[0], x2: at[0], y1: ends[2], y2: ends[3] });
  for (const value of point.y) draw(group, "circle", { cx: at[0], cy: place(ends, value), r: 2.6, style: `fill:${line.colour}` });
  draw(group, "circle", { cx: at[0], cy: at[1], r: 4.5, style: `fill:${line.colour}` });
  const seeds = point.y.length > 1 ? point.y.map((value, i) => `seed ${point.seeds[i]}: ${text(value)}`) : [];
  tell(event, line.name, [`${chart.y} ${text(mean)}`, `${chart.x.replace(/ \(0:.*/, "")}: ${text(point.x)}`, ...seeds]);
}

// A heat map holds its numbers as colours of the scale; the nearest colour is the number.
const pixels = new Map();

function pixelsOf(image) {
  const address = image.getAttribute("href");
  if (!pixels.has(address)) {
    pixels.set(address, null);
    const picture = new Image();
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [picture.width, picture.height];
      const context = canvas.getContext("2d");
      context.drawImage(picture, 0, 0);
      pixels.set(address, context.getImageData(0, 0, picture.width, picture.height));
    };
    picture.src = address;
  }
  return pixels.get(address);
}

function overHeat(svg, event) {
  const [x, y] = pointer(svg, event), [left, top, right, foot] = svg.dataset.box.split(" ").map(Number);
  const u = (x - left) / (right - left), up = (foot - y) / (foot - top);
  const image = all("image", svg).find((one) => getComputedStyle(one).display !== "none");
  const found = image && pixelsOf(image);
  if (!found || u < 0 || u >= 1 || up <= 0 || up > 1) return quiet();
  const column = Math.floor(u * found.width), row = Math.min(Math.floor((1 - up) * found.height), found.height - 1);
  const colour = found.data.slice(4 * (row * found.width + column));
  const { colours, reach } = data.scale;
  let best = 0, far = Infinity;
  colours.forEach((hex, i) => {
    const away = [0, 1, 2].reduce((sum, k) => sum + (parseInt(hex.slice(2 * k, 2 * k + 2), 16) - colour[k]) ** 2, 0);
    if (away < far) [best, far] = [i, away];
  });
  const times = 2 ** (((2 * best) / (colours.length - 1) - 1) * reach);
  const edge = best === 0 ? "at most " : best === colours.length - 1 ? "at least " : "";
  const snr = data[svg.id].snr, level = snr[Math.min(Math.floor(u * snr.length), snr.length - 1)];
  const name = svg.closest("figure").querySelector("figcaption span").textContent;
  const step = Math.round(up * Number(svg.dataset.end));
  tell(event, name, [`${edge}${times.toPrecision(2)} times uniform`, `u ${u.toFixed(2)}, log SNR ${level === null ? "infinite" : level.toFixed(1)}`, `step ${step.toLocaleString("en")}`]);
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
