// Line charts: a few series over one axis, lanes of marks below them, and a crosshair that shows the values.

import { draw, set } from "/assets/format.js";

const LEFT = 52, RIGHT = 6, TOP = 18, BOTTOM = 20, LANE = 15, MIDDLE_FROM = 300, LEGEND_LINE = 16;
const NEAR = 0.01; // share of the width: marks this close to the crosshair are shown

export class Chart {
  // options: x and y format numbers (y is told the distance of ticks); wholeX puts ticks of x at whole numbers only; fromZero starts the y axis at 0; area fills below the first series; lanes are the names of lanes.
  constructor(host, options) {
    this.host = host;
    this.options = options;
    this.svg = draw("svg", { role: "img", "aria-label": options.title });
    this.svg.append((this.ground = draw("g")), (this.lines = draw("g")), (this.cross = draw("g")));
    host.append(this.svg);
    this.series = [];
    this.marks = [];
    this.long = new Map(); // width of names in pixels
    this.lanes = options.lanes ?? [];
    this.floor = BOTTOM + (this.lanes.length ? this.lanes.length * LANE + 4 : 0);
    new ResizeObserver(() => this.paint()).observe(host);
    host.addEventListener("pointermove", (event) => this.point(event.clientX - host.getBoundingClientRect().left));
    host.addEventListener("pointerleave", () => this.cross.replaceChildren());
  }

  // series: [{name, points: [[x, y]], faint}], points in order of x; a y of null is a gap. marks: [[x, lane, count]].
  show(series, marks = []) {
    this.marks = marks;
    this.series = series.filter((one) => one.points.some(([, y]) => y !== null));
    this.paint();
  }

  paint() {
    const width = this.host.clientWidth, height = this.host.clientHeight;
    if (!width || !height) return;
    set(this.svg, { viewBox: `0 0 ${width} ${height}` });
    this.cross.replaceChildren();
    const all = this.series.flatMap((one) => one.points).filter(([, y]) => y !== null);
    if (!all.length) {
      this.lines.replaceChildren();
      this.ground.replaceChildren(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
      return;
    }
    const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
    const x0 = min(xs), x1 = Math.max(max(xs), x0 + 1);
    const [y0, y1, ticks] = scale(this.options.fromZero ? 0 : min(ys), max(ys));
    this.box = { width, height, x0, x1 };
    this.X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    this.Y = (y) => height - this.floor - ((y - y0) / (y1 - y0)) * (height - TOP - this.floor);
    this.paintGround(ticks, x0, x1);
    this.paintLines();
    this.paintMarks();
    this.paintLegend();
    set(this.svg, { "aria-label": this.summary() });
  }

  paintGround(ticks, x0, x1) {
    const { width, height } = this.box, { x, y } = this.options, parts = [];
    for (const tick of ticks) {
      parts.push(draw("line", { class: "rule", x1: LEFT, x2: width, y1: this.Y(tick), y2: this.Y(tick) }));
      parts.push(draw("text", { x: LEFT - 7, y: this.Y(tick) + 4, "text-anchor": "end" }, y(tick, ticks[1] - ticks[0])));
    }
    this.lanes.forEach((name, lane) => parts.push(draw("text", { x: LEFT - 7, y: this.laneAt(lane) + 4, "text-anchor": "end" }, name)));
    if (this.options.wholeX) {
      for (const tick of wholeTicks(x0, x1, width > MIDDLE_FROM ? 4 : 2)) {
        const at = this.X(tick), anchor = at < LEFT + 20 ? "start" : at > width - 30 ? "end" : "middle";
        parts.push(draw("text", { x: anchor === "end" ? width : at, y: height - 3, "text-anchor": anchor }, x(tick)));
      }
    } else {
      parts.push(draw("text", { x: LEFT, y: height - 3 }, x(x0)), draw("text", { x: width, y: height - 3, "text-anchor": "end" }, x(x1)));
      if (width > MIDDLE_FROM && x1 - x0 > 1) parts.push(draw("text", { x: (LEFT + width - RIGHT) / 2, y: height - 3, "text-anchor": "middle" }, x((x0 + x1) / 2)));
    }
    this.ground.replaceChildren(...parts);
  }

  paintLines() {
    const parts = [], { height } = this.box;
    this.series.forEach((one, index) => {
      const colour = one.colour ?? 0, path = pathOf(one.points, this.X, this.Y);
      if (this.options.area && !index) {
        for (const run of runsOf(one.points)) {
          const [from, to] = [run[0], run.at(-1)].map(([at]) => this.X(at).toFixed(1)), floor = height - this.floor;
          parts.push(draw("path", { class: `area f${colour}`, d: `${pathOf(run, this.X, this.Y)}L${to} ${floor}L${from} ${floor}Z` }));
        }
      }
      const known = one.points.filter(([, y]) => y !== null);
      if (known.length === 1) parts.push(draw("circle", { class: `f${colour}`, cx: this.X(known[0][0]), cy: this.Y(known[0][1]), r: 3.5 })); // a line of no length shows nothing
      parts.push(draw("path", { class: `line s${colour}${one.faint ? " faint" : ""}`, d: path, "stroke-dasharray": one.dashed ? "5 4" : "none" }));
    });
    this.lines.replaceChildren(...parts);
  }

  laneAt(lane) {
    return this.box.height - this.floor + 8 + LANE * (lane + 0.5);
  }

  // A stroke for each mark, thicker if it counts several. The lane gives its meaning; the colour only repeats it.
  paintMarks() {
    for (const [x, lane, count] of this.marks) {
      if (x < this.box.x0 || x > this.box.x1) continue;
      const at = this.X(x).toFixed(1), middle = this.laneAt(lane);
      this.lines.append(draw("line", { class: `mark lane-${lane}`, x1: at, x2: at, y1: middle - 4, y2: middle + 4, "stroke-width": Math.min(6, 1.5 + 0.5 * count) }));
    }
  }

  // The legend: the name of each line with a sample of it, from the right.
  paintLegend() {
    const shown = this.series.filter((one) => !one.faint);
    if (shown.length < 2) return;
    let x = this.box.width;
    for (const one of [...shown].reverse()) {
      const text = draw("text", { x, y: 9, "text-anchor": "end", class: `tag f${one.colour ?? 0}` }, one.name);
      this.lines.append(text);
      if (!this.long.has(one.name)) this.long.set(one.name, text.getComputedTextLength());
      x -= this.long.get(one.name) + 5;
      this.lines.append(draw("line", { class: `line s${one.colour ?? 0}`, x1: x - LEGEND_LINE, x2: x, y1: 5, y2: 5, "stroke-dasharray": one.dashed ? "5 4" : "none" }));
      x -= LEGEND_LINE + 12;
    }
  }

  point(pixel) {
    if (!this.box || !this.series.length) return;
    const { width, height, x0, x1 } = this.box;
    const wanted = x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    const shown = this.series.filter((one) => !one.faint);
    const near = nearest(shown[0].points, wanted);
    if (!near) return;
    const words = shown.map((one) => [one, nearest(one.points, near[0])]).filter(([, found]) => found);
    const text = `${this.options.x(near[0])}: ${words.map(([one, [, y]]) => (shown.length > 1 ? `${one.name} ` : "") + this.options.y(y)).join(", ")}${this.marksNear(near[0])}`;
    const at = this.X(near[0]), end = at > width / 2;
    const label = draw("text", { x: end ? at - 6 : at + 6, y: TOP + 12, "text-anchor": end ? "end" : "start", class: "tag" }, text);
    const long = 6.4 * text.length;
    this.cross.replaceChildren(
      draw("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: height - this.floor }),
      draw("rect", { class: "paper", x: end ? at - 10 - long : at + 2, y: TOP, width: long + 8, height: 17, rx: 4 }),
      ...words.map(([one, [x, y]]) => draw("circle", { cx: this.X(x), cy: this.Y(y), r: 3.5, class: `f${one.colour ?? 0}` })),
      label,
    );
  }

  marksNear(x) {
    const { x0, x1 } = this.box, counts = this.lanes.map(() => 0);
    for (const [at, lane, count] of this.marks) if (Math.abs(at - x) <= NEAR * (x1 - x0)) counts[lane] += count;
    return counts.map((count, lane) => (count ? `, ${count} ${this.lanes[lane]}` : "")).join("");
  }

  summary() {
    const counts = this.lanes.map((name, lane) => `; ${this.marks.reduce((sum, mark) => sum + (mark[1] === lane ? mark[2] : 0), 0)} ${name}`);
    const told = this.series.filter((one) => !one.faint).map((one) => {
      const known = one.points.filter(([, y]) => y !== null), [first, last] = [known[0], known.at(-1)];
      return `${one.name}: ${this.options.y(first[1])} at ${this.options.x(first[0])}, ${this.options.y(last[1])} at ${this.options.x(last[0])}`;
    });
    return `${this.options.title}. ${told.join("; ")}${counts.join("")}`;
  }
}

const min = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const max = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// Split a series at its gaps.
function runsOf(points) {
  const runs = [[]];
  for (const point of points) point[1] === null ? runs.push([]) : runs.at(-1).push(point);
  return runs.filter((run) => run.length);
}

function pathOf(points, X, Y) {
  let pen = "M", path = "";
  for (const [x, y] of points) {
    if (y === null) { pen = "M"; continue; }
    path += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}${pen === "M" ? "h0" : ""}`; // a single point is a dot
    pen = "L";
  }
  return path;
}

// Round numbers for the axis, and its limits.
export function scale(low, high) {
  if (high - low < 1e-9) { high += Math.abs(high) * 0.1 || 1; low -= low ? Math.abs(low) * 0.1 : 0; }
  const rough = (high - low) / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough);
  const begin = Math.floor(low / step) * step, ticks = [];
  for (let tick = begin; tick <= high + step * 0.999; tick += step) ticks.push(tick);
  return [begin, ticks.at(-1), ticks];
}

// Round whole numbers between two whole numbers, with at most `most` gaps between them; the two numbers if fewer than two are round.
export function wholeTicks(low, high, most) {
  const power = Math.max(1, 10 ** Math.floor(Math.log10((high - low) / most / 2)));
  const gaps = (step) => Math.floor(high / step) - Math.ceil(low / step);
  const step = [1, 2, 5, 10, 20, 50, 100].map((m) => m * power).find((m) => gaps(m) <= most);
  if (gaps(step) < 1) return [low, high];
  return Array.from({ length: gaps(step) + 1 }, (_, index) => (Math.ceil(low / step) + index) * step);
}

// Decimals that tell ticks at this distance apart; two at least.
export const decimals = (step) => Math.max(2, Math.min(8, Math.ceil(-Math.log10(step) + (String(step).includes("25") ? 1 : 0) - 1e-9)));

function nearest(points, wanted) {
  let best = null;
  for (const point of points) if (point[1] !== null && (!best || Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted))) best = point;
  return best;
}

// The mean of each point and up to `reach` neighbours on both sides, so that it has no lag. A gap stays a gap.
export function smoothed(points, reach) {
  return points.map(([x, y], index) => {
    if (y === null) return [x, null];
    let sum = y, count = 1;
    for (let by = 1; by <= Math.min(reach, index, points.length - 1 - index); by += 1) {
      const before = points[index - by][1], after = points[index + by][1];
      if (before === null || after === null) break;
      sum += before + after;
      count += 2;
    }
    return [x, sum / count];
  });
}
