'use strict';
const assert = require('node:assert/strict');
const path = require('node:path');
const test = require('node:test');
const pino = require('pino');
const { LIMIT, name, options, pelton, place } = require('./support.js');

const { Receiver, listen } = pelton;
const target = path.join(path.dirname(require.resolve(process.env.PELTON_PACKAGE ?? '..')), 'pino.js');

/** Logs so many lines, and ends the transport. */
async function logged(given, count) {
  const transport = pino.transport({ target, options: given });
  const logger = pino(transport);
  for (let number = 0; number < count; number += 1) logger.info({ number }, 'größe '.repeat(number % 100));
  return transport;
}

async function checked(receiver, count) {
  for (let number = 0; number < count; number += 1) {
    const line = JSON.parse(await receiver.recv(LIMIT));
    assert.equal(line.number, number);
    assert.equal(line.msg, 'größe '.repeat(number % 100));
  }
  await assert.rejects(receiver.recv(LIMIT), { code: 'closed' });
  receiver.close();
}

test('each_line_of_pino_is_a_message', options, async () => {
  const at = name();
  const listener = listen(at);
  const transport = await logged({ name: at }, 3000);
  const receiver = await listener.acceptReceiver(LIMIT);
  transport.end();
  await checked(receiver, 3000);
  listener.close();
});

test('lines_in_a_path_channel_outlive_the_process_that_logged_them', options, async () => {
  const directory = place();
  const transport = await logged({ directory }, 100);
  // pino's worker does not keep the process alive.
  const alive = setInterval(() => {}, 1000);
  const closed = new Promise((resolve) => transport.once('close', resolve));
  transport.end();
  await closed;
  clearInterval(alive);
  const receiver = await Receiver.openPath(directory);
  await checked(receiver, 100);
});
