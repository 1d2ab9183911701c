/// <reference types="node" />
/**
 * pelton: messages at memory speed between the threads and processes of one Linux machine.
 *
 * Every object belongs to the thread that made it; nothing here blocks that thread. Where a method returns a promise,
 * `timeout` is in milliseconds, without a limit unless given, and 0 is not to wait; `signal` ends the wait with the
 * signal's reason. A wait that ended so has taken nothing and sent nothing. Waits of one object are served in order. A
 * wait keeps the process alive, unless `unref()` was called.
 *
 * @packageDocumentation
 */
import { Readable, ReadableOptions, Writable, WritableOptions } from 'node:stream';

/** How long to wait, and what ends the wait. */
export interface WaitOptions {
  timeout?: number | undefined;
  signal?: AbortSignal | undefined;
}

/** Options of a message or a call: the header `traceparent` of W3C Trace Context, with the sender's span. */
export interface TraceOptions {
  /** One that is not valid is as none; so is any on a channel without the option `traced`. */
  traceparent?: string | null | undefined;
}

/** Of a sender's side of a channel. */
export interface TracedOptions {
  /** Messages may carry a `traceparent`, and the largest one is 40 bytes smaller: false unless given. */
  traced?: boolean | undefined;
}

/** The sizes of a lane, and the users that may connect. */
export interface LaneOptions {
  /** The lane's bytes: 64 MiB unless given. Memory is used as messages need it. */
  capacity?: number | undefined;
  /** The largest message, in bytes: half of the capacity, less 32, unless given. */
  messageBytesMax?: number | undefined;
  /** The users that may be the peer, besides the own one. */
  allowUids?: readonly number[] | undefined;
  /** Waits of steps never sleep, and occupy a processor. The event loop sleeps all the same. */
  spin?: boolean | undefined;
}

/** Options of `connect`. `timeout` is how long to wait for a listener: 0 unless given. */
export interface ConnectOptions extends LaneOptions, WaitOptions {}

/** Options of `openPath`. `timeout` is how long to wait for the channel, for its role, and for a peer: else 0. */
export interface PathOptions extends ConnectOptions, TracedOptions {
  /** Creates the channel if it does not exist. Only then its sizes, `lanes` and `traced` may be given. */
  create?: boolean | undefined;
  /** The permissions of the directory. */
  mode?: number | undefined;
  /** How many senders the channel may have. */
  lanes?: number | undefined;
}

/** What is known about an endpoint. `messages` and `bytes` were sent or released. */
export interface Info {
  capacity: number;
  messageBytesMax: number;
  /** Messages that the receiver has not released; of a sender alone. */
  unreleased?: number;
  peerPid?: number;
  peerUid?: number;
  messages: number;
  bytes: number;
  /** How often there was no space, or no message. */
  waits: number;
  sleeps: number;
  wakesSent: number;
}

/** An endpoint on its way to another thread of this process: post it, and `attach` it there, once. */
export interface Token {
  readonly pelton: 'sender' | 'receiver';
  readonly number: number;
}

declare abstract class Endpoint {
  protected constructor();
  /**
   * After `peer_died`: waits for the peer's successor, which gets the lane. Fails with `refused` while the peer is
   * alive. Until it has ended, the object does nothing else.
   */
  resume(options?: WaitOptions): Promise<void>;
  /** Makes what was sent, or released, durable, on a path channel; `refused` on others. Waits for the disk. */
  sync(): Promise<void>;
  /** Sizes, peer and counters. Does not wait. */
  info(): Info;
  /** A wait keeps the process alive: the default. */
  ref(): this;
  /** A wait does not keep the process alive. */
  unref(): this;
  /** Ends the channel: the peer gets `closed`. Waits here fail with `closed_handle`. Does not wait. */
  close(): void;
  readonly closed: boolean;
  /** Closes this object, and hands the endpoint over to another thread of this process. */
  detach(): Token;
  /** As `close`, at the end of `using`. */
  [Symbol.dispose](): void;
  /** As `close`, at the end of `await using`. */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * The sending endpoint of a channel. Its methods fail with `closed` if the receiver has closed, and `peer_died` if its
 * process has ended otherwise; `error.unreleased` is the number of messages that it has not released.
 *
 * @example
 * const sender = await Sender.connect('events', { timeout: 10_000 });
 * await sender.send(Buffer.from('hello'));
 */
export class Sender extends Endpoint {
  /**
   * Connects to a receiver that listens under `name`: a short name, or `unix:PATH`. Fails with `no_listener`,
   * `timed_out`, `name`, `option`, `refused`.
   */
  static connect(name: string, options?: ConnectOptions & TracedOptions): Promise<Sender>;
  /**
   * Opens the channel in a directory, whose messages outlive both sides. Fails with `no_channel`, `not_a_channel`,
   * `role_taken`, `no_space`, `rebooted`.
   */
  static openPath(directory: string, options?: PathOptions): Promise<Sender>;
  /** Takes over the sender that another thread has detached. */
  static attach(token: Token): Sender;
  /** Copies a message into the lane. Waits for space; until then, do not change `data`. Fails with `too_large`. */
  send(data: Uint8Array, options?: WaitOptions & TraceOptions): Promise<void>;
  /** As `send`, but does not wait: whether the message is sent. False also while an earlier `send` waits. */
  trySend(data: Uint8Array, options?: TraceOptions): boolean;
  /** Sends each message, and returns how many. After an error, `error.sent` is the number of those sent. */
  sendMany(messages: Iterable<Uint8Array>, options?: WaitOptions): Promise<number>;
  /** Sends a message with up to 64 descriptors, which stay open here. Not on a path channel. */
  sendDescriptors(
    data: Uint8Array, descriptors: Iterable<number | { fd: number }>, options?: WaitOptions): Promise<void>;
  /** Waits until the receiver has released every message. Until then, the sender does nothing else. */
  waitReleased(options?: WaitOptions): Promise<void>;
  /** A stream whose chunks are messages: a chunk is done once it is in the lane. Its end closes the sender. */
  writable(options?: WritableOptions): Writable;
}

/**
 * The receiving endpoint of a channel. `for await (const message of receiver)` takes messages until the sender has
 * closed. After the last message its methods fail with `closed`, or with `peer_died` if the sender's process has ended
 * otherwise.
 *
 * @example
 * const receiver = await Receiver.connect('events', { timeout: 10_000 });
 * console.log(await receiver.recv({ timeout: 1000 }));
 */
export class Receiver extends Endpoint implements AsyncIterable<Buffer> {
  /** Connects to a sender that listens under `name`. Otherwise as `Sender.connect`. */
  static connect(name: string, options?: ConnectOptions): Promise<Receiver>;
  /** Opens the channel in a directory; begins at the oldest unreleased message. As `Sender.openPath`. */
  static openPath(directory: string, options?: PathOptions): Promise<Receiver>;
  /** Takes over the receiver that another thread has detached. */
  static attach(token: Token): Receiver;
  /**
   * The next message, copied. It is released at the next call, or at the end of this turn of the loop. Small ones share
   * memory, as small Buffers of Node do: 64 KiB stay while one of them is kept.
   */
  recv(options?: WaitOptions): Promise<Buffer>;
  /** As `recv`, but does not wait: null if there is no message, or while an earlier `recv` waits. */
  tryRecv(): Buffer | null;
  /** Waits for a message, and returns up to `most` that are there; at most 1,024. */
  recvMany(most?: number, options?: WaitOptions): Promise<Buffer[]>;
  /**
   * The next message in place, without a copy: release it soon, since space is released in order. A sender that writes
   * after its commit can change the bytes: use `recv` if you do not trust it.
   */
  peek(options?: WaitOptions): Promise<Message>;
  /** As `peek`, but does not wait. */
  tryPeek(): Message | null;
  /** The next message, copied, and the descriptors that came with it, which the caller closes. */
  recvDescriptors(options?: WaitOptions): Promise<{ data: Buffer; descriptors: number[] }>;
  /**
   * That of the message which this receiver has handed out last; null if it came without one. While several waits are
   * pending, and of `recvMany`, only the last message has it: use `peek`, and `Message.traceparent`.
   */
  readonly traceparent: string | null;
  /** A stream of messages, which takes one only while the stream wants one. Its end closes the receiver. */
  readable(options?: ReadableOptions): Readable;
  [Symbol.asyncIterator](): AsyncIterableIterator<Buffer>;
}

/** A message in place: `Receiver.peek` returns it. Collected without `release`, it is released, with one warning. */
export class Message {
  private constructor();
  /** The bytes, in shared memory. After `release` this throws, and earlier views of it have no bytes. */
  readonly data: Buffer;
  readonly released: boolean;
  /** Its number in the lane. */
  readonly seq: number;
  /** Its sender's lane, of a receiver that gathers. */
  readonly lane: number;
  readonly peerPid: number | null;
  /** Whether an earlier receiver may have received it. */
  readonly isRedelivered: boolean;
  /** The header of W3C Trace Context with which it was sent; null if it came without one. */
  readonly traceparent: string | null;
  /** The descriptors that came with it, which the caller closes; empty at the second call. */
  takeDescriptors(): number[];
  /** Releases its space: the sender gets it at the receiver's next call. */
  release(): void;
  [Symbol.dispose](): void;
}

/** Accepts peers under a name, one after another. One wait at a time. */
export class Listener {
  private constructor();
  /** Waits for a receiver to connect: the sender for it. */
  acceptSender(options?: WaitOptions): Promise<Sender>;
  /** Waits for a sender to connect: the receiver for it. */
  acceptReceiver(options?: WaitOptions): Promise<Receiver>;
  ref(): this;
  unref(): this;
  /** Stops listening. What was accepted stays open. Does not wait. */
  close(): void;
  readonly closed: boolean;
  [Symbol.dispose](): void;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Listens under a name for peers to accept. Does not wait. Throws `in_use`, `name`, `option`. */
export function listen(name: string, options?: LaneOptions & TracedOptions): Listener;
/** A receiver of up to `lanes` senders (1,024), each with a lane of its own; it accepts them while it receives. */
export function gather(name: string, options?: LaneOptions & { lanes?: number | undefined }): Receiver;
/** A channel between two threads of this process: detach one endpoint, and post its token to a worker. */
export function threads(options?: Omit<LaneOptions, 'allowUids'> & TracedOptions): { sender: Sender; receiver: Receiver };

/** Options of a publisher. */
export interface PublishOptions extends LaneOptions {
  /** Messages kept for subscribers that join later, as far as they fit into half the capacity: 0 unless given. */
  history?: number | undefined;
  /**
   * How many milliseconds one subscriber may hold the publisher up at one message. One that could do so for longer is
   * refused; with 0, each must lag. No limit unless given.
   */
  holdMax?: number | undefined;
}

/** Options of `Subscriber.connect`. `timeout` is how long to wait for a publisher: 0 unless given. */
export interface SubscribeOptions extends ConnectOptions {
  /**
   * What the publisher does when this subscriber falls behind. `gate`, the default: it waits, and nothing is lost.
   * `lag`: it goes on, and messages are missed, and counted. `latest`: the subscriber receives the newest alone.
   */
  policy?: 'gate' | 'lag' | 'latest' | undefined;
  /** With `gate`: it holds the publisher up for so many milliseconds at one message. Then it lags until caught up. */
  lagAfter?: number | undefined;
  /** By how many bytes it may be behind, while it lags, before it misses messages: 256 KiB unless given. */
  slack?: number | undefined;
  /** The first message: `now`, the default, `oldest`, or a number of messages before now. */
  startFrom?: 'now' | 'oldest' | number | undefined;
}

/**
 * Options of `Publisher.openPath`. `timeout` is how long to wait while another publisher is alive: 200 ms unless given,
 * which the kernel may take to end a process. `mode` is the permission bits of a new directory, 0o700 unless given.
 */
export interface PublishPathOptions extends ConnectOptions {
  /** As of `publish`. */
  history?: number | undefined;
  /**
   * As of `publish`. The limit stays until the next publisher begins, and refuses also while there is none. A publisher
   * that has a subscriber beyond its own, also a durable one that no process uses, is refused.
   */
  holdMax?: number | undefined;
  mode?: number | undefined;
}

/**
 * Options of `Subscriber.openPath`. `timeout` is how long to wait for the directory, and for a name that another
 * process uses: 200 ms for the name unless given. `mode` is the permission bits that the directory may have.
 */
export interface SubscribePathOptions extends Omit<SubscribeOptions, 'capacity' | 'messageBytesMax'> {
  /**
   * The subscription keeps its place under this name, over restarts of both sides. While no process uses the name it
   * counts by its policy: `gate` holds the publisher up once the lane is full, until it returns, or
   * `removeSubscription`. `startFrom` is for the first subscriber of the name alone. Not with `latest`.
   */
  durable?: string | undefined;
  mode?: number | undefined;
}

/** A subscriber, as `Publisher.subscribers` shows it. Times are in milliseconds. */
export interface SubscriberState {
  /** 0: a durable subscription that no process uses. */
  pid: number;
  uid: number;
  /** The name of its durable subscription. */
  durable?: string;
  policy: 'gate' | 'lag' | 'latest';
  lagAfter?: number;
  /** Whether the publisher goes on without it now. */
  lags: boolean;
  /** Messages that it has not released. */
  behind: number;
  /** Messages that it says to have received, */
  messages: number;
  /** and to have missed. */
  missed: number;
  /** For how long it has been holding the publisher up, if it does. */
  holds?: number;
}

/** A received message. */
export interface Delivery {
  data: Buffer;
  /** Each publisher counts its messages from 1; in a directory it continues its predecessor's count. */
  number: number;
  /** Messages that the subscriber has missed directly before this one. */
  missed: number;
}

declare abstract class BroadcastEndpoint {
  protected constructor();
  /** Sizes, peer and counters. Does not wait. */
  info(): Info;
  /** It keeps the process alive: a wait, and an open publisher. The default. */
  ref(): this;
  /** It does not keep the process alive. */
  unref(): this;
  /** Leaves, or ends, the broadcast. Waits here fail with `closed_handle`. Does not wait. */
  close(): void;
  readonly closed: boolean;
  /** As `close`, at the end of `using`. */
  [Symbol.dispose](): void;
  /** As `close`, at the end of `await using`. */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * The sending endpoint of a broadcast: up to 64 subscribers receive each message, which is in memory once. It admits
 * them whenever they connect, and keeps the process alive until it is closed, unless `unref()` was called. The end of a
 * subscriber is no error. What fails while it admits one is a warning of the process, and is tried again. After `close`
 * the subscribers receive what the lane has for them. Worker threads subscribe by the name, too.
 *
 * @example
 * const publisher = publish('prices', { history: 100 });
 * await publisher.send(Buffer.from('17'));
 */
export class Publisher extends BroadcastEndpoint {
  private constructor();
  /**
   * Publishes in a directory, which keeps the lane: creates the broadcast, or continues as its publisher, with the
   * sizes that it has. Subscribers join by `Subscriber.openPath`, also while there is no publisher. Fails with
   * `role_taken`, `not_a_channel`, `no_space`, `corrupt`, `option`; `rebooted`: remove the directory.
   */
  static openPath(directory: string, options?: PublishPathOptions): Promise<Publisher>;
  /**
   * Copies a message into the lane. Waits while a subscriber that gates holds the lane full; until then, do not change
   * `data`. Fails with `too_large`.
   */
  send(data: Uint8Array, options?: WaitOptions): Promise<void>;
  /** As `send`, but does not wait: whether the message is sent. False also while an earlier `send` waits. */
  trySend(data: Uint8Array): boolean;
  /** Waits until there are `count` subscribers. Until then, the publisher does nothing else. */
  waitSubscribers(count: number, options?: WaitOptions): Promise<void>;
  /**
   * Waits until each subscriber that gates has released every message. One with `lagAfter` that releases nothing for so
   * long is not waited for. Until then, the publisher does nothing else.
   */
  waitReleased(options?: WaitOptions): Promise<void>;
  /** The subscribers that have joined, and how far each is behind. Does not wait. */
  subscribers(): SubscriberState[];
}

/**
 * A receiving endpoint of a broadcast. `for await (const delivery of subscriber)` takes messages until the publisher
 * has closed. After the last message its methods fail with `closed`, or with `peer_died` if the publisher's process has
 * ended otherwise.
 *
 * @example
 * const subscriber = await Subscriber.connect('prices', { timeout: 10_000, policy: 'lag' });
 * for await (const { data, missed } of subscriber) console.log(`${data}`, missed);
 */
export class Subscriber extends BroadcastEndpoint implements AsyncIterable<Delivery> {
  private constructor();
  /**
   * Subscribes to the publisher under `name`: a short name, or `unix:PATH`. Fails with `no_listener`, `timed_out`,
   * `refused`, `name`, `option`.
   */
  static connect(name: string, options?: SubscribeOptions): Promise<Subscriber>;
  /**
   * Subscribes to the broadcast in a directory, with or without a publisher. Fails with `no_channel`; `role_taken`:
   * another process uses the durable name; `refused`, `not_a_channel`, `no_space`, `rebooted`, `corrupt`, `name`,
   * `option`.
   */
  static openPath(directory: string, options?: SubscribePathOptions): Promise<Subscriber>;
  /** The next message, copied. */
  recv(options?: WaitOptions): Promise<Delivery>;
  /** As `recv`, but does not wait: null if there is no message, or while an earlier `recv` waits. */
  tryRecv(): Delivery | null;
  /**
   * After `peer_died` or `closed`: waits for the publisher's successor under the same name, and joins it with the same
   * options. Its messages count from 1, in a directory they continue. After `timed_out`, call it again, or close the
   * subscriber: a successor may count it already. Fails with `refused` while the publisher is alive.
   */
  resume(options?: WaitOptions): Promise<void>;
  /** Messages missed so far, also at the very end of a broadcast; with `latest`, those skipped. */
  readonly missed: number;
  /** Whether it continues a durable subscription, and did not begin it. */
  readonly continues: boolean;
  [Symbol.asyncIterator](): AsyncGenerator<Delivery, void, void>;
}

/** Publishes under `name`, a short name or `unix:PATH`. Does not wait. Throws `in_use`, `name`, `option`. */
export function publish(name: string, options?: PublishOptions): Publisher;
/**
 * Removes the durable subscription of a directory, which no process uses: it holds the publisher up no more. Returns
 * whether there was one. Blocks for at most 200 ms, while another process opens or removes one there; then it throws
 * `timed_out`. Throws `role_taken`, `no_channel`, `not_a_channel`.
 */
export function removeSubscription(directory: string, durable: string): boolean;

/** Options of a call. */
export interface CallOptions extends WaitOptions, TraceOptions {
  /** The call may be executed more than once: if its service dies, it goes to another one. */
  idempotent?: boolean | undefined;
}

/** Options of clients and services. */
export interface CallLimits {
  /** The largest request or reply, in bytes: 64 MiB unless given. */
  callBytesMax?: number | undefined;
  /** A limit of the memory that peers can make this side use. */
  memoryBytesMax?: number | undefined;
}

/**
 * Calls the services of a name. Any number of calls may be begun; 1,024 are in flight, more wait. Under a short name
 * several services may listen, and each call goes to the one with the fewest calls of this client in flight.
 *
 * @example
 * const client = await Client.connect('prices', { timeout: 10_000 });
 * console.log(await client.call(Buffer.from('tea'), { timeout: 1000 }));
 */
export class Client {
  private constructor();
  static connect(name: string, options?: ConnectOptions & CallLimits): Promise<Client>;
  /**
   * Calls the service, and returns its whole reply. A timeout or an abort cancels the call. Fails with `failed`
   * ({@link Failed}), `abandoned`, `closed`, `peer_died`, and with `too_large` if the request, or all parts of the
   * reply together, have more than `callBytesMax` bytes: take such parts by `stream`.
   */
  call(request: Uint8Array, options?: CallOptions): Promise<Buffer>;
  /** Calls the service, and returns the parts of its reply. Leaving the loop cancels the call. */
  stream(request: Uint8Array, options?: CallOptions): AsyncGenerator<Buffer, void, void>;
  /** Sends a message that gets no reply. Waits for space. */
  notify(message: Uint8Array, options?: WaitOptions): Promise<void>;
  /** Calls whose last completion has not come, cancelled ones included. */
  readonly inFlight: number;
  /** Services that this client uses at present. */
  readonly services: number;
  ref(): this;
  unref(): this;
  /** Closes it: calls in flight fail with `closed_handle`, and their services are notified. Does not wait. */
  close(): void;
  readonly closed: boolean;
  [Symbol.dispose](): void;
  [Symbol.asyncDispose](): Promise<void>;
}

/** A client's request, which a handler answers. */
export interface Request {
  readonly data: Buffer;
  /** Whether it is a notification, which is not answered. */
  readonly isNotification: boolean;
  readonly isAnswered: boolean;
  /** Whether the client has cancelled the call, or has left. */
  readonly isCancelled: boolean;
  /** Aborts when the client cancels the call, or leaves. As any signal, it may be aborted when it is first read. */
  readonly signal: AbortSignal;
  /** When the client stops waiting, in milliseconds of `performance.now()`. */
  readonly deadline: number | null;
  /** The header `traceparent` with which the client has made the call; null without one, and once it is answered. */
  readonly traceparent: string | null;
  readonly peerPid: number | null;
  readonly peerUid: number | null;
  /** Replies, and ends the call. Does not wait. Throws `closed`, `peer_died`, `too_large`, `refused`. */
  reply(data: Uint8Array): void;
  /** Fails the call with a code of your own, from 0 to 4,294,967,295. Does not wait. */
  fail(failure: number, text?: string | Uint8Array): void;
  /** Sends a part of a streaming reply. Waits until the client has space for it. */
  part(data: Uint8Array): Promise<void>;
  /** Ends a reply that was sent in parts. Does not wait. */
  end(): void;
  /** Drops the call: its client gets `abandoned`. */
  abandon(): void;
}

/** A reply, or its parts. Nothing is for a handler that answers by the request's methods. */
export type Reply = Uint8Array | Iterable<Uint8Array> | AsyncIterable<Uint8Array> | void;
export type Handler = (request: Request) => Reply | Promise<Reply>;

/** Options of `Service.run`. */
export interface RunOptions {
  /** Handlers that run at the same time: 1,024 unless given. More requests wait at their clients. */
  inFlightMax?: number | undefined;
  /** Called with what a handler throws, except {@link Failed}. A warning of the process unless given. */
  onError?: ((error: unknown, request: Request) => void) | undefined;
}

/**
 * Runs a function for each request of the clients that connect under its name.
 *
 * @example
 * const service = Service.listen('prices');
 * process.once('SIGTERM', () => service.drain());
 * await service.run(async (request) => Buffer.from(`${request.data}: 1`));
 */
export class Service {
  private constructor();
  /** Listens under `name`: a short name, or `unix:PATH`. Does not wait. Throws `in_use`, `name`, `option`. */
  static listen(name: string, options?: LaneOptions & CallLimits & { lanes?: number | undefined }): Service;
  /**
   * Calls `handler` for each request. Returns after `stop` or `drain`, once the handlers have ended. What the handler
   * returns is the reply; the items of an iterable are the parts of a streaming one. What it throws fails the call:
   * {@link Failed} with its own code and text, another error with code 1, its name and its message.
   */
  run(handler: Handler, options?: RunOptions): Promise<void>;
  /** `run` takes no more requests. Calls that are not answered by the time of `close` fail. Does not wait. */
  stop(): void;
  /** Answers what it has taken; the next requests go to another service of the name. No call fails. Does not wait. */
  drain(): void;
  /** Replies to clients that had left. */
  readonly repliesDropped: number;
  /** Clients that broke the rules, and were disconnected. */
  readonly corruptClients: number;
  ref(): this;
  unref(): this;
  /** Closes it. Calls that are not answered fail at their clients with `closed`. Does not wait. */
  close(): void;
  readonly closed: boolean;
  [Symbol.dispose](): void;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Every error of pelton. The text says what was found, what was wanted, and what to do. */
export class PeltonError extends Error {
  /**
   * The name of the code in `pelton.h`, in small letters: `closed`, `timed_out`, `no_listener`, and so on. Of
   * `pelton/fs`: that of Node's own errors, as `ENOENT`. Of the reason of a request's signal: `cancelled`.
   */
  code: string;
  /** Of `closed` and `peer_died`: messages that the receiver has not released. */
  unreleased?: number;
  /** Of `damaged`: where the damage is in the file, in bytes. */
  offset?: number;
  /** Of `damaged`: where reading continues; null if it cannot. */
  nextOffset?: number | null;
  /** Of `system`, `no_space` and `pelton/fs`: negative, as in Node's own errors; `cause` has its name. */
  errno?: number;
  /** Of `pelton/fs`: as in Node's own errors. */
  syscall?: string;
  path?: string;
  dest?: string;
  /** Of an error of `sendMany`: how many messages were sent. */
  sent?: number;
  constructor(code: string, message: string, options?: ErrorOptions);
}

/** A call that its service has failed, with a code and a text of its own. A handler throws it to fail its call so. */
export class Failed extends PeltonError {
  failure: number;
  bytes: Buffer;
  readonly text: string;
  constructor(failure: number, text?: string | Uint8Array);
}

/** When a record file is written, and when it is on the disk. Intervals are milliseconds. */
export interface RecordOptions {
  /** A new file is begun before this one is larger, in bytes: FILE becomes FILE.000001. */
  rotateBytes?: number | undefined;
  /** The file is synced after each so many bytes; 0: after each write. Unless given, only by `sync` and `close`. */
  syncBytes?: number | undefined;
  /** The file is synced at this interval. */
  syncInterval?: number | undefined;
  /** The buffer, in bytes: 1 MiB unless given. */
  flushBytes?: number | undefined;
  /** The buffer is written at this interval, 100 unless given. Infinity: only when it is full. */
  flushInterval?: number | undefined;
}

/**
 * Messages appended to a file, which {@link RecordReader}, `pelton cat` and the other languages read. A message is in a
 * buffer of this process at first. It is written when it is full, and at intervals, by a thread. Then the message
 * survives the process, also one that is killed; a failure of the machine only after `sync`.
 *
 * @example
 * const file = await RecordFile.open('events.records');
 * await file.append(Buffer.from('hello'));
 * await file.close();
 */
export class RecordFile {
  private constructor();
  /**
   * Creates the file, or cuts off the torn end that a killed writer has left. Waits up to a second while another writer
   * has it. Rejects with `role_taken` if that one still writes, `not_a_record_file`, `damaged`, `system`.
   */
  static open(path: string | URL | Uint8Array, options?: RecordOptions): Promise<RecordFile>;
  /**
   * Appends a copy of a message. Waits only while the full buffer is written, on a thread; those of calls that are not
   * awaited are appended in order. Rejects with `too_large` if the buffer is smaller than the message; with `no_space`
   * or `system` of the disk: then this message is not appended, those before it are kept, and the next call retries.
   */
  append(data: Uint8Array): Promise<void>;
  /** Writes all messages to the file. Waits for the system, not for the disk. Rejects as `append`. */
  flush(): Promise<void>;
  /** Writes all messages to the file, and waits until they are on the disk. Rejects as `append`. */
  sync(): Promise<void>;
  /** As `sync`, after all that was begun, and closes the file, also if that fails. */
  close(): Promise<void>;
  /** Whether `close` was called. */
  readonly closed: boolean;
  /** The bytes of a torn end that the opening has cut off: 0 of a whole file. */
  readonly cutBytes: number;
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * The messages of a record file, from the first to the last complete one, which a writer may append to meanwhile.
 *
 * @example
 * const reader = await RecordReader.open('events.records');
 * for await (const message of reader) console.log(message.toString());
 * reader.close();
 */
export class RecordReader {
  private constructor();
  /** Opens the file. Waits for the disk, on a thread. Rejects with `not_a_record_file`, `system`. */
  static open(path: string | URL | Uint8Array): Promise<RecordReader>;
  /**
   * The next message; null at the end: a later call returns what was appended since. Waits for the disk, on a thread.
   * Rejects with `damaged` where the bytes violate the format; unless `nextOffset` is null, the next call continues
   * behind that. Rejects with `system`.
   */
  read(): Promise<Buffer | null>;
  /** Closes it. Does not wait. */
  close(): void;
  /** Whether it is closed. */
  readonly closed: boolean;
  /** `read` until it returns null. */
  [Symbol.asyncIterator](): AsyncGenerator<Buffer, void, undefined>;
  [Symbol.dispose](): void;
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * Sets the function that receives what changes how the program runs and is no result of a call: peers that were
 * refused, with process, user and reason, and fallbacks, where the system refuses membarrier or io_uring. null, the
 * default: none. One function for the process, with its worker threads: the last one set. Refused peers have at most
 * one record per second, which counts those before it without one. Nothing is logged for each message.
 *
 * The loop of the thread that has set it calls it later; at most 256 records wait for that, and further ones are
 * dropped. It does not keep the process alive. Throws a TypeError for what is no function.
 *
 * @example
 * setLog((level, text) => console[level](`pelton: ${text}`));
 */
export function setLog(log: ((level: 'error' | 'warn' | 'info', text: string) => void) | null): void;
