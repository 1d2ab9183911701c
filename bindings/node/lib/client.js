'use strict';
// Calls of services.

const native = require('./native.js');
const { checkData, checkName, checkOptions, checkWait } = require('./check.js');
const { Driver, TURN } = require('./driver.js');
const { closedHandle, timedOut } = require('./errors.js');
const { opened } = require('./waits.js');

/** A call in flight: its parts that have come, and what wakes the code that waits. */
class Call {
  parts = [];
  error = undefined;
  isOver = false;
  wake = undefined;
  timer = undefined;
  abort = undefined;

  constructor(signal) {
    this.signal = signal;
  }

  /** Ends it, with an error or none. */
  end(error) {
    if (this.isOver) return;
    this.isOver = true;
    this.error = error;
    clearTimeout(this.timer);
    if (this.abort !== undefined) this.signal.removeEventListener('abort', this.abort);
    this.wake?.();
  }
}

class Client extends Driver {
  #calls = new Map();
  #forSpace = [];
  // Bytes of parts that nobody has taken. Beyond the largest reply, nothing more is received.
  #stored = 0;
  #storedMax;

  constructor(client) {
    super(client);
    this.#storedMax = client.callBytesMax;
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Client(await opened(native.connectClient(name, checkOptions(options, 'client')), options));
  }

  async call(request, options = {}) {
    const [number, call] = await this.#begin(request, options);
    while (!call.isOver) {
      await new Promise((resolve) => {
        call.wake = resolve;
      });
    }
    const parts = this.#takeAll(call);
    if (call.error !== undefined) {
      this.#forget(number);
      throw call.error;
    }
    return parts.length === 1 ? parts[0] : Buffer.concat(parts);
  }

  async *stream(request, options = {}) {
    const [number, call] = await this.#begin(request, options, true);
    try {
      for (;;) {
        while (call.parts.length > 0) {
          const part = call.parts.shift();
          this.#took(part.length);
          yield part;
        }
        if (call.isOver) {
          if (call.error !== undefined) throw call.error;
          return;
        }
        await new Promise((resolve) => {
          call.wake = resolve;
        });
      }
    } finally {
      this.#takeAll(call);
      call.end();
      this.#forget(number);
    }
  }

  async notify(message, options = {}) {
    checkData(message);
    const { timeout, signal } = checkWait(options);
    await this.#submitted(() => (this._native.tryNotify(message) ? true : null), timeout, signal);
    if (this._native.hasQueued) this._start();
  }

  get inFlight() {
    return this._native.inFlight;
  }

  get services() {
    return this._native.services;
  }

  close() {
    this._native.close();
    this.#fail(() => closedHandle('client'));
  }

  async #begin(request, options, isStream = false) {
    checkData(request);
    const { timeout, signal, idempotent } = checkWait(options);
    const end = timeout === undefined ? undefined : performance.now() + timeout;
    const left = () => (end === undefined ? undefined : Math.max(0, end - performance.now()));
    const submit = () => this._native.trySubmit(request, left(), Boolean(idempotent));
    const number = await this.#submitted(submit, timeout, signal);
    const call = new Call(signal);
    call.isStream = isStream;
    this.#calls.set(number, call);
    this._start();
    const leave = (error) => {
      if (call.isOver) return;
      call.end(error);
      this.#forget(number);
    };
    if (timeout !== undefined && timeout < 0x7fffffff) {
      call.timer = setTimeout(() => leave(timedOut('waiting for the reply')), left()).unref();
    }
    if (signal !== undefined) {
      call.abort = () => leave(signal.reason);
      if (signal.aborted) call.abort();
      else signal.addEventListener('abort', call.abort, { once: true });
    }
    return [number, call];
  }

  /** Repeats a submit until there is space for it. */
  async #submitted(submit, timeout, signal) {
    signal?.throwIfAborted();
    const end = timeout === undefined ? Infinity : performance.now() + timeout;
    // Those that wait are first.
    let found = this.#forSpace.length === 0 ? submit() : null;
    while (found === null) {
      if (performance.now() >= end) throw timedOut('waiting for space for a request');
      await new Promise((resolve) => {
        const entry = {
          wake() {
            clearTimeout(entry.timer);
            signal?.removeEventListener('abort', entry.leave);
            resolve();
          },
          leave: () => {
            const index = this.#forSpace.indexOf(entry);
            if (index >= 0) this.#forSpace.splice(index, 1);
            entry.wake();
          },
          timer: undefined,
        };
        if (end - performance.now() < 0x7fffffff) entry.timer = setTimeout(entry.leave, end - performance.now());
        signal?.addEventListener('abort', entry.leave, { once: true });
        this.#forSpace.push(entry);
        this._start();
      });
      signal?.throwIfAborted();
      found = submit();
    }
    return found;
  }

  #wakeForSpace(most) {
    for (const entry of this.#forSpace.splice(0, most)) entry.wake();
  }

  #takeAll(call) {
    const parts = call.parts;
    call.parts = [];
    this.#took(parts.reduce((bytes, part) => bytes + part.length, 0));
    return parts;
  }

  #took(bytes) {
    const wasFull = this.#stored > this.#storedMax;
    this.#stored -= bytes;
    if (wasFull && this.#stored <= this.#storedMax && !this.closed) this._start();
  }

  /** Cancels a call, unless it has ended. */
  #forget(number) {
    if (!this.#calls.delete(number) || this.closed) return;
    try {
      this._native.cancel(number);
    } catch {
      // The client's end, which the next call reports.
      return;
    }
    this._start();
  }

  #fail(makeError) {
    const calls = [...this.#calls.values()];
    this.#calls.clear();
    for (const call of calls) call.end(makeError());
    // They try again, and find the error by themselves.
    this.#wakeForSpace(this.#forSpace.length);
  }

  #completed({ call: number, isFinal, data, error }) {
    const call = this.#calls.get(number);
    if (call === undefined) return;
    if (isFinal) this.#calls.delete(number);
    if (data != null) {
      call.parts.push(data);
      this.#stored += data.length;
    }
    if (isFinal) call.end(error ?? undefined);
    else if (call.isStream) call.wake?.();
  }

  _drive() {
    const client = this._native;
    try {
      for (;;) {
        let taken = 0;
        while (taken < TURN && this.#stored <= this.#storedMax) {
          const completion = client.completion();
          if (completion === null) break;
          this.#completed(completion);
          taken += 1;
        }
        if (taken > 0) {
          this.#wakeForSpace(taken);
          if (this.#calls.size > 0 || this.#forSpace.length > 0) this._start();
          else if (client.hasQueued) this._start();
          else client.stop();
          return;
        }
        // Parts have to be taken first, which starts it again.
        if (this.#stored > this.#storedMax) return;
        if (this.#calls.size === 0 && this.#forSpace.length === 0 && !client.hasQueued) {
          client.stop();
          return;
        }
        if (client.busyPoll()) continue;
        if (client.wait()) return;
        // Space, or a completion.
        this.#wakeForSpace(TURN);
        this._start();
        return;
      }
    } catch (error) {
      client.stop();
      this.#fail(() => Object.assign(Object.create(Object.getPrototypeOf(error)), error, {
        message: error.message, stack: error.stack,
      }));
    }
  }
}

if (Symbol.dispose) Object.defineProperty(Client.prototype, Symbol.dispose, { value: Client.prototype.close });
if (Symbol.asyncDispose) {
  Object.defineProperty(Client.prototype, Symbol.asyncDispose, { async value() { this.close(); } });
}

module.exports = { Client };
