'use strict';
// Checks of arguments: before anything is begun.

const { invalidType, invalidValue } = require('./errors.js');

const CONNECT = ['timeout', 'signal', 'capacity', 'messageBytesMax', 'allowUids', 'spin'];
const LISTEN = ['capacity', 'messageBytesMax', 'allowUids', 'spin'];
const SUBSCRIBE = ['policy', 'lagAfter', 'slack', 'startFrom'];

/** The options of each function that opens something. */
const TAKEN = {
  connectSender: [...CONNECT, 'traced'],
  connectReceiver: CONNECT,
  listen: [...LISTEN, 'traced'],
  gather: [...LISTEN, 'lanes'],
  threads: ['capacity', 'messageBytesMax', 'spin', 'traced'],
  open: ['timeout', 'signal', 'allowUids', 'mode', 'spin', 'create'],
  create: [...CONNECT, 'mode', 'lanes', 'traced', 'create'],
  publish: [...LISTEN, 'history', 'holdMax'],
  publishPath: [...CONNECT, 'history', 'holdMax', 'mode'],
  subscribe: [...CONNECT, ...SUBSCRIBE],
  subscribePath: ['timeout', 'signal', 'allowUids', 'mode', 'spin', 'durable', ...SUBSCRIBE],
  client: [...CONNECT, 'callBytesMax', 'memoryBytesMax'],
  service: [...LISTEN, 'callBytesMax', 'memoryBytesMax', 'lanes'],
};

const POLICIES = ['gate', 'lag', 'latest'];

function isUint32(value) {
  return Number.isInteger(value) && value >= 0 && value <= 0xffffffff;
}

function checkTimeout(timeout) {
  if (timeout === undefined) return;
  if (typeof timeout !== 'number') throw invalidType('timeout', timeout, 'milliseconds');
  if (Number.isNaN(timeout)) throw invalidValue('timeout', timeout, 'milliseconds, or Infinity for no limit');
}

function checkSignal(signal) {
  if (signal !== undefined && !(signal instanceof AbortSignal)) throw invalidType('signal', signal, 'an AbortSignal');
}

/** The options of a wait: `{timeout, signal}`. */
function checkWait(options) {
  if (options === null || typeof options !== 'object') throw invalidType('options', options, 'an object');
  checkTimeout(options.timeout);
  checkSignal(options.signal);
  return options;
}

/** One that may be none. Whether it is valid by W3C's rules, the addon checks: another one is as none. */
function checkTraceparent(traceparent) {
  if (traceparent !== undefined && traceparent !== null && typeof traceparent !== 'string') {
    throw invalidType('traceparent', traceparent, 'a string');
  }
}

/** The options of what waits, and has a traceparent. */
function checkTraced(options) {
  checkWait(options);
  checkTraceparent(options.traceparent);
  return options;
}

/** The options for the addon, of a function's list. */
function checkOptions(options, kind) {
  if (options === null || typeof options !== 'object') throw invalidType('options', options, 'an object');
  const given = {};
  for (const [name, value] of Object.entries(options)) {
    if (!TAKEN[kind].includes(name)) {
      throw invalidValue('an option', name, `one of ${TAKEN[kind].join(', ')}`);
    }
    if (value === undefined || name === 'signal' || name === 'create') continue;
    switch (name) {
      case 'timeout':
        checkTimeout(value);
        break;
      case 'holdMax':
      case 'lagAfter':
        if (typeof value !== 'number') throw invalidType(name, value, 'milliseconds');
        if (!(value >= 0)) throw invalidValue(name, value, 'milliseconds, 0 or more');
        break;
      case 'policy':
        if (!POLICIES.includes(value)) throw invalidValue(name, value, `one of ${POLICIES.join(', ')}`);
        break;
      case 'startFrom':
        if (value === 'now' || value === 'oldest') {
          given[name] = value === 'now' ? 0 : -1;
          continue;
        }
        if (!Number.isSafeInteger(value) || value < 0) {
          throw invalidValue(name, value, "'now', 'oldest' or a number of messages");
        }
        break;
      case 'durable':
        if (typeof value !== 'string') throw invalidType(name, value, 'a string');
        break;
      case 'spin':
      case 'traced':
        if (typeof value !== 'boolean') throw invalidType(name, value, 'a boolean');
        break;
      case 'allowUids':
        if (!Array.isArray(value) || !value.every(isUint32)) throw invalidType(name, value, 'an array of uids');
        break;
      case 'lanes':
      case 'mode':
        if (!isUint32(value)) throw invalidValue(name, value, 'an integer from 0 to 4294967295');
        break;
      default:
        if (!Number.isSafeInteger(value) || value < 0) throw invalidValue(name, value, name === 'history' ? 'a number of messages' : 'a number of bytes');
    }
    given[name] = value;
  }
  checkSignal(options.signal);
  const gates = (given.policy ?? 'gate') === 'gate';
  if (given.lagAfter !== undefined && !gates) {
    throw invalidValue('lagAfter', given.lagAfter, "undefined, or the policy 'gate'");
  }
  if (given.slack !== undefined && (given.policy === 'latest' || (gates && given.lagAfter === undefined))) {
    throw invalidValue('slack', given.slack, "undefined, the policy 'lag', or 'gate' with lagAfter");
  }
  return given;
}

function checkData(data) {
  if (!(data instanceof Uint8Array)) throw invalidType('data', data, 'a Buffer or a Uint8Array');
}

function checkName(name) {
  if (typeof name !== 'string') throw invalidType('name', name, 'a string');
}

function checkCount(name, value) {
  if (!isUint32(value) || value === 0) throw invalidValue(name, value, 'an integer from 1 to 4294967295');
}

module.exports = {
  checkCount, checkData, checkName, checkOptions, checkSignal, checkTimeout, checkTraced, checkWait,
};
