'use strict';
// The errors. `code` is the name of the code in `pelton.h`, in small letters.

const { getSystemErrorName } = require('node:util');

class PeltonError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.code = code;
  }

  get name() {
    return 'PeltonError';
  }
}

/** A call that its service has failed, with a code and bytes of its own. A handler throws it to fail its call so. */
class Failed extends PeltonError {
  constructor(failure, text = '') {
    if (!Number.isInteger(failure) || failure < 0 || failure > 0xffffffff) {
      throw invalidValue('failure', failure, 'an integer from 0 to 4294967295');
    }
    const bytes = typeof text === 'string' ? Buffer.from(text) : Buffer.from(text);
    super('failed', `the service failed the call with code ${failure}: ${bytes}`);
    this.failure = failure;
    this.bytes = bytes;
  }

  get text() {
    return this.bytes.toString();
  }
}

function systemError(errno) {
  const name = getSystemErrorName(-errno);
  return Object.assign(new Error(`the system returned ${name}`), { errno: -errno, code: name });
}

/** Makes the error that the addon throws. */
function makeError(code, text, first, second, bytes) {
  switch (code) {
    case 'failed':
      return new Failed(first, bytes);
    case 'system':
    case 'no_space': {
      const error = new PeltonError(code, text, first === undefined ? undefined : { cause: systemError(first) });
      if (first !== undefined) error.errno = -first;
      return error;
    }
    case 'closed':
    case 'peer_died':
      return Object.assign(new PeltonError(code, text), { unreleased: first });
    case 'damaged':
      return Object.assign(new PeltonError(code, text), { offset: first, nextOffset: second ?? null });
    default:
      return new PeltonError(code, text);
  }
}

function timedOut(what) {
  return new PeltonError('timed_out', `timed out while ${what}: wait longer, or see whether the other side runs`);
}

function closedHandle(noun) {
  return new PeltonError('closed_handle', `this ${noun} is closed: open another one`);
}

function invalidType(name, found, wanted) {
  const kind = found === null ? 'null' : (found?.constructor?.name ?? typeof found);
  return Object.assign(new TypeError(`${name} is ${kind}, wanted ${wanted}`), { code: 'ERR_INVALID_ARG_TYPE' });
}

function invalidValue(name, found, wanted) {
  return Object.assign(new RangeError(`${name} is ${String(found)}, wanted ${wanted}`), { code: 'ERR_OUT_OF_RANGE' });
}

function transferred(name) {
  const text = `${name} was transferred while it waited to be sent, and is not sent: transfer it afterwards`;
  return Object.assign(new TypeError(text), { code: 'ERR_INVALID_STATE' });
}

module.exports = { PeltonError, Failed, makeError, timedOut, closedHandle, invalidType, invalidValue, transferred };
