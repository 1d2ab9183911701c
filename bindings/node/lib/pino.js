'use strict';
// A transport of pino: `pino.transport({ target: 'pelton/pino', options: { name } })`. Each line is a message.

const { Sender } = require('./channel.js');
const { invalidType } = require('./errors.js');
const { Writable } = require('node:stream');

/** The stream into which pino's worker writes: lines of JSON, in chunks that end anywhere. */
module.exports = async function transport(options = {}) {
  // pino adds what it knows of the logger.
  const { name, directory, $context: _context, pinoWillSendConfig: _config, ...given } = options;
  if ((name === undefined) === (directory === undefined)) {
    throw invalidType('options', options, '{ name } of a listener, or { directory } of a path channel');
  }
  const sender = name === undefined ? await Sender.openPath(directory, { create: true, ...given })
    : await Sender.connect(name, { timeout: 10_000, ...given });
  let rest = Buffer.alloc(0);
  const settle = (promise, done) => void promise.then(() => done(), done);
  return new Writable({
    autoDestroy: true,
    write(chunk, encoding, done) {
      const bytes = Buffer.concat([rest, typeof chunk === 'string' ? Buffer.from(chunk, encoding) : chunk]);
      const lines = [];
      let from = 0;
      for (let end = bytes.indexOf(10); end >= 0; end = bytes.indexOf(10, from)) {
        lines.push(bytes.subarray(from, end));
        from = end + 1;
      }
      rest = bytes.subarray(from);
      settle(sender.sendMany(lines), done);
    },
    final(done) {
      settle(rest.length === 0 ? Promise.resolve() : sender.send(rest), (error) => {
        sender.close();
        done(error);
      });
    },
    destroy(error, done) {
      sender.close();
      done(error);
    },
  });
};
