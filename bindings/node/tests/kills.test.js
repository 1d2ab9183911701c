'use strict';
// Either side is killed at any moment, again and again: the survivor continues with the successor, and nothing is lost.
// PELTON_KILLS has the number of kills of each side; `./run verify node` sets it.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const test = require('node:test');
const { once } = require('node:events');
const { LIMIT, pelton, place, program } = require('./support.js');

const KILLS = Number(process.env.PELTON_KILLS ?? 12);
const options = { timeout: 20_000 + KILLS * 5000 };
const CHANNEL = { create: true, capacity: 1 << 16 };

/** Message `number`: it says which one it is, and has other bytes to lose. */
const message = (number) => Buffer.concat([Buffer.from(`${number}`), Buffer.alloc(number % 500)]);

// Each continues at its directory's next number, and says so: the pauses of the other side are at any message.
const SEND = `const sender = await pelton.Sender.openPath(argument.directory, ${JSON.stringify(CHANNEL)});
  const message = (number) => Buffer.concat([Buffer.from(String(number)), Buffer.alloc(number % 500)]);
  process.stdout.write('begins');
  for (let number = argument.next;;) {
    if (number % 3 === 0) {
      const batch = Array.from({ length: 40 }, (_, at) => message(number + at));
      await sender.sendMany(batch);
      number += batch.length;
    } else {
      await sender.send(message(number));
      number += 1;
    }
  }`;

// What a receiver has written down is what it has received: its number, whether the message is marked as one that may
// come again, and the message. One in place is released after that; copies are released before it, by some turns.
const WAYS = ['peek', 'recv', 'recvMany', 'for await'];
const RECEIVE = `const receiver = await pelton.Receiver.openPath(argument.directory, ${JSON.stringify(CHANNEL)});
  const log = require('node:fs').openSync(argument.log, 'a');
  const write = (isAgain, data) => {
    const end = data.indexOf(0);
    const text = data.subarray(0, end < 0 ? undefined : end);
    require('node:fs').writeSync(log, argument.receiver + ' ' + isAgain + ' ' + text + '\\n');
  };
  process.stdout.write('begins');
  if (argument.way === 'for await') for await (const message of receiver) write(0, message);
  for (;;) {
    if (argument.way === 'recv') write(0, await receiver.recv());
    if (argument.way === 'recvMany') for (const message of await receiver.recvMany()) write(0, message);
    if (argument.way !== 'peek') continue;
    const message = await receiver.peek();
    write(Number(message.isRedelivered), message.data);
    message.release();
  }`;

/** Random numbers, of which the seed is printed. */
function chance(t) {
  let seed = Number(process.env.PELTON_SEED ?? Date.now() % 1_000_000);
  t.diagnostic(`PELTON_SEED=${seed}`);
  return (least, end) => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return least + Math.floor((seed / 2 ** 32) * (end - least));
  };
}

async function begun(text, argument) {
  const process = program(text, argument);
  const ended = process.ended.then((code) => assert.fail(`the other side ended with ${code} before it began`));
  await Promise.race([once(process.stdout, 'data'), ended]);
  return process;
}

async function killed(process) {
  process.kill('SIGKILL');
  assert.equal(await process.ended, 'SIGKILL');
}

/** Repeats a step: each peer's end is reported once, and the survivor continues. */
async function untilDone(step) {
  for (;;) {
    try {
      return await step();
    } catch (error) {
      if (error.code !== 'peer_died') throw error;
    }
  }
}

test('a_killed_senders_messages_arrive_once_and_its_successor_continues', options, async (t) => {
  const random = chance(t);
  const directory = place();
  const receiver = await pelton.Receiver.openPath(directory, CHANNEL);
  let next = 0;
  for (let kill = 0; kill < KILLS; kill += 1) {
    const process = await begun(SEND, { directory, next });
    const until = next + random(1, 3000);
    let ending;
    try {
      for (;;) {
        assert.deepEqual(await receiver.recv(LIMIT), message(next));
        next += 1;
        if (next >= until) ending ??= killed(process);
      }
    } catch (error) {
      if (error.code !== 'peer_died') throw error;
    }
    await ending;
  }
  assert.ok(next >= KILLS);
  t.diagnostic(`${KILLS} senders killed: ${next} messages`);
  receiver.close();
});

test('a_killed_receivers_successor_gets_the_rest_and_what_may_be_twice_is_marked', options, async (t) => {
  const random = chance(t);
  const [directory, log] = [place(), place()];
  const sender = await pelton.Sender.openPath(directory, CHANNEL);
  let number = 0;
  // Of each receiver: its way, the number of the first message that its predecessors have not released, and its end.
  const receivers = [];
  const begin = async (way) => {
    const first = number - sender.info().unreleased;
    const process = await begun(RECEIVE, { directory, log, receiver: receivers.length, way });
    receivers.push({ way, first, end: undefined });
    return process;
  };
  for (let kill = 0; kill < KILLS; kill += 1) {
    const process = await begin(WAYS[kill % WAYS.length]);
    for (let left = random(1, 1500); left > 0; left -= 1) {
      await untilDone(() => sender.send(message(number), LIMIT));
      number += 1;
    }
    await killed(process);
  }
  const last = await begin('peek');
  await untilDone(() => sender.waitReleased(LIMIT));
  await killed(last);
  sender.close();
  let seen = -1;
  let twice = 0;
  for (const line of fs.readFileSync(log, 'utf8').trimEnd().split('\n')) {
    const [which, isMarked, got] = line.split(' ').map(Number);
    const receiver = receivers[which];
    // Each begins at the first message that is not released, and gets all that follow.
    assert.equal(got, receiver.end ?? receiver.first, `found ${line}`);
    receiver.end = got + 1;
    if (got <= seen) twice += 1;
    if (receiver.way === 'peek') assert.ok(got > seen || isMarked === 1, `found ${line} after ${seen}, unmarked`);
    seen = Math.max(seen, got);
  }
  // What is in no receiver's notes was released by one that was killed, and had copied it.
  let [lost, next] = [0, 0];
  for (const [which, { first, end }] of receivers.entries()) {
    if (first > next) {
      assert.notEqual(receivers[which - 1].way, 'peek');
      lost += first - next;
    }
    next = Math.max(next, end ?? first);
  }
  assert.equal(next, number);
  t.diagnostic(`${KILLS} receivers killed: ${number} messages, ${twice} twice, ${lost} released and not noted`);
});
