"use strict";
const curves = JSON.parse(document.getElementById("curves").textContent);
const chart = document.getElementById("chart");
const picks = [...document.querySelectorAll(".pick")];
const axes = [...document.querySelectorAll(".axis")];
const own = [...document.querySelectorAll(".curve")];
const plots = new Map(); // by element
let axis = "steps";

const DASHES = [[], [9, 4], [2, 3], [12, 3, 2, 3]];
const measured = curves.filter(curve => !curve.published);

function plot(element, shown, axis, highest) {
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);
  const grid = { stroke: `${colour("--line")}44`, width: 1 };
  const strokeOf = curve => {
    const n = measured.indexOf(curve);
    return curve.published
      ? { stroke: colour("--soft"), width: 1 }
      : { stroke: colour(`--c${n % 6 + 1}`), width: 2, dash: DASHES[Math.floor(n / 6) % DASHES.length] };
  };
  const options = {
    width: element.clientWidth, height: Math.max(240, Math.min(highest, element.clientWidth * 0.55)),
    scales: { x: { time: false } },
    focus: { alpha: 0.25 }, cursor: { focus: { prox: 16 } },
    axes: [
      { stroke: colour("--ink"), grid, label: axis },
      { stroke: colour("--ink"), grid, label: "loss, nats per token" },
    ],
    series: [{ label: axis }, ...shown.map(curve => ({
      label: curve.label, spanGaps: true, points: { show: false },
      value: (_, y) => y == null ? "" : y.toFixed(3), ...strokeOf(curve),
    }))],
  };
  const data = shown.length ? uPlot.join(shown.map(curve => [curve[axis], curve.loss])) : [[], []];
  plots.get(element)?.destroy();
  plots.set(element, new uPlot(options, data, element));
}

function draw() {
  plot(chart, curves.filter((curve, i) => picks[i].checked && curve[axis]), axis, 440);
  for (const details of own.filter(details => details.open)) {
    const title = details.dataset.title;
    const shown = curves.filter(curve => [title, `${title}, published`].includes(curve.label));
    plot(details.querySelector(".chart"), shown, "steps", 260);
  }
}

for (const button of axes) button.addEventListener("click", () => {
  axis = button.dataset.axis;
  for (const other of axes) other.setAttribute("aria-pressed", String(other === button));
  draw();
});
for (const pick of picks) pick.addEventListener("change", draw);
for (const details of own) details.addEventListener("toggle", draw);
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", draw);
addEventListener("resize", draw);
draw();
