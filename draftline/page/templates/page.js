"use strict";
// A read-out under the pointer, and on a watched page a look whether there is something new. All else is plain HTML.

function valueOf(text) {
  const size = Math.abs(text);
  if (size >= 1000) return Math.round(text).toLocaleString("en");
  return size === 0 || size >= 0.01 ? String(Number(text.toPrecision(4))) : text.toExponential(2);
}

function readOut(figure) {
  const svg = figure.querySelector("svg"), plot = figure.querySelector(".plot");
  const [x0, x1] = figure.dataset.x.split(" ").map(Number), [y0, y1] = figure.dataset.y.split(" ").map(Number);
  const atX = (u) => x0 + (u / 1000) * (x1 - x0);
  const atY = (u) => ("log" in figure.dataset ? y0 * (y1 / y0) ** (1 - u / 1000) : y0 + (1 - u / 1000) * (y1 - y0));
  let curves = null, box = null, cursor = null;

  function read() {
    curves = [...svg.querySelectorAll("[data-name]")].map((path) => ({
      name: path.dataset.name,
      color: path.parentNode.style.getPropertyValue("--color"),
      points: path.getAttribute("d").slice(1).split("L").map((point) => point.split(",").map(Number)),
    }));
    box = plot.appendChild(Object.assign(document.createElement("div"), { className: "readout" }));
    cursor = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
    cursor.setAttribute("class", "cursor");
  }

  function nearest(points, u) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < u) low = middle; else high = middle;
    }
    return u - points[low][0] < points[high][0] - u ? points[low] : points[high];
  }

  function show(event) {
    if (!curves) read();
    const frame = svg.getBoundingClientRect();
    const u = Math.min(1000, Math.max(0, (1000 * (event.clientX - frame.left)) / frame.width));
    const found = curves.map((curve) => ({ ...curve, point: nearest(curve.points, u) }));
    const middle = found.reduce((a, b) => (Math.abs(b.point[0] - u) < Math.abs(a.point[0] - u) ? b : a)).point[0];
    cursor.setAttribute("d", `M${middle},0V1000`);
    box.textContent = `${figure.dataset.xName} ${valueOf(Math.round(atX(middle)))}`;
    for (const curve of found) {
      if (Math.abs(curve.point[0] - middle) > 12) continue;
      const line = box.appendChild(document.createElement("div"));
      const dot = line.appendChild(document.createElement("i"));
      dot.style.setProperty("--color", curve.color);
      line.append(`${curve.name} ${valueOf(atY(curve.point[1]))}`);
    }
    const outer = plot.getBoundingClientRect(), place = frame.left - outer.left + (middle / 1000) * frame.width;
    box.style.top = "0.2rem";
    box.style.left = `${place + 12 + box.offsetWidth < outer.width ? place + 12 : Math.max(0, place - 12 - box.offsetWidth)}px`;
    box.hidden = false;
    cursor.style.display = "";
  }

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    if (!box) return;
    box.hidden = true;
    cursor.style.display = "none";
  });
}

for (const figure of document.querySelectorAll("figure[data-x]")) if (figure.querySelector("svg")) readOut(figure);

const { follow, known } = document.body.dataset;
if (follow) {
  setInterval(async () => {
    try {
      const answer = await fetch(follow, { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== known) location.reload();
    } catch {
      // The server has ended; what is on the page stays readable.
    }
  }, 2000);
}
