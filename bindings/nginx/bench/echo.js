'use strict';
// Answers each request with its own bytes: by pelton, or on a Unix stream socket, where a message is a length in four
// little-endian bytes and the payload.
//
//   echo.js pelton NAME
//   echo.js socket PATH
const net = require('node:net');

const { receiveFrames, sendFrame } = require('../../node/bench/frames.js');

const [kind, address] = process.argv.slice(2);
switch (kind) {
  case 'pelton':
    void require('pelton').Service.listen(address).run((request) => request.data);
    break;
  case 'socket':
    net.createServer((socket) => receiveFrames(socket, (message) => void sendFrame(socket, message)))
      .listen({ path: address, backlog: 4096 });
    break;
  default:
    console.error(`echo.js: found ${kind}, wanted pelton or socket`);
    process.exitCode = 2;
}
