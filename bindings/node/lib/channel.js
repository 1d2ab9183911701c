'use strict';
// Senders, receivers, and what makes them.

const native = require('./native.js');
const { checkCount, checkData, checkName, checkOptions, checkWait } = require('./check.js');
const { closedHandle, invalidType, timedOut } = require('./errors.js');
const { Message } = require('./message.js');
const { readable, writable } = require('./streams.js');
const { Waits, opened } = require('./waits.js');

// Small messages share memory, as Node's own small Buffers do.
const SLAB = 64 << 10;
const BATCH_SLAB = 256 << 10;
const BATCH = 1024;
let slab = Buffer.allocUnsafeSlow(SLAB);
let used = 0;
let batchSlab = Buffer.allocUnsafeSlow(BATCH_SLAB);
let batchUsed = 0;
const sizes = new Uint32Array(BATCH);

const SPACE = 'waiting for space in the lane';
const MESSAGE = 'waiting for a message';

/** What both endpoints have. */
class Endpoint {
  _native;
  _waits;

  constructor(endpoint, noun) {
    this._native = endpoint;
    this._waits = new Waits(endpoint, noun);
  }

  resume(options = {}) {
    const { timeout } = checkWait(options);
    return this._waits.step((done) => this._native.startResume(timeout, done), 'waiting for a successor', options);
  }

  sync() {
    return this._waits.step((done) => this._native.startSync(done), 'waiting for the disk');
  }

  info() {
    return this._native.info();
  }

  ref() {
    this._native.setRef(true);
    return this;
  }

  unref() {
    this._native.setRef(false);
    return this;
  }

  close() {
    this._native.close();
    this._waits.rejectAll();
  }

  get closed() {
    return this._native.closed;
  }

  /** Hands it over to another thread: post the token, and attach it there. */
  detach() {
    const token = { pelton: this instanceof Sender ? 'sender' : 'receiver', number: this._native.detach() };
    this._waits.rejectAll();
    return token;
  }
}

for (const [symbol, dispose] of [
  [Symbol.dispose, Endpoint.prototype.close],
  [Symbol.asyncDispose, async function close() { this.close(); }],
]) {
  if (symbol) Object.defineProperty(Endpoint.prototype, symbol, { value: dispose });
}

function attached(token, wanted) {
  if (token?.pelton !== wanted || typeof token.number !== 'number') {
    throw invalidType('token', token, `what detach() of a ${wanted} has returned`);
  }
  return native.attach(token.number);
}

class Sender extends Endpoint {
  constructor(endpoint) {
    super(endpoint, 'sender');
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Sender(await opened(native.connectSender(name, checkOptions(options, 'connect')), options));
  }

  static async openPath(directory, options = {}) {
    checkName(directory);
    const creates = Boolean(options.create);
    const given = checkOptions(options, creates ? 'create' : 'open');
    return new Sender(await opened(native.openSender(directory, creates, given), options));
  }

  static attach(token) {
    return new Sender(attached(token, 'sender'));
  }

  trySend(data) {
    checkData(data);
    // Those that wait are first.
    if (this._waits.isWaiting) return false;
    return this._native.trySend(data);
  }

  send(data, options) {
    try {
      checkData(data);
      if (options === undefined) {
        if (this._waits.isFree && this._native.trySend(data)) {
          this._waits.count();
          return Promise.resolve();
        }
      } else {
        checkWait(options);
      }
    } catch (error) {
      return Promise.reject(error);
    }
    const attempt = () => (this._native.trySend(data) ? null : undefined);
    return this._waits.wait(attempt, SPACE, options, () => data.length).then(() => undefined);
  }

  async sendMany(messages, options = {}) {
    checkWait(options);
    const list = Array.isArray(messages) ? messages : [...messages];
    list.forEach(checkData);
    let sent = 0;
    const attempt = () => {
      const before = sent;
      sent = this._native.trySendMany(list, sent);
      this._waits.count(sent - before);
      return sent > before || sent === list.length ? sent : undefined;
    };
    const end = options.timeout === undefined ? undefined : performance.now() + options.timeout;
    try {
      do {
        const timeout = end === undefined ? undefined : Math.max(0, end - performance.now());
        await this._waits.wait(attempt, SPACE, { timeout, signal: options.signal }, () => list[sent].length);
      } while (sent < list.length);
    } catch (error) {
      if (error !== null && typeof error === 'object') error.sent = sent;
      throw error;
    }
    return sent;
  }

  async sendDescriptors(data, descriptors, options = {}) {
    checkData(data);
    const { timeout } = checkWait(options);
    const fds = Array.from(descriptors, (it) => (typeof it === 'number' ? it : it.fd));
    if (!fds.every(Number.isInteger)) throw invalidType('descriptors', descriptors, 'numbers, or objects with fd');
    return this._waits.step((done) => this._native.startSendDescriptors(data, fds, timeout, done), SPACE, options);
  }

  async waitReleased(options = {}) {
    const { timeout } = checkWait(options);
    const what = 'waiting until the receiver has released every message';
    return this._waits.step((done) => this._native.startWaitReleased(timeout, done), what, options);
  }

  writable(options) {
    return writable(this, options);
  }
}

class Receiver extends Endpoint {
  constructor(endpoint) {
    super(endpoint, 'receiver');
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Receiver(await opened(native.connectReceiver(name, checkOptions(options, 'connect')), options));
  }

  static async openPath(directory, options = {}) {
    checkName(directory);
    const creates = Boolean(options.create);
    const given = checkOptions(options, creates ? 'create' : 'open');
    return new Receiver(await opened(native.openReceiver(directory, creates, given), options));
  }

  static attach(token) {
    return new Receiver(attached(token, 'receiver'));
  }

  /** The next message, copied; undefined if there is none. */
  _take() {
    let bytes = this._native.tryRecvInto(slab, used);
    if (bytes === -1) return undefined;
    if (bytes < -1) {
      const needed = -2 - bytes;
      if (needed > SLAB / 16) {
        const own = Buffer.allocUnsafeSlow(needed);
        this._native.tryRecvInto(own, 0);
        return own;
      }
      slab = Buffer.allocUnsafeSlow(SLAB);
      used = 0;
      bytes = this._native.tryRecvInto(slab, 0);
    }
    const message = slab.subarray(used, used + bytes);
    used += (bytes + 7) & ~7;
    return message;
  }

  tryRecv() {
    if (this._waits.isWaiting) return null;
    return this._take() ?? null;
  }

  recv(options) {
    try {
      if (options !== undefined) {
        checkWait(options);
      } else if (this._waits.isFree) {
        const message = this._take();
        if (message !== undefined) {
          this._waits.count();
          return Promise.resolve(message);
        }
      }
    } catch (error) {
      return Promise.reject(error);
    }
    return this._waits.wait(() => this._take(), MESSAGE, options);
  }

  _takeMany(most) {
    let space = batchSlab.subarray(batchUsed);
    const wanted = most >= BATCH ? sizes : sizes.subarray(0, most);
    let count = this._native.tryRecvMany(space, wanted);
    if (count === -1) return undefined;
    if (count < -1) {
      const needed = -2 - count;
      if (needed > BATCH_SLAB / 4) {
        space = Buffer.allocUnsafeSlow(needed);
      } else {
        batchSlab = space = Buffer.allocUnsafeSlow(BATCH_SLAB);
        batchUsed = 0;
      }
      count = this._native.tryRecvMany(space, wanted);
    }
    this._waits.count(count);
    const messages = new Array(count);
    let offset = 0;
    for (let index = 0; index < count; index += 1) {
      const end = offset + sizes[index];
      messages[index] = space.subarray(offset, end);
      offset = end;
    }
    if (space.buffer === batchSlab.buffer) batchUsed += offset;
    return messages;
  }

  async recvMany(most = BATCH, options = {}) {
    checkCount('most', most);
    return this._waits.wait(() => this._takeMany(most), MESSAGE, checkWait(options));
  }

  tryPeek() {
    if (this._waits.isWaiting) return null;
    const message = this._native.tryPeek();
    return message === null ? null : new Message(message);
  }

  async peek(options = {}) {
    const message = await this._waits.wait(() => this._native.tryPeek() ?? undefined, MESSAGE, checkWait(options));
    return new Message(message);
  }

  async recvDescriptors(options = {}) {
    const message = await this.peek(options);
    try {
      return { data: Buffer.from(message.data), descriptors: message.takeDescriptors() };
    } finally {
      message.release();
    }
  }

  readable(options) {
    return readable(this, options);
  }

  [Symbol.asyncIterator]() {
    return {
      next: () => this.recv().then(
        (value) => ({ value, done: false }),
        (error) => {
          if (error.code !== 'closed') throw error;
          return { value: undefined, done: true };
        },
      ),
      return: async (value) => ({ value, done: true }),
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }
}

/** Accepts peers under a name, one after another. */
class Listener {
  #native;
  #waiting;
  #rung = () => this.#waiting?.readable();

  constructor(listener) {
    this.#native = listener;
    listener.watch(this.#rung);
  }

  acceptSender(options) {
    return this.#accept(true, options, 'waiting for a receiver to connect').then((it) => new Sender(it));
  }

  acceptReceiver(options) {
    return this.#accept(false, options, 'waiting for a sender to connect').then((it) => new Receiver(it));
  }

  async #accept(acceptsSender, options = {}, what) {
    const { timeout, signal } = checkWait(options);
    signal?.throwIfAborted();
    if (this.#waiting !== undefined) {
      throw Object.assign(closedHandle('listener'), {
        code: 'wrong_thread', message: 'another accept waits at this listener: await that first',
      });
    }
    return new Promise((resolve, reject) => {
      const end = (settle, value) => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', abort);
        this.#waiting = undefined;
        settle(value);
      };
      const leave = (error) => {
        this.#native.stop();
        end(reject, error);
      };
      const abort = () => leave(signal.reason);
      const timer = timeout !== undefined && timeout < 0x7fffffff
        ? setTimeout(() => leave(timedOut(what)), timeout).unref() : undefined;
      signal?.addEventListener('abort', abort, { once: true });
      const waiting = {
        readable: () => {
          this.#native.startAccept(acceptsSender, waiting.accepted);
        },
        accepted: () => {
          try {
            const accepted = this.#native.finishAccept();
            if (this.#waiting !== waiting) accepted?.close();
            else if (accepted === null) this.#native.wait();
            else end(resolve, accepted);
          } catch (error) {
            if (this.#waiting === waiting) end(reject, error);
          }
        },
        leave,
      };
      this.#waiting = waiting;
      try {
        this.#native.wait();
      } catch (error) {
        end(reject, error);
      }
    });
  }

  ref() {
    this.#native.setRef(true);
    return this;
  }

  unref() {
    this.#native.setRef(false);
    return this;
  }

  close() {
    const waiting = this.#waiting;
    waiting?.leave(closedHandle('listener'));
    this.#native.close();
  }

  get closed() {
    return this.#native.closed;
  }
}

if (Symbol.dispose) Object.defineProperty(Listener.prototype, Symbol.dispose, { value: Listener.prototype.close });
if (Symbol.asyncDispose) {
  Object.defineProperty(Listener.prototype, Symbol.asyncDispose, { async value() { this.close(); } });
}

function listen(name, options = {}) {
  checkName(name);
  return new Listener(native.listen(name, checkOptions(options, 'listen')));
}

function gather(name, options = {}) {
  checkName(name);
  return new Receiver(native.gather(name, checkOptions(options, 'gather')));
}

function threads(options = {}) {
  const [sender, receiver] = native.threads(checkOptions(options, 'threads'));
  return { sender: new Sender(sender), receiver: new Receiver(receiver) };
}

module.exports = { Listener, Receiver, Sender, gather, listen, threads };
