'use strict';
// Services: an async function for each request.

const native = require('./native.js');
const { checkCount, checkData, checkName, checkOptions } = require('./check.js');
const { Copies } = require('./copies.js');
const { BATCH, Driver } = require('./driver.js');
const { Failed, PeltonError, closedHandle, invalidType } = require('./errors.js');

/** The numbers of a request: the place of its responder, process, user, milliseconds left. `src/service.rs`. */
const HEAD = 4;

/** A request of which nobody awaits a reply. */
const NOTIFICATION = -1;

/** The place of a request that is answered. */
const ANSWERED = -2;

/** The codes of an answer to a client that has left, or of a service that has ended. */
const GONE = ['closed', 'peer_died', 'closed_handle'];

const known = (id) => (id < 0 ? null : id);

/** A client's request. */
class Request {
  #native;
  #reply;
  #space;
  #data;
  #place;
  #peerPid;
  #peerUid;
  #deadline = null;
  #isNotification;
  #abort;
  // The error with which its own answer has found the client, or the service, gone.
  #gone;

  constructor(native, reply, space, data, heads, at) {
    this.#native = native;
    this.#reply = reply;
    this.#space = space;
    this.#data = data;
    this.#place = heads[at];
    this.#isNotification = this.#place === NOTIFICATION;
    this.#peerPid = heads[at + 1];
    this.#peerUid = heads[at + 2];
    if (!Number.isNaN(heads[at + 3])) this.#deadline = performance.now() + heads[at + 3];
  }

  get data() {
    return this.#data;
  }

  get isNotification() {
    return this.#isNotification;
  }

  get isAnswered() {
    return this.#place < 0;
  }

  get isCancelled() {
    return this.#place >= 0 && this.#native.isCancelled(this.#place);
  }

  get deadline() {
    return this.#deadline;
  }

  get traceparent() {
    return this.#place >= 0 ? this.#native.traceparent(this.#place) : null;
  }

  get peerPid() {
    return known(this.#peerPid);
  }

  get peerUid() {
    return known(this.#peerUid);
  }

  get signal() {
    this.#abort ??= new AbortController();
    if (this.isCancelled) this._cancel();
    return this.#abort.signal;
  }

  /** Ends the call by `answer(place)`, also if that throws, unless the reply is too large. */
  #answer(answer) {
    const place = this.#open();
    try {
      answer(place);
    } catch (error) {
      if (error.code !== 'too_large') this.#place = ANSWERED;
      throw this.#noted(error);
    }
    this.#place = ANSWERED;
  }

  #noted(error) {
    if (GONE.includes(error?.code)) this.#gone = error;
    return error;
  }

  /** Whether an error is of its own answer, which nobody can get any more: not one of the handler's other peers. */
  _isGone(error) {
    return this.#gone !== undefined && error === this.#gone;
  }

  #open() {
    if (this.#place >= 0) return this.#place;
    throw new PeltonError('refused', this.#isNotification ? 'a notification is not answered' : 'the call is answered');
  }

  reply(data) {
    checkData(data);
    this.#answer((place) => this.#reply(place, data));
  }

  fail(failure, text = '') {
    const { bytes } = new Failed(failure, text);
    this.#answer((place) => this.#native.fail(place, failure, bytes));
  }

  async part(data) {
    checkData(data);
    try {
      while (!this.#native.tryPart(this.#open(), data)) await this.#space();
    } catch (error) {
      throw this.#noted(error);
    }
  }

  end() {
    this.#answer((place) => this.#native.endParts(place));
  }

  abandon() {
    if (this.#place < 0) return;
    this.#native.abandon(this.#place);
    this.#place = ANSWERED;
  }

  _cancel() {
    if (this.#abort !== undefined && !this.#abort.signal.aborted) {
      this.#abort.abort(new PeltonError('cancelled', 'the client has cancelled the call, or has left'));
    }
  }
}

function warn(error) {
  const warning = new Error(`a handler failed: ${error?.stack ?? error}`);
  warning.name = 'PeltonWarning';
  process.emitWarning(warning);
}

class Service extends Driver {
  #copies;
  #heads = new Float64Array(BATCH * HEAD);
  // How many requests the next call may take.
  #most = 0;
  #countCancels;
  #reply;
  #space = () => this.#waitForSpace();
  #handler;
  #onError;
  #running = new Set();
  #runningMax = 0;
  #cancels = 0;
  #forSpace = [];
  #over;
  #isEnding = false;
  #isFull = false;

  constructor(service) {
    const [receive, busyPoll, arm, cancels, reply] = service.functions();
    super(service, busyPoll, arm);
    this.#countCancels = cancels;
    this.#reply = reply;
    this.#copies = new Copies((space, offset, sizes) => receive(space, offset, sizes, this.#heads, this.#most), BATCH);
  }

  static listen(name, options = {}) {
    checkName(name);
    return new Service(native.listenService(name, checkOptions(options, 'service')));
  }

  run(handler, { inFlightMax = 1024, onError = warn } = {}) {
    try {
      if (typeof handler !== 'function') throw invalidType('handler', handler, 'a function');
      if (typeof onError !== 'function') throw invalidType('onError', onError, 'a function');
      checkCount('inFlightMax', inFlightMax);
      if (this.closed) throw closedHandle('service');
      if (this.#over !== undefined) throw new PeltonError('wrong_thread', 'this service runs already');
    } catch (error) {
      return Promise.reject(error);
    }
    this.#handler = handler;
    this.#onError = onError;
    this.#runningMax = inFlightMax;
    this.#isEnding = false;
    return new Promise((resolve, reject) => {
      this.#over = { resolve, reject };
      this._start();
    });
  }

  stop() {
    this._native.end();
    this._start();
  }

  drain() {
    this._native.drain();
    this._start();
  }

  get repliesDropped() {
    return this._native.repliesDropped;
  }

  get corruptClients() {
    return this._native.corruptClients;
  }

  close() {
    super.close();
    for (const request of this.#running) request._cancel();
    this.#end();
  }

  /** The end of `run`, once the handlers have ended too. */
  #end(error) {
    this.#isEnding = true;
    this.#endError = error;
    this.#wakeForSpace();
    this.#endIfIdle();
  }

  #endError;

  #endIfIdle() {
    if (!this.#isEnding || this.#running.size > 0 || this.#over === undefined) return;
    const { resolve, reject } = this.#over;
    this.#over = undefined;
    if (this.#endError === undefined) resolve();
    else reject(this.#endError);
  }

  #wakeForSpace() {
    for (const wake of this.#forSpace.splice(0)) wake();
  }

  #waitForSpace() {
    if (this.#isEnding) throw closedHandle('service');
    return new Promise((resolve) => {
      this.#forSpace.push(resolve);
      this._start();
    });
  }

  /** Takes the requests that have come, as many as may run, and begins those that somebody awaits: how many it took. */
  #beginAll() {
    const free = Math.max(0, this.#runningMax - this.#running.size);
    this.#most = Math.min(free, BATCH);
    const count = this.#copies.fill();
    // All of them first, since a handler may detach the memory of its data, which they share.
    const requests = [];
    for (let at = 0; at < count * HEAD; at += HEAD) {
      requests.push(new Request(this._native, this.#reply, this.#space, this.#copies.take(), this.#heads, at));
    }
    const hasCancels = this.#abortCancelled();
    for (const request of requests) {
      // The handler before may have closed the service. A client may have left behind its last request: a handler that
      // began now would find its signal aborted, and never get the event.
      if (this.closed || (hasCancels && request.isCancelled)) request.abandon();
      else this.#begin(request);
    }
    return count;
  }

  _drive() {
    if (this.#over === undefined || this.#isEnding) {
      this._rest();
      return;
    }
    try {
      for (let isReady = false; ;) {
        const taken = this.#beginAll();
        if (this.closed) return;
        this._taken += taken;
        this.#isFull = this.#running.size >= this.#runningMax;
        if (taken > 0) {
          this._start();
          return;
        }
        if (isReady) {
          // Space for a part, or a request that may not begin.
          this.#wakeForSpace();
          this._start();
          return;
        }
        const found = !this.#isFull && this._poll();
        // A client that leaves while this polls is noticed by that alone: its end does not wake the loop again.
        this.#abortCancelled();
        if (this.closed) return;
        if (!found && this._await()) return;
        isReady = true;
      }
    } catch (error) {
      this._rest();
      this.#end(error.code === 'closed' ? undefined : error);
    }
  }

  /** Aborts the signals of calls that were cancelled, or whose client has left. Returns whether any have come. */
  #abortCancelled() {
    const cancels = this.#countCancels();
    if (cancels === this.#cancels) return false;
    this.#cancels = cancels;
    for (const request of this.#running) if (request.isCancelled) request._cancel();
    // Some of them may wait for space, which nobody makes any more.
    this.#wakeForSpace();
    return true;
  }

  #begin(request) {
    this.#running.add(request);
    let reply;
    try {
      reply = this.#handler(request);
      if (reply instanceof Uint8Array) {
        this.#replied(request, reply);
        this.#ended(request);
        return;
      }
    } catch (error) {
      this.#failed(request, error);
      this.#ended(request);
      return;
    }
    void this.#answer(request, reply).finally(() => this.#ended(request));
  }

  /** A handler, and its reply, have ended. */
  #ended(request) {
    request.abandon();
    this.#running.delete(request);
    if (this.#isFull && !this.closed) {
      this.#isFull = false;
      this._start();
    }
    this.#endIfIdle();
  }

  #replied(request, reply) {
    if (!request.isNotification) request.reply(reply);
  }

  async #answer(request, found) {
    try {
      const reply = typeof found?.then === 'function' ? await found : found;
      if (reply instanceof Uint8Array) {
        this.#replied(request, reply);
      } else if (reply?.[Symbol.asyncIterator] || (reply?.[Symbol.iterator] && typeof reply === 'object')) {
        for await (const part of reply) {
          if (request.isCancelled || request.isAnswered) return;
          await request.part(part);
        }
        if (!request.isAnswered) request.end();
      } else if (!request.isAnswered) {
        throw invalidType('what a handler returns', reply, 'a Uint8Array, an iterable of them, or a request answered');
      }
    } catch (error) {
      this.#failed(request, error);
    }
  }

  #failed(request, error) {
    // Of a cancelled call nobody waits for a reply.
    if (request._isGone(error) || request.isCancelled || this.closed) return;
    try {
      if (error instanceof Failed) {
        if (!request.isAnswered) request.fail(error.failure, error.bytes);
        return;
      }
      this.#onError(error, request);
      if (!request.isAnswered) request.fail(1, error instanceof Error ? `${error.name}: ${error.message}` : `${error}`);
    } catch (again) {
      if (!request._isGone(again)) warn(again);
    }
  }
}

if (Symbol.dispose) Object.defineProperty(Service.prototype, Symbol.dispose, { value: Service.prototype.close });
if (Symbol.asyncDispose) {
  Object.defineProperty(Service.prototype, Symbol.asyncDispose, { async value() { this.close(); } });
}

module.exports = { Service };
