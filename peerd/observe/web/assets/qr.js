// QR codes of short texts: byte mode, error correction M, versions 1 to 10 (ISO/IEC 18004).

// Of each version: error correction codewords of a block, then pairs of blocks and their data codewords.
const BLOCKS = [
  [10, 1, 16], [16, 1, 28], [26, 1, 44], [18, 2, 32], [24, 2, 43], [16, 4, 27], [18, 4, 31], [22, 2, 38, 2, 39], [22, 3, 36, 2, 37], [26, 4, 43, 1, 44],
];
const MIDDLES = [[], [6, 18], [6, 22], [6, 26], [6, 30], [6, 34], [6, 22, 38], [6, 24, 42], [6, 26, 46], [6, 28, 50]];
const MASKS = [
  (r, c) => (r + c) % 2 === 0, (r) => r % 2 === 0, (r, c) => c % 3 === 0, (r, c) => (r + c) % 3 === 0,
  (r, c) => (Math.floor(r / 2) + Math.floor(c / 3)) % 2 === 0, (r, c) => ((r * c) % 2) + ((r * c) % 3) === 0,
  (r, c) => (((r * c) % 2) + ((r * c) % 3)) % 2 === 0, (r, c) => (((r + c) % 2) + ((r * c) % 3)) % 2 === 0,
];

// The rows of the code, true is dark; null if the text is too long.
export function qr(text) {
  const bytes = new TextEncoder().encode(text), version = BLOCKS.findIndex((_, index) => roomOf(index + 1) >= bytes.length) + 1;
  if (!version) return null;
  const bits = placed(codewords(bytes, version), frame(version), version);
  const tried = MASKS.map((_, mask) => masked(bits, mask, version));
  const costs = tried.map(penalty);
  return tried[costs.indexOf(Math.min(...costs))].map((row) => row.map(Boolean));
}

const dataOf = ([, ...pairs]) => pairs.reduce((sum, count, index) => (index % 2 ? sum + count * pairs[index - 1] : sum), 0);
const countBits = (version) => (version < 10 ? 8 : 16);
const roomOf = (version) => dataOf(BLOCKS[version - 1]) - Math.ceil((4 + countBits(version)) / 8);

function codewords(bytes, version) {
  const block = BLOCKS[version - 1], total = dataOf(block), bits = [];
  const push = (value, width) => { for (let at = width - 1; at >= 0; at -= 1) bits.push((value >> at) & 1); };
  push(4, 4);
  push(bytes.length, countBits(version));
  bytes.forEach((byte) => push(byte, 8));
  push(0, Math.min(4, 8 * total - bits.length));
  while (bits.length % 8) bits.push(0);
  const data = [];
  for (let at = 0; at < bits.length; at += 8) data.push(parseInt(bits.slice(at, at + 8).join(""), 2));
  for (let pad = 0; data.length < total; pad += 1) data.push(pad % 2 ? 0x11 : 0xec);
  const parts = [], [correction, ...pairs] = block;
  for (let pair = 0, at = 0; pair < pairs.length; pair += 2) {
    for (let count = 0; count < pairs[pair]; count += 1) parts.push(data.slice(at, (at += pairs[pair + 1])));
  }
  return [...interleaved(parts), ...interleaved(parts.map((part) => remainder(part, correction)))];
}

const interleaved = (parts) => Array.from({ length: Math.max(...parts.map((part) => part.length)) }, (_, at) => parts.flatMap((part) => (at < part.length ? [part[at]] : []))).flat();

function times(a, b) { // in the field of 256 elements
  let product = 0;
  for (let bit = 7; bit >= 0; bit -= 1) product = (product << 1) ^ ((product >> 7) * 0x11d) ^ (((b >> bit) & 1) * a);
  return product;
}

function remainder(data, degree) {
  const divisor = [...Array(degree - 1).fill(0), 1];
  for (let root = 1, step = 0; step < degree; step += 1, root = times(root, 2)) {
    for (let at = 0; at < degree; at += 1) divisor[at] = times(divisor[at], root) ^ (divisor[at + 1] ?? 0);
  }
  const rest = Array(degree).fill(0);
  for (const byte of data) {
    const factor = byte ^ rest.shift();
    rest.push(0);
    divisor.forEach((coefficient, at) => { rest[at] ^= times(coefficient, factor); });
  }
  return rest;
}

// What does not depend on the text: 0 or 1, and null where the text goes. The places of the format hold 0.
function frame(version) {
  const size = 17 + 4 * version, rows = Array.from({ length: size }, () => Array(size).fill(null));
  const square = (row, column, reach, dark) => {
    for (let r = -reach; r <= reach; r += 1) for (let c = -reach; c <= reach; c += 1) if (rows[row + r]?.[column + c] !== undefined) rows[row + r][column + c] = Number(dark(Math.max(Math.abs(r), Math.abs(c))));
  };
  for (let at = 0; at < size; at += 1) rows[6][at] = rows[at][6] = 1 - (at % 2);
  for (const [row, column] of [[3, 3], [3, size - 4], [size - 4, 3]]) square(row, column, 4, (ring) => ring !== 2 && ring !== 4);
  const middles = MIDDLES[version - 1], last = middles.at(-1);
  for (const row of middles) for (const column of middles) if (!(row === 6 && column === 6) && !(row === 6 && column === last) && !(row === last && column === 6)) square(row, column, 2, (ring) => ring !== 1);
  for (const [row, column] of formatPlaces(size).flat()) rows[row][column] = 0;
  rows[size - 8][8] = 1;
  if (version >= 7) {
    const code = withCheck(version, 12, 0x1f25);
    for (let bit = 0; bit < 18; bit += 1) {
      const [near, far] = [Math.floor(bit / 3), size - 11 + (bit % 3)];
      rows[near][far] = rows[far][near] = (code >> bit) & 1;
    }
  }
  return rows;
}

// Where the bits of the format stand, the lowest first, in both copies.
function formatPlaces(size) {
  const first = [], second = [];
  for (let bit = 0; bit < 15; bit += 1) {
    first.push(bit < 6 ? [bit, 8] : bit < 8 ? [bit + 1, 8] : bit === 8 ? [8, 7] : [8, 14 - bit]);
    second.push(bit < 8 ? [8, size - 1 - bit] : [size - 15 + bit, 8]);
  }
  return [first, second];
}

function withCheck(value, width, polynomial) {
  let rest = value << width;
  for (let bit = 31 - Math.clz32(rest); bit >= width; bit -= 1) if ((rest >> bit) & 1) rest ^= polynomial << (bit - width);
  return (value << width) | rest;
}

// The text's bits go up and down in columns two wide, from the right. Returns the rows, and which places are the text's.
function placed(words, rows, version) {
  const size = rows.length, bits = words.flatMap((word) => Array.from({ length: 8 }, (_, at) => (word >> (7 - at)) & 1));
  const free = rows.map((row) => row.map((cell) => cell === null));
  let next = 0;
  for (let right = size - 1; right > 0; right -= 2) {
    if (right === 6) right = 5;
    for (let step = 0; step < size; step += 1) {
      const row = (right + 1) & 2 ? step : size - 1 - step;
      for (const column of [right, right - 1]) if (free[row][column]) rows[row][column] = bits[next++] ?? 0;
    }
  }
  return { rows, free, version };
}

function masked({ rows, free }, mask) {
  const out = rows.map((row, r) => row.map((cell, c) => (free[r][c] && MASKS[mask](r, c) ? 1 - cell : cell)));
  const code = withCheck(mask, 10, 0x537) ^ 0x5412; // M is 00
  for (const copy of formatPlaces(rows.length)) copy.forEach(([row, column], bit) => { out[row][column] = (code >> bit) & 1; });
  return out;
}

function penalty(rows) {
  const size = rows.length, columns = rows.map((_, at) => rows.map((row) => row[at]));
  let cost = 0, dark = 0;
  for (const line of [...rows, ...columns]) {
    const text = line.join("");
    for (const run of text.match(/0+|1+/g)) if (run.length >= 5) cost += run.length - 2;
    for (let at = 0; at + 11 <= size; at += 1) if (["10111010000", "00001011101"].includes(text.slice(at, at + 11))) cost += 40;
  }
  for (let r = 0; r < size; r += 1) {
    for (let c = 0; c < size; c += 1) {
      dark += rows[r][c];
      if (r && c && rows[r][c] === rows[r - 1][c] && rows[r][c] === rows[r][c - 1] && rows[r][c] === rows[r - 1][c - 1]) cost += 3;
    }
  }
  return cost + 10 * Math.floor(Math.abs((20 * dark) / size ** 2 - 10));
}
