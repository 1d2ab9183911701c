'use strict';
// The library's log.

const { invalidType } = require('./errors.js');
const native = require('./native.js');

function setLog(log) {
  if (log !== null && typeof log !== 'function') throw invalidType('log', log, 'a function, or null');
  native.setLog(log ?? undefined);
}

module.exports = { setLog };
