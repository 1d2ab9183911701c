'use strict';
// Streams of messages. `Readable.toWeb` and `Writable.toWeb` of Node make web streams of them.

const { Readable, Writable } = require('node:stream');

/** A stream of a receiver's messages, each a Buffer. Takes a message only while the stream wants one. */
function readable(receiver, options = {}) {
  let isWaiting = false;
  const stream = new Readable({
    ...options,
    objectMode: true,
    async read() {
      if (isWaiting) return;
      isWaiting = true;
      try {
        while (stream.push(await receiver.recv(waiting)));
      } catch (error) {
        if (error?.code === 'closed') stream.push(null);
        else stream.destroy(error);
      } finally {
        isWaiting = false;
      }
    },
    destroy(error, done) {
      // A message that was not taken stays in the lane.
      cancel.abort();
      receiver.close();
      done(error);
    },
  });
  const cancel = new AbortController();
  const waiting = { signal: cancel.signal };
  return stream;
}

/** A stream whose chunks are messages. A chunk is done when it is in the lane; the end closes the sender. */
function writable(sender, options = {}) {
  const cancel = new AbortController();
  const waiting = { signal: cancel.signal };
  const settle = (promise, done) => void promise.then(() => done(), done);
  return new Writable({
    ...options,
    objectMode: true,
    write(chunk, encoding, done) {
      settle(sender.send(typeof chunk === 'string' ? Buffer.from(chunk, encoding) : chunk, waiting), done);
    },
    writev(chunks, done) {
      const messages = chunks.map(({ chunk, encoding }) =>
        (typeof chunk === 'string' ? Buffer.from(chunk, encoding) : chunk));
      settle(sender.sendMany(messages, waiting), done);
    },
    final(done) {
      sender.close();
      done();
    },
    destroy(error, done) {
      cancel.abort();
      sender.close();
      done(error);
    },
  });
}

module.exports = { readable, writable };
