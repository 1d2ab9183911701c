'use strict';
// Record files: messages appended to a file, and read from it. What waits for the file runs on a thread, one step after
// another.

const { Buffer } = require('node:buffer');
const { fileURLToPath } = require('node:url');
const { markAsUntransferable } = require('node:worker_threads');

const native = require('./native.js');
const { checkData } = require('./check.js');
const { closedHandle, invalidType, invalidValue } = require('./errors.js');

/** What an `append` without a wait returns. */
const DONE = Promise.resolve();

function checkPath(path) {
  if (typeof path === 'string') return Buffer.from(path);
  if (path instanceof URL) return Buffer.from(fileURLToPath(path));
  if (path instanceof Uint8Array) return path;
  throw invalidType('path', path, 'a string, a Buffer or a file URL');
}

/** The options for the addon. */
function checkRecords(options) {
  if (options === null || typeof options !== 'object') throw invalidType('options', options, 'an object');
  const given = { flushInterval: 100 };
  for (const [name, value] of Object.entries(options)) {
    switch (name) {
      case 'flushBytes':
      case 'rotateBytes':
      case 'syncBytes':
        if (value === undefined) break;
        if (!Number.isSafeInteger(value) || value < 0) throw invalidValue(name, value, 'a number of bytes');
        given[name] = value;
        break;
      case 'flushInterval':
      case 'syncInterval':
        if (value === undefined) break;
        // Infinity: never.
        if (typeof value !== 'number') throw invalidType(name, value, 'milliseconds');
        if (!(value >= 0)) throw invalidValue(name, value, 'milliseconds, which are not negative');
        given[name] = value === Infinity ? undefined : value;
        break;
      default:
        throw invalidValue('an option', name,
          'one of rotateBytes, syncBytes, syncInterval, flushBytes, flushInterval');
    }
  }
  return given;
}

/** What runs steps of threads, one at a time. */
class Steps {
  _native;
  #last = DONE;
  #count = 0;

  /** Opens by `open(callback)`, which returns the native object. */
  _open(open) {
    return new Promise((resolve, reject) => {
      this._native = open(() => this.#finish(resolve, reject));
    });
  }

  get _isBusy() {
    return this.#count > 0;
  }

  /** Does `work` after what was begun before: an async function. */
  _inOrder(work) {
    this.#count += 1;
    const done = this.#last.then(work).finally(() => {
      this.#count -= 1;
    });
    this.#last = done.catch(() => {});
    // Another promise, whose rejection is unhandled unless the caller handles it.
    return done.then();
  }

  /** Runs a step, which `start(callback)` begins. */
  _step(start) {
    return new Promise((resolve, reject) => {
      start(() => this.#finish(resolve, reject));
    });
  }

  #finish(resolve, reject) {
    try {
      this._native.finish();
      resolve();
    } catch (error) {
      reject(error);
    }
  }
}

/** Whether the end of the process writes the buffers of what is open. */
let writesAtExit = false;

class RecordFile extends Steps {
  #tryAppend;
  #cutBytes;
  #closing;

  static async open(path, options = {}) {
    if (!writesAtExit) process.on('exit', () => native.writeRecordFiles());
    writesAtExit = true;
    const file = new RecordFile();
    const [bytes, given] = [checkPath(path), checkRecords(options)];
    await file._open((done) => native.openRecordFile(bytes, given, done));
    file.#cutBytes = file._native.cutBytes;
    [file.#tryAppend] = file._native.functions();
    return file;
  }

  get cutBytes() {
    return this.#cutBytes;
  }

  get closed() {
    return this.#closing !== undefined;
  }

  append(data) {
    try {
      checkData(data);
      this.#check();
      if (!this._isBusy && this.#tryAppend(data)) return DONE;
    } catch (error) {
      return Promise.reject(error);
    }
    // A copy, since the caller may change it meanwhile.
    const copy = Buffer.from(data);
    return this._inOrder(async () => {
      if (!this.#tryAppend(copy)) await this._step((done) => this._native.startAppend(copy, done));
    });
  }

  async flush() {
    this.#check();
    return this._inOrder(() => this._step((done) => this._native.startFlush(done)));
  }

  async sync() {
    this.#check();
    return this._inOrder(() => this._step((done) => this._native.startSync(done)));
  }

  async close() {
    this.#closing ??= this._inOrder(() => this._step((done) => this._native.startClose(done)));
    return this.#closing;
  }

  #check() {
    if (this.closed) throw closedHandle('record file');
  }
}

class RecordReader extends Steps {
  #isClosed = false;
  #bytes;
  #sizes = [];
  #next = 0;
  #offset = 0;

  static async open(path) {
    const reader = new RecordReader();
    const bytes = checkPath(path);
    await reader._open((done) => native.openRecordReader(bytes, done));
    return reader;
  }

  read() {
    if (!this._isBusy && !this.#isClosed && this.#next < this.#sizes.length) return Promise.resolve(this.#take());
    return this._inOrder(async () => {
      if (this.#isClosed) throw closedHandle('record reader');
      if (this.#next === this.#sizes.length) {
        await this._step((done) => this._native.startRead(done));
        const [bytes, sizes] = this._native.take();
        if (sizes.length === 0) return null;
        // The transfer of one message would take the others along.
        if (bytes.length > 0) markAsUntransferable(bytes.buffer);
        [this.#bytes, this.#sizes, this.#next, this.#offset] = [bytes, sizes, 0, 0];
      }
      return this.#take();
    });
  }

  #take() {
    const begin = this.#offset;
    this.#offset += this.#sizes[this.#next];
    this.#next += 1;
    return this.#bytes.subarray(begin, this.#offset);
  }

  get closed() {
    return this.#isClosed;
  }

  close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    void this._inOrder(async () => this._native.close());
  }

  async *[Symbol.asyncIterator]() {
    for (let message = await this.read(); message !== null; message = await this.read()) yield message;
  }
}

if (Symbol.asyncDispose) {
  Object.defineProperty(RecordFile.prototype, Symbol.asyncDispose, { value: RecordFile.prototype.close });
  Object.defineProperty(RecordReader.prototype, Symbol.asyncDispose, { async value() { this.close(); } });
}
if (Symbol.dispose) {
  Object.defineProperty(RecordReader.prototype, Symbol.dispose, { value: RecordReader.prototype.close });
}

module.exports = { RecordFile, RecordReader };
