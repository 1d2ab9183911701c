'use strict';
// Calls of services.

const native = require('./native.js');
const { checkData, checkName, checkOptions, checkTraced, checkWait } = require('./check.js');
const { Copies } = require('./copies.js');
const { BATCH, Driver } = require('./driver.js');
const { PeltonError, closedHandle, timedOut } = require('./errors.js');
const { opened } = require('./waits.js');

// Of a completion, whose head is its slot, and these bits: `src/client.rs`.
const FINAL = 1;
const BYTES = 2;
const FAILED = 4;
const MORE = 8;
const SLOT_SHIFT = 4;

/** A call in flight: its parts that have come, and the code that waits. */
class Call {
  parts = [];
  // Of one reply: the bytes of its parts.
  bytes = 0;
  error = undefined;
  isOver = false;
  // Of a stream: what wakes the code that waits.
  wake = undefined;
  timer = undefined;
  signal = undefined;
  abort = undefined;

  /** Of one reply: what settles its promise. */
  constructor(resolve, reject) {
    this.resolve = resolve;
    this.reject = reject;
  }

  /** Ends it, with an error or none. */
  end(error) {
    if (this.isOver) return;
    this.isOver = true;
    this.error = error;
    if (this.timer !== undefined) clearTimeout(this.timer);
    if (this.abort !== undefined) this.signal.removeEventListener('abort', this.abort);
    if (this.resolve === undefined) this.wake?.();
    else if (error !== undefined) this.reject(error);
    else this.resolve(this.parts.length === 1 ? this.parts[0] : Buffer.concat(this.parts));
  }
}

class Client extends Driver {
  #trySubmit;
  #hasQueued;
  #copies;
  // The heads and errors of the completions that one call has copied.
  #heads = new Uint32Array(BATCH);
  #errors = [];
  // By slot.
  #calls = [];
  #inFlight = 0;
  #forSpace = [];
  // Bytes of parts of streams that nobody has taken. Beyond the largest reply, nothing more is received.
  #stored = 0;
  #replyMax;

  constructor(client) {
    const [trySubmit, completions, busyPoll, arm, hasQueued] = client.functions();
    super(client, busyPoll, arm);
    this.#trySubmit = trySubmit;
    this.#hasQueued = hasQueued;
    const copy = (space, offset, sizes) => completions(space, offset, sizes, this.#heads, this.#errors);
    this.#copies = new Copies(copy, BATCH);
    this.#replyMax = client.callBytesMax;
  }

  static async connect(name, options = {}) {
    checkName(name);
    return new Client(await opened(native.connectClient(name, checkOptions(options, 'client')), options));
  }

  call(request, options) {
    if (options !== undefined || this.#forSpace.length > 0) return this.#callSlow(request, options);
    let slot;
    try {
      checkData(request);
      slot = this.#trySubmit(request);
    } catch (error) {
      this._rearm();
      return Promise.reject(error);
    }
    if (slot < 0) return this.#callSlow(request, options);
    return new Promise((resolve, reject) => this.#add(slot, new Call(resolve, reject)));
  }

  /** A call with options, or one that waits for space. */
  #callSlow(request, options = {}) {
    return new Promise((resolve, reject) => {
      this.#begin(new Call(resolve, reject), request, options).catch(reject);
    });
  }

  async *stream(request, options = {}) {
    const call = new Call();
    const slot = await this.#begin(call, request, options);
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
      this.#forget(slot, call);
    }
  }

  async notify(message, options = {}) {
    checkData(message);
    const { timeout, signal } = checkWait(options);
    await this.#submitted(() => (this._native.tryNotify(message) ? 0 : -1), timeout, signal);
    if (this.#hasQueued()) this._start();
  }

  get inFlight() {
    return this._native.inFlight;
  }

  get services() {
    return this._native.services;
  }

  close() {
    super.close();
    this.#fail(() => closedHandle('client'));
  }

  /** Submits the request of a call: its slot. */
  async #begin(call, request, options) {
    checkData(request);
    const { timeout, signal, idempotent, traceparent } = checkTraced(options);
    const end = timeout === undefined ? undefined : performance.now() + timeout;
    const left = () => (end === undefined ? undefined : Math.max(0, end - performance.now()));
    return this.#submitted(() => {
      const slot = this.#trySubmit(request, left(), Boolean(idempotent), traceparent);
      if (slot < 0) return slot;
      this.#add(slot, call);
      const leave = (error) => {
        call.end(error);
        this.#takeAll(call);
        this.#forget(slot, call);
      };
      if (timeout !== undefined && timeout < 0x7fffffff) {
        call.timer = setTimeout(() => leave(timedOut('waiting for the reply')), left()).unref();
      }
      if (signal !== undefined) {
        call.signal = signal;
        call.abort = () => leave(signal.reason);
        signal.addEventListener('abort', call.abort, { once: true });
      }
      return slot;
    }, timeout, signal);
  }

  #add(slot, call) {
    this.#calls[slot] = call;
    this.#inFlight += 1;
    this._start();
  }

  /** Repeats `attempt` until there is space for its message. */
  async #submitted(attempt, timeout, signal) {
    const submit = () => {
      try {
        return attempt();
      } finally {
        this._rearm();
      }
    };
    signal?.throwIfAborted();
    const end = timeout === undefined ? Infinity : performance.now() + timeout;
    // Those that wait are first.
    let found = this.#forSpace.length === 0 ? submit() : -1;
    while (found < 0) {
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
    if (call.resolve === undefined) this.#took(parts.reduce((bytes, part) => bytes + part.length, 0));
  }

  #took(bytes) {
    const wasFull = this.#stored > this.#replyMax;
    this.#stored -= bytes;
    if (wasFull && this.#stored <= this.#replyMax && !this.closed) this._start();
  }

  /** Cancels a call, unless it has ended. */
  #forget(slot, call) {
    if (this.#calls[slot] !== call) return;
    this.#calls[slot] = undefined;
    this.#inFlight -= 1;
    if (this.closed) return;
    try {
      this._native.cancel(slot);
    } catch {
      // The client's end, which `_drive` finds too.
    }
    this._start();
  }

  #fail(makeError) {
    const calls = this.#calls;
    this.#calls = [];
    this.#inFlight = 0;
    for (const call of calls) call?.end(makeError());
    // They try again, and find the error by themselves.
    this.#wakeForSpace(this.#forSpace.length);
  }

  /** Takes a completion out of the copies: that of the number. */
  #complete(index) {
    const head = this.#heads[index];
    const data = this.#copies.take();
    const slot = head >>> SLOT_SHIFT;
    const call = this.#calls[slot];
    if (call === undefined) return;
    if (head & BYTES) {
      call.parts.push(data);
      call.bytes += data.length;
      if (call.resolve === undefined) {
        this.#stored += data.length;
      } else if (call.bytes > this.#replyMax) {
        call.end(new PeltonError('too_large',
          `the parts of the reply have more than ${this.#replyMax} bytes: take them by stream, or increase callBytesMax`));
        this.#takeAll(call);
        this.#forget(slot, call);
        return;
      }
    }
    if (!(head & FINAL)) {
      call.wake?.();
      return;
    }
    this.#calls[slot] = undefined;
    this.#inFlight -= 1;
    call.end(head & FAILED ? this.#errors[index] : undefined);
    if (call.resolve !== undefined) this.#takeAll(call);
  }

  /** Takes the completions that are there, but for parts that nobody takes: how many. */
  #completeAll() {
    if (this.#stored > this.#replyMax) return 0;
    let total = 0;
    for (let isMore = true; isMore;) {
      const count = this.#copies.fill();
      for (let index = 0; index < count; index += 1) this.#complete(index);
      if (this.#errors.length > 0) this.#errors = [];
      // One that had no space has freed its slot: before another call gets that.
      isMore = count > 0 && (this.#heads[count - 1] & MORE) !== 0;
      total += count;
    }
    return total;
  }

  _drive() {
    try {
      for (let isReady = false; ;) {
        const taken = this.#completeAll();
        if (taken > 0) {
          this._taken += taken;
          this.#wakeForSpace(taken);
          if (this.#inFlight > 0 || this.#forSpace.length > 0 || this.#hasQueued()) this._start();
          else this._rest();
          return;
        }
        if (isReady) {
          // Space.
          this.#wakeForSpace(BATCH);
          this._start();
          return;
        }
        // Parts have to be taken first, which starts it again.
        if (this.#stored > this.#replyMax) return;
        if (this.#inFlight === 0 && this.#forSpace.length === 0 && !this.#hasQueued()) {
          this._rest();
          return;
        }
        if (!this._poll() && this._await()) return;
        isReady = true;
      }
    } catch (error) {
      this._rest();
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
