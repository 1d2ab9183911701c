'use strict';
// Publishers and subscribers.

const native = require('./native.js');
const { checkCount, checkData, checkName, checkOptions, checkWait } = require('./check.js');
const { Copies } = require('./copies.js');
const { transferred } = require('./errors.js');
const { Waits, opened } = require('./waits.js');

const SPACE = 'waiting for subscribers to release their messages';
const MESSAGE = 'waiting for a message';

/** What both endpoints have. */
class Endpoint {
  _native;
  _waits;

  constructor(endpoint, arm, noun, idle) {
    this._native = endpoint;
    this._waits = new Waits(endpoint, arm, noun, idle);
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
}

for (const [symbol, dispose] of [
  [Symbol.dispose, function close() { this.close(); }],
  [Symbol.asyncDispose, async function close() { this.close(); }],
]) {
  if (symbol) Object.defineProperty(Endpoint.prototype, symbol, { value: dispose });
}

class Publisher extends Endpoint {
  #trySend;

  constructor(endpoint) {
    const [trySend, arm] = endpoint.functions();
    const admit = () => {
      try {
        if (!endpoint.closed) endpoint.admit();
      } catch (error) {
        // During a step, that admits.
        if (error.code !== 'wrong_thread') process.emitWarning(error);
      }
    };
    super(endpoint, arm, 'publisher', admit);
    this.#trySend = trySend;
    admit();
  }

  static async openPath(directory, options = {}) {
    checkName(directory);
    return new Publisher(await opened(native.openPublisher(directory, checkOptions(options, 'publishPath')), options));
  }

  trySend(data) {
    checkData(data);
    // Those that wait are first.
    if (this._waits.isWaiting) return false;
    return this.#trySend(data);
  }

  async send(data, options = {}) {
    checkData(data);
    checkWait(options);
    const { length } = data;
    const attempt = () => {
      if (data.length !== length) throw transferred('data');
      return this.#trySend(data) ? null : undefined;
    };
    await this._waits.wait(attempt, SPACE, options, () => data.length);
  }

  async waitSubscribers(count, options = {}) {
    checkCount('count', count);
    const { timeout } = checkWait(options);
    const start = (done) => this._native.startWaitSubscribers(count, timeout, done);
    return this._waits.step(start, 'waiting for subscribers', options);
  }

  async waitReleased(options = {}) {
    const { timeout } = checkWait(options);
    return this._waits.step((done) => this._native.startWaitReleased(timeout, done), SPACE, options);
  }

  subscribers() {
    return this._native.subscribers();
  }
}

class Subscriber extends Endpoint {
  #copies;
  // The number of the message that was read last, and how many were missed before it.
  #numbers = new Float64Array(2);
  #attempt = () => this.#take();

  constructor(endpoint) {
    const [read, arm] = endpoint.functions();
    super(endpoint, arm, 'subscriber');
    this.#copies = new Copies((space, offset, sizes) => read(space, offset, sizes, this.#numbers), 1);
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Subscriber(await opened(native.connectSubscriber(name, checkOptions(options, 'subscribe')), options));
  }

  static async openPath(directory, options = {}) {
    checkName(directory);
    const given = checkOptions(options, 'subscribePath');
    return new Subscriber(await opened(native.openSubscriber(directory, given), options));
  }

  #take() {
    if (this.#copies.fill() === 0) return undefined;
    const [number, missed] = this.#numbers;
    return { data: this.#copies.take(), number, missed };
  }

  async recv(options = {}) {
    return this._waits.wait(this.#attempt, MESSAGE, checkWait(options));
  }

  tryRecv() {
    if (this._waits.isWaiting) return null;
    return this.#take() ?? null;
  }

  async resume(options = {}) {
    const { timeout } = checkWait(options);
    const what = 'waiting for a successor of the publisher';
    return this._waits.step((done) => this._native.startResume(timeout, done), what, options);
  }

  get missed() {
    return this._native.missed;
  }

  get continues() {
    return this._native.continues;
  }

  async* [Symbol.asyncIterator]() {
    for (;;) {
      let delivery;
      try {
        delivery = await this.recv();
      } catch (error) {
        if (error.code === 'closed') return;
        throw error;
      }
      yield delivery;
    }
  }
}

function publish(name, options = {}) {
  checkName(name);
  return new Publisher(native.publish(name, checkOptions(options, 'publish')));
}

function removeSubscription(directory, durable) {
  checkName(directory);
  checkName(durable);
  return native.removeSubscription(directory, durable);
}

module.exports = { Publisher, Subscriber, publish, removeSubscription };
