'use strict';
// The conformance driver in Node. ../README.md has the command line, the messages and the report.

const fs = require('node:fs');
const pelton = require('./pelton');

const limit = { timeout: 1000 * Number(process.env.PELTON_SECONDS ?? '10') };

// zlib.crc32 came with Node 20.15.
const table = Uint32Array.from({ length: 256 }, (_, index) => {
  let entry = index;
  for (let bit = 0; bit < 8; bit += 1) entry = entry & 1 ? (entry >>> 1) ^ 0xedb88320 : entry >>> 1;
  return entry;
});
function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = table[(sum ^ byte) & 0xff] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

class Mismatch extends Error {}

/** One run: its arguments, and the report. */
class Driver {
  messages = 0;
  bytes = 0;
  checksum = 0;

  constructor(verb, name, count, sizes, then) {
    Object.assign(this, { verb, name, count, sizes, then });
    this.letters = Buffer.alloc(Math.max(...sizes) + 52, 'abcdefghijklmnopqrstuvwxyz');
  }

  message(i) {
    const start = i % 26;
    return this.letters.subarray(start, start + this.sizes[i % this.sizes.length]);
  }

  add(message) {
    this.messages += 1;
    this.bytes += message.length;
    this.checksum = (this.checksum + crc32(message)) % 2 ** 32;
  }

  /** Adds the next message, unless it is another one. */
  addExpected(found) {
    if (this.messages === this.count || !found.equals(this.message(this.messages))) {
      throw new Mismatch(`message ${this.messages} of ${this.count}: found another one, of ${found.length} bytes`);
    }
    this.add(found);
  }

  checkCount() {
    if (this.messages !== this.count) throw new Mismatch(`found ${this.messages} messages, expected ${this.count}`);
  }

  report(rest = '') {
    const checksum = this.checksum.toString(16).padStart(8, '0');
    fs.writeSync(1, `ok ${this.verb} ${this.messages} messages ${this.bytes} bytes checksum ${checksum}${rest}\n`);
  }

  die() {
    this.report();
    process.kill(process.pid, 'SIGKILL');
  }

  /** That of message `i`: with `traced`, all but each third have one. */
  traceparent(i) {
    if (this.then !== 'traced' || i % 3 === 0) return null;
    const hex = (number, digits) => number.toString(16).padStart(digits, '0');
    return `00-${hex(i + 1, 32)}-${hex(i + 1, 16)}-${hex(i % 256, 2)}`;
  }

  async send() {
    const sender = await openSender(this.name, this.then === 'traced');
    const resumed = async (step) => {
      for (;;) {
        try {
          return await step();
        } catch (error) {
          if (this.then !== 'resume' || error.code !== 'peer_died') throw error;
          await sender.resume(limit); // The successor gets what its predecessor has not released.
        }
      }
    };
    for (let i = 0; i < this.count; i += 1) {
      const message = this.message(i);
      await resumed(() => sender.send(message, { ...limit, traceparent: this.traceparent(i) }));
      this.add(message);
    }
    if (this.then === 'die') this.die();
    await resumed(() => sender.waitReleased(limit));
    sender.close();
  }

  async recv() {
    const rest = [];
    const receiver = await openReceiver(this.name, this.then === 'traced');
    for (;;) {
      let message;
      try {
        message = await receiver.recv(limit);
      } catch (error) {
        if (error.code === (this.then === 'died' ? 'peer_died' : 'closed')) break;
        throw error;
      }
      if (this.then === 'rest') {
        this.add(message);
        rest.push(crc32(message));
        continue;
      }
      if (receiver.traceparent !== this.traceparent(this.messages)) {
        throw new Mismatch(`message ${this.messages}: found the traceparent ${receiver.traceparent}`);
      }
      this.addExpected(message);
      if (this.then === 'die' && this.messages === this.count) this.die();
    }
    receiver.close();
    if (this.then !== 'rest') {
      this.checkCount();
    } else if (rest.length < 1 || rest.length > this.count) {
      throw new Mismatch(`found ${rest.length} messages, expected the last of ${this.count}`);
    } else if (rest.some((sum, i) => sum !== crc32(this.message(this.count - rest.length + i)))) {
      throw new Mismatch(`the ${rest.length} messages are not the last of ${this.count}`);
    }
  }

  async gather() {
    const receiver = pelton.gather(this.name);
    while (this.messages < this.count) {
      const message = await receiver.recv(limit); // Of all senders, round-robin.
      fs.writeSync(1, Buffer.concat([message.subarray(0, this.sizes[0]), Buffer.from('\n')]));
      this.add(message);
    }
    receiver.close();
  }

  async call() {
    const client = await pelton.Client.connect(this.name, limit);
    for (let i = 0; i < this.count; i += 1) this.addExpected(await client.call(this.message(i), limit));
    client.close();
  }

  async stream() {
    const client = await pelton.Client.connect(this.name, limit);
    for await (const part of client.stream(this.message(0), limit)) this.addExpected(part);
    client.close();
    this.checkCount();
  }

  serve() {
    return this.#serveBy((request) => {
      request.reply(request.data);
      this.add(request.data);
    });
  }

  'serve-stream'() {
    return this.#serveBy(async (request) => {
      for (let i = 0; i < this.count; i += 1) {
        await request.part(this.message(i));
        this.add(this.message(i));
      }
      request.end();
    });
  }

  async 'write-records'() {
    const file = await pelton.RecordFile.open(this.name);
    for (let i = 0; i < this.count; i += 1) {
      await file.append(this.message(i));
      this.add(this.message(i));
    }
    await file.close();
  }

  /** Reads the file to its end. Returns the rest of the report. */
  async 'read-records'() {
    let damaged = 0;
    let reader;
    try {
      reader = await pelton.RecordReader.open(this.name);
    } catch (error) {
      if (error.code === 'not_a_record_file') return ` damaged ${damaged} refused`;
      throw error;
    }
    for (;;) {
      try {
        for await (const message of reader) this.add(message);
        return ` damaged ${damaged} end`;
      } catch (error) {
        if (error.code === 'not_a_record_file') return ` damaged ${damaged} later`;
        if (error.code !== 'damaged') throw error;
        if (error.nextOffset === null) return ` damaged ${damaged} torn`;
        damaged += 1;
      }
    }
  }

  /** Serves until the count is reached, and every client has its replies. */
  async #serveBy(reply) {
    const service = pelton.Service.listen(this.name);
    let timer;
    const late = () => fail(`no request came in ${limit.timeout} ms`);
    const waits = () => {
      clearTimeout(timer);
      timer = setTimeout(late, limit.timeout);
    };
    waits();
    await service.run(async (request) => {
      waits();
      if (request.isNotification) return;
      try {
        await reply(request);
      } catch (error) {
        if (error.code !== 'closed' && error.code !== 'peer_died') throw error;
        fs.writeSync(2, `reply: ${error.message}\n`); // The client has gone.
      }
      if (this.messages >= this.count) service.drain();
    }, { onError: (error, request) => request.isNotification || fail(error.stack) });
    clearTimeout(timer);
    service.close();
    this.checkCount();
  }
}

function openSender(name, traced) {
  return name.startsWith('path:')
    ? pelton.Sender.openPath(name.slice(5), { create: true, traced })
    : pelton.Sender.connect(name, { ...limit, traced });
}

async function openReceiver(name, traced) {
  if (name.startsWith('path:')) return pelton.Receiver.openPath(name.slice(5), { create: true, traced });
  const listener = pelton.listen(name, { traced });
  return listener.acceptReceiver(limit);
}

function fail(text, code = 1) {
  fs.writeSync(2, `driver: ${text}\n`);
  process.exit(code);
}

function unsupported(text) {
  fs.writeSync(1, `unsupported ${text}\n`);
  process.exit(3);
}

const THEN = { send: ['close', 'die', 'resume', 'traced'], recv: ['close', 'died', 'die', 'rest', 'traced'] };
const RECORDS = ['write-records', 'read-records'];
const VERBS = ['send', 'recv', 'gather', 'call', 'serve', 'stream', 'serve-stream', ...RECORDS];

async function main([verb, name, count, sizes, then, ...more]) {
  if (verb === 'vectors') unsupported('vectors: cargo test replays the vectors, with the crates that this binding uses');
  if (!VERBS.includes(verb)) fail(`\`${verb}\` is no command: ../README.md`, 2);
  if (then !== undefined && !THEN[verb]?.includes(then)) fail(`\`${then}\` is no THEN of ${verb}`, 2);
  if (name?.startsWith('path:') && THEN[verb] === undefined && !RECORDS.includes(verb)) {
    unsupported(`${verb} path: a path channel is for messages`);
  }
  if (verb === 'read-records') {
    if (name === undefined || count !== undefined) fail('wanted read-records FILE', 2);
    [count, sizes] = ['0', '0'];
  }
  const numbers = /^\d+(,\d+)*$/;
  if (!/^\d+$/.test(count) || !numbers.test(sizes) || more.length > 0) {
    fail(`wanted ${verb} NAME COUNT SIZES [THEN]`, 2);
  }
  const driver = new Driver(verb, name, Number(count), sizes.split(',').map(Number), then ?? 'close');
  driver.report(await driver[verb]());
}

main(process.argv.slice(2)).then(() => process.exit(0), (error) => {
  fail(error instanceof Mismatch ? error.message : error.stack);
});
