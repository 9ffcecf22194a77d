// The map: stages in the order of the pipeline, their peers, and the possible flow of work between them.

import { amount, draw, hereWithin, known, markOf, nameOf, say, set } from "/assets/format.js";

const GLYPHS = { averaging: "\u21c4", averaged: "\u2713", joining: "\u2193", leaving: "\u2192", paused: "\u2016", pausing: "\u2016", suspect: "?", sidelined: "\u2014", unaveraged: "\u2205" };
const FEW = 8; // a stage with at most this many peers shows their names and lines to the next stage
const HEAD = 46;
const NARROW = 560;

// A peer's row of the stream's "now" message, as an object with named fields.
export function peerOf(row, stage) {
  const [id, phase, step, done, queue, throughput, tokens, device, inFlight, reach, up, down, place, nickname = "", team = ""] = row;
  return { id, phase, step, done, queue, throughput, tokens, device, inFlight, reach, up, down, place, nickname, team, stage };
}

export class SwarmMap {
  // `told` is text for screen readers: it names the selection and does not repeat its changes.
  constructor(host, told, onChoose) {
    this.host = host;
    this.told = told;
    this.onChoose = onChoose;
    this.svg = draw("svg", { role: "img", "aria-label": "No swarm yet" });
    this.edges = draw("g", { "aria-hidden": "true" });
    this.heads = draw("g", { "aria-hidden": "true" });
    this.bodies = draw("g", { "aria-hidden": "true" });
    this.svg.append(this.edges, this.heads, this.bodies);
    host.append(this.svg);
    this.marks = new Map();
    this.stages = [];
    this.chosen = null;
    host.addEventListener("click", (event) => {
      const mark = event.target.closest(".peer");
      if (mark) this.choose(mark.dataset.peer);
    });
    host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(host);
  }

  show(stages, microbatches, me) {
    this.microbatches = microbatches;
    this.me = me;
    this.stages = stages;
    if (this.chosen === null || !this.find(this.chosen)) this.chosen = me;
    this.layout();
  }

  find(id) {
    for (const stage of this.stages) for (const peer of stage.peers) if (peer.id === id) return peer;
    return null;
  }

  choose(id) {
    this.chosen = id;
    const peer = this.find(id);
    if (peer) say(this.told, `Peer ${nameOf(peer)}${id === this.me ? `, ${hereWithin()}` : ""}, stage ${peer.stage}, ${peer.phase}, queue ${peer.queue}`);
    for (const [peer, mark] of this.marks) mark.group.toggleAttribute("data-chosen", peer === id);
    this.onChoose(peer);
  }

  key(event) {
    const step = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const filled = this.stages.filter((stage) => stage.peers.length);
    if (!filled.length) return;
    const [across, along] = this.upright ? [step[1], step[0]] : step;
    let column = Math.max(0, filled.findIndex((stage) => stage.peers.some((peer) => peer.id === this.chosen)));
    let row = Math.max(0, filled[column].peers.findIndex((peer) => peer.id === this.chosen));
    column = Math.min(filled.length - 1, Math.max(0, column + across));
    row = Math.min(filled[column].peers.length - 1, Math.max(0, row + along));
    this.choose(filled[column].peers[row].id);
  }

  // Positions in pixels, for the available width. On a narrow screen the pipeline runs downwards.
  layout() {
    const width = Math.max(280, this.host.clientWidth);
    if (!this.stages.length) return;
    this.upright = width < NARROW;
    const places = this.upright ? this.rows(width) : this.columns(width);
    this.svg.toggleAttribute("data-dense", !places.few);
    set(this.svg, { viewBox: `0 0 ${width} ${places.height}`, "aria-label": this.summary() });
    this.drawHeads(places);
    this.drawPeers(places);
    this.drawEdges(places);
  }

  columns(width) {
    const count = this.stages.length, gap = width / count;
    const most = Math.max(1, ...this.stages.map((stage) => stage.peers.length));
    const few = most <= FEW && gap >= 110;
    const room = Math.max(40, gap * 0.62), pitch = few ? 94 : Math.max(6, Math.min(24, Math.sqrt((room * 330) / most)));
    const perRow = few ? 1 : Math.max(1, Math.floor(room / pitch));
    const rows = Math.ceil(most / perRow), bodyHeight = Math.max(few ? 2 * pitch : 160, rows * pitch);
    const places = { few, tight: gap < 190, radius: few ? 23 : pitch * 0.36, height: HEAD + bodyHeight + 14, heads: [], spots: new Map(), centers: [], bodyHeight };
    this.stages.forEach((stage, index) => {
      const x = gap * (index + 0.5), used = Math.ceil(stage.peers.length / perRow);
      const top = HEAD + (bodyHeight - used * pitch) / 2;
      places.heads.push({ x, y: 16, anchor: "middle" });
      places.centers.push({ x, y: HEAD + bodyHeight / 2, half: few ? 22 : (perRow * pitch) / 2 });
      stage.peers.forEach((peer, at) => {
        const row = Math.floor(at / perRow), inRow = Math.min(perRow, stage.peers.length - row * perRow);
        places.spots.set(peer.id, { x: x + ((at % perRow) - (inRow - 1) / 2) * pitch, y: top + (row + 0.5) * pitch - (few ? 14 : 0) });
      });
    });
    return places;
  }

  rows(width) {
    const left = 104, room = width - left, most = Math.max(1, ...this.stages.map((stage) => stage.peers.length));
    const few = most <= 4, pitch = few ? room / 4 : Math.max(7, Math.min(26, Math.sqrt((room * 160) / most)));
    const perRow = few ? 4 : Math.max(1, Math.floor(room / pitch));
    const places = { few, crowded: most > 2, radius: few ? 19 : pitch * 0.36, heads: [], spots: new Map(), centers: [] };
    let top = 0;
    this.stages.forEach((stage) => {
      const used = Math.max(1, Math.ceil(stage.peers.length / perRow)), body = few ? 84 : Math.max(48, used * pitch);
      places.heads.push({ x: 0, y: top + (few ? 22 : 16), anchor: "start" });
      places.centers.push({ x: left + (Math.min(perRow, Math.max(1, stage.peers.length)) * pitch) / 2, y: top + (used * pitch) / 2, half: (used * pitch) / 2 });
      stage.peers.forEach((peer, at) => {
        const row = Math.floor(at / perRow), inRow = few ? stage.peers.length : perRow;
        places.spots.set(peer.id, { x: left + (few ? (room * (at + 0.5)) / inRow : ((at % perRow) + 0.5) * pitch), y: top + (few ? 24 : (row + 0.5) * pitch) });
      });
      top += body + 34;
    });
    places.height = top - 30;
    return places;
  }

  drawHeads(places) {
    while (this.heads.childElementCount > 3 * this.stages.length) this.heads.lastChild.remove();
    while (this.heads.childElementCount < 3 * this.stages.length) this.heads.append(draw("text"));
    this.stages.forEach((stage, index) => {
      const [name, note, empty] = [0, 1, 2].map((k) => this.heads.children[3 * index + k]), { x, y, anchor } = places.heads[index];
      set(name, { x, y, "text-anchor": anchor, class: "stage-name" });
      say(name, `Stage ${stage.stage}`);
      set(note, { x, y: y + 16, "text-anchor": anchor, class: "stage-note" });
      const count = `${stage.num_peers} ${stage.num_peers === 1 ? "peer" : "peers"}`;
      const speed = `${amount(stage.throughput)} samples/s`;
      say(note, this.upright || places.tight ? (nobodyIn(stage) ? "" : count) : stage.peers.length ? `${count}, ${speed}, ${stage.queue} held` : "");
      const center = places.centers[index], nobody = nobodyIn(stage);
      set(empty, { x: this.upright ? 0 : x, y: this.upright ? y + 32 : center.y, "text-anchor": anchor, class: nobody ? "empty" : "stage-note" });
      say(empty, nobody ? "nobody serves it" : this.upright ? speed : "");
    });
  }

  drawPeers(places) {
    const present = new Set();
    for (const stage of this.stages) {
      for (const peer of stage.peers) {
        present.add(peer.id);
        const mark = this.marks.get(peer.id) ?? this.mark(peer.id);
        this.place(mark, peer, places.spots.get(peer.id), places);
      }
    }
    for (const [id, mark] of this.marks) if (!present.has(id)) { mark.group.remove(); this.marks.delete(id); }
  }

  mark(id) {
    const group = draw("g", { class: "peer", "data-peer": id });
    const parts = {
      group, halo: draw("circle", { class: "halo" }), body: draw("circle", { class: "body" }), arc: draw("circle", { class: "arc" }),
      glyph: draw("text", { class: "glyph" }), name: draw("text", {}), note: draw("text", { class: "peer-note" }),
    };
    group.append(parts.halo, parts.body, parts.arc, parts.glyph, parts.name, parts.note);
    group.toggleAttribute("data-chosen", id === this.chosen);
    this.bodies.append(group);
    this.marks.set(id, parts);
    return parts;
  }

  place(mark, peer, spot, places) {
    const r = places.radius, round = 2 * Math.PI * r, mine = peer.id === this.me;
    const share = peer.phase === "accumulating" ? Math.min(1, peer.done / this.microbatches) : peer.phase === "averaging" ? 1 : 0;
    set(mark.group, { transform: `translate(${spot.x.toFixed(1)} ${spot.y.toFixed(1)})`, "data-phase": peer.phase });
    set(mark.body, { r });
    set(mark.halo, { r: r + (places.few ? 4 : 2) });
    set(mark.arc, { r, "stroke-width": places.few ? 3.5 : Math.max(1, r * 0.28), "stroke-dasharray": `${(share * round).toFixed(1)} ${round.toFixed(1)}`, transform: "rotate(-90)", "stroke-opacity": share ? 1 : 0 });
    const glyph = r >= 5 ? GLYPHS[peer.phase] ?? (mine && !places.few ? "\u2022" : "") : "";
    set(mark.glyph, { "font-size": places.few ? 18 : Math.max(6, r * 1.2) });
    say(mark.glyph, glyph);
    set(mark.name, { y: r + 18, "text-anchor": "middle", class: mine ? "mine" : "" });
    set(mark.note, { y: r + 32, "text-anchor": "middle" });
    say(mark.name, places.few ? (mine ? (places.crowded ? "this one" : hereWithin()) : markOf(peer)) : "");
    say(mark.note, places.few ? (peer.phase === "suspect" ? "no answer" : places.crowded ? `${peer.queue} held` : `${peer.done}/${this.microbatches}, ${peer.queue} held`) : "");
    if (places.few && mark.title === undefined) { mark.title = draw("title"); mark.group.prepend(mark.title); }
    if (mark.title) say(mark.title, `${known(peer.nickname, peer.team)} ${peer.id}, ${peer.phase}`.trim());
  }

  // Any peer may send to any peer of the next stage; a line's strength is the speed of both ends.
  drawEdges(places) {
    const lines = [];
    for (let at = 0; at + 1 < this.stages.length; at += 1) {
      const from = flowing(this.stages[at]), to = flowing(this.stages[at + 1]);
      if (!from.length || !to.length) continue;
      if (places.few) {
        for (const [a, shareA] of from) for (const [b, shareB] of to) {
          const start = places.spots.get(a.id), end = places.spots.get(b.id), share = shareA * shareB;
          lines.push([this.curve(start, end, places.radius + (this.upright ? 42 : 6), places.radius + 6), 1 + 6 * share, 0.16 + 0.3 * share]);
        }
      } else {
        const start = places.centers[at], end = places.centers[at + 1];
        lines.push([this.curve(start, end, start.half + 6, end.half + 6), 10, 0.16]);
      }
    }
    while (this.edges.childElementCount > lines.length) this.edges.lastChild.remove();
    while (this.edges.childElementCount < lines.length) this.edges.append(draw("path", { class: "edge" }));
    lines.forEach(([d, width, opacity], index) => set(this.edges.children[index], { d, "stroke-width": width.toFixed(2), "stroke-opacity": opacity.toFixed(2) }));
  }

  curve(start, end, before, after) {
    const points = (x1, y1, x2, y2, x3, y3, x4, y4) => `M${x1.toFixed(1)} ${y1.toFixed(1)}C${x2.toFixed(1)} ${y2.toFixed(1)} ${x3.toFixed(1)} ${y3.toFixed(1)} ${x4.toFixed(1)} ${y4.toFixed(1)}`;
    if (this.upright) {
      const y1 = start.y + before, y2 = end.y - after, middle = (y1 + y2) / 2; // with few peers, names are below them
      return points(start.x, y1, start.x, middle, end.x, middle, end.x, y2);
    }
    const x1 = start.x + before, x2 = end.x - after, middle = (x1 + x2) / 2;
    return points(x1, start.y, middle, start.y, middle, end.y, x2, end.y);
  }

  summary() {
    const told = this.stages.map((stage) => {
      const suspects = stage.peers.filter((peer) => peer.phase === "suspect").length;
      return `stage ${stage.stage}: ${stage.num_peers || "no"} peers${suspects ? `, ${suspects} suspect` : ""}, ${stage.queue} microbatches held`;
    });
    return `Pipeline of ${this.stages.length} stages. ${told.join("; ")}.`;
  }
}

const nobodyIn = (stage) => stage.peers.length === 0;

// The peers of a stage that accept work, each with its share of the stage's speed.
function flowing(stage) {
  const able = stage.peers.filter((peer) => !["suspect", "joining"].includes(peer.phase));
  const total = able.reduce((sum, peer) => sum + peer.throughput, 0);
  return able.map((peer) => [peer, total ? peer.throughput / total : 1 / able.length]);
}
