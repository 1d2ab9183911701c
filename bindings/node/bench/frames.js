'use strict';
// Frames of a socket: a length of four bytes, and as many bytes.
const { once } = require('node:events');

/** Calls `take` with each frame that comes. */
function receiveFrames(socket, take) {
  let rest = Buffer.alloc(0);
  socket.on('data', (chunk) => {
    rest = rest.length === 0 ? chunk : Buffer.concat([rest, chunk]);
    let at = 0;
    while (rest.length - at >= 4) {
      const end = at + 4 + rest.readUInt32LE(at);
      if (end > rest.length) break;
      take(rest.subarray(at + 4, end));
      at = end;
    }
    rest = rest.subarray(at);
  });
}

/** Writes a frame. Returns a promise if the next one should wait. */
function sendFrame(socket, message) {
  const head = Buffer.allocUnsafe(4);
  head.writeUInt32LE(message.length);
  socket.cork();
  socket.write(head);
  const isFree = socket.write(message);
  socket.uncork();
  return isFree ? undefined : once(socket, 'drain');
}

module.exports = { receiveFrames, sendFrame };
