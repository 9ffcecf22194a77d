// Formatting of numbers, times and names. Text that a peer chose enters the page as text only.

const UNITS = ["", "K", "M", "G", "T", "P"];

export function amount(value) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  if (unit === 0) return Number.isInteger(value) || Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1);
  return `${Number(value.toPrecision(3))}${UNITS[unit]}`;
}

export const bytes = (value) => amount(value).replace(/[A-Z]?$/, (unit) => `\u00a0${unit}B`);

export const whole = (value) => Math.round(value).toLocaleString("en");

export const shortId = (peer) => (peer.length > 8 ? `..${peer.slice(-6)}` : peer);

// What a peer calls itself, with its team; empty if it has told no name. It enters the page as text only.
export const known = (nickname, team) => [nickname, team && `(${team})`].filter(Boolean).join(" ");

// The daemon that serves this page: the visitor's own, unless the page is public.
export const here = () => (document.body.dataset.public === "true" ? "This page's peer" : "This machine");
export const hereWithin = () => here().replace("T", "t");

// Its name beside its id.
export const nameOf = (peer) => [known(peer.nickname, peer.team), shortId(peer.id)].filter(Boolean).join(" ");

// The same where there is little room.
export const markOf = (peer) => (peer.nickname?.length > 12 ? `${[...peer.nickname].slice(0, 11).join("")}\u2026` : peer.nickname) || shortId(peer.id);

export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

export const clock = (seconds) => CLOCK.format(seconds * 1000);

export const minutes = (seconds) => MINUTES.format(seconds * 1000);

const WEEKDAY = new Intl.DateTimeFormat("en-GB", { weekday: "short" });

// A time: today's to the second, this week's with its day, others with their date.
export function moment(seconds, now = Date.now() / 1000) {
  if (DAY.format(seconds * 1000) === DAY.format(now * 1000) && now - seconds < 86400) return clock(seconds);
  return now - seconds < 6 * 86400 ? `${WEEKDAY.format(seconds * 1000)} ${minutes(seconds)}` : DAY.format(seconds * 1000);
}

export const dayAndTime = (seconds) => `${DAY.format(seconds * 1000)} ${minutes(seconds)}`;

// An element with attributes and children; strings become text, never markup.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function draw(name, attributes = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(element, attributes);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Set only attributes that differ, which keeps updates fast with a thousand peers.
export function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(key) !== text) element.setAttribute(key, text);
  }
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
