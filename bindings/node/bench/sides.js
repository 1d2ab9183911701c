'use strict';
// Node in the workloads `stream`, `roundtrip` and `call` of pelton-bench: pelton, and what Node has for messages of its
// own (child_process IPC, worker threads, a Unix socket with length prefixes), or npm for calls (undici,
// @grpc/grpc-js).
//
// As their documentation recommends for messages that are bytes: IPC with the advanced serialization, back-pressure by
// what `send` and `write` return; a worker has none, so its sender lets the loop have a turn after 1,000 messages.
// HTTP is undici's Client with pipelining of as many calls as are in flight, to node:http; gRPC is a unary method whose
// serializers leave bytes as they are. Both use a Unix socket.
//
// The first process receives, asks or calls; its child, or worker, sends, answers or serves on its parent's orders. The
// contract with pelton-bench is that of every side: see bench/src/side.rs and payload.rs. The side compares every
// message's number and size, and every byte of the warm-up's and of a stream's last.
//   node sides.js SYSTEM side JOB
const { fork } = require('node:child_process');
const { once } = require('node:events');
const http = require('node:http');
const net = require('node:net');
const readline = require('node:readline');
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');

const { receiveFrames, sendFrame } = require('./frames.js');

const WARM_UP = 16;
const LIMIT = { timeout: 10_000 };

/** As many as pelton's batches have, in a stream by `pelton-node-batches`. */
const BATCH = 64;

/** The same sequence as in all sides: that of limits.c. */
class Sizes {
  #seed = 1;

  constructor({ min, max }) {
    this.least = min;
    this.most = max;
  }

  next() {
    if (this.least === this.most) return this.most;
    this.#seed = (Math.imul(this.#seed, 1664525) + 1013904223) >>> 0;
    return this.least + ((this.#seed >>> 8) % (this.most - this.least + 1));
  }
}

/** Messages: their number in the first eight bytes, or as much of that as fits; then the pattern. */
class Messages {
  constructor(sizes) {
    this.sizes = new Sizes(sizes);
    this.tail = Buffer.from({ length: Math.max(sizes.max, 8) }, (_, at) => (at * 31 + (at >> 8) + 7) & 0xff);
  }

  next(number) {
    const size = this.sizes.next();
    const message = Buffer.allocUnsafe(Math.max(size, 8));
    message.writeUInt32LE(number >>> 0, 0);
    message.writeUInt32LE(Math.floor(number / 2 ** 32), 4);
    this.tail.copy(message, 8, 8, size);
    return size < 8 ? message.subarray(0, size) : message;
  }

  /** Checks the next message's number and size, or every byte. */
  check(came, number, whole) {
    const size = this.sizes.next();
    let isRight = came.length === size;
    if (isRight && size >= 8) {
      isRight = came.readUInt32LE(0) === number >>> 0 && came.readUInt32LE(4) === Math.floor(number / 2 ** 32);
    }
    if (isRight && whole) {
      const head = Buffer.alloc(8);
      head.writeBigUInt64LE(BigInt(number));
      isRight = came.equals(Buffer.concat([head, this.tail.subarray(8)]).subarray(0, size));
    }
    if (!isRight) throw new Error(`message ${number} is not the one that was sent: lost, doubled or out of order`);
    return size;
  }
}

/** What an event brings one by one, to be awaited. */
class Inbox {
  #found = [];
  #next = 0;
  #wake;

  put(message) {
    if (this.#wake === undefined) {
      this.#found.push(message);
      return;
    }
    const wake = this.#wake;
    this.#wake = undefined;
    wake(message);
  }

  take() {
    if (this.#next === this.#found.length) {
      return new Promise((resolve) => {
        this.#wake = resolve;
      });
    }
    const message = this.#found[this.#next];
    this.#next += 1;
    if (this.#next === this.#found.length) {
      this.#found = [];
      this.#next = 0;
    }
    return message;
  }
}

/** Both directions of a socket. */
function framed(socket) {
  const inbox = new Inbox();
  receiveFrames(socket, (message) => inbox.put(message));
  return {
    send: (message) => sendFrame(socket, message),
    receive: () => inbox.take(),
    close: () => socket.end(),
  };
}

/** Endpoints of a system: `send` and `receive`, each a promise or a value, of the parent or of its child. */
const CHANNELS = {
  async 'pelton-node'({ directory, isParent = false, roundTrip }) {
    const pelton = require('pelton');
    const name = (to) => `unix:${directory}/to-${to}`;
    const listen = async (to) => {
      const listener = pelton.listen(name(to));
      const receiver = await listener.acceptReceiver(LIMIT);
      listener.close();
      return receiver;
    };
    const connect = (to) => pelton.Sender.connect(name(to), LIMIT);
    // The parent receives what its child sends first.
    const [first, second] = isParent ? ['receiver', 'sender'] : ['sender', 'receiver'];
    const found = {};
    for (const which of roundTrip ? [first, second] : [first]) {
      const to = (which === 'receiver') === isParent ? 'parent' : 'child';
      found[which] = await (which === 'receiver' ? listen(to) : connect(to));
    }
    return {
      send: (message) => found.sender.send(message),
      receive: () => found.receiver.recv(),
      sendMany: (messages) => found.sender.sendMany(messages),
      receiveMany: (most) => found.receiver.recvMany(most),
      close: () => Object.values(found).forEach((it) => it.close()),
    };
  },

  async 'node-child-process'({ child }) {
    const port = child ?? process;
    const inbox = new Inbox();
    port.on('message', (message) => inbox.put(message));
    return {
      // `send` says whether the next one should wait; its callback says until when.
      send: (message) => {
        let written;
        const isWritten = new Promise((resolve) => {
          written = resolve;
        });
        return port.send(message, written) ? undefined : isWritten;
      },
      receive: () => inbox.take(),
      close() {},
    };
  },

  async 'node-worker'({ worker }) {
    const port = worker ?? parentPort;
    const inbox = new Inbox();
    port.on('message', (message) => inbox.put(Buffer.from(message.buffer, message.byteOffset, message.length)));
    let sent = 0;
    return {
      send: (message) => {
        port.postMessage(message);
        sent += 1;
        return sent % 1000 === 0 ? new Promise(setImmediate) : undefined;
      },
      receive: () => inbox.take(),
      close() {},
    };
  },

  async 'node-sock-stream'({ directory, isParent }) {
    if (!isParent) {
      const socket = net.connect(`${directory}/socket`);
      await once(socket, 'connect');
      return framed(socket);
    }
    const server = net.createServer().listen(`${directory}/socket`);
    const [socket] = await once(server, 'connection');
    server.close();
    return framed(socket);
  },
};
CHANNELS['pelton-node-batches'] = CHANNELS['pelton-node'];

/** A method that takes and returns bytes. */
const ECHO = {
  path: '/bench/echo',
  requestStream: false,
  responseStream: false,
  requestSerialize: (bytes) => bytes,
  requestDeserialize: (bytes) => bytes,
  responseSerialize: (bytes) => bytes,
  responseDeserialize: (bytes) => bytes,
};

/** Services that reply to each request with its own bytes: what ends one. */
const SERVICES = {
  async 'pelton-node'(directory) {
    const service = require('pelton').Service.listen(`unix:${directory}/service`);
    void service.run((request) => request.data);
    return () => service.close();
  },

  async 'node-undici'(directory) {
    const server = http.createServer((request, response) => {
      const chunks = [];
      request.on('data', (chunk) => chunks.push(chunk));
      request.on('end', () => response.end(chunks.length === 1 ? chunks[0] : Buffer.concat(chunks)));
    });
    server.listen(`${directory}/socket`);
    await once(server, 'listening');
    return () => server.close();
  },

  async 'node-grpc'(directory) {
    const grpc = require('@grpc/grpc-js');
    const server = new grpc.Server({ 'grpc.max_receive_message_length': -1 });
    server.addService({ echo: ECHO }, { echo: (call, reply) => reply(null, call.request) });
    await new Promise((resolve, reject) => {
      server.bindAsync(`unix:${directory}/socket`, grpc.ServerCredentials.createInsecure(),
        (error) => (error ? reject(error) : resolve()));
    });
    return () => server.forceShutdown();
  },
};

/** Their clients: `call`, and what closes it. */
const CLIENTS = {
  async 'pelton-node'(directory) {
    const client = await require('pelton').Client.connect(`unix:${directory}/service`, LIMIT);
    return { call: (request) => client.call(request), close: () => client.close() };
  },

  async 'node-undici'(directory, inFlight) {
    const { Client } = require('undici');
    const client = new Client('http://localhost', { socketPath: `${directory}/socket`, pipelining: inFlight });
    return {
      // The body's own `bytes` is its shortest way to a copy.
      async call(body) {
        const response = await client.request({ path: '/', method: 'POST', body, blocking: false, idempotent: true });
        return Buffer.from(await response.body.arrayBuffer());
      },
      close: () => client.close(),
    };
  },

  async 'node-grpc'(directory) {
    const grpc = require('@grpc/grpc-js');
    const Client = grpc.makeGenericClientConstructor({ echo: ECHO }, 'bench');
    const client = new Client(`unix:${directory}/socket`, grpc.credentials.createInsecure(),
      { 'grpc.max_receive_message_length': -1 });
    return {
      call: (request) => new Promise((resolve, reject) => {
        client.echo(request, (error, reply) => (error ? reject(error) : resolve(reply)));
      }),
      close: () => client.close(),
    };
  },
};

const now = () => process.hrtime.bigint();

function usage() {
  const used = process.resourceUsage();
  return [(used.userCPUTime + used.systemCPUTime) / 1e6, used.voluntaryContextSwitches,
    used.involuntaryContextSwitches];
}

const difference = (before, after) => after.map((it, at) => it - before[at]);

function busy(ns) {
  if (ns === 0) return;
  const end = now() + BigInt(ns);
  while (now() < end);
}

class Side {
  constructor(job, channel) {
    this.job = job;
    this.channel = channel;
    this.delay = job.delay_us * 1000;
  }

  async sender(count) {
    const { channel, job } = this;
    const messages = new Messages(job.sizes);
    if (job.system === 'pelton-node-batches') {
      for (let number = 0; number < count; number += BATCH) {
        const length = Math.min(BATCH, count - number);
        await channel.sendMany(Array.from({ length }, (_, at) => messages.next(number + at)));
      }
      return;
    }
    for (let number = 0; number < count; number += 1) {
      const full = channel.send(messages.next(number));
      if (full !== undefined) await full;
    }
  }

  async receiver(count, whole) {
    const { channel, job } = this;
    const messages = new Messages(job.sizes);
    let total = 0;
    const isBatched = job.system === 'pelton-node-batches';
    for (let number = 0; number < count;) {
      if (isBatched) {
        for (const message of await channel.receiveMany(count - number)) {
          total += messages.check(message, number, whole || number === count - 1);
          number += 1;
        }
      } else {
        total += messages.check(await channel.receive(), number, whole || number === count - 1);
        number += 1;
      }
    }
    return [total, []];
  }

  async answerer(count) {
    const messages = new Messages(this.job.sizes);
    for (let number = 0; number < count; number += 1) {
      const came = await this.channel.receive();
      busy(this.delay);
      await this.channel.send(came);
      messages.check(came, number, false);
    }
  }

  /** One exchange after another, or several calls at a time; times each of them. */
  async asker(count, times, exchange, inFlight = 1) {
    const messages = new Messages(this.job.sizes);
    const took = [];
    let [number, total] = [0, 0];
    const { rate } = this.job.calls;
    const begun = now() + 200_000n;
    const one = async () => {
      while (number < count) {
        const own = number;
        number += 1;
        let start = now();
        if (rate) {
          start = begun + (BigInt(own) * 1_000_000_000n) / BigInt(rate);
          const left = Number(start - now()) / 1e6;
          if (left > 2) await new Promise((resolve) => { setTimeout(resolve, left - 2); });
          while (now() < start);
        }
        busy(this.delay);
        const sent = messages.next(own);
        const came = await exchange(sent);
        if (!came.equals(sent)) throw new Error(`the reply to call ${own} has other bytes than the request`);
        if (times) took.push(Math.max(Number(now() - start) - (rate ? 0 : 2 * this.delay), 0));
        total += sent.length;
      }
    };
    await Promise.all(Array.from({ length: inFlight }, one));
    return [total, took];
  }
}

/** The child's part, on the orders of its parent: a count, which it answers with its start and what it used. */
async function child(job, port) {
  const isService = job.workload === 'call';
  const close = isService ? await SERVICES[job.system](job.directory) : undefined;
  if (isService) port.send({ ready: true });
  const channel = isService ? undefined
    : await CHANNELS[job.system]({ directory: job.directory, roundTrip: job.workload === 'roundtrip' });
  const side = new Side(job, channel);
  let [before, start] = [usage(), now()];
  for (;;) {
    const { count } = await port.orders.take();
    if (count === undefined) break;
    [before, start] = [usage(), now()];
    if (job.workload === 'roundtrip') await side.answerer(count);
    else if (!isService) await side.sender(count);
    // A service is asked for what it used once its client has all replies.
    else await port.orders.take();
    port.send({ start, used: difference(before, usage()) });
  }
  close?.();
  channel?.close();
  port.end();
}

/** Lines of text for orders, which no system under test uses. */
function linesPort(input, output) {
  const orders = new Inbox();
  const lines = readline.createInterface({ input });
  lines.on('line', (line) => orders.put(JSON.parse(line, (key, value) => (key === 'start' ? BigInt(value) : value))));
  // Its parent is gone, or has no more orders.
  lines.on('close', () => orders.put({}));
  return {
    orders,
    send: (order) => output.write(`${JSON.stringify(order, (_, it) => (typeof it === 'bigint' ? `${it}` : it))}\n`),
    end: () => lines.close(),
  };
}

function begin(job) {
  if (job.system === 'node-worker') {
    const worker = new Worker(__filename, { workerData: job, stdin: true, stdout: true });
    return { worker, port: linesPort(worker.stdout, worker.stdin), end: () => worker.stdin.end() };
  }
  const started = fork(__filename, [job.system, 'child', JSON.stringify(job)],
    { serialization: 'advanced', stdio: ['pipe', 'pipe', 'inherit', 'ipc'] });
  return { child: started, port: linesPort(started.stdout, started.stdin), end: () => started.stdin.end() };
}

async function parent(job) {
  if (job.wait !== 'block') throw new Error(`it waits only by sleeping, found the wait ${job.wait}: write block`);
  const [isCall, roundTrip] = [job.workload === 'call', job.workload === 'roundtrip'];
  const other = begin(job);
  const over = once(other.child ?? other.worker, 'exit');
  if (isCall) await other.port.orders.take();
  const client = isCall ? await CLIENTS[job.system](job.directory, job.calls.in_flight) : undefined;
  const channel = isCall ? undefined
    : await CHANNELS[job.system]({ directory: job.directory, isParent: true, roundTrip, ...other });
  const side = new Side(job, channel);
  const exchange = isCall ? (request) => client.call(request) : async (message) => {
    await channel.send(message);
    return channel.receive();
  };

  const go = async (count, times, whole) => {
    const before = usage();
    other.port.send({ count });
    const start = now();
    const [bytes, took] = roundTrip || isCall
      ? await side.asker(count, times, exchange, isCall ? job.calls.in_flight : 1)
      : await side.receiver(count, whole);
    const end = now();
    if (isCall) other.port.send({});
    const reply = await other.port.orders.take();
    const own = difference(before, usage());
    // A worker is in this process, whose use is both threads'.
    const used = own.map((it, at) => it + (other.worker ? 0 : reply.used[at]));
    return {
      start_ns: Number(roundTrip || isCall ? start : reply.start),
      end_ns: Number(end),
      bytes,
      usage: { cpu_seconds: used[0], voluntary_switches: used[1], involuntary_switches: used[2] },
      rounds_ns: took,
    };
  };

  const program = new Inbox();
  const lines = readline.createInterface({ input: process.stdin });
  lines.on('line', (line) => program.put(line));
  lines.on('close', () => program.put(undefined));
  await go(WARM_UP, false, true);
  for (const pass of job.passes) {
    console.log('"ready"');
    if (await program.take() !== 'go') throw new Error('the order was not to go');
    console.log(JSON.stringify(await go(pass.count, pass.time_each, false)));
  }
  if (await program.take() !== undefined) throw new Error('there was an order after the last one');
  await client?.close();
  channel?.close();
  other.end();
  if (other.child?.connected) other.child.disconnect();
  await over;
}

async function main() {
  if (!isMainThread) {
    await child(workerData, linesPort(process.stdin, process.stdout));
    parentPort.close();
    return;
  }
  const [system, role, text] = process.argv.slice(2);
  const job = { ...JSON.parse(text), system };
  if (role === 'side') await parent(job);
  else await child(job, linesPort(process.stdin, process.stdout));
  if (role === 'child') process.exit();
}

main().catch((error) => {
  console.error(error.stack);
  process.exit(1);
});
