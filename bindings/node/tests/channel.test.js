'use strict';
const assert = require('node:assert/strict');
const { once } = require('node:events');
const fs = require('node:fs');
const { setImmediate: turn, setTimeout: sleep } = require('node:timers/promises');
const test = require('node:test');
const { Worker } = require('node:worker_threads');
const { pipeline } = require('node:stream/promises');
const { LIMIT, name, options, pelton, place, program, start, tool } = require('./support.js');

const { Client, PeltonError, Receiver, Sender, gather, listen, threads } = pelton;
const coded = (code) => (error) => error instanceof PeltonError && error.code === code;

/** A sender detects the end of its peer within some messages. */
async function sendForEver(sender) {
  for (;;) await sender.send(Buffer.from('x'));
}

test('messages_arrive_in_order_and_the_iterator_ends_with_the_sender', options, async () => {
  const { sender, receiver } = threads();
  for (let i = 0; i < 2000; i += 1) await sender.send(Buffer.from(`${i}`));
  sender.close();
  let next = 0;
  for await (const message of receiver) assert.equal(`${message}`, `${next++}`);
  assert.equal(next, 2000);
  await assert.rejects(receiver.recv(), coded('closed'));
});

test('messages_of_every_size_arrive_whole', options, async () => {
  const { sender, receiver } = threads();
  const all = [0, 1, 7, 8, 9, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_000, 3_000_000].map((size) =>
    Buffer.alloc(size, `${size}.`));
  for (const sent of all) {
    await sender.send(sent);
    assert.ok((await receiver.recv(LIMIT)).equals(sent));
  }
  assert.equal(await sender.sendMany(all), all.length);
  const found = [];
  while (found.length < all.length) found.push(...await receiver.recvMany(3, LIMIT));
  found.forEach((message, index) => assert.ok(message.equals(all[index])));
});

test('a_waiting_receiver_is_woken', options, async () => {
  const { sender, receiver } = threads();
  for (let i = 0; i < 100; i += 1) {
    const waiting = receiver.recv(LIMIT);
    await turn();
    assert.equal(receiver.tryRecv(), null);
    sender.trySend(Buffer.from([i]));
    assert.deepEqual([...await waiting], [i]);
  }
});

test('a_batch_is_what_the_array_had_when_it_was_given', options, async () => {
  const { sender, receiver } = threads({ capacity: 64 << 10 });
  const list = Array.from({ length: 100 }, () => Buffer.alloc(4000, 'a'));
  const sending = sender.sendMany(list);
  list.length = 0;
  let count = 0;
  while (count < 100) count += (await receiver.recvMany(100, LIMIT)).length;
  assert.equal(await sending, 100);
  // A message that is transferred while it waits for space is refused, and not sent empty.
  for (const send of [(it) => sender.send(it, LIMIT), (it) => sender.sendMany([it, Buffer.alloc(1)], LIMIT)]) {
    while (sender.trySend(Buffer.alloc(4000)));
    const large = Buffer.from(new ArrayBuffer(4000));
    const waiting = send(large);
    structuredClone(large, { transfer: [large.buffer] });
    const refused = assert.rejects(waiting, { code: 'ERR_INVALID_STATE' });
    while (receiver.tryRecv() !== null);
    await refused;
  }
});

test('a_full_lane_makes_sends_wait_in_order', options, async () => {
  const { sender, receiver } = threads({ capacity: 65_536, messageBytesMax: 4096 });
  const sends = [];
  for (let i = 0; i < 100; i += 1) sends.push(sender.send(Buffer.alloc(4000, i)));
  await turn();
  assert.equal(sender.trySend(Buffer.from('later')), false);
  for (let i = 0; i < 100; i += 1) assert.equal((await receiver.recv(LIMIT))[0], i);
  await Promise.all(sends);
  const many = sender.sendMany(Array.from({ length: 100 }, (_, i) => Buffer.alloc(4000, i)));
  for (let i = 0; i < 100; i += 1) assert.equal((await receiver.recv(LIMIT))[0], i);
  assert.equal(await many, 100);
});

test('a_timeout_and_a_signal_take_nothing', options, async () => {
  const { sender, receiver } = threads();
  await assert.rejects(receiver.recv({ timeout: 0 }), coded('timed_out'));
  await assert.rejects(receiver.recv({ timeout: 5 }), coded('timed_out'));
  const abort = new AbortController();
  const waiting = receiver.recv({ signal: abort.signal });
  await turn();
  abort.abort(new Error('enough'));
  await assert.rejects(waiting, /enough/);
  await assert.rejects(receiver.recv({ signal: abort.signal }), /enough/);
  sender.trySend(Buffer.from('kept'));
  assert.equal(`${await receiver.recv(LIMIT)}`, 'kept');
});

test('a_timeout_of_0_ends_only_where_nothing_is_there', options, async () => {
  const { sender, receiver } = threads();
  const zero = { timeout: 0 };
  for (let i = 0; i < 1000; i += 1) await sender.send(Buffer.from(`${i}`), zero);
  for (let i = 0; i < 1000; i += 1) assert.equal(Number(await receiver.recv(zero)), i);
  await assert.rejects(receiver.recv(zero), coded('timed_out'));
  await sender.send(Buffer.from('later'), zero);
  assert.equal(`${await receiver.recv(zero)}`, 'later');
  // Many at once: in order, and those for which there is no message end too.
  assert.equal(await sender.sendMany(Array.from({ length: 3000 }, (_, i) => Buffer.from(`${i}`)), zero), 3000);
  for (let next = 0; next < 2500;) {
    for (const message of await receiver.recvMany(Math.min(100, 2500 - next), zero)) {
      assert.equal(Number(message), next++);
    }
  }
  const found = await Promise.allSettled(Array.from({ length: 600 }, () => receiver.recv(zero)));
  found.forEach(({ value, reason }, i) => {
    if (i < 500) assert.equal(Number(value), 2500 + i);
    else assert.equal(reason.code, 'timed_out');
  });
  const small = threads({ capacity: 64 << 10 });
  const all = new Array(3000).fill(Buffer.alloc(56));
  const error = await small.sender.sendMany(all, zero).catch((it) => it);
  assert.equal(error.code, 'timed_out');
  assert.equal(small.sender.info().unreleased, error.sent);
  // The lane is full.
  assert.equal(small.sender.trySend(all[0]), false);
});

test('wrong_arguments_are_refused_before_anything_is_done', options, async () => {
  const { sender, receiver } = threads();
  const type = { code: 'ERR_INVALID_ARG_TYPE' };
  await assert.rejects(sender.send('text'), type);
  assert.throws(() => sender.trySend(null), type);
  await assert.rejects(sender.sendMany([Buffer.from('a'), 1]), type);
  await assert.rejects(receiver.recv({ timeout: '1' }), type);
  await assert.rejects(receiver.recv({ signal: {} }), type);
  await assert.rejects(receiver.recvMany(0), { code: 'ERR_OUT_OF_RANGE' });
  await assert.rejects(Sender.connect(7), type);
  await assert.rejects(Sender.connect('a', { lanes: 2 }), { code: 'ERR_OUT_OF_RANGE' });
  assert.throws(() => Receiver.attach({}), type);
  assert.equal(receiver.tryRecv(), null);
});

test('a_closed_handle_says_so', options, async () => {
  const { sender, receiver } = threads();
  const waiting = receiver.recv();
  await turn();
  receiver.close();
  await assert.rejects(waiting, coded('closed_handle'));
  await assert.rejects(receiver.recv(), coded('closed_handle'));
  await assert.rejects(sendForEver(sender), coded('closed'));
  assert.ok(receiver.closed);
});

test('a_message_in_place_has_its_bytes_until_it_is_released', options, async () => {
  const { sender, receiver } = threads({ capacity: 65_536, messageBytesMax: 16_384 });
  for (let i = 0; i < 50; i += 1) {
    await sender.send(Buffer.alloc(10_000, i));
    const message = await receiver.peek(LIMIT);
    const { data } = message;
    assert.ok(data.equals(Buffer.alloc(10_000, i)));
    message.release();
    assert.throws(() => message.data, coded('not_received'));
    assert.equal(data.length, 0);
    message.release();
  }
  assert.equal(receiver.tryPeek(), null);
  assert.equal(sender.info().unreleased, 0);
});

test('a_message_has_its_traceparent_or_none', options, async () => {
  const span = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
  const { sender, receiver } = threads({ traced: true, capacity: 64 << 10 });
  await sender.send(Buffer.from('plain'));
  assert.ok(sender.trySend(Buffer.from('traced'), { traceparent: span }));
  await sender.send(Buffer.from('traced too'), { traceparent: span, ...LIMIT });
  for (const traceparent of [null, undefined, '', 'none', span.toUpperCase(), `${span}0`, '0'.repeat(1000)]) {
    await sender.send(Buffer.from('invalid'), { traceparent });
  }
  await sender.sendMany([Buffer.from('many'), Buffer.from('many')]);
  const found = [];
  for (let i = 0; i < 12; i += 1) found.push([`${await receiver.recv(LIMIT)}`, receiver.traceparent]);
  assert.deepEqual(found, [['plain', null], ['traced', span], ['traced too', span],
    ...Array.from({ length: 7 }, () => ['invalid', null]), ['many', null], ['many', null]]);
  for (const wrong of [7, {}, Buffer.from(span)]) {
    await assert.rejects(sender.send(Buffer.from('x'), { traceparent: wrong }), { code: 'ERR_INVALID_ARG_TYPE' });
    assert.throws(() => sender.trySend(Buffer.from('x'), { traceparent: wrong }), { code: 'ERR_INVALID_ARG_TYPE' });
  }
  // The largest ones: each waits for the one before, in order, and is woken.
  const large = Buffer.alloc(sender.info().messageBytesMax, 'x');
  const sends = Array.from({ length: 10 }, () => sender.send(large, { traceparent: span, ...LIMIT }));
  for (let i = 0; i < 10; i += 1) {
    const message = await receiver.peek(LIMIT);
    assert.deepEqual([message.data.length, message.traceparent], [large.length, span]);
    message.release();
  }
  await Promise.all(sends);
  await sender.send(Buffer.from('first'), { traceparent: span });
  await sender.send(Buffer.from('second'));
  await receiver.recv(LIMIT);
  assert.equal(receiver.traceparent, span);
  assert.equal(`${(await receiver.recvDescriptors(LIMIT)).data}`, 'second');
  assert.equal(receiver.traceparent, null, 'not that of the message before');
  // As of recv, what was read ahead has none of another.
  await sender.send(Buffer.from('one'), { traceparent: span });
  await sender.send(Buffer.from('other'));
  const traced = [];
  sender.close();
  for await (const _ of receiver) traced.push(receiver.traceparent);
  assert.deepEqual(traced, [span, null]);

  const other = threads();
  other.sender.trySend(Buffer.from('without the option'), { traceparent: span });
  assert.equal(`${await other.receiver.recv(LIMIT)}`, 'without the option');
  assert.equal(other.receiver.traceparent, null);
  await assert.rejects(Receiver.connect('a', { traced: true }), { code: 'ERR_OUT_OF_RANGE' });
  assert.throws(() => threads({ traced: 1 }), { code: 'ERR_INVALID_ARG_TYPE' });
});

test('listen_connect_and_a_clean_end', options, async () => {
  const at = name();
  const listener = listen(at);
  assert.throws(() => listen(at), coded('in_use'));
  const [receiver, sender] = await Promise.all([listener.acceptReceiver(LIMIT), Sender.connect(at, LIMIT)]);
  await sender.send(Buffer.from('hello'));
  const released = sender.waitReleased(LIMIT);
  await assert.rejects(sender.send(Buffer.from('busy')), coded('wrong_thread'));
  assert.equal(`${await receiver.recv(LIMIT)}`, 'hello');
  await released;
  assert.equal(receiver.info().peerPid, process.pid);
  await assert.rejects(listener.acceptSender({ timeout: 5 }), coded('timed_out'));
  // A step that runs is the only one, and ends with its object.
  await sender.send(Buffer.from('not taken'));
  const first = sender.waitReleased(LIMIT);
  await assert.rejects(sender.waitReleased(), coded('wrong_thread'));
  const ended = assert.rejects(first, coded('closed_handle'));
  sender.close();
  await ended;
  await assert.rejects(sender.resume(), coded('closed_handle'));
  await assert.rejects(sender.resume({ timeout: '1' }), { code: 'ERR_INVALID_ARG_TYPE' });
  const accepting = listener.acceptSender();
  listener.close();
  await assert.rejects(accepting, coded('closed_handle'));
  assert.equal(`${await receiver.recv(LIMIT)}`, 'not taken');
  await assert.rejects(receiver.recv(LIMIT), coded('closed'));
  receiver.close();
  await assert.rejects(Sender.connect(name()), coded('no_listener'));
  const abort = new AbortController();
  const connecting = Sender.connect(name(), { timeout: Infinity, signal: abort.signal });
  abort.abort(new Error('enough'));
  await assert.rejects(connecting, /enough/);
});

test('a_peer_whose_accept_was_ended_goes_to_the_next_one', options, async () => {
  const at = name();
  const listener = listen(at);
  const native = require(`${process.env.PELTON_PACKAGE ?? '..'}/lib/native.js`);
  const { startAccept } = native.Listener.prototype;
  const abort = new AbortController();
  // The handshake has begun, on a thread.
  native.Listener.prototype.startAccept = function start(...given) {
    native.Listener.prototype.startAccept = startAccept;
    startAccept.apply(this, given);
    abort.abort(new Error('enough'));
  };
  const connecting = Sender.connect(at, LIMIT);
  await assert.rejects(listener.acceptReceiver({ ...LIMIT, signal: abort.signal }), /enough/);
  const sender = await connecting;
  await sender.send(Buffer.from('kept'));
  await assert.rejects(listener.acceptSender({ timeout: 5 }), coded('timed_out'));
  const receiver = await listener.acceptReceiver(LIMIT);
  assert.equal(`${await receiver.recv(LIMIT)}`, 'kept');
  receiver.close();
  listener.close();
});

test('a_step_or_an_accept_without_descriptors_fails_and_loses_nothing', options, async () => {
  const text = `const fs = require('node:fs');
    const { threads, listen, RecordFile, Sender } = pelton;
    const { sender, receiver } = threads();
    const file = await RecordFile.open(argument.file, { flushInterval: Infinity });
    await file.append(Buffer.from('a'));
    // The thread of a step that has ended gives its descriptor back, at any moment.
    const isStep = (task) => {
      try {
        return fs.readFileSync('/proc/self/task/' + task + '/comm', 'utf8').startsWith('pelton step');
      } catch {
        return false; // It has ended meanwhile.
      }
    };
    while (fs.readdirSync('/proc/self/task').some(isStep)) await new Promise(setImmediate);
    const listener = listen(argument.name);
    const accepting = listener.acceptReceiver({ timeout: 20000 }).catch((error) => error.code);
    const connecting = Sender.connect(argument.name, { timeout: 20000 });
    const taken = [];
    try {
      for (;;) taken.push(fs.openSync('/dev/null'));
    } catch {}
    const steps = [sender.waitReleased(), file.flush(), accepting].map((it) => it.catch((error) => error.code));
    console.log((await Promise.all(steps)).join());
    for (const fd of taken) fs.closeSync(fd);
    await sender.send(Buffer.from('sent'));
    await file.append(Buffer.from('b'));
    await file.close();
    const accepted = await listener.acceptReceiver({ timeout: 20000 });
    await (await connecting).send(Buffer.from('accepted'));
    console.log(String(await receiver.recv()), String(await accepted.recv()));
    process.exit();`;
  const child = program(text, { file: place(), name: name() }, { descriptorsMax: 100 });
  assert.equal(await child.ended, 0);
  assert.equal(child.output(), 'system,system,system\nsent accepted\n');
});

test('descriptors_arrive', options, async () => {
  const at = name();
  const listener = listen(at);
  const [receiver, sender] = await Promise.all([listener.acceptReceiver(LIMIT), Sender.connect(at, LIMIT)]);
  const file = place();
  fs.writeFileSync(file, 'content');
  const fd = fs.openSync(file);
  await sender.sendDescriptors(Buffer.from('file'), [fd], LIMIT);
  fs.closeSync(fd);
  const { data, descriptors } = await receiver.recvDescriptors(LIMIT);
  assert.equal(`${data}`, 'file');
  assert.equal(fs.readFileSync(descriptors[0], 'utf8'), 'content');
  descriptors.forEach((found) => fs.closeSync(found));
  [sender, receiver, listener].forEach((it) => it.close());
});

test('a_path_channel_keeps_messages_without_either_side', options, async () => {
  const directory = place();
  await assert.rejects(Receiver.openPath(directory), coded('no_channel'));
  const sender = await Sender.openPath(directory, { create: true, capacity: 1 << 20 });
  await sender.sendMany(['a', 'b', 'c'].map((it) => Buffer.from(it)));
  await sender.sync();
  await assert.rejects(Sender.openPath(directory), coded('role_taken'));
  sender.close();
  const receiver = await Receiver.openPath(directory);
  assert.deepEqual((await receiver.recvMany(10, LIMIT)).map(String), ['a', 'b', 'c']);
  receiver.close();
});

test('gather_takes_the_messages_of_many_senders', options, async () => {
  const at = name();
  const receiver = gather(at);
  const found = [];
  const receiving = (async () => {
    while (found.length < 20) found.push(...(await receiver.recvMany(20, LIMIT)).map(Number));
  })();
  const senders = await Promise.all(Array.from({ length: 20 }, () => Sender.connect(at, LIMIT)));
  senders.forEach((sender, index) => sender.trySend(Buffer.from(`${index}`)));
  await receiving;
  assert.deepEqual(found.sort((a, b) => a - b), senders.map((_, index) => index));
  [...senders, receiver].forEach((it) => it.close());
});

test('what_was_copied_and_not_handed_out_is_not_lost', options, async () => {
  const numbered = (from, to) => Array.from({ length: to - from }, (_, i) => Buffer.from(`${from + i}`));
  const { sender, receiver } = threads();
  await sender.sendMany(numbered(0, 100));
  // The first one is released at once, the others at the end of the turn, or before the counters are read.
  assert.equal(`${await receiver.recv()}`, '0');
  assert.equal(sender.info().unreleased, 99);
  for (let i = 1; i < 10; i += 1) assert.equal(`${receiver.tryRecv()}`, `${i}`);
  assert.equal(receiver.info().messages, 10);
  assert.equal(sender.info().unreleased, 90);
  assert.deepEqual((await receiver.recvMany(5)).map(Number), [10, 11, 12, 13, 14]);
  await turn();
  await turn();
  assert.equal(sender.info().unreleased, 85);
  const message = receiver.tryPeek();
  assert.equal(`${message.data}`, '15');
  // While one is held, each is taken by itself.
  assert.equal(`${await receiver.recv()}`, '16');
  message.release();
  for (let i = 17; i < 20; i += 1) assert.equal(`${await receiver.recv()}`, `${i}`);
  const other = Receiver.attach(receiver.detach());
  assert.equal(`${await other.recv()}`, '20');
  sender.close();
  let next = 21;
  for await (const found of other) assert.equal(Number(found), next++);
  assert.equal(next, 100);
  other.close();

  const directory = place();
  const first = await Sender.openPath(directory, { create: true });
  await first.sendMany(numbered(0, 100));
  first.close();
  const begun = await Receiver.openPath(directory);
  for (let i = 0; i < 10; i += 1) assert.equal(`${await begun.recv()}`, `${i}`);
  begun.close();
  // An exit within a turn, and a kill after it.
  const receives = `const receiver = await pelton.Receiver.openPath(argument);
    for (let i = 0; i < 10; i += 1) await receiver.recv();`;
  const exits = program(`${receives} process.exit(3);`, directory);
  assert.equal(await exits.ended, 3);
  const killed = program(`${receives} setTimeout(() => process.kill(process.pid, 'SIGKILL'), 20);`, directory);
  assert.equal(await killed.ended, 'SIGKILL');
  const last = await Receiver.openPath(directory);
  // That of the exit has released the first one of its turn alone; the killed one all that it was handed.
  const found = Number(await last.recv());
  assert.ok(found >= 21 && found <= 30, `${found}`);
  for (let i = found + 1; i < 70; i += 1) assert.equal(Number(await last.recv()), i);
  // The end of a block releases what was handed out, as close() does, and nothing is received after it.
  for (let i = 0; i < 3; i += 1) await last.recv();
  last[Symbol.dispose ?? Symbol.asyncDispose]();
  await assert.rejects(last.recv(), coded('closed_handle'));
  const successor = await Receiver.openPath(directory);
  assert.equal(Number(await successor.recv()), 73);
  successor.close();
});

test('messages_of_every_size_arrive_whole_and_apart', options, async () => {
  const { sender, receiver } = threads();
  const sizes = [0, 1, 7, 8, 9, 4000, 16_384, 16_385, 70_000, 3, 0, 65_536, 1_000_000, 5];
  const sent = Array.from({ length: 300 }, (_, i) => Buffer.alloc(sizes[i % sizes.length], `${i},`));
  const sending = sender.sendMany(sent);
  const found = [];
  while (found.length < sent.length) {
    if (found.length % 3 === 0) found.push(...(await receiver.recvMany(7)));
    else found.push(await receiver.recv());
  }
  assert.equal(await sending, sent.length);
  sent.forEach((message, i) => assert.ok(found[i].equals(message), `message ${i}`));
  // What a user writes into one is in no other.
  found.forEach((message) => message.fill(0));
  // Nor does a transfer of one take others along. Node 20 copies instead, later versions throw.
  try {
    structuredClone(found[1], { transfer: [found[1].buffer] });
  } catch (error) {
    assert.equal(error.name, 'DataCloneError');
  }
  assert.equal(found[1].length, 1);
  // A large one has memory of its own, which a transfer takes; empty messages follow it.
  await sender.sendMany([Buffer.alloc(70_000, 1), Buffer.alloc(0), Buffer.alloc(0), Buffer.from('last')]);
  const large = await receiver.recv();
  structuredClone(large, { transfer: [large.buffer] });
  assert.equal(large.length, 0);
  const rest = [await receiver.recv(), await receiver.recv(), await receiver.recv()];
  assert.deepEqual(rest.map(String), ['', '', 'last']);
  assert.deepEqual(Object.getPrototypeOf(found[1]), Buffer.prototype);
});

test('timers_have_their_turn_beside_a_saturating_sender', options, async () => {
  const { sender, receiver } = threads();
  let isOver = false;
  setTimeout(() => { isOver = true; }, 20);
  let count = 0;
  // Without a bound, these promises would never let the timer run.
  while (!isOver) {
    await sender.send(Buffer.from('x'));
    await receiver.recv();
    count += 1;
  }
  assert.ok(count > 0);
});

test('an_endpoint_goes_to_a_worker_and_a_worker_may_be_terminated', options, async () => {
  const text = `
    const { parentPort, workerData } = require('node:worker_threads');
    const pelton = require(workerData.pelton);
    parentPort.once('message', async (token) => {
      const receiver = pelton.Receiver.attach(token);
      parentPort.postMessage('attached');
      let count = 0;
      for await (const message of receiver) count += Number(message);
      parentPort.postMessage(count);
      if (count === 0) await new Promise(() => {});
    });`;
  const begin = async (receiver) => {
    const worker = new Worker(text, { eval: true, workerData: { pelton: require.resolve(
      process.env.PELTON_PACKAGE ?? '..') } });
    const token = receiver.detach();
    assert.ok(receiver.closed);
    worker.postMessage(token);
    assert.deepEqual(await once(worker, 'message'), ['attached']);
    return worker;
  };
  const { sender, receiver } = threads();
  const worker = await begin(receiver);
  for (let i = 0; i < 1000; i += 1) await sender.send(Buffer.from(`${i}`));
  sender.close();
  const exited = once(worker, 'exit');
  assert.deepEqual(await once(worker, 'message'), [499_500]);
  await exited;
  for (let round = 0; round < 5; round += 1) {
    const pair = threads();
    const other = await begin(pair.receiver);
    await other.terminate();
    await assert.rejects(sendForEver(pair.sender), coded('closed'));
  }
  // A step that has the endpoint ends with the worker.
  const last = threads();
  const waiter = new Worker(`
    const { parentPort, workerData } = require('node:worker_threads');
    const { Sender } = require(workerData);
    parentPort.once('message', async (token) => {
      const sender = Sender.attach(token);
      await sender.send(Buffer.from('not released'));
      const waiting = sender.waitReleased();
      parentPort.postMessage('waits');
      await waiting;
    });`, { eval: true, workerData: require.resolve(process.env.PELTON_PACKAGE ?? '..') });
  waiter.postMessage(last.sender.detach());
  await once(waiter, 'message');
  await waiter.terminate();
  const message = await last.receiver.peek(LIMIT);
  assert.equal(`${message.data}`, 'not released');
  await assert.rejects(last.receiver.recv(LIMIT), coded('closed'));
  message.release();
});

test('streams_keep_back_pressure', options, async () => {
  const { sender, receiver } = threads({ capacity: 65_536, messageBytesMax: 4096 });
  const count = 5000;
  async function* source() {
    for (let i = 0; i < count; i += 1) yield Buffer.from(`${i}`.padStart(1000));
  }
  let next = 0;
  await Promise.all([
    pipeline(source, sender.writable()),
    pipeline(receiver.readable({ highWaterMark: 4 }), async (messages) => {
      for await (const message of messages) assert.equal(Number(message), next++);
    }),
  ]);
  assert.equal(next, count);
  const other = threads();
  for (let i = 0; i < 100; i += 1) other.sender.trySend(Buffer.from('x'));
  const stream = other.receiver.readable({ highWaterMark: 4 });
  await once(stream, 'readable');
  // What nobody reads stays in the lane.
  assert.ok(other.sender.info().unreleased >= 90);
  stream.destroy();
});

test('a_process_ends_when_nothing_is_pending_or_after_unref', options, async () => {
  const idle = program('globalThis.kept = pelton.threads(); console.log("idle");');
  assert.equal(await idle.ended, 0);
  const unref = program(`const [one, other] = [pelton.threads(), pelton.threads()];
    one.receiver.unref().recv();
    other.sender.trySend(Buffer.from('not released'));
    other.sender.unref().waitReleased();`);
  assert.equal(await unref.ended, 0);
  const over = program(`const { sender, receiver } = pelton.threads();
    const service = pelton.Service.listen(argument);
    service.unref().run((request) => request.data);
    globalThis.client = await pelton.Client.connect(argument);
    const first = client.call(Buffer.from('x'));
    setTimeout(() => client.call(Buffer.from('y')), 5);
    await first;
    const waits = [receiver.recv({ timeout: 5 }).catch(() => {}), receiver.recv()];
    setTimeout(() => sender.trySend(Buffer.from('x')), 5);
    await Promise.all(waits);`, name());
  assert.equal(await over.ended, 0);
  const exits = program('const { sender, receiver } = pelton.threads();'
    + 'receiver.recv().then(() => process.exit(7)); sender.trySend(Buffer.from("x"));');
  assert.equal(await exits.ended, 7);
});

test('the_permission_model_needs_allow_addons', options, async () => {
  const flag = process.allowedNodeEnvironmentFlags.has('--permission') ? '--permission' : '--experimental-permission';
  const text = `try {
      const { sender, receiver } = require(${JSON.stringify(require.resolve(process.env.PELTON_PACKAGE ?? '..'))}).threads();
      sender.trySend(Buffer.from('sent'));
      console.log(String(receiver.tryRecv()));
    } catch (error) {
      console.log(error.code);
    }`;
  for (const [more, output] of [[[], 'ERR_DLOPEN_DISABLED'], [['--allow-addons'], 'sent']]) {
    const child = start(process.execPath, ['--no-warnings', flag, '--allow-fs-read=*', ...more, '-e', text]);
    assert.equal(await child.ended, 0);
    assert.equal(child.output().trim(), output);
  }
});

test('an_unhandled_rejection_ends_the_process_as_node_says', options, async () => {
  const child = start(process.execPath, ['-e', `const pelton = require(${JSON.stringify(require.resolve(
    process.env.PELTON_PACKAGE ?? '..'))}); pelton.threads().receiver.recv({ timeout: 0 });`],
  { stdio: ['ignore', 'pipe', 'ignore'] });
  assert.equal(await child.ended, 1);
});

test('a_forgotten_message_is_released_with_one_warning', options, async () => {
  const text = `const { sender, receiver } = pelton.threads();
    const warnings = [];
    process.on('warning', (warning) => warnings.push(warning.name));
    for (let i = 0; i < 100; i += 1) { sender.trySend(Buffer.alloc(1000)); receiver.tryPeek(); }
    while (sender.info().unreleased > 0) { gc(); await new Promise(setImmediate); receiver.tryRecv(); }
    console.log(warnings.join());`;
  const child = program(text, undefined, { flags: ['--expose-gc'] });
  assert.equal(await child.ended, 0);
  assert.equal(child.output().trim(), 'PeltonWarning');
});

// Messages and calls in one process, which prints what it has found.
const EXCHANGE = `const turn = require('node:timers/promises').setImmediate;
  const service = pelton.Service.listen(argument);
  const running = service.run(async (request) => { during(); await turn(); return request.data; });
  const client = await pelton.Client.connect(argument, { timeout: 20000 });
  const { sender, receiver } = pelton.threads();
  for (let i = 0; i < 150; i += 1) {
    const data = Buffer.alloc(i * 400, i);
    const waiting = receiver.recv();
    during();
    await sender.sendMany([data, Buffer.from(String(i))]);
    const call = client.call(data);
    during();
    const found = [await waiting, await call];
    if (!found.every((it) => it.equals(data))) console.log('other bytes');
    const message = await receiver.peek();
    during();
    if (String(message.data) !== String(i)) console.log('another message');
    message.release();
  }
  service.drain();
  await running;
  service.close();
  client.close();
  sender.close();`;

test('collections_of_garbage_at_any_moment_lose_nothing', options, async () => {
  const text = `const during = gc;
    ${EXCHANGE}
    // Endpoints that nobody has any more are closed by their collection.
    const kept = (() => {
      const [one, other] = [pelton.threads({ capacity: 1 << 16 }), pelton.threads()];
      return { sender: one.sender, receiver: other.receiver };
    })();
    const ends = [];
    for (const attempt of [() => kept.sender.trySend(Buffer.alloc(100)), () => kept.receiver.tryRecv()]) {
      for (let end; end === undefined; await turn()) {
        gc();
        try {
          attempt();
        } catch (error) {
          end = error.code;
          ends.push(end);
        }
      }
    }
    console.log(ends.join());`;
  const child = program(text, name(), { flags: ['--expose-gc'] });
  assert.equal(await child.ended, 0);
  assert.equal(child.output(), 'closed,closed\n');
});

test('a_debugger_and_a_profiler_disturb_nothing', options, async () => {
  const text = `const session = new (require('node:inspector').Session)();
    session.connect();
    for (const what of ['Runtime.enable', 'Debugger.enable', 'Profiler.enable', 'Profiler.start']) session.post(what);
    let count = 0;
    session.on('Debugger.paused', () => { count += 1; });
    const during = () => { debugger; };
    ${EXCHANGE}
    session.post('Profiler.stop', (error, { profile }) => console.log(error, profile.nodes.length > 0));`;
  const child = program(text, name(), { flags: ['--inspect=127.0.0.1:0', '--inspect-publish-uid=http'] });
  assert.equal(await child.ended, 0);
  assert.equal(child.output(), 'null true\n');
});

test('a_kill_of_either_side_is_detected_and_its_successor_continues', options, async () => {
  for (let round = 0; round < 10; round += 1) {
    const at = name();
    const listener = listen(at);
    const child = program(`const sender = await pelton.Sender.connect(argument, { timeout: 20000 });
      for (let i = 0; ; i += 1) await sender.send(Buffer.from(String(i)));`, at);
    const receiver = await listener.acceptReceiver(LIMIT);
    let next = 0;
    const take = async () => {
      for (;;) assert.equal(Number(await receiver.recv(LIMIT)), next++);
    };
    for (let i = 0; i < 500; i += 1) assert.equal(Number(await receiver.recv(LIMIT)), next++);
    child.kill('SIGKILL');
    await assert.rejects(take(), coded('peer_died'));
    await child.ended;
    const successor = program(`const sender = await pelton.Sender.connect(argument, { timeout: 20000 });
      await sender.send(Buffer.from('successor')); await sender.waitReleased(); sender.close();`, at);
    await receiver.resume(LIMIT);
    assert.equal(`${await receiver.recv(LIMIT)}`, 'successor');
    await assert.rejects(receiver.recv(LIMIT), coded('closed'));
    assert.equal(await successor.ended, 0);
    receiver.close();

    const victim = program(`const receiver = await pelton.Receiver.connect(argument, { timeout: 20000 });
      for (;;) await receiver.recv();`, at);
    const sender = await listener.acceptSender(LIMIT);
    let sent = 0;
    for (; sent < 500; sent += 1) await sender.send(Buffer.from(`${sent}`));
    victim.kill('SIGKILL');
    await assert.rejects(async () => {
      for (;; sent += 1) await sender.send(Buffer.from(`${sent}`));
    }, (error) => coded('peer_died')(error) && error.unreleased >= 0);
    const second = program(`const receiver = await pelton.Receiver.connect(argument, { timeout: 20000 });
      let last; for await (const message of receiver) last = message; console.log(String(last));`, at);
    await sender.resume(LIMIT);
    await sender.send(Buffer.from('last'));
    await sender.waitReleased(LIMIT);
    sender.close();
    assert.equal(await second.ended, 0);
    assert.equal(second.output().trim(), 'last');
    listener.close();
  }
});

test('both_ways_with_the_tool', { ...options, skip: !tool && 'PELTON_TOOL is not set' }, async () => {
  const at = name();
  const sending = start(tool, ['send', '--timeout', '20', at]);
  const listener = listen(at);
  sending.stdin.end('one\ntwo\nthree\n');
  const receiver = await listener.acceptReceiver(LIMIT);
  const found = [];
  for await (const message of receiver) found.push(`${message}`);
  assert.deepEqual(found, ['one', 'two', 'three']);
  assert.equal(await sending.ended, 0);
  listener.close();
  const other = name();
  const receiving = start(tool, ['recv', other]);
  const sender = await Sender.connect(other, LIMIT);
  await sender.sendMany(['four', 'five'].map((it) => Buffer.from(it)), LIMIT);
  sender.close();
  assert.equal(await receiving.ended, 0);
  assert.equal(receiving.output(), 'four\nfive\n');
});

test('a_refused_peer_is_logged', options, async () => {
  assert.throws(() => pelton.setLog('warn'), { name: 'TypeError', message: /log is String, wanted a function, or null/ });
  const records = [];
  let wake;
  pelton.setLog((level, text) => {
    records.push([level, text]);
    wake();
  });
  const at = name();
  const receiver = pelton.gather(at);
  // It accepts and refuses while it waits.
  const waiting = receiver.recv();
  // Again, if a refusal less than a second ago had a record.
  while (records.length === 0) {
    const logged = new Promise((resolve) => { wake = resolve; });
    await assert.rejects(Client.connect(at, LIMIT), coded('refused'));
    await Promise.race([logged, sleep(100)]);
  }
  pelton.setLog(null);
  receiver.close();
  await assert.rejects(waiting, coded('closed_handle'));
  const [[level, text]] = records;
  assert.equal(level, 'warn');
  assert.match(text, new RegExp(`^refused the peer, process ${process.pid} of uid ${process.getuid()}: `));
});

test('a_logger_keeps_no_process_alive', options, async () => {
  const quiet = program('pelton.setLog(() => {});');
  assert.equal(await quiet.ended, 0);
});
