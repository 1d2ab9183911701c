'use strict';
// Senders, receivers, and what makes them.

const native = require('./native.js');
const { checkCount, checkData, checkName, checkOptions, checkTraced, checkWait } = require('./check.js');
const { Copies } = require('./copies.js');
const { PeltonError, closedHandle, invalidType, timedOut, transferred } = require('./errors.js');
const { Message } = require('./message.js');
const { readable, writable } = require('./streams.js');
const { Waits, opened } = require('./waits.js');

/** How many messages are copied by one call of the addon. */
const AHEAD = 1024;

/** How many messages one call of the addon sends: `src/sender.rs`. */
const CHUNK = 64;

/** What a `send` without a wait returns. */
const DONE = Promise.resolve();

const SPACE = 'waiting for space in the lane';
const MESSAGE = 'waiting for a message';

/** What both endpoints have. */
class Endpoint {
  _native;
  _waits;

  constructor(endpoint, arm, noun) {
    this._native = endpoint;
    this._waits = new Waits(endpoint, arm, noun);
  }

  async resume(options = {}) {
    const { timeout } = checkWait(options);
    return this._waits.step((done) => this._native.startResume(timeout, done), 'waiting for a successor', options);
  }

  async sync() {
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
  [Symbol.dispose, function close() { this.close(); }],
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
  #trySend;
  #trySendMany;
  #trySendTraced;

  constructor(endpoint) {
    const [trySend, trySendMany, trySendTraced, arm] = endpoint.functions();
    super(endpoint, arm, 'sender');
    this.#trySend = trySend;
    this.#trySendMany = trySendMany;
    this.#trySendTraced = trySendTraced;
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Sender(await opened(native.connectSender(name, checkOptions(options, 'connectSender')), options));
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

  #sendNow(data, traceparent) {
    return typeof traceparent === 'string' ? this.#trySendTraced(data, traceparent) : this.#trySend(data);
  }

  trySend(data, options) {
    checkData(data);
    if (options !== undefined) checkTraced(options);
    // Those that wait are first.
    if (this._waits.isWaiting) return false;
    return this.#sendNow(data, options?.traceparent);
  }

  send(data, options) {
    try {
      checkData(data);
      if (options !== undefined) {
        checkTraced(options);
      } else if (this._waits.isFree && this.#trySend(data)) {
        this._waits.taken += 1;
        return DONE;
      }
    } catch (error) {
      return Promise.reject(error);
    }
    const { length } = data;
    const traceparent = options?.traceparent;
    const attempt = () => {
      if (data.length !== length) throw transferred('data');
      return this.#sendNow(data, traceparent) ? null : undefined;
    };
    return this._waits.wait(attempt, SPACE, options, () => data.length).then(() => undefined);
  }

  async sendMany(messages, options = {}) {
    checkWait(options);
    // A copy, since the caller may change the array during a wait.
    const list = [...messages];
    list.forEach(checkData);
    const lengths = list.map((it) => it.length);
    let sent = 0;
    let hasWaited = false;
    const attempt = () => {
      const before = sent;
      const end = Math.min(sent + AHEAD, list.length);
      // A transferred one has no bytes any more.
      for (let index = sent; hasWaited && index < end; index += 1) {
        if (list[index].length !== lengths[index]) throw transferred('a message');
      }
      hasWaited = true;
      for (let isMore = true; isMore && sent < end;) {
        const chunk = list.slice(sent, Math.min(sent + CHUNK, end));
        const count = this.#trySendMany(...chunk);
        sent += count;
        isMore = count === chunk.length;
      }
      this._waits.taken += (sent - before) / 4;
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
  #release;
  // What one call has copied.
  #copies;
  // Those that were handed out, and are not released: at the next call, or at the end of the loop's turn. The others
  // are still the next messages of the lane, so that close, detach or death lose none.
  #handed = 0;
  // The next copy is the first of its call, which has released it.
  #isFirst = false;
  #isScheduled = false;
  #attempt = () => this.#take();

  constructor(endpoint) {
    const [read, release, arm] = endpoint.functions();
    super(endpoint, arm, 'receiver');
    this.#release = release;
    const copy = (space, offset, sizes) => {
      const handed = this.#handed;
      this.#handed = 0;
      return read(space, offset, sizes, handed);
    };
    this.#copies = new Copies(copy, AHEAD);
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Receiver(await opened(native.connectReceiver(name, checkOptions(options, 'connectReceiver')), options));
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

  async resume(options) {
    this.#giveBack();
    return super.resume(options);
  }

  async sync() {
    this.#giveBack();
    return super.sync();
  }

  info() {
    this.#settle();
    return super.info();
  }

  close() {
    if (!this.closed) this.#giveBack();
    super.close();
  }

  detach() {
    this.#giveBack();
    return super.detach();
  }

  /** Releases what was handed out. */
  #settle() {
    if (this.#handed === 0) return;
    const handed = this.#handed;
    this.#handed = 0;
    this.#release(handed);
  }

  /** Forgets the copies that were not handed out. */
  #giveBack() {
    this.#copies.forget();
    this.#settle();
  }

  #settleLater() {
    this.#isScheduled = true;
    setImmediate(() => {
      this.#isScheduled = false;
      if (!this.closed) this.#settle();
    });
  }

  /** Copies the next messages; false if there is none. */
  #fill() {
    // The call has released the first one, which is handed out now.
    this.#isFirst = this.#copies.fill() > 0;
    return this.#isFirst;
  }

  #handOut() {
    const message = this.#copies.take();
    if (this.#isFirst) {
      this.#isFirst = false;
    } else {
      this.#handed += 1;
      if (!this.#isScheduled) this.#settleLater();
    }
    return message;
  }

  /** The next message, copied; undefined if there is none. */
  #take() {
    return this.#copies.length > 0 || this.#fill() ? this.#handOut() : undefined;
  }

  tryRecv() {
    if (this._waits.isWaiting) return null;
    return this.#take() ?? null;
  }

  /** Whether a copy lies there that may be handed out. */
  get #isReady() {
    return this.#copies.length > 0 && this._waits.isFree;
  }

  recv(options) {
    if (options !== undefined) {
      try {
        checkWait(options);
      } catch (error) {
        return Promise.reject(error);
      }
    } else if (this.#isReady) {
      this._waits.taken += 1;
      return Promise.resolve(this.#handOut());
    }
    return this._waits.wait(this.#attempt, MESSAGE, options);
  }

  #takeMany(most) {
    if (this.#copies.length === 0 && !this.#fill()) return undefined;
    const count = Math.min(most, this.#copies.length);
    this._waits.taken += count / 4;
    const messages = new Array(count);
    for (let index = 0; index < count; index += 1) messages[index] = this.#handOut();
    return messages;
  }

  async recvMany(most = AHEAD, options = {}) {
    checkCount('most', most);
    return this._waits.wait(() => this.#takeMany(most), MESSAGE, checkWait(options));
  }

  #tryPeek() {
    this.#giveBack();
    return this._native.tryPeek();
  }

  tryPeek() {
    if (this._waits.isWaiting) return null;
    const message = this.#tryPeek();
    return message === null ? null : new Message(message);
  }

  async peek(options = {}) {
    const message = await this._waits.wait(() => this.#tryPeek() ?? undefined, MESSAGE, checkWait(options));
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

  get traceparent() {
    return this._native.traceparent;
  }

  readable(options) {
    return readable(this, options);
  }

  [Symbol.asyncIterator]() {
    const found = (value) => ({ value, done: false });
    const ended = (error) => {
      if (error.code !== 'closed') throw error;
      return { value: undefined, done: true };
    };
    return {
      next: () => {
        if (!this.#isReady) return this.recv().then(found, ended);
        this._waits.taken += 1;
        return Promise.resolve({ value: this.#handOut(), done: false });
      },
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
  // What waits: whether for a receiver's sender, and what ends it.
  #waiting;
  // Of the step of a thread that runs, with a peer that has connected: whether it accepts a sender.
  #accepting;
  // By the same: what was accepted for a wait that had ended, for the next one. Its peer is connected, and may have
  // sent messages.
  #kept = new Map();
  #rung = () => this.#startAccept();
  #accepted = () => this.#finishAccept();

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
      throw new PeltonError('wrong_thread', 'another accept waits at this listener: await that first');
    }
    const kept = this.#kept.get(acceptsSender);
    if (kept !== undefined) {
      this.#kept.delete(acceptsSender);
      return kept;
    }
    return new Promise((resolve, reject) => {
      const end = (settle, value) => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', abort);
        this.#waiting = undefined;
        this.#native.stop();
        settle(value);
      };
      const leave = (error) => end(reject, error);
      const abort = () => leave(signal.reason);
      const timer = timeout !== undefined && timeout < 0x7fffffff
        ? setTimeout(() => leave(timedOut(what)), timeout).unref() : undefined;
      signal?.addEventListener('abort', abort, { once: true });
      this.#waiting = { acceptsSender, end: (endpoint) => end(resolve, endpoint), leave };
      this.#wait();
    });
  }

  /** Waits for a peer, unless nobody wants one, or a step has one. */
  #wait() {
    if (this.#waiting === undefined || this.#accepting !== undefined) return;
    try {
      this.#native.wait();
    } catch (error) {
      this.#waiting.leave(error);
    }
  }

  #startAccept() {
    if (this.#waiting === undefined) return;
    const { acceptsSender, leave } = this.#waiting;
    try {
      this.#native.startAccept(acceptsSender, this.#accepted);
      this.#accepting = acceptsSender;
    } catch (error) {
      leave(error);
    }
  }

  #finishAccept() {
    const acceptsSender = this.#accepting;
    this.#accepting = undefined;
    const waiting = this.#waiting?.acceptsSender === acceptsSender ? this.#waiting : undefined;
    try {
      const accepted = this.#native.finishAccept();
      if (accepted !== null) {
        if (waiting !== undefined) waiting.end(accepted);
        else this.#kept.set(acceptsSender, accepted);
      }
    } catch (error) {
      waiting?.leave(error);
    }
    this.#wait();
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
    this.#waiting?.leave(closedHandle('listener'));
    for (const endpoint of this.#kept.values()) endpoint.close();
    this.#kept.clear();
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
