// The values under the pointer, in the legend of every chart at once.
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
  svg: figure.querySelector("svg"),
  line: figure.querySelector(".pointer"),
  label: figure.querySelector(".step"),
  values: [...figure.querySelectorAll(".legend b")],
  points: JSON.parse(figure.querySelector("script").textContent),
}));

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function show(step) {
  for (const { line, label, values, points } of charts) {
    const { low, high, left, right, curves } = points;
    const x = left + (step - low) / (high - low) * (right - left);
    const inside = step !== null && x >= left - 1 && x <= right + 1;
    line.classList.toggle("shown", inside);
    label.textContent = inside ? `step ${step.toLocaleString("en")}` : "";
    if (inside) { line.setAttribute("x1", x); line.setAttribute("x2", x); }
    curves.forEach((curve, index) => {
      const at = nearest(curve.steps, step);
      const value = curve.values[at];
      const text = value === null ? "not finite" : value.toLocaleString("en", { maximumSignificantDigits: 5 });
      const where = curve.steps[at] === step ? "" : ` @ ${curve.steps[at]}`;
      values[index].textContent = inside ? text + where : "";
    });
  }
}

for (const { svg, points } of charts) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const { low, high, left, right, width } = points;
    const x = (event.clientX - box.left) / box.width * width;
    show(Math.round(low + (x - left) / (right - left) * (high - low)));
  });
  svg.addEventListener("pointerleave", () => show(null));
}
