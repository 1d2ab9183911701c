'use strict';
// Services: an async function for each request.

const native = require('./native.js');
const { checkCount, checkData, checkName, checkOptions } = require('./check.js');
const { Driver, TURN } = require('./driver.js');
const { Failed, PeltonError, closedHandle, invalidType } = require('./errors.js');

/** A client's request. */
class Request {
  #native;
  #data;
  #abort;
  #deadline;
  #space;

  constructor(request, space) {
    this.#native = request;
    this.#space = space;
    this.#data = request.takeData();
    this.#deadline = request.msLeft === null ? null : performance.now() + request.msLeft;
  }

  get data() {
    return this.#data;
  }

  get isNotification() {
    return this.#native.isNotification;
  }

  get isAnswered() {
    return this.#native.isAnswered;
  }

  get isCancelled() {
    return this.#native.isCancelled;
  }

  get deadline() {
    return this.#deadline;
  }

  get peerPid() {
    return this.#native.peerPid;
  }

  get peerUid() {
    return this.#native.peerUid;
  }

  get signal() {
    this.#abort ??= new AbortController();
    if (this.isCancelled) this._cancel();
    return this.#abort.signal;
  }

  reply(data) {
    checkData(data);
    this.#native.reply(data);
  }

  fail(failure, text = '') {
    const { bytes } = new Failed(failure, text);
    this.#native.fail(failure, bytes);
  }

  async part(data) {
    checkData(data);
    while (!this.#native.tryPart(data)) await this.#space();
  }

  end() {
    this.#native.end();
  }

  abandon() {
    this.#native.abandon();
  }

  _cancel() {
    if (this.#abort !== undefined && !this.#abort.signal.aborted) {
      this.#abort.abort(new PeltonError('cancelled', 'the client has cancelled the call, or has left'));
    }
  }
}

function isGone(error) {
  return error instanceof PeltonError && (error.code === 'closed' || error.code === 'peer_died');
}

function warn(error) {
  const warning = new Error(`a handler failed: ${error?.stack ?? error}`);
  warning.name = 'PeltonWarning';
  process.emitWarning(warning);
}

class Service extends Driver {
  #handler;
  #onError;
  #running = new Set();
  #runningMax = 0;
  #cancels = 0;
  #forSpace = [];
  #over;
  #isEnding = false;
  #isFull = false;

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
    this._native.close();
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

  #space() {
    if (this.#isEnding) throw closedHandle('service');
    return new Promise((resolve) => {
      this.#forSpace.push(resolve);
      this._start();
    });
  }

  _drive() {
    if (this.#over === undefined || this.#isEnding) {
      if (!this.closed) this._native.stop();
      return;
    }
    const service = this._native;
    try {
      for (;;) {
        let taken = 0;
        let isFull = false;
        while (taken < TURN) {
          isFull = this.#running.size >= this.#runningMax;
          const request = service.tryReceive(isFull);
          if (request === null) break;
          this.#begin(request);
          // The handler may have closed the service.
          if (this.closed) return;
          taken += 1;
        }
        this.#isFull = isFull;
        if (taken === 0 && !isFull && service.busyPoll()) continue;
        const { cancels } = service;
        if (cancels !== this.#cancels) {
          this.#cancels = cancels;
          for (const request of this.#running) if (request.isCancelled) request._cancel();
        }
        if (this.closed) return;
        if (taken > 0) {
          this._start();
          return;
        }
        if (service.wait()) return;
        // Space for a part, or a request.
        this.#wakeForSpace();
        this._start();
        return;
      }
    } catch (error) {
      service.stop();
      this.#end(error.code === 'closed' ? undefined : error);
    }
  }

  #begin(found) {
    const request = new Request(found, () => this.#space());
    this.#running.add(request);
    void this.#answer(request).finally(() => {
      request.abandon();
      this.#running.delete(request);
      if (this.#isFull && !this.closed) {
        this.#isFull = false;
        this._start();
      }
      this.#endIfIdle();
    });
  }

  async #answer(request) {
    try {
      const found = this.#handler(request);
      const reply = typeof found?.then === 'function' ? await found : found;
      if (reply instanceof Uint8Array) {
        if (!request.isNotification) request.reply(reply);
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
    if (isGone(error) || request.isCancelled || this.closed) return;
    try {
      if (error instanceof Failed) {
        if (!request.isAnswered) request.fail(error.failure, error.bytes);
        return;
      }
      this.#onError(error, request);
      if (!request.isAnswered) request.fail(1, error instanceof Error ? `${error.name}: ${error.message}` : `${error}`);
    } catch (again) {
      if (!isGone(again)) warn(again);
    }
  }
}

if (Symbol.dispose) Object.defineProperty(Service.prototype, Symbol.dispose, { value: Service.prototype.close });
if (Symbol.asyncDispose) {
  Object.defineProperty(Service.prototype, Symbol.asyncDispose, { async value() { this.close(); } });
}

module.exports = { Service };
