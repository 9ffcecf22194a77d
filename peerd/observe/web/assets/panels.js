// The panels around the map: facts, events, contributions, health. All text is inserted as text, never as markup.

import { amount, bytes, duration, here, hereWithin, known, make, moment, nameOf, say, shortId, whole } from "/assets/format.js";

const TELL = {
  started: ["\u25b6", "good", (e, who) => `${who} began to serve stage ${e.stage}`],
  joined: ["+", "good", (e, who) => `${who} joined stage ${e.stage}`],
  suspect: ["?", "warn", (e, who) => `${who} does not answer (stage ${e.stage})`],
  back: ["+", "good", (e, who) => `${who} answers again (stage ${e.stage})`],
  leaving: ["\u2192", "", (e, who) => `${who} is about to leave stage ${e.stage}`],
  paused: ["\u2016", "", (e, who) => `${who} pauses (stage ${e.stage})`],
  left: ["\u2212", "", (e, who) => `${who} left stage ${e.stage}`],
  gone: ["\u2212", "bad", (e, who) => `${who} is gone (stage ${e.stage})`],
  banned: ["\u2212", "bad", (e, who) => `${who} was banned by the organiser`, (e) => e.text],
  lifted: ["+", "good", (e, who) => `${who} is no longer banned`],
  moved: ["\u21c6", "", (e, who) => `${who} moved to stage ${e.stage} ${e.text}`],
  rebalancing: ["\u21c6", "", (e, who) => `Rebalancing: ${who} to stage ${e.stage}`, (e) => e.text],
  resumed: ["\u21ba", "good", (e) => `Resumed ${e.text}`],
  raised: ["!", "warn", (e) => `Noted: ${titled(e.text)}`],
  cleared: ["\u2713", "good", (e) => `No longer: ${titled(e.text)}`],
};

// The lanes of the chart of peers, with the kinds of events marked in each.
export const LANES = ["joined", "suspect", "lost", "moved"];
const LANE_OF = { started: 0, joined: 0, suspect: 1, left: 2, gone: 2, banned: 2, moved: 3 };
export const markOf = (time, kind, count) => (kind in LANE_OF ? [[time, LANE_OF[kind], count]] : []);

const titled = (text) => text.slice(text.indexOf(": ") + 2);

export class Events {
  constructor(host) {
    this.host = host;
    this.newest = 0;
  }

  clear() {
    this.host.replaceChildren();
    this.newest = 0;
  }

  // Returns the events that are new. `names`: what peers call themselves, by id.
  add(events, me, names, most = 200) {
    const fresh = events.filter((event) => event.number > this.newest);
    for (const event of fresh) {
      this.newest = event.number;
      this.host.prepend(line(event, me, names.get(event.peer)));
    }
    while (this.host.childElementCount > most) this.host.lastChild.remove();
    return fresh;
  }
}

function line(event, me, name) {
  const [sign, tone, tell, why] = TELL[event.kind] ?? ["\u00b7", "", (e) => `${e.kind} ${e.text}`];
  const who = event.peer === me || !event.peer ? here() : [name ?? "Peer", shortId(event.peer)].join(" ");
  const text = make("span", {}, tell(event, who));
  if (why) text.append(make("span", { class: "why" }, why(event)));
  return make("li", { "data-tone": tone }, make("time", { datetime: new Date(event.time_s * 1000).toISOString() }, moment(event.time_s)), make("span", { class: "sign", "aria-hidden": "true" }, sign), text);
}

const MOST_SHARES = 10;

// Names and values. Only differences are changed, so that a screen reader does not repeat the rest.
function facts(host, pairs, wrapped) {
  const key = pairs.map(([name]) => name).join("|");
  if (host.dataset.key !== key) {
    host.dataset.key = key;
    const rows = pairs.map(([name, , kind]) => [make("dt", {}, name), make("dd", { class: kind })]);
    host.replaceChildren(...(wrapped ? rows.map((row) => make("div", {}, ...row)) : rows.flat()));
  }
  const values = host.querySelectorAll("dd");
  pairs.forEach(([, value], index) => say(values[index], value));
}

export function showChosen(host, peer, me, microbatches) {
  if (!peer) { facts(host, [["Peer", "none chosen"]], true); return; }
  const name = peer.id === me ? `${nameOf(peer)} (${hereWithin()})` : nameOf(peer);
  facts(host, [
    ["Peer", name], ["Stage", String(peer.stage)], ["Step", whole(peer.step)], ["Phase", peer.phase], ["Holds", `${peer.done} of ${microbatches}`],
    ["Queue", String(peer.queue)], ["Speed", `${amount(peer.throughput)} samples/s`], ["Given", `${amount(peer.tokens)} tokens`], ["Device", peer.device || "unknown"], ["Reached", peer.reach === "client" ? "not at all" : peer.reach || "unknown"],
    ["Line", [[peer.up, "up"], [peer.down, "down"]].filter(([rate]) => rate).map(([rate, way]) => `${bits(rate)} ${way}`).join(", ") || "not measured"],
  ], true);
}

const bits = (rate) => (8e-6 * rate < 999.5 ? `${amount(8e-6 * rate)} Mbit/s` : `${amount(8e-9 * rate)} Gbit/s`);

export function showOwn(host, said, own, share, localBatch) {
  const { peer, counters } = own, exact = counters.duplicate_microbatches + counters.lost_microbatches + counters.inexact_steps;
  facts(said, [["Now", own.paused ? "paused" : own.joining?.plan || own.decision], ["Rebalancing", own.rebalancing || "not looked at yet"]], true);
  facts(host, [
    ["Stage", own.moves ? `${peer.stage}, after ${own.moves} ${own.moves === 1 ? "move" : "moves"}` : String(peer.stage)],
    ["Phase", own.paused ? "paused" : peer.paused ? "pausing" : peer.leaving ? "leaving" : peer.phase], ["Queue", `${peer.queue} held`], ["Speed", `${amount(peer.throughput)} samples/s`],
    ["Microbatches", whole(counters.accumulated_microbatches)],
    ...(localBatch ? [["Updates of its own", `${whole(counters.own_updates)}, each after ${localBatch} microbatches`]] : []), ["Given", `${amount(peer.tokens)} tokens`],
    ...(own.texts?.share ? [["Answers to those who ask", `${own.texts.answering ? "now; " : ""}${amount(own.texts.tokens)} tokens in ${duration(own.texts.busy_s)}`]] : []),
    ["Share of the work", share === null ? "not counted yet" : `${(100 * share).toFixed(1)}%`],
    ["Sent", bytes(counters.bytes_sent)], ["Received", bytes(counters.bytes_received)],
    ["Exactness", exact ? `${exact} faults counted` : "every step exact"], ["Up", duration(own.uptime_s)],
    ["Priority", own.nice > 0 ? `other programs first (nice ${own.nice})` : `as most programs (nice ${own.nice})`], ["Pauses by itself", own.pauses.join(", ") || "never"],
  ]);
}

export function showHealth(alerts, notes, items) {
  const serious = items.filter((item) => item.severity !== "info"), info = items.filter((item) => item.severity === "info");
  lines(alerts, serious, (item) => make("li", { "data-severity": item.severity }, make("strong", {}, `${item.severity === "problem" ? "Problem" : "Warning"}: ${item.title}`), "; ", ...typed(item.remedy)));
  lines(notes, info, (item) => make("li", {}, ...typed(`${item.title}; ${item.remedy}`)));
}

// Text between backticks is shown as code.
const typed = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

function lines(host, items, tell) {
  const key = JSON.stringify(items);
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  host.replaceChildren(...items.map(tell));
}

// The contributions of each peer. Returns this machine's share, or null if nothing is counted.
export function showShares(host, note, told) {
  const sums = new Map();
  for (const stage of told.stages) for (const row of stage.peers) {
    const sum = sums.get(row.peer) ?? { tokens: 0, week: 0, signed: 0, stages: [] };
    sum.tokens += row.tokens;
    sum.week += row.week_tokens ?? 0;
    sum.signed += row.signed_tokens ?? 0;
    sum.stages.push(stage.stage);
    sums.set(row.peer, sum);
  }
  const total = [...sums.values()].reduce((all, one) => all + one.tokens, 0);
  const order = [...sums].sort((a, b) => b[1].tokens - a[1].tokens), largest = order[0]?.[1].tokens || 1;
  const shown = order.slice(0, MOST_SHARES), mine = order.findIndex(([peer]) => peer === told.me);
  if (mine >= MOST_SHARES) shown[MOST_SHARES - 1] = order[mine];
  host.replaceChildren(...shown.map(([peer, sum]) => {
    const part = total ? sum.tokens / total : 0, bar = make("i");
    bar.style.width = `${((100 * sum.tokens) / largest).toFixed(1)}%`; // of the largest: among hundreds all shares are small
    const own = known(told.names?.[peer], told.teams?.[peer]), name = [own, peer === told.me ? here() : peer ? shortId(peer) : "Not named"].filter(Boolean).join(" "), where = `stage\u00a0${sum.stages.join(", ")}`;
    return make("li", { class: peer === told.me ? "is-me" : undefined }, make("span", {}, `${name}, ${where}`), make("span", {}, `${amount(sum.tokens)} tokens, ${(100 * part).toFixed(1)}%${sum.signed ? `; ${amount(sum.week)} this week` : ""}`), make("span", { class: "share", "aria-hidden": "true" }, bar));
  }));
  const ranges = told.stages.map((stage) => `${whole(stage.steps)} of stage ${stage.stage}`);
  const more = order.length > shown.length ? `${order.length - shown.length} more: see peerd contributions. ` : "";
  say(note, order.length ? `${more}${ranges.length <= 4 ? `Averages counted: ${ranges.join("; ")}` : `${ranges.length} stages`}.` : "Nothing is counted yet.");
  return total && mine >= 0 ? order[mine][1].tokens / total : null;
}

export function showRows(host, stages) {
  const rows = stages.flatMap((stage) => stage.peers).map((peer) => [peer.stage, nameOf(peer), peer.step, peer.phase, peer.done, peer.queue, amount(peer.throughput), peer.device]);
  while (host.childElementCount > rows.length) host.lastChild.remove();
  while (host.childElementCount < rows.length) host.append(make("tr", {}, ...Array.from({ length: 8 }, () => make("td"))));
  rows.forEach((row, index) => row.forEach((value, column) => say(host.children[index].children[column], String(value))));
}
