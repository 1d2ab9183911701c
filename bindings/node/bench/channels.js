'use strict';
// pelton beside what Node has for messages of its own: child_process IPC (advanced serialization), postMessage between
// worker threads, and a Unix socket with length prefixes. The systems take turns; each figure is the median of the
// rounds, with its range.
//   channels.js stream | trip [ROUNDS]
//     stream: messages of 256 bytes one way, per second; and the event loop's delay at the receiver
//     trip: microseconds for a message of 256 bytes there and back
const { fork } = require('node:child_process');
const { once } = require('node:events');
const fs = require('node:fs');
const net = require('node:net');
const os = require('node:os');
const path = require('node:path');
const { monitorEventLoopDelay } = require('node:perf_hooks');
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');

const { receiveFrames, sendFrame } = require('./frames.js');
const { median } = require('./median.js');
const pelton = require(process.env.PELTON_PACKAGE ?? '..');

const SIZE = 256;
const TRIPS = 5000;
const COUNTS = { 'pelton': 300_000, 'pelton-many': 1_000_000, 'child-process': 30_000, 'worker': 100_000,
  'unix-socket': 100_000 };

/** The peer, in another process or thread: sends COUNT messages, or echoes until its parent has ended. */
async function peer({ system, kind, name, count }) {
  const message = Buffer.alloc(SIZE, 'x');
  const isStream = kind === 'stream';
  switch (system) {
    case 'pelton': case 'pelton-many': {
      const sender = await pelton.Sender.connect(name, { timeout: 10_000 });
      if (!isStream) {
        const receiver = await pelton.Receiver.connect(`${name}-back`, { timeout: 10_000 });
        for await (const found of receiver) await sender.send(found);
      } else if (system === 'pelton') {
        for (let i = 0; i < count; i += 1) await sender.send(message);
      } else {
        const batch = new Array(1000).fill(message);
        for (let i = 0; i < count; i += 1000) await sender.sendMany(batch);
      }
      sender.close();
      break;
    }
    case 'unix-socket': {
      const socket = net.connect(name);
      await once(socket, 'connect');
      if (isStream) for (let i = 0; i < count; i += 1) await sendFrame(socket, message);
      else receiveFrames(socket, (found) => void sendFrame(socket, found));
      if (isStream) socket.end();
      break;
    }
    case 'child-process':
      if (!isStream) process.on('message', (found) => process.send(found));
      // The callback says when it is written: that is its back-pressure.
      else for (let i = 0; i < count; i += 1) {
        if (!process.send(message)) await new Promise((resolve) => { process.send(message, resolve); i += 1; });
      }
      break;
    default:
      if (!isStream) parentPort.on('message', (found) => parentPort.postMessage(found));
      else for (let i = 0; i < count; i += 1) {
        parentPort.postMessage(message);
        if (i % 1000 === 999) await new Promise(setImmediate);
      }
  }
}

/** Nanoseconds of `count` messages from the first one on, or of as many trips. */
async function run(system, kind, directory, round) {
  const name = system.startsWith('pelton')
    ? `unix:${directory}/${system}-${kind}-${round}` : `${directory}/${system}-${kind}-${round}`;
  const count = kind === 'stream' ? COUNTS[system] : TRIPS;
  const message = Buffer.alloc(SIZE, 'x');
  const job = { system, kind, name, count };
  let ended;
  const begin = () => {
    const started = system === 'worker' ? new Worker(__filename, { workerData: job })
      : fork(__filename, ['--peer', JSON.stringify(job)], { serialization: 'advanced' });
    ended = once(started, 'exit');
    return started;
  };
  const delay = monitorEventLoopDelay({ resolution: 1 });
  let started;
  let found = 0;
  let isOver;
  const over = new Promise((resolve) => { isOver = resolve; });
  let again = () => {};
  const take = () => {
    if (found === 0) {
      started = process.hrtime.bigint();
      delay.enable();
    }
    found += 1;
    if (found > count) isOver();
    else if (found === count && kind === 'stream') isOver();
    else again();
  };
  let other;
  if (system.startsWith('pelton')) {
    const listener = pelton.listen(name);
    const back = pelton.listen(`${name}-back`);
    other = begin();
    const receiver = await listener.acceptReceiver();
    if (kind === 'trip') {
      const sender = await back.acceptSender();
      for (let i = 0; i <= count; i += 1) {
        await sender.send(message);
        await receiver.recv();
        take();
      }
      sender.close();
    } else if (system === 'pelton') {
      for await (const _ of receiver) take();
    } else {
      while (found < count) for (const _ of await receiver.recvMany()) take();
    }
    receiver.close();
    listener.close();
    back.close();
  } else if (system === 'unix-socket') {
    const server = net.createServer((socket) => {
      receiveFrames(socket, take);
      if (kind === 'trip') {
        again = () => void sendFrame(socket, message);
        again();
      }
    }).listen(name);
    other = begin();
    await over;
    server.close();
  } else {
    other = begin();
    const send = system === 'worker' ? (it) => other.postMessage(it) : (it) => other.send(it);
    other.on('message', take);
    if (kind === 'trip') {
      again = () => send(message);
      again();
    }
    await over;
  }
  const ns = Number(process.hrtime.bigint() - started);
  delay.disable();
  if (system === 'worker') await other.terminate();
  else other.kill('SIGKILL');
  await ended;
  return { figure: kind === 'stream' ? (count / ns) * 1e9 : ns / count / 1000, p99: delay.percentile(99) / 1e6 };
}

async function main(kind, rounds) {
  const directory = fs.mkdtempSync(path.join(os.tmpdir(), 'channels-'));
  try {
    const systems = Object.keys(COUNTS).filter((system) => kind === 'stream' || system !== 'pelton-many');
    const found = Object.fromEntries(systems.map((system) => [system, []]));
    const delays = Object.fromEntries(systems.map((system) => [system, []]));
    for (let round = 0; round < rounds; round += 1) {
      for (const system of systems) {
        const { figure, p99 } = await run(system, kind, directory, round);
        found[system].push(figure);
        delays[system].push(p99);
      }
    }
    const unit = kind === 'stream' ? 'messages/s' : 'µs a trip';
    for (const system of systems) {
      const figures = found[system];
      // Of each round, because the machine changes between two.
      const speedups = figures.map((figure, i) =>
        (kind === 'stream' ? found.pelton[i] / figure : figure / found.pelton[i]));
      const digits = kind === 'stream' ? 0 : 1;
      const range = `${Math.min(...figures).toFixed(digits)} to ${Math.max(...figures).toFixed(digits)}`;
      const more = kind === 'stream' ? `, event loop's delay p99 ${median(delays[system]).toFixed(1)} ms` : '';
      console.log(`${system.padEnd(14)} ${median(figures).toFixed(digits).padStart(9)} ${unit} (${range}); pelton's `
        + `speedup ${median(speedups).toFixed(2)}${more}`);
    }
  } finally {
    fs.rmSync(directory, { recursive: true });
  }
}

if (!isMainThread) {
  void peer(workerData);
} else if (process.argv[2] === '--peer') {
  void peer(JSON.parse(process.argv[3]));
} else if (['stream', 'trip'].includes(process.argv[2])) {
  void main(process.argv[2], Number(process.argv[3] ?? 5));
} else {
  console.error('wanted `stream` or `trip`, and perhaps a number of rounds');
  process.exitCode = 2;
}
