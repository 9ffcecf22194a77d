// Who is near whom: peers where their coordinates say that they are, moved apart where they would cover each other.

import { draw, hereWithin, known, markOf, say, set } from "/assets/format.js";

const FEW = 12; // so many peers or fewer show their names
const MARGIN = 44, MOST_MOVED = 500, ROUNDS = 120, SERIES = 6, NARROW = 560;
const BARS_MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

export class NearMap {
  constructor(host, note, onChoose) {
    this.host = host;
    this.note = note;
    this.svg = draw("svg", { role: "img", "aria-label": "No peer is placed yet" });
    this.bar = draw("path", { class: "bar", "aria-hidden": "true" });
    this.barNote = draw("text", { class: "peer-note", "aria-hidden": "true" });
    this.bodies = draw("g", { "aria-hidden": "true" });
    this.svg.append(this.bar, this.barNote, this.bodies);
    host.append(this.svg);
    this.marks = new Map();
    this.key = "";
    host.addEventListener("click", (event) => {
      const mark = event.target.closest(".near-peer");
      if (mark) onChoose(mark.dataset.peer);
    });
  }

  // `peers` of all stages; `place` is x, y and what the access line adds, in ms of round trip, or null.
  show(peers, me, chosen) {
    const placed = peers.filter((peer) => peer.place), width = Math.max(280, this.host.clientWidth), unknown = peers.length - placed.length;
    const key = `${width} ${placed.map((peer) => `${peer.id} ${peer.place}`).join(" ")}`;
    if (key !== this.key) { this.key = key; this.spots = spread(placed, width); }
    const { at, radius, height, scale } = this.spots, few = placed.length <= FEW;
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, "aria-label": summary(placed, unknown) });
    say(this.note, `Distances are round trips without what the access lines add.${unknown ? ` Not placed yet: ${unknown}.` : ""}`);
    this.drawBar(scale, height, placed.length);
    const present = new Set();
    placed.forEach((peer, index) => {
      present.add(peer.id);
      this.place(this.marks.get(peer.id) ?? this.mark(peer.id), peer, at[index], radius, few, me, chosen);
    });
    for (const [id, mark] of this.marks) if (!present.has(id)) { mark.group.remove(); this.marks.delete(id); }
  }

  mark(id) {
    const group = draw("g", { class: "near-peer", "data-peer": id });
    const parts = { group, title: draw("title"), halo: draw("circle", { class: "halo" }), body: draw("circle"), stage: draw("text", { class: "stage-number" }), name: draw("text") };
    group.append(parts.title, parts.halo, parts.body, parts.stage, parts.name);
    this.bodies.append(group);
    this.marks.set(id, parts);
    return parts;
  }

  place(mark, peer, [x, y], radius, few, me, chosen) {
    const mine = peer.id === me;
    set(mark.group, { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    mark.group.toggleAttribute("data-chosen", peer.id === chosen);
    set(mark.body, { r: radius, class: `f${peer.stage % SERIES}` });
    set(mark.halo, { r: radius + 3 });
    set(mark.stage, { "font-size": Math.max(7, radius * 0.95).toFixed(1) });
    say(mark.stage, String(peer.stage));
    set(mark.name, { y: radius + 14, "text-anchor": "middle", class: mine ? "mine" : "peer-note" });
    say(mark.name, mine ? hereWithin() : few ? markOf(peer) : "");
    if (mine && mark.group !== this.bodies.lastChild) this.bodies.append(mark.group); // on top of others
    say(mark.title, `${known(peer.nickname, peer.team)} ${peer.id}, stage ${peer.stage}, its line adds ${peer.place[2]} ms`.trim());
  }

  drawBar(scale, height, count) {
    const ms = BARS_MS.find((each) => each * scale >= 60) ?? BARS_MS.at(-1), length = Math.min(ms * scale, 200), y = height - 10;
    set(this.bar, { d: `M12 ${y - 5}V${y}H${(12 + length).toFixed(1)}V${y - 5}`, visibility: count > 1 ? "visible" : "hidden" });
    set(this.barNote, { x: 18, y: y - 6 });
    say(this.barNote, count > 1 ? `${ms} ms there and back` : "");
  }
}

// Positions in pixels: to one scale in both directions, the middle of all in the middle.
function spread(peers, width) {
  const height = Math.round(Math.max(260, Math.min(480, width * (width < NARROW ? 1.1 : 0.55)))), count = Math.max(1, peers.length);
  const radius = peers.length <= FEW ? 15 : Math.max(6.5, Math.min(11, Math.sqrt((width * height) / (22 * count))));
  const [xs, ys] = [0, 1].map((axis) => peers.map((peer) => peer.place[axis]));
  const range = (values) => (values.length ? [Math.min(...values), Math.max(...values)] : [0, 0]);
  const [[left, right], [top, bottom]] = [range(xs), range(ys)];
  const scale = Math.min((width - 2 * MARGIN) / Math.max(4, right - left), (height - 2 * MARGIN) / Math.max(4, bottom - top));
  const at = peers.map((_, n) => [width / 2 + (xs[n] - (left + right) / 2) * scale, height / 2 + (ys[n] - (top + bottom) / 2) * scale]);
  if (peers.length > 1 && peers.length <= MOST_MOVED) moveApart(at, 2 * radius + (peers.length <= FEW ? 22 : 2), width, height, radius);
  return { at, radius, height, scale };
}

// A force layout of few rounds: pairs that are too close push each other away, and all stay on the page.
function moveApart(at, least, width, height, radius) {
  for (let round = 0; round < ROUNDS; round += 1) {
    let moved = false;
    for (let a = 0; a < at.length; a += 1) for (let b = 0; b < a; b += 1) {
      let dx = at[a][0] - at[b][0], dy = at[a][1] - at[b][1];
      if (Math.abs(dx) >= least || Math.abs(dy) >= least) continue;
      let apart = Math.hypot(dx, dy);
      if (apart >= least) continue;
      if (apart < 0.01) { dx = Math.cos(2.4 * a); dy = Math.sin(2.4 * a); apart = 1; }
      const push = (least - Math.min(apart, least)) / 2 / apart;
      at[a][0] += dx * push; at[a][1] += dy * push; at[b][0] -= dx * push; at[b][1] -= dy * push;
      moved = true;
    }
    for (const spot of at) {
      spot[0] = Math.min(width - radius - 4, Math.max(radius + 4, spot[0]));
      spot[1] = Math.min(height - radius - 26, Math.max(radius + 4, spot[1]));
    }
    if (!moved) break;
  }
}

function summary(placed, unknown) {
  const stages = new Set(placed.map((peer) => peer.stage)).size;
  return `${placed.length} peers of ${stages} stages, placed by round trips${unknown ? `; ${unknown} not placed yet` : ""}. The table tells each peer's stage.`;
}
