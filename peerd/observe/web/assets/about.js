// What a visitor wants to know first: what is trained, how to take part, which team gives most; and the speed before the first step is over.

import { amount, draw, make, say, whole } from "/assets/format.js";
import { qr } from "/assets/qr.js";

const WINDOW_S = 60, ENOUGH_S = 4;
const MAIL = /^[^\s@<>"]+@[^\s@<>"]+\.[^\s@<>"]+$/;

// Only an address of mail or of a secure page becomes a link; all else stays text.
function linked(text) {
  const href = text.startsWith("https://") ? text : MAIL.test(text) ? `mailto:${text}` : "";
  return href ? make("a", { href, rel: "noopener noreferrer" }, text) : text;
}

export function showAbout(host, run) {
  const told = run.about ?? {}, purpose = host.querySelector("#purpose");
  purpose.hidden = !told.purpose;
  say(purpose, told.purpose ?? "");
  const rows = [["Licence of the model", told.licence], ["Contact", told.contact], ["More", told.page]].filter(([, text]) => text);
  host.querySelector("#about-facts").replaceChildren(...rows.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, linked(text)))));
}

export function showJoin(host, run, line, isInvited) {
  host.hidden = !line && !Object.keys(run.about ?? {}).length;
  host.querySelector(".join").hidden = !line;
  const here = line.startsWith("/ip4/127.") ? "This run can be joined from this machine only: it listens on 127.0.0.1." : "Install peerd, then run this command on Linux, macOS or WSL 2.";
  say(host.querySelector("#join-note"), isInvited ? `${here} The organiser invites peers: the command prints the id to send to them.` : here);
  const isShort = location.protocol === "https:" && line; // then this page says where
  say(host.querySelector("#join"), `peerd join ${isShort ? location.origin : line}`);
}

// The address of a public page as a QR code, for whoever sees it on a screen or a slide.
export function showCode(host, isPublic) {
  const figure = host.querySelector("#code"), rows = isPublic ? qr(location.origin) : null;
  figure.hidden = !rows;
  if (!rows) return;
  const size = rows.length + 8; // a white border of four
  const path = rows.flatMap((row, y) => row.flatMap((dark, x) => (dark ? [`M${x + 4} ${y + 4}h1v1h-1z`] : []))).join("");
  const picture = draw("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `QR code of ${location.origin}`, "shape-rendering": "crispEdges" });
  picture.append(draw("rect", { width: size, height: size, fill: "#fff" }), draw("path", { d: path, fill: "#000" }));
  figure.replaceChildren(picture, make("figcaption", {}, "this page"));
}

// How the model goes on from the organiser's text, in bold, at the last evaluation.
export function showSample(host, told) {
  const card = host.querySelector("#sample");
  card.hidden = !told;
  if (!told) return;
  say(host.querySelector("#sample-note"), `at step ${whole(told.step)}`);
  say(host.querySelector("#sample-prompt"), told.prompt);
  say(host.querySelector("#sample-text"), told.text);
}

export function letCopy(host) {
  const button = host.querySelector("#copy"), code = host.querySelector("#join");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      say(button, "Copied");
      say(host.querySelector("#copied"), "The command is in the clipboard");
    } catch { // pages without TLS have no clipboard: the text is marked, so that the keyboard copies it
      getSelection().selectAllChildren(code);
      say(button, "Press Ctrl+C");
    }
    setTimeout(() => { say(button, "Copy"); say(host.querySelector("#copied"), ""); }, 3000);
  });
}

// Tokens of each team, the most first. Peers without a team are not shown here.
export function showTeams(host, title, told) {
  const sums = new Map();
  for (const { peers } of told.stages) {
    for (const row of peers) {
      const team = told.teams?.[row.peer];
      if (team) sums.set(team, (sums.get(team) ?? 0) + row.tokens);
    }
  }
  title.hidden = !sums.size;
  const order = [...sums].sort((a, b) => b[1] - a[1]).slice(0, 10);
  host.replaceChildren(...order.map(([team, tokens]) => make("li", {}, make("span", {}, team), make("span", {}, `${amount(tokens)} tokens`))));
}

// The speed while the run's first step is computed, from the microbatches that the last stage still misses.
export class Beginning {
  clear() {
    this.seen = [];
  }

  // Tokens per second; 0 once a step has ended, and in the first seconds.
  rate(now, run) {
    const last = now.stages.at(-1);
    if (now.tokens_per_second || !last) return 0;
    const done = run.microbatches_per_step - last.missing, step = now.step ?? 0;
    if (this.seen.length && this.seen.at(-1).step !== step) this.seen = [];
    this.seen.push({ time: now.time_s, step, done });
    while (now.time_s - this.seen[0].time > WINDOW_S) this.seen.shift();
    const span = now.time_s - this.seen[0].time;
    return span < ENOUGH_S ? 0 : Math.max(0, ((done - this.seen[0].done) / span) * (run.tokens_per_step / run.microbatches_per_step));
  }
}
