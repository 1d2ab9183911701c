'use strict';
// Reads of 4 KiB of a file that the page cache has, by pelton/fs and by node:fs/promises, one at a time and 32 at once.
// The systems take turns; each figure is the median of the rounds, with its range.
//   files.js [ROUNDS]
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');

const { median } = require('./median.js');

const peltonFs = require(`${process.env.PELTON_PACKAGE ?? '..'}/lib/fs.js`);

const SIZE = 4096;
const FILE_BYTES = 16 << 20;
const READS = 20_000;

/** Reads per second. */
async function run(system, at, inFlight) {
  const handle = await system.open(at, 'r');
  let next = 0;
  const reader = async () => {
    const buffer = Buffer.alloc(SIZE);
    while (next < READS) {
      next += 1;
      const position = ((next * 7919) % (FILE_BYTES / SIZE)) * SIZE;
      const { bytesRead } = await handle.read(buffer, 0, SIZE, position);
      if (bytesRead !== SIZE || buffer.readUInt32LE(0) !== position) throw new Error(`other bytes at ${position}`);
    }
  };
  const began = process.hrtime.bigint();
  await Promise.all(Array.from({ length: inFlight }, reader));
  const ns = Number(process.hrtime.bigint() - began);
  await handle.close();
  return (READS / ns) * 1e9;
}

async function main(rounds) {
  const directory = fs.mkdtempSync(path.join(os.tmpdir(), 'files-'));
  const at = path.join(directory, 'file');
  try {
    const content = Buffer.alloc(FILE_BYTES);
    for (let position = 0; position < FILE_BYTES; position += SIZE) content.writeUInt32LE(position, position);
    fs.writeFileSync(at, content);
    const systems = { 'pelton/fs': peltonFs, 'node:fs/promises': fs.promises };
    for (const inFlight of [1, 32]) {
      const found = { 'pelton/fs': [], 'node:fs/promises': [] };
      for (let round = 0; round < rounds; round += 1) {
        for (const [name, system] of Object.entries(systems)) found[name].push(await run(system, at, inFlight));
      }
      for (const [name, figures] of Object.entries(found)) {
        const speedups = figures.map((figure, round) => found['pelton/fs'][round] / figure);
        console.log(`${name.padEnd(16)} ${`${inFlight}`.padStart(2)} at once ${median(figures).toFixed(0).padStart(8)} `
          + `reads/s (${Math.min(...figures).toFixed(0)} to ${Math.max(...figures).toFixed(0)}); pelton's speedup `
          + `${median(speedups).toFixed(2)}`);
      }
    }
  } finally {
    fs.rmSync(directory, { recursive: true });
  }
}

void main(Number(process.argv[2] ?? 5));
