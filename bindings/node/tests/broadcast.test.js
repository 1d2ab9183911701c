'use strict';
const assert = require('node:assert/strict');
const { once } = require('node:events');
const test = require('node:test');
const { LIMIT, name, options, pelton, place, program } = require('./support.js');

const { PeltonError, Publisher, Subscriber, publish, removeSubscription } = pelton;
const coded = (code) => (error) => error instanceof PeltonError && error.code === code;

const SUBSCRIBE = `
  const subscriber = await pelton.Subscriber.connect(argument.at, { timeout: 20_000, policy: argument.policy });
  let [received, missed] = [0, 0];
  for await (const delivery of subscriber) {
    received += 1;
    missed += delivery.missed;
    if (Number(delivery.data) !== delivery.number || delivery.number !== received + missed) process.exit(1);
  }
  console.log(received, subscriber.missed);`;

const PUBLISH_ONE = `
  const publisher = pelton.publish(argument);
  await publisher.waitSubscribers(1, { timeout: 20_000 });
  await publisher.send(Buffer.from('one'));`;

test('each_process_receives_by_its_policy', options, async () => {
  const at = name();
  const total = 20_000;
  const children = ['gate', 'lag', 'latest'].map((policy) => [policy, program(SUBSCRIBE, { at, policy })]);
  const publisher = publish(at, { capacity: 64 << 10 });
  await publisher.waitSubscribers(3, LIMIT);
  for (let number = 1; number <= total; number += 1) await publisher.send(Buffer.from(`${number}`), LIMIT);
  await publisher.waitReleased(LIMIT);
  const states = publisher.subscribers();
  assert.deepEqual(states.map((it) => it.policy).sort(), ['gate', 'lag', 'latest']);
  assert.deepEqual(new Set(states.map((it) => it.pid)), new Set(children.map(([, child]) => child.pid)));
  const { messages, capacity, messageBytesMax } = publisher.info();
  assert.deepEqual([messages, capacity, messageBytesMax], [total, 64 << 10, (32 << 10) - 32]);
  publisher.close();
  for (const [policy, child] of children) {
    assert.equal(await child.ended, 0);
    const [received, missed] = child.output().split(' ').map(Number);
    assert.equal(received + missed, total);
    assert.ok(received > 0 && (policy !== 'gate' || missed === 0));
  }
});

test('a_slow_gate_is_shown_and_waited_for', options, async () => {
  const at = name();
  const publisher = publish(at, { capacity: 64 << 10 });
  // It admits while nothing waits at it.
  const subscriber = await Subscriber.connect(at, LIMIT);
  let sent = 0;
  while (publisher.trySend(Buffer.alloc(1000, 'x'))) sent += 1;
  await assert.rejects(publisher.send(Buffer.alloc(1000), { timeout: 1 }), coded('timed_out'));
  const [state] = publisher.subscribers();
  assert.deepEqual([state.policy, state.behind, state.lags, state.pid], ['gate', sent, false, process.pid]);
  assert.ok(state.holds > 0);
  const sending = publisher.send(Buffer.from('more'), LIMIT);
  assert.equal(publisher.trySend(Buffer.from('not before that')), false);
  for (let number = 1; number <= sent; number += 1) {
    const delivery = await subscriber.recv(LIMIT);
    assert.deepEqual([delivery.data.length, delivery.number, delivery.missed], [1000, number, 0]);
  }
  await sending;
  assert.equal(`${(await subscriber.recv(LIMIT)).data}`, 'more');
  await publisher.waitReleased(LIMIT);
  assert.equal(publisher.subscribers()[0].holds, undefined);
  assert.equal(subscriber.tryRecv(), null);
  const waiting = subscriber.recv(LIMIT);
  await publisher.send(Buffer.alloc(30_000, 'y'));
  assert.ok((await waiting).data.equals(Buffer.alloc(30_000, 'y')));
  const aborted = AbortSignal.abort(new Error('enough'));
  await assert.rejects(subscriber.recv({ signal: aborted }), /enough/);
  subscriber.close();
  await assert.rejects(subscriber.recv(), coded('closed_handle'));
  publisher.close();
  assert.ok(publisher.closed && subscriber.closed);
});

test('policies_that_miss_messages_count_them', options, async () => {
  const at = name();
  const publisher = publish(at, { capacity: 64 << 10, holdMax: 10, history: 5 });
  await publisher.send(Buffer.from('before'));
  await assert.rejects(Subscriber.connect(at, LIMIT), coded('refused'));
  const join = (more) => Subscriber.connect(at, { ...LIMIT, ...more });
  const late = await join({ lagAfter: 10, slack: 8192, startFrom: 'oldest' });
  const lag = await join({ policy: 'lag', startFrom: 1 });
  const latest = await join({ policy: 'latest' });
  for (const subscriber of [late, lag]) assert.equal(`${subscriber.tryRecv().data}`, 'before');
  for (let i = 0; i < 200; i += 1) await publisher.send(Buffer.alloc(1000), LIMIT);
  assert.equal(latest.tryRecv().missed, 199);
  for (const subscriber of [late, lag]) {
    let [received, missed] = [1, 0];
    for (let delivery; (delivery = subscriber.tryRecv()) !== null;) {
      received += 1;
      missed += delivery.missed;
      assert.equal(delivery.number, received + missed);
    }
    assert.deepEqual([received + missed, subscriber.missed], [201, missed]);
    assert.ok(missed > 0);
  }
  assert.equal(publisher.subscribers().find((it) => it.policy === 'gate').lagAfter, 10);
  for (const it of [late, lag, latest, publisher]) it.close();
});

test('options_that_contradict_are_refused', options, async () => {
  const at = name();
  const wrong = [
    { policy: 'fast' }, { startFrom: 'yesterday' }, { startFrom: -1 }, { lagAfter: -1 }, { lagAfter: NaN },
    { lagAfter: 1, policy: 'lag' }, { slack: 4096 }, { slack: 4096, policy: 'latest' }, { history: 1 },
  ];
  for (const given of wrong) await assert.rejects(Subscriber.connect(at, given), { code: 'ERR_OUT_OF_RANGE' });
  await assert.rejects(Subscriber.connect(at, { lagAfter: '1' }), { code: 'ERR_INVALID_ARG_TYPE' });
  assert.throws(() => publish(at, { holdMax: -1 }), { code: 'ERR_OUT_OF_RANGE' });
  assert.throws(() => publish(at, { policy: 'lag' }), { code: 'ERR_OUT_OF_RANGE' });
  assert.throws(() => publish('a/b'), coded('name'));
  await assert.rejects(Subscriber.connect(at), coded('no_listener'));
  const publisher = publish(at);
  await assert.rejects(publisher.send(Buffer.alloc(1 << 25)), coded('too_large'));
  await assert.rejects(publisher.send('text'), { code: 'ERR_INVALID_ARG_TYPE' });
  await assert.rejects(publisher.waitSubscribers(0), { code: 'ERR_OUT_OF_RANGE' });
  await assert.rejects(publisher.waitSubscribers(1, { timeout: 1 }), coded('timed_out'));
  assert.throws(() => publish(at), coded('in_use'));
  publisher.close();
});

test('an_end_is_an_error_and_a_successor_continues', options, async () => {
  const at = name();
  const first = program(PUBLISH_ONE, at);
  const subscriber = await Subscriber.connect(at, LIMIT);
  assert.equal(`${(await subscriber.recv(LIMIT)).data}`, 'one');
  assert.equal(subscriber.info().peerPid, first.pid);
  await assert.rejects(subscriber.resume({ timeout: 0 }), coded('refused'));
  first.kill('SIGKILL');
  await assert.rejects(subscriber.recv(LIMIT), coded('peer_died'));
  await first.ended;
  await assert.rejects(subscriber.resume({ timeout: 0 }), coded('timed_out'));
  const resuming = subscriber.resume(LIMIT);
  const second = program(PUBLISH_ONE, at);
  await resuming;
  const { data, number } = await subscriber.recv(LIMIT);
  assert.deepEqual([`${data}`, number, subscriber.info().peerPid], ['one', 1, second.pid]);
  second.kill('SIGKILL');
  await assert.rejects(subscriber.recv(LIMIT), coded('peer_died'));
  await second.ended;
  // This one sends when the subscriber waits in the loop.
  const third = publish(at);
  await subscriber.resume(LIMIT);
  for (const text of ['waited for', 'and again']) {
    const waiting = subscriber.recv(LIMIT);
    await new Promise(setImmediate);
    await third.send(Buffer.from(text));
    assert.equal(`${(await waiting).data}`, text);
  }
  third.close();
  await assert.rejects(subscriber.recv(LIMIT), coded('closed'));
  subscriber.close();
});

test('an_open_publisher_keeps_the_process_alive_unless_unref_was_called', options, async () => {
  const at = name();
  const kept = program('console.log("open"); pelton.publish(argument);', at);
  await once(kept.stdout, 'data');
  const subscriber = await Subscriber.connect(at, LIMIT);
  kept.kill('SIGKILL');
  assert.equal(await kept.ended, 'SIGKILL');
  subscriber.close();
  assert.equal(await program('pelton.publish(argument).unref();', at).ended, 0);
});

// Receives one message, and waits to be killed.
const AUDIT = `
  const subscriber = await pelton.Subscriber.openPath(argument, { durable: 'audit', timeout: 20_000 });
  const { number } = await subscriber.recv();
  if (subscriber.continues || number !== 1) process.exit(1);
  console.log('received');
  setInterval(() => {}, 1000);`;

test('a_limit_in_a_directory_stays_until_the_next_publisher', options, async () => {
  const at = place();
  (await Publisher.openPath(at, { capacity: 64 << 10, holdMax: 10 })).close();
  await assert.rejects(Subscriber.openPath(at), coded('refused'));
  (await Subscriber.openPath(at, { lagAfter: 10 })).close();
  (await Publisher.openPath(at)).close();
  const subscriber = await Subscriber.openPath(at);
  await assert.rejects(Publisher.openPath(at, { holdMax: 0 }), coded('refused'));
  subscriber.close();
  (await Publisher.openPath(at, { holdMax: 0 })).close();
});

test('a_durable_subscription_continues_after_a_kill', options, async () => {
  const at = place();
  const durable = { durable: 'audit' };
  await assert.rejects(Subscriber.openPath(at, durable), coded('no_channel'));
  let publisher = await Publisher.openPath(at, { capacity: 64 << 10 });
  const audit = program(AUDIT, at);
  await publisher.waitSubscribers(1, LIMIT);
  for (const text of ['one', 'two', 'three']) await publisher.send(Buffer.from(text), LIMIT);
  await once(audit.stdout, 'data');
  assert.deepEqual(publisher.subscribers().map((it) => [it.pid, it.durable, it.behind]), [[audit.pid, 'audit', 2]]);
  assert.throws(() => removeSubscription(at, 'audit'), coded('role_taken'));
  await assert.rejects(Publisher.openPath(at), coded('role_taken'));
  audit.kill('SIGKILL');
  assert.equal(await audit.ended, 'SIGKILL');
  // While it is away it gates.
  let sent = 3;
  while (publisher.trySend(Buffer.alloc(1000))) sent += 1;
  assert.deepEqual(publisher.subscribers().map((it) => [it.pid, it.durable, it.behind]), [[0, 'audit', sent - 1]]);
  let subscriber = await Subscriber.openPath(at, { ...durable, ...LIMIT });
  assert.equal(subscriber.continues, true);
  for (const [number, text] of [[2, 'two'], [3, 'three']]) {
    const delivery = await subscriber.recv(LIMIT);
    assert.deepEqual([`${delivery.data}`, delivery.number, delivery.missed], [text, number, 0]);
  }
  for (let number = 4; number <= sent; number += 1) assert.equal((await subscriber.recv(LIMIT)).number, number);
  // The publisher's successor continues.
  publisher.close();
  await assert.rejects(subscriber.recv(LIMIT), coded('closed'));
  await assert.rejects(subscriber.resume({ timeout: 1 }), coded('timed_out'));
  const resumed = subscriber.resume(LIMIT);
  publisher = await Publisher.openPath(at);
  await resumed;
  await publisher.send(Buffer.from('next'), LIMIT);
  assert.equal((await subscriber.recv(LIMIT)).number, sent + 1);
  subscriber.close();
  // It learns how many messages it has missed while away.
  (await Subscriber.openPath(at, { ...durable, policy: 'lag' })).close();
  for (let number = 0; number < 200; number += 1) await publisher.send(Buffer.alloc(1000), LIMIT);
  subscriber = await Subscriber.openPath(at, { ...durable, policy: 'lag' });
  const { missed, number } = await subscriber.recv(LIMIT);
  assert.ok(missed > 0 && number === sent + 2 + missed);
  subscriber.close();
  await assert.rejects(Subscriber.openPath(at, durable), coded('refused'));
  await assert.rejects(Subscriber.openPath(at, { durable: 'a b' }), coded('name'));
  await assert.rejects(Subscriber.openPath(at, { durable: 1 }), TypeError);
  assert.equal(removeSubscription(at, 'audit'), true);
  assert.equal(removeSubscription(at, 'audit'), false);
  publisher.close();
});
