// The page: reads the daemon's stream and passes its messages to the parts. It keeps the history for the charts.

import { Chart, decimals, smoothed } from "/assets/chart.js";
import { amount, bytes, clock, dayAndTime, duration, here, hereWithin, known, minutes, say, whole } from "/assets/format.js";
import { SwarmMap, peerOf } from "/assets/map.js";
import { NearMap } from "/assets/near.js";
import { Beginning, letCopy, showAbout, showCode, showJoin, showSample, showTeams } from "/assets/about.js";
import { Events, LANES, markOf, showChosen, showHealth, showOwn, showRows, showShares } from "/assets/panels.js";

const $ = (id) => document.getElementById(id);
const RETRY_MS = 1000, SILENT_MS = 6000, SHARES_MS = 5000, SHARES_TURNS = 4, OBEYED_MS = 3000, MOST_STEPS = 4000, MOST_SAMPLES = 1200, MOST_LINES = 6, MOST_MARKS = 3000, MOST_PLACES = 2000;

const DAY_S = 24 * 3600, SHORT_S = 600, KEPT = "peerd-range";

const past = { run: null, me: "", steps: new Map(), evaluations: new Map(), samples: new Map(), churn: [], untold: [], reach: null, spacing: 0, began: 0 };
const places = new Map(); // the position of each peer in its stage, in the order in which peers were first seen
const names = new Map(); // what peers call themselves, also those that are gone
let latest = null, heardAt = 0, charted = "", stream = null, share = null, waiting = null, turn = 0, arrived = 0;

const map = new SwarmMap($("map"), $("told"), (peer) => showChosen($("chosen"), peer, past.me, past.run.microbatches_per_step));
const near = new NearMap($("near"), $("near-note"), (id) => { map.choose(id); showNear(); });
const events = new Events($("events"));
const beginning = new Beginning();
const when = (seconds) => { const span = spanOf(past.samples); return (span > DAY_S / 2 ? dayAndTime : span > SHORT_S ? minutes : clock)(seconds); };
const charts = {
  loss: new Chart($("loss-chart"), { title: "Loss by step", x: (step) => `step ${whole(step)}`, y: (loss, step) => loss.toFixed(step ? decimals(step) : 3), wholeX: true }),
  rate: new Chart($("rate-chart"), { title: "Tokens per second", x: when, y: amount, fromZero: true, area: true }),
  queue: new Chart($("queue-chart"), { title: "Microbatches held", x: when, y: amount, fromZero: true }),
  peers: new Chart($("peers-chart"), { title: "Peers", x: when, y: amount, fromZero: true, area: true, lanes: LANES }),
  traffic: new Chart($("traffic-chart"), { title: "Bytes per second", x: when, y: bytes, fromZero: true }),
};

function takePast(told) {
  past.run = told.run;
  past.me = told.me;
  past.steps = new Map(told.steps.map((row) => [row[0], row]));
  past.evaluations = new Map(told.evaluations.map((row) => [row[0], row]));
  past.samples = new Map(told.samples.map((row) => [row[0], row]));
  past.churn = told.churn.flatMap(([time, kind, count]) => markOf(time, kind, count));
  past.reach = told.reach_s;
  past.spacing = told.spacing_s;
  past.began = told.samples.at(-1)?.[0] ?? 0;
  events.clear();
  past.untold = told.events; // until the first look at the table says their names
  say($("run"), told.run.name);
  showAbout($("about"), told.run);
  beginning.clear();
  document.title = `${told.run.name} - peerd`;
  $("progress").hidden = !told.run.steps;
  charted = "";
  fetchSession();
  fetchShares();
}

function takeNow(now) {
  if (!past.run) return;
  const began = performance.now();
  latest = now;
  for (const row of now.steps) past.steps.set(row[0], row);
  if (now.evaluation) past.evaluations.set(now.evaluation[0], now.evaluation);
  for (const row of now.samples) addSample(row);
  trim(past.steps, MOST_STEPS);
  trim(past.evaluations, MOST_STEPS);
  trim(past.samples, MOST_SAMPLES);
  nameAll(now.stages);
  events.add(past.untold, past.me, names);
  past.untold = [];
  const fresh = events.add(now.events, past.me, names);
  past.churn.push(...fresh.flatMap((event) => (event.peer ? markOf(event.time_s, event.kind, 1) : [])));
  past.churn.splice(0, past.churn.length - MOST_MARKS);
  const stages = now.stages.map((stage) => ({ ...stage, peers: inPlace(stage.peers.map((row) => peerOf(row, stage.stage))) }));
  showFigures(now, stages);
  map.show(stages, past.run.microbatches_per_step, past.me);
  if (places.size > MOST_PLACES + map.marks.size) for (const id of places.keys()) if (!map.marks.has(id)) places.delete(id);
  showChosen($("chosen"), map.find(map.chosen), past.me, past.run.microbatches_per_step);
  if ($("as-table").open) showRows($("rows"), stages);
  showNear();
  showOwn($("own"), $("own-said"), now.own, share, past.run.local_batch);
  showActs(now.own.paused);
  showJoin($("about"), past.run, now.own.join ?? "", now.own.invited);
  showSample(document, now.sample);
  showHealth($("health"), $("notes"), now.own.health);
  showCharts();
  document.documentElement.dataset.updateMs = (performance.now() - began).toFixed(1);
}

function showNear() {
  if ($("as-near").open) near.show(map.stages.flatMap((stage) => stage.peers), past.me, map.chosen);
}

// New points keep the spacing of the history, so that a long range does not change its shape over time.
function addSample(row) {
  const newest = [...past.samples.keys()].at(-1) ?? 0;
  if (row[0] <= newest) return;
  if (row[0] < past.began + past.spacing) { if (newest > past.began) past.samples.delete(newest); } else past.began = row[0];
  past.samples.set(row[0], row);
  if (past.reach) for (const time of past.samples.keys()) { if (time >= row[0] - past.reach) break; past.samples.delete(time); }
}

function nameAll(stages) {
  for (const stage of stages) for (const row of stage.peers) {
    const { id, nickname, team } = peerOf(row, stage.stage);
    if (nickname || team) names.set(id, known(nickname, team));
  }
  trim(names, MOST_PLACES);
}

// This machine first, then the others in order of arrival, so that a joining peer moves no other.
function inPlace(peers) {
  for (const peer of peers) if (!places.has(peer.id)) places.set(peer.id, peer.id === past.me ? -1 : (arrived += 1));
  return peers.sort((a, b) => places.get(a.id) - places.get(b.id));
}

const sum = (values) => values.reduce((all, value) => all + value, 0);
const spanOf = (samples) => { const times = [...samples.keys()]; return times.length ? times.at(-1) - times[0] : 0; };

function trim(kept, most) {
  for (const key of kept.keys()) { if (kept.size <= most) return; kept.delete(key); }
}

function showFigures(now, stages) {
  const { run } = past, losses = [...past.steps.values()].filter((row) => row[1] !== null).sort((a, b) => a[0] - b[0]);
  const step = now.step ?? now.own.peer.step, peers = sum(stages.map((stage) => stage.num_peers));
  const left = run.steps && now.tokens_per_second ? ((run.steps - step) * run.tokens_per_step) / now.tokens_per_second : 0;
  say($("step"), whole(step));
  if (now.outdated) say($("step-note"), "when this machine paused");
  else say($("step-note"), run.steps ? `of ${whole(run.steps)}${left > 0 ? `, ${duration(left)} left` : ""}` : "");
  $("progress").value = run.steps ? step / run.steps : 0;
  const ofStep = now.loss ?? losses.at(-1)?.[1] ?? null, before = losses.at(-11); // known even if no peer reports it any more
  const isLocal = run.local_batch > 0 && step >= run.local_steps_after;
  const evaluation = isLocal ? now.evaluation ?? [...past.evaluations.values()].sort((a, b) => a[0] - b[0]).at(-1) ?? null : null;
  const loss = isLocal ? evaluation?.[1] ?? null : ofStep;
  say($("loss"), loss === null ? "\u2013" : loss.toFixed(3));
  if (isLocal) say($("loss-note"), `averaged parameters, ${evaluation ? `step ${whole(evaluation[0])}` : "not evaluated yet"}${ofStep === null ? "" : `; ${ofStep.toFixed(3)} within the last step`}`);
  else if (loss === null) say($("loss-note"), "known after the first step");
  else say($("loss-note"), before ? `${loss > before[1] ? "up" : "down"} ${Math.abs(loss - before[1]).toFixed(3)} in 10 steps` : "");
  const first = beginning.rate(now, run); // no step has ended yet
  say($("rate"), now.tokens_per_second || first ? amount(now.tokens_per_second || first) : "\u2013");
  say($("rate-note"), first ? "tokens/s so far" : "tokens/s");
  say($("peers"), now.outdated ? "\u2013" : whole(peers));
  const suspects = sum(stages.map((stage) => stage.peers.filter((peer) => peer.phase === "suspect").length));
  if (now.outdated) say($("peers-note"), "not heard of during a pause");
  else say($("peers-note"), `in ${stages.length} ${stages.length === 1 ? "stage" : "stages"}${suspects ? `, ${suspects} suspect` : ""}`);
}

function showCharts() {
  const steps = [...past.steps.values()].sort((a, b) => a[0] - b[0]), samples = [...past.samples.values()].sort((a, b) => a[0] - b[0]);
  const evaluations = [...past.evaluations.values()].sort((a, b) => a[0] - b[0]);
  const key = `${evaluations.at(-1)?.[0]} ${steps.at(-1)?.[0]} ${steps.at(-1)?.[1]} ${samples.at(-1)?.[0]}`;
  if (key === charted) return;
  charted = key;
  const loss = steps.map((row) => [row[0], row[1]]);
  const evaluated = past.run.local_batch ? "evaluation of averaged parameters" : "evaluation", within = past.run.local_batch ? " (within steps)" : "";
  charts.loss.show([{ name: `each step${within}`, points: loss, faint: true }, { name: `loss, smoothed${within}`, points: smoothed(loss.filter(([, y]) => y !== null), Math.min(12, Math.floor(loss.length / 12))) }, { name: evaluated, points: evaluations, colour: 1, dashed: !past.run.local_batch }]);
  charts.rate.show([{ name: "tokens per second", points: gapped(samples, (row) => row[1] || null) }]);
  charts.traffic.show([{ name: "sent", points: smoothed(gapped(samples, (row) => row[2]), 3) }, { name: "received", points: smoothed(gapped(samples, (row) => row[3]), 3), colour: 1, dashed: true }]);
  charts.peers.show([{ name: "in all stages", points: gapped(samples, (row) => sum(row[4])) }, { name: "in the smallest stage", points: gapped(samples, (row) => Math.min(...row[4])), colour: 3, dashed: true }], past.churn);
  const count = past.run.num_stages;
  say($("queue-note"), `microbatches held, ${count <= MOST_LINES ? "by stage" : "all stages together"}`);
  charts.queue.show(count <= MOST_LINES
    ? Array.from({ length: count }, (_, stage) => ({ name: count > 3 ? `${stage}` : `stage ${stage}`, points: smoothed(gapped(samples, (row) => row[5][stage] ?? 0), 5), colour: stage, dashed: stage % 2 === 1 }))
    : [{ name: "all stages", points: smoothed(gapped(samples, (row) => sum(row[5])), 5) }]);
}

// The line has a gap where the daemon did not run.
function gapped(samples, read) {
  const points = [];
  let usual = Infinity;
  samples.forEach((row, index) => {
    const gap = index ? row[0] - samples[index - 1][0] : 0;
    if (index && gap > Math.max(30, 5 * usual)) points.push([row[0] - gap / 2, null]);
    else if (index) usual = gap;
    points.push([row[0], read(row)]);
  });
  return points;
}

async function fetchSession() {
  try {
    const session = await (await fetch("/api/session")).json();
    $("leave").hidden = $("pause").hidden = !session.may_act;
    showCode($("about"), session.public);
    document.body.dataset.public = session.public;
    say($("own-title"), here());
    say($("traffic-note"), `of ${hereWithin()}, per second`);
  } catch { /* the stream reports a lost connection */ }
}

async function fetchShares() {
  try {
    const answer = await fetch("/api/contributions");
    if (answer.ok) {
      const told = await answer.json();
      share = showShares($("shares"), $("coverage"), told);
      showTeams($("teams"), $("teams-title"), told);
    }
  } catch { /* as above */ }
}

function showActs(paused) {
  if (waiting !== null && paused !== waiting) return;
  waiting = null;
  $("pause").disabled = false;
  say($("pause"), paused ? "Go on" : "Pause");
  $("pause").dataset.paused = paused;
}

async function pauseOrGoOn() {
  const paused = $("pause").dataset.paused === "true";
  waiting = !paused;
  $("pause").disabled = true;
  say($("pause"), paused ? "Going on" : "Pausing");
  await fetch(paused ? "/api/resume" : "/api/pause", { method: "POST" }).catch(() => null);
  setTimeout(() => { waiting = null; }, OBEYED_MS); // a limit may keep it paused
}

function connect() {
  stream?.close();
  const mine = (stream = new EventSource(`/api/live?range=${$("range").value}`));
  mine.addEventListener("past", (event) => takePast(JSON.parse(event.data)));
  mine.addEventListener("now", (event) => { heardAt = Date.now(); state("live"); takeNow(JSON.parse(event.data)); });
  mine.onerror = () => {
    state("lost");
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => mine === stream && connect(), RETRY_MS);
  };
}

function state(name) {
  if ($("connection").dataset.state === name) return;
  $("connection").dataset.state = document.body.dataset.state = name;
  say($("connection-text"), name === "live" ? "live" : latest ? `no connection since ${clock(Date.now() / 1000)}; trying again` : "no connection; trying again");
}

$("range").addEventListener("change", () => {
  try { localStorage.setItem(KEPT, $("range").value); } catch { /* the choice then lasts until the page is closed */ }
  connect();
});
$("as-table").addEventListener("toggle", () => latest && takeNow({ ...latest, events: [] }));
$("as-near").addEventListener("toggle", showNear);
$("pause").addEventListener("click", pauseOrGoOn);
letCopy($("about"));
$("leave").addEventListener("click", () => $("sure").showModal());
$("sure").addEventListener("close", async () => {
  if ($("sure").returnValue !== "leave") return;
  $("leave").disabled = true;
  const answer = await fetch("/api/leave", { method: "POST" });
  say($("leave"), answer.ok ? "Leaving" : "Refused");
});
setInterval(() => { turn += 1; if (share === null || turn % SHARES_TURNS === 0) fetchShares(); }, SHARES_MS);
setInterval(() => { if (heardAt && Date.now() - heardAt > SILENT_MS) state("lost"); }, 1000);
try { $("range").value = localStorage.getItem(KEPT) ?? "24h"; } catch { /* keep the default */ }
if (!$("range").value) $("range").value = "24h";
fetchSession().finally(connect); // the names of things depend on who looks
