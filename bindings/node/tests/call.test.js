'use strict';
const assert = require('node:assert/strict');
const { setImmediate: turn, setTimeout: sleep } = require('node:timers/promises');
const test = require('node:test');
const { once } = require('node:events');
const { Worker } = require('node:worker_threads');
const { LIMIT, name, options, pelton, program, start, tool } = require('./support.js');

const { Client, Failed, PeltonError, Service } = pelton;
const coded = (code) => (error) => error instanceof PeltonError && error.code === code;

/** A service and a client, for `with`; the service drains after it. */
async function served(handler, body, settings, limits = {}) {
  const at = name();
  const service = Service.listen(at, limits);
  const running = service.run(handler, settings);
  const client = await Client.connect(at, { ...LIMIT, ...limits });
  try {
    await body(client, service, at);
    service.drain();
    client.close();
    await running;
  } finally {
    client.close();
    service.close();
  }
}

test('calls_of_every_size_are_replied_to', options, async () => {
  await served(async (request) => request.data, async (client) => {
    for (const size of [0, 1, 100, 65_536, 1_000_000, 40_000_000]) {
      const request = Buffer.alloc(size, 'abc');
      assert.ok((await client.call(request, LIMIT)).equals(request));
    }
  });
});

test('ten_thousand_calls_are_pending_at_once', options, async () => {
  await served((request) => request.data, async (client) => {
    const calls = Array.from({ length: 10_000 }, (_, i) => client.call(Buffer.from(`${i}`), { timeout: 50_000 }));
    assert.deepEqual((await Promise.all(calls)).map(Number), calls.map((_, index) => index));
    assert.equal(client.inFlight, 0);
  });
});

test('handlers_overlap_up_to_the_bound', options, async () => {
  let running = 0;
  let most = 0;
  await served(async (request) => {
    running += 1;
    most = Math.max(most, running);
    await sleep(1);
    running -= 1;
    return request.data;
  }, async (client) => {
    await Promise.all(Array.from({ length: 100 }, () => client.call(Buffer.from('x'), LIMIT)));
    assert.equal(most, 4);
  }, { inFlightMax: 4 });
});

test('a_streaming_reply_arrives_in_parts_with_back_pressure', options, async () => {
  let ended = 0;
  async function* parts() {
    try {
      for (let i = 0; i < 3000; i += 1) yield Buffer.alloc(10_000, i);
    } finally {
      ended += 1;
    }
  }
  await served(() => parts(), async (client) => {
    let next = 0;
    for await (const part of client.stream(Buffer.from('all'), LIMIT)) {
      assert.equal(part.length, 10_000);
      assert.equal(part[0], next++ % 256);
    }
    assert.equal(next, 3000);
    // Leaving the loop cancels the call, and ends the generator.
    for await (const part of client.stream(Buffer.from('all'), LIMIT)) {
      assert.equal(part[0], 0);
      break;
    }
    while (ended < 2) await turn();
    assert.equal((await client.call(Buffer.from('all'), LIMIT)).length, 30_000_000);
  });
});

test('a_call_whose_parts_are_too_large_together_fails_alone', options, async () => {
  let ended;
  const over = new Promise((resolve) => { ended = resolve; });
  const handler = (request) => {
    if (request.data.length === 0) return request.data;
    return (async function* parts() {
      try {
        for (let i = 0; i < 40; i += 1) yield Buffer.alloc(64 << 10, i);
      } finally {
        ended();
      }
    }());
  };
  await served(handler, async (client) => {
    const large = client.call(Buffer.from('all'), LIMIT);
    const small = client.call(Buffer.alloc(0), LIMIT);
    await assert.rejects(large, coded('too_large'));
    assert.equal((await small).length, 0);
    await over;
    let count = 0;
    for await (const part of client.stream(Buffer.from('all'), LIMIT)) assert.equal(part[0], count++);
    assert.equal(count, 40);
    assert.equal((await client.call(Buffer.alloc(0), LIMIT)).length, 0);
  }, {}, { callBytesMax: 1 << 20 });
});

test('a_call_in_flight_ends_whatever_else_the_client_does', options, async () => {
  let begin;
  const handler = (request) => {
    if (request.isNotification) return undefined;
    return new Promise((resolve) => begin(() => resolve(request.data)));
  };
  await served(handler, async (client) => {
    for (const use of [
      () => client.notify(Buffer.from('note')),
      () => assert.rejects(client.call(Buffer.alloc((64 << 20) + 1)), coded('too_large')),
      () => assert.rejects(client.notify(Buffer.alloc((64 << 20) + 1), LIMIT), coded('too_large')),
    ]) {
      const began = new Promise((resolve) => { begin = resolve; });
      const call = client.call(Buffer.from('first'), LIMIT);
      // The client sleeps by now.
      const reply = await began;
      await use();
      reply();
      assert.equal(`${await call}`, 'first');
    }
  }, { onError: () => {} });
});

test('a_failure_has_its_code_and_text', options, async () => {
  const errors = [];
  await served(async (request) => {
    if (`${request.data}` === 'own') throw new Failed(42, 'no tea');
    if (`${request.data}` === 'none') return undefined;
    if (`${request.data}` === 'drop') return request.abandon();
    throw new RangeError('broken');
  }, async (client) => {
    await assert.rejects(client.call(Buffer.from('own')), (error) =>
      coded('failed')(error) && error instanceof Failed && error.failure === 42 && error.text === 'no tea');
    await assert.rejects(client.call(Buffer.from('other')), (error) =>
      error.failure === 1 && error.text === 'RangeError: broken');
    await assert.rejects(client.call(Buffer.from('none')), (error) => error.text.startsWith('TypeError'));
    await assert.rejects(client.call(Buffer.from('drop')), coded('abandoned'));
    assert.equal(errors.length, 2);
  }, { onError: (error) => errors.push(error) });
});

test('a_handler_whose_own_peer_is_gone_fails_its_call', options, async () => {
  const errors = [];
  let upstream;
  await served((request) => upstream.call(request.data), async (client) => {
    const at = name();
    const service = Service.listen(at);
    void service.run(() => service.close());
    upstream = await Client.connect(at, LIMIT);
    await assert.rejects(client.call(Buffer.from('x'), LIMIT), (error) =>
      error.failure === 1 && error.text.startsWith('PeltonError'));
    assert.deepEqual(errors, ['closed']);
    upstream.close();
  }, { onError: (error) => errors.push(error.code) });
});

test('parts_that_nobody_takes_any_more_end_their_handler', options, async () => {
  const errors = [];
  const ends = [];
  let isBlocked;
  async function parts(request) {
    try {
      for (;;) {
        let hasSent = false;
        const sending = request.part(Buffer.alloc(1024)).finally(() => { hasSent = true; });
        // The client takes what it may in each of its turns.
        for (let i = 0; i < 10 && !hasSent; i += 1) await turn();
        if (!hasSent) isBlocked();
        await sending;
      }
    } finally {
      ends.push(`${request.data}`);
    }
  }
  const limits = { capacity: 64 << 10, callBytesMax: 1 << 14 };
  await served(parts, async (client, service, at) => {
    const begin = async (it, text) => {
      const blocked = new Promise((resolve) => { isBlocked = resolve; });
      const stream = it.stream(Buffer.from(text), LIMIT);
      await stream.next();
      await blocked;
      return stream;
    };
    const other = await Client.connect(at, { ...LIMIT, ...limits });
    await begin(other, 'of a client that leaves');
    other.close();
    while (ends.length < 1) await turn();
    const stream = await begin(client, 'of a service that stops');
    service.stop();
    while (ends.length < 2) await turn();
    await assert.rejects(async () => {
      for await (const part of stream) assert.equal(part.length, 1024);
    }, coded('abandoned'));
    assert.deepEqual(ends, ['of a client that leaves', 'of a service that stops']);
    assert.deepEqual(errors, []);
  }, { onError: (error) => errors.push(error) }, limits);
});

test('a_cancel_aborts_the_handler_s_signal', options, async () => {
  const aborted = [];
  let begun = 0;
  await served((request) => new Promise((resolve) => {
    begun += 1;
    request.signal.addEventListener('abort', () => {
      aborted.push(`${request.data}`);
      resolve(request.data);
    });
  }), async (client) => {
    // Long enough for the handler to begin: a request that has timed out before never gets there.
    await assert.rejects(client.call(Buffer.from('time'), { timeout: 200 }), coded('timed_out'));
    const abort = new AbortController();
    const calling = client.call(Buffer.from('signal'), { signal: abort.signal });
    while (begun < 2) await turn();
    abort.abort(new Error('enough'));
    await assert.rejects(calling, /enough/);
    while (aborted.length < 2) await turn();
    assert.deepEqual(aborted, ['time', 'signal']);
  });
});

test('notifications_arrive_and_deadlines_are_seen', options, async () => {
  const seen = [];
  await served((request) => {
    seen.push([`${request.data}`, request.isNotification, request.deadline > performance.now()]);
    return request.isNotification ? undefined : request.data;
  }, async (client) => {
    await client.notify(Buffer.from('note'), LIMIT);
    await client.call(Buffer.from('call'), LIMIT);
    assert.deepEqual(seen, [['note', true, false], ['call', false, true]]);
  }, { onError: () => {} });
});

test('a_call_has_its_traceparent_or_none', options, async () => {
  const span = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
  let last;
  await served(async (request) => {
    last = request;
    await turn();
    return Buffer.from(`${request.traceparent}`);
  }, async (client) => {
    const call = async (given) => `${await client.call(Buffer.from('x'), given)}`;
    assert.equal(await call({ traceparent: span }), span);
    assert.equal(last.traceparent, null);
    assert.equal(await call({ traceparent: span, idempotent: true, ...LIMIT }), span);
    for (const traceparent of [null, 'none', `${span}0`]) assert.equal(await call({ traceparent }), 'null');
    assert.equal(await call(), 'null');
    for await (const part of client.stream(Buffer.from('x'), { traceparent: span })) assert.equal(`${part}`, span);
    const many = await Promise.all(Array.from({ length: 3000 }, (_, i) =>
      call(i % 3 === 0 ? undefined : { traceparent: span.replace('4736', `${i}`.padStart(4, '0')), ...LIMIT })));
    many.forEach((found, i) => assert.equal(
      found, i % 3 === 0 ? 'null' : span.replace('4736', `${i}`.padStart(4, '0'))));
    await assert.rejects(client.call(Buffer.from('x'), { traceparent: 7 }), { code: 'ERR_INVALID_ARG_TYPE' });
  });
});

test('the_death_of_a_service_fails_its_calls_and_the_death_of_a_client_aborts', options, async () => {
  const at = name();
  const child = program(`const service = pelton.Service.listen(argument);
    await service.run(() => new Promise(() => {}));`, at);
  const client = await Client.connect(at, LIMIT);
  const calls = Array.from({ length: 50 }, () => client.call(Buffer.from('x'), LIMIT));
  const failures = Promise.all(calls.map((call) => assert.rejects(call, coded('peer_died'))));
  while (client.inFlight < 50) await turn();
  await sleep(20);
  child.kill('SIGKILL');
  await failures;
  await assert.rejects(client.call(Buffer.from('x'), LIMIT), coded('peer_died'));
  client.close();

  const other = name();
  let abort;
  const aborted = new Promise((resolve) => { abort = resolve; });
  const service = Service.listen(other);
  const began = new Promise((resolve) => {
    void service.run((request) => {
      request.signal.addEventListener('abort', abort);
      resolve();
      return new Promise(() => {});
    });
  });
  const caller = program(`const client = await pelton.Client.connect(argument, { timeout: 20000 });
    await client.call(Buffer.from('x'));`, other);
  await began;
  caller.kill('SIGKILL');
  await aborted;
  service.close();
});

test('a_worker_may_be_terminated_amid_calls', options, async () => {
  const begin = (text, at) => new Worker(`const { parentPort, workerData } = require('node:worker_threads');
    const pelton = require(workerData.pelton);
    (async () => { ${text} })();`, { eval: true, workerData: { at, pelton: require.resolve(
    process.env.PELTON_PACKAGE ?? '..') } });
  for (let round = 0; round < 5; round += 1) {
    const at = name();
    const serving = begin(`const service = pelton.Service.listen(workerData.at);
      void service.run((request) => (request.data[0] === 0 ? request.data : new Promise(() => {})));`, at);
    const client = await Client.connect(at, LIMIT);
    assert.equal((await client.call(Buffer.alloc(1), LIMIT)).length, 1);
    const calls = Array.from({ length: 100 }, () => assert.rejects(client.call(Buffer.alloc(1, 1), LIMIT),
      (error) => ['closed', 'peer_died', 'abandoned'].includes(error.code)));
    await serving.terminate();
    await Promise.all(calls);
    client.close();

    const other = name();
    const service = Service.listen(other);
    let received = 0;
    let aborted = 0;
    let check = () => {};
    let calling;
    void service.run((request) => new Promise(() => {
      received += 1;
      request.signal.addEventListener('abort', () => {
        aborted += 1;
        check();
      });
      // Amid the requests of the others.
      if (request.data[0] === 50) void calling.terminate();
    }));
    calling = begin(`const client = await pelton.Client.connect(workerData.at, { timeout: 20000 });
      for (let i = 0; i < 100; i += 1) void client.call(Buffer.alloc(1, i));`, other);
    const exited = once(calling, 'exit');
    await exited;
    // It may have been terminated before it had sent all.
    await new Promise((resolve) => {
      check = () => { if (aborted === received) resolve(); };
      check();
    });
    assert.ok(received > 50);
    service.close();
  }
});

test('no_handler_begins_for_a_call_whose_cancel_has_come_with_it', options, async () => {
  const seen = [];
  await served((request) => {
    seen.push(`${request.data}`);
    return request.data;
  }, async (client) => {
    const abort = new AbortController();
    // Both are in the lane before the service, of this thread, takes the first of them.
    const call = assert.rejects(client.call(Buffer.from('cancelled'), { ...LIMIT, signal: abort.signal }));
    abort.abort();
    await call;
    await client.call(Buffer.from('next'), LIMIT);
  });
  assert.deepEqual(seen, ['next']);
});

test('a_call_that_waits_behind_a_notification_can_be_cancelled', options, async () => {
  const seen = [];
  let release;
  let began;
  const beginning = new Promise((resolve) => { began = resolve; });
  await served((request) => {
    seen.push(`${request.data}`);
    if (!request.isNotification) return request.data;
    began();
    return new Promise((resolve) => { release = resolve; });
  }, async (client) => {
    await client.notify(Buffer.from('note'), LIMIT);
    await beginning;
    const abort = new AbortController();
    const calls = [client.call(Buffer.from('behind'), { signal: abort.signal }),
      client.call(Buffer.from('behind too'), { timeout: 20 })];
    const next = client.call(Buffer.from('next'), LIMIT);
    await turn();
    abort.abort(new Error('enough'));
    await assert.rejects(calls[0], /enough/);
    await assert.rejects(calls[1], coded('timed_out'));
    release();
    assert.equal(`${await next}`, 'next');
    // A cancel comes after its request: the handlers begin, in order, and nobody gets their replies.
    assert.deepEqual(seen, ['note', 'behind', 'behind too', 'next']);
    while (client.inFlight > 0) await turn();
  }, { inFlightMax: 1, onError: () => {} });
});

test('a_stream_that_nobody_takes_delays_the_other_calls_until_it_is_taken', options, async () => {
  const parts = 200;
  await served((request) => (request.data.length > 0 ? request.data : (function* all() {
    for (let i = 0; i < parts; i += 1) yield Buffer.alloc(10_000, i);
  }())), async (client) => {
    const stream = client.stream(Buffer.alloc(0), LIMIT);
    assert.equal((await stream.next()).value[0], 0);
    // More than the client stores: its other calls wait, and fail by their own limits alone.
    await assert.rejects((async () => {
      for (;;) await client.call(Buffer.from('x'), { timeout: 200 });
    })(), coded('timed_out'));
    const waiting = client.call(Buffer.from('y'), LIMIT);
    let next = 1;
    for await (const part of stream) assert.equal(part[0], next++ % 256);
    assert.equal(next, parts);
    assert.equal(`${await waiting}`, 'y');
  }, {}, { callBytesMax: 1 << 18, capacity: 1 << 18 });
});

test('an_exit_in_a_handler_or_behind_a_reply_ends_both_sides', options, async () => {
  const at = name();
  const service = program(`const service = pelton.Service.listen(argument);
    await service.run((request) => {
      if (request.data[0] === 1) process.exit(7);
      return request.data;
    });`, at);
  const caller = program(`const client = await pelton.Client.connect(argument, { timeout: 20000 });
    void client.call(Buffer.alloc(100_000)).then(() => process.exit(8));`, at);
  assert.equal(await caller.ended, 8);
  const client = await Client.connect(at, LIMIT);
  const calls = Array.from({ length: 20 }, () => assert.rejects(client.call(Buffer.alloc(9, 1), LIMIT), (error) =>
    ['closed', 'peer_died', 'abandoned'].includes(error.code)));
  await Promise.all(calls);
  assert.equal(await service.ended, 7);
  client.close();
});

test('close_fails_what_is_in_flight', options, async () => {
  const at = name();
  const service = Service.listen(at);
  void service.run(() => new Promise(() => {}));
  const client = await Client.connect(at, LIMIT);
  const call = client.call(Buffer.from('x'), LIMIT);
  await sleep(5);
  service.close();
  await assert.rejects(call, (error) => coded('closed')(error) || coded('abandoned')(error));
  client.close();
  await assert.rejects(client.call(Buffer.from('x')), coded('closed_handle'));
});

test('calls_both_ways_with_the_tool', { ...options, skip: !tool && 'PELTON_TOOL is not set' }, async () => {
  const at = name();
  const service = Service.listen(at);
  const running = service.run((request) => Buffer.from(`${request.data}`.toUpperCase()));
  const calling = start(tool, ['call', '--timeout', '20', '--frame', 'lines', at]);
  calling.stdin.end('tea\nrice\n');
  assert.equal(await calling.ended, 0);
  assert.equal(calling.output(), 'TEA\nRICE\n');
  service.drain();
  await running;
  service.close();
  const other = name();
  start(tool, ['serve', other, '--co-process', '--exec', 'cat']);
  const client = await Client.connect(other, LIMIT);
  assert.equal(`${await client.call(Buffer.from('milk\n'), LIMIT)}`, 'milk\n');
  client.close();
});
